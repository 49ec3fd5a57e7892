// Incoming: a request whose parts are being read, by one thread or by several, and served part by part.
//
// Where a request is large, threads of the crew do the same on the same stream: whoever has the stream reads the next
// part into memory of its own, passes the stream on, and works on the part while it is still in its cache. Answers
// leave in whatever order they are made.
//
//     stream:  header | part 0 | part 1 | part 2 | part 3 ...
//                         A        B        A        B        each reads, passes the stream on, applies, answers
//
// Where the numbers lie in arenas, and what is left of the frame has been read ahead, nobody reads: the threads share
// its parts (exec/shares.h).
//
// Thread safety: help() from several threads; the rest before it, or from the connection's thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "exec/crew_task.h"
#include "exec/shares.h"
#include "server/connection.h"
#include "server/request.h"

namespace windlass {

class Incoming final : public Counted, public CrewTask {
 public:
  Incoming(std::shared_ptr<Connection> from, const wire::Header& header);

  Request& request() { return request_; }
  // Calls threads of the crew to it where they are of use.
  void call_help(Server& server);
  void help() override;
  // After help(): waits for the others. What was wrong with the stream, if anything.
  Status finish();

 private:
  // What one thread takes from the stream at once: a part, whole, in this thread's memory or, where it is the only
  // one, in what was read ahead. Where the numbers lie elsewhere there is little to read and much to do, and threads
  // would wait for each other: then several parts, of which only the last may have more bytes than were read ahead.
  struct Batch {
    Request::Taken parts[Request::kAtOnceMax];
    size_t n = 0;
    uint64_t staged = 0;
  };
  bool next(Batch* batch, Freed* freed);
  bool next_read(Batch* batch);
  bool take_all();
  void begin_together();
  void end_together(const std::vector<std::byte>& answers, Freed* freed);
  Status read_part(Request::Taken* taken, uint64_t* staged);
  bool has_part_ahead();
  bool read_small_part(Request::Taken* taken, size_t* used);

  const std::shared_ptr<Connection> from_;
  Channel& channel_;
  Request request_;
  bool shared_ = false;  // several threads read its parts
  size_t threads_ = 1;   // that may
  size_t at_once_ = 1;   // parts that a thread takes, at most

  // Where all parts have been read.
  std::vector<Request::Taken> all_;
  Shares shares_;

  std::mutex reading_;  // of what follows, and of the stream
  uint32_t left_parts_;
  uint64_t left_bytes_;
  Status status_;
  std::atomic<uint32_t> helpers_{0};

  // Where the arrays lie in arenas an answer says only that all is done: those of all threads leave together, when the
  // last has ended. Else the client would wake up for half of them, often on the very core that has the other half.
  std::mutex ending_;  // of what follows
  size_t working_ = 0;
  std::vector<std::byte> answers_;
  Freed freed_;
};

}  // namespace windlass
