// Several: small requests that have arrived together. Threads of the crew share them, and their answers leave together.
//
// All of them has been read ahead, so nobody waits for the client meanwhile, and what they bring is used where it lies.
//
// Thread safety: help() from several threads; the rest is the connection's thread's.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "exec/crew_task.h"
#include "server/connection.h"
#include "server/request.h"
#include "wire/frame.h"

namespace windlass {

class Several final : public Counted, public CrewTask {
 public:
  explicit Several(std::shared_ptr<Connection> from);

  // Takes the small requests at the front of what was read ahead; false, and takes nothing, when there are not two.
  bool take();
  void call_help(Server& server);
  void help() override;
  // After help(): waits for the others. What was wrong with the stream, if anything.
  Status finish();

 private:
  struct Frame {
    wire::Header header;
    std::byte* bytes;  // behind the header
  };
  Status serve(const Frame& frame, Answers* answers, Freed* freed);

  const std::shared_ptr<Connection> from_;
  Channel& channel_;
  std::vector<Frame> frames_;
  uint64_t work_bytes_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<uint32_t> helpers_{0};
  std::mutex mutex_;  // of status_
  Status status_;
};

}  // namespace windlass
