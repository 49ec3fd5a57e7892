// FrameBatch: small requests that have arrived together. Threads of the crew share them, and their answers are sent
// together.
//
// All of them have been read ahead, so no thread waits for the client, and their payloads are used in place.
//
// Thread safety: help() from several threads; the rest is the connection's thread's.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "exec/crew_task.h"
#include "server/net/connection.h"
#include "server/net/request.h"
#include "wire/frame.h"

namespace windlass {

class FrameBatch final : public Counted, public CrewTask {
 public:
  explicit FrameBatch(std::shared_ptr<Connection> from);

  // Takes the small requests at the front of what was read ahead; takes nothing and returns false if there are fewer
  // than two.
  bool take();
  void call_help(Server& server);
  void help() override;
  // After help(): waits for the other threads. Returns the stream's error, if any.
  Status finish();

 private:
  struct Frame {
    wire::Header header;
    std::byte* bytes;  // after the header
  };
  Status serve(const Frame& frame, Answers* answers, Freed* freed);

  const std::shared_ptr<Connection> from_;
  Channel& channel_;
  std::vector<Frame> frames_;
  uint64_t work_bytes_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<uint32_t> helpers_{0};
  std::mutex mutex_;  // guards status_
  Status status_;
};

}  // namespace windlass
