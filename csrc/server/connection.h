// Connection: one socket of a client, and the thread that serves it.
//
// The thread reads a frame's header, then part by part. A part is complete and its checksums are right before its shard
// hears of it. Where a request is large, threads of the crew do the same on the same stream: whoever has the stream
// reads the next part into memory of its own, passes the stream on, and works on the part while it is still in its
// cache. Answers leave in whatever order they are made.
//
//     stream:  header | part 0 | part 1 | part 2 | part 3 ...
//                         A        B        A        B        each reads, passes the stream on, applies, answers
//
// Thread safety: run() is the thread's own; send() and shut_down() from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "server/host.h"
#include "wire/frame.h"

namespace windlass {

class Incoming;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Host& host, int fd, std::string peer, std::string key);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  void run();
  void shut_down() { os::shut_down(fd_); }
  // Whether nothing that came on this connection is under way any more, by then.
  bool wait_ended(int64_t deadline_ns) const;
  // A whole frame; false when the peer is gone or does not read.
  bool send(const std::byte* frame, size_t bytes);
  // The same in pieces, of memory that is only lent: it is given back before anything waits for the peer. What the
  // socket does not take at once is copied to `spare`.
  template <class GiveBack>
  bool send_lent(std::vector<os::Piece>* pieces, Buffer* spare, GiveBack give_back);

 private:
  friend class Incoming;
  friend class ParkedOrder;

  bool send_locked(const std::byte* frame, size_t bytes);
  // Exactly so many bytes of the stream; false when it has ended or stalls. `behind`: what may be read ahead as well.
  bool read(void* to, size_t bytes, size_t behind = 0);
  bool has_ahead(size_t bytes) const { return ahead_end_ - ahead_begin_ >= bytes; }
  // The next bytes where they were read ahead, good until more is read; nullptr when they were not, or not on a
  // boundary of sections.
  std::byte* in_place(size_t bytes) {
    if (!has_ahead(bytes) || ahead_begin_ % limits::kSectionBytes != 0) return nullptr;
    return ahead_.data() + std::exchange(ahead_begin_, ahead_begin_ + bytes);
  }
  long receive(const os::Piece* pieces, size_t n, bool rest, int64_t spin_ns);
  long receive_some(const os::Piece* pieces, size_t n, bool wait) {
    return os::receive_pieces(fd_, pieces, n, wait, local_ ? &files_ : nullptr);
  }
  Status arena(const std::string& body);
  bool wait_for_frame();
  Status serve_frame();
  Status serve_control(const wire::Header& header);
  Status control(const wire::Header& header, const std::string& body, std::vector<std::string>* answers);
  Status hello(const wire::Header& header, const std::string& body, std::string* answer);
  std::string held(const std::string& asked);
  void answer_control(const wire::Header& header, const Status& status, const std::vector<std::string>& bodies);
  void forget_parked();

  Host& host_;
  const int fd_;
  const std::string peer_, key_;
  const bool local_;  // the client is on the same host, and may share memory
  os::Files files_;   // that came and have not been asked for yet
  std::atomic<uint32_t> ended_{0};
  std::shared_ptr<Guest> guest_;  // once it has said hello

  Buffer ahead_;  // read from the socket and not used yet
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  bool hurried_ = false;                // must not stall: who reads holds memory that others may be waiting for
  bool busy_ = false;                   // the last request came soon after the one before
  std::atomic<int64_t> sent_bytes_{0};  // since a frame was last waited for

  std::mutex sending_;
  std::atomic<bool> broken_{false};

  std::mutex parked_mutex_;
  std::vector<uint64_t> parked_;                                         // requests with a part that is parked
  std::vector<std::pair<std::shared_ptr<Hosted>, uint32_t>> parked_at_;  // and where
};

}  // namespace windlass
