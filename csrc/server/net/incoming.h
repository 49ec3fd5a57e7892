// Incoming: a request whose blocks one or several threads read and serve, block by block.
//
// If a request is large, threads of the crew share its stream: the one that has the stream reads the next block into
// its own memory, passes the stream on, and works on the block while it is still in its cache. Answers leave in the
// order in which they are made.
//
//     stream:  header | block 0 | block 1 | block 2 | block 3 ...
//                         A         B         A         B        each reads, passes the stream on, applies, answers
//
// If the numbers lie in arenas and the rest of the frame has been read ahead, there is no reading left: the threads
// share its blocks (exec/shares.h).
//
// Thread safety: help() from several threads; the rest before it, or from the connection's thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "exec/crew_task.h"
#include "exec/shares.h"
#include "server/net/connection.h"
#include "server/net/request.h"

namespace windlass {

class Incoming final : public Counted, public CrewTask {
 public:
  Incoming(std::shared_ptr<Connection> from, const wire::Header& header);

  Request& request() { return request_; }
  // Calls threads of the crew to it if they are of use.
  void call_help(Server& server);
  void help() override;
  // After help(): waits for the other threads. Returns the stream's error, if any.
  Status finish();

 private:
  // What one thread takes from the stream at once: one whole block, in this thread's memory or, if it is the only
  // thread, in place where it was read ahead. If the numbers lie in arenas there is little to read and much to do, and
  // threads would wait for each other: then it is several blocks, of which only the last may have more bytes than were
  // read ahead.
  struct Some {
    Request::Taken* blocks = nullptr;
    size_t n = 0;
    uint64_t staged = 0;
  };
  bool next(Some* some, Freed* freed);
  bool next_read(Some* some);
  bool take_all();
  void take(Request::Taken* taken);
  void begin_together();
  void end_together(const std::vector<std::byte>& answers, Freed* freed);
  Status read_block(Request::Taken* taken, uint64_t* staged);
  bool reserve(const wire::Block& block, uint64_t bytes);
  bool has_block_ahead();
  bool read_small_block(Request::Taken* taken, size_t* used);

  const std::shared_ptr<Connection> from_;
  Channel& channel_;
  Request request_;
  bool shared_ = false;  // several threads read blocks
  size_t threads_ = 1;   // that may read blocks
  size_t at_once_ = 1;   // blocks that a thread takes, at most

  // If all blocks have been read.
  std::vector<Request::Taken> all_;
  Shares shares_;

  std::mutex reading_;  // guards what follows, and the stream
  uint32_t left_blocks_;
  uint32_t entries_ = 0;  // of the blocks that were read
  uint64_t left_bytes_;
  Status status_;
  std::atomic<uint32_t> helpers_{0};

  // If the arrays lie in arenas, an answer says only that its block is done. Those of all threads leave together when
  // the last has ended; else the client would wake up for half of them, often on the core that works on the other half.
  std::mutex ending_;  // guards what follows
  size_t working_ = 0;
  std::vector<std::byte> answers_;
  Freed freed_;
};

}  // namespace windlass
