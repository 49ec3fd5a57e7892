// Channel: a client's socket as a server reads and writes it.
//
// Reading is buffered: small pieces are read ahead, large ones go straight to their destination. For a client that asks
// often, waiting for the next frame spins for a moment first.
//
// Thread safety: sending, broken(), gone() and shut_down() from any thread; reading is one thread's at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/limits.h"
#include "base/os.h"
#include "server/net/answer_quota.h"

namespace windlass {

class Host;

// Why a connection is served no longer: its stream is over, `where`.
inline Status connection_ended(const char* where) {
  return Status(Code::kServerLost, std::string("the connection ended ") + where);
}

// Counts of what has passed through sockets.
struct Traffic {
  uint64_t requests = 0, bytes_in = 0, bytes_out = 0;
  Traffic& operator+=(const Traffic& t) {
    requests += t.requests;
    bytes_in += t.bytes_in;
    bytes_out += t.bytes_out;
    return *this;
  }
};

class Channel {
 public:
  Channel(Host& host, int fd);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  void shut_down() { os::shut_down(fd_); }
  bool broken() const { return broken_; }
  // Whether nobody will read what is sent any more: the client has closed, or shut_down() was called.
  bool gone() const { return broken_ || os::hung_up(fd_); }

  // Waits without limit for the first bytes of a frame; false if the stream has ended.
  bool wait_for_frame();
  // Reads exactly so many bytes; false if the stream has ended or stalls. `behind`: how much more may be read ahead.
  bool read(void* to, size_t bytes, size_t behind = 0);
  bool has_ahead(size_t bytes) const { return ahead_end_ - ahead_begin_ >= bytes; }
  // Takes the next bytes in place if they were read ahead, valid until more is read; nullptr if they were not, or do
  // not begin at a section boundary.
  std::byte* in_place(size_t bytes) {
    if (!has_ahead(bytes) || ahead_begin_ % limits::kSectionBytes != 0) return nullptr;
    return ahead_.data() + std::exchange(ahead_begin_, ahead_begin_ + bytes);
  }
  // Likewise bytes that begin `at` after the next one, without taking them; skip() takes them.
  std::byte* ahead(size_t at, size_t bytes) {
    const size_t n = ahead_end_ - ahead_begin_;
    if (at > n || bytes > n - at || ahead_begin_ % limits::kSectionBytes != 0) return nullptr;
    return ahead_.data() + ahead_begin_ + at;
  }
  void skip(size_t bytes) { ahead_begin_ += bytes; }
  // Whether reads give up soon on a stream that stalls: the reader holds memory that others may be waiting for.
  void hurry(bool hurried) { hurried_ = hurried; }
  // Files that were received and not taken yet.
  os::Files& files() { return files_; }

  // Spin longer for the next frame: a client needs time for each part of this answer, and of its next request, which is
  // often alike.
  void expect_pause(uint32_t parts) { pause_ns_ = parts * limits::kSpinNsPerPart; }
  void count_requests(uint64_t n) { requests_.fetch_add(n, std::memory_order_relaxed); }
  Traffic traffic() const { return {requests_, bytes_in_, bytes_out_}; }

  // Sends a whole frame; false if the peer is gone or does not read.
  bool send(const std::byte* frame, size_t bytes);
  // The same without waiting for the peer: the right to send, if nobody has it and nothing is left of an earlier frame.
  // send_held() then keeps what the socket does not take. It is sent before anything else, and the caller must see to
  // that with flush(); false if something was kept.
  std::unique_lock<std::mutex> try_hold();
  bool send_held(const std::byte* frame, size_t bytes);
  void flush();  // waits for the peer
  // The same for pieces of borrowed memory, which is given back before anything waits for the peer. Copies what the
  // socket does not take at once to `spare`.
  template <class GiveBack>
  bool send_lent(std::vector<os::Piece>* pieces, Buffer* spare, GiveBack give_back);

 private:
  bool send_locked(const std::byte* frame, size_t bytes);
  long receive(const os::Piece* pieces, size_t n, bool rest, int64_t spin_ns);
  long receive_some(const os::Piece* pieces, size_t n, bool wait) {
    const long got = os::receive_pieces(fd_, pieces, n, wait, local_ ? &files_ : nullptr);
    if (got > 0) bytes_in_.fetch_add(static_cast<uint64_t>(got), std::memory_order_relaxed);
    return got;
  }

  Host& host_;
  const int fd_;
  const bool local_;  // the client is on the same host, and may share memory
  os::Files files_;

  Buffer ahead_;  // read from the socket and not used yet
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  bool hurried_ = false;
  int64_t pause_ns_ = 0;                // of the connection's thread: the time a client needs for parts it was sent
  bool busy_ = false;                   // the last request came soon after the one before
  std::atomic<int64_t> sent_bytes_{0};  // since a frame was last waited for
  std::atomic<uint64_t> requests_{0}, bytes_in_{0}, bytes_out_{0};

  std::mutex sending_;
  std::vector<std::byte> rest_;  // of a frame that is half sent; guarded by sending_
  AnswerQuota::Room rest_room_;  // likewise
  std::atomic<bool> broken_{false};
};

template <class GiveBack>
bool Channel::send_lent(std::vector<os::Piece>* pieces, Buffer* spare, GiveBack give_back) {
  std::unique_lock lock(sending_, std::try_to_lock);
  if (lock.owns_lock() && !rest_.empty()) lock.unlock();
  size_t left = 0, at = 0;
  for (const os::Piece& p : *pieces) left += p.bytes;
  while (lock.owns_lock() && left != 0) {
    long sent = os::send_pieces(fd_, pieces->data() + at, pieces->size() - at, false);
    if (sent <= 0) break;
    sent_bytes_.fetch_add(sent, std::memory_order_relaxed);
    bytes_out_.fetch_add(static_cast<uint64_t>(sent), std::memory_order_relaxed);
    left -= static_cast<size_t>(sent);
    for (; sent > 0; ++at) {
      os::Piece& p = (*pieces)[at];
      const size_t step = std::min(p.bytes, static_cast<size_t>(sent));
      p.data = static_cast<std::byte*>(p.data) + step;
      p.bytes -= step;
      sent -= static_cast<long>(step);
      if (p.bytes != 0) break;
    }
  }
  std::byte* const rest = left != 0 ? spare->room(left) : nullptr;
  if (rest != nullptr) {
    std::byte* to = rest;
    for (; at < pieces->size(); ++at) {
      std::memcpy(to, (*pieces)[at].data, (*pieces)[at].bytes);
      to += (*pieces)[at].bytes;
    }
  }
  give_back();
  if (left == 0) return true;
  if (rest == nullptr) {  // out of memory with half a frame sent
    broken_ = true;
    shut_down();
    return false;
  }
  if (!lock.owns_lock()) lock.lock();
  return send_locked(rest, left);
}

}  // namespace windlass
