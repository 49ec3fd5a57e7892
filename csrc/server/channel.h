// Channel: a client's socket as a server reads and writes it.
//
// Reading is buffered: small things are read ahead, large ones go straight to where they belong. Who waits for the next
// frame of a client that asks often waits awake for a moment.
//
// Thread safety: send(), send_lent(), broken() and shut_down() from any thread; reading is one thread's at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/limits.h"
#include "base/os.h"

namespace windlass {

class Host;

// What has passed through sockets.
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

  // Waits for the first bytes of a frame, for as long as it takes; false when there will be none.
  bool wait_for_frame();
  // Exactly so many bytes of the stream; false when it has ended or stalls. `behind`: what may be read ahead as well.
  bool read(void* to, size_t bytes, size_t behind = 0);
  bool has_ahead(size_t bytes) const { return ahead_end_ - ahead_begin_ >= bytes; }
  // The next bytes where they were read ahead, good until more is read; nullptr when they were not, or not on a
  // boundary of sections.
  std::byte* in_place(size_t bytes) {
    if (!has_ahead(bytes) || ahead_begin_ % limits::kSectionBytes != 0) return nullptr;
    return ahead_.data() + std::exchange(ahead_begin_, ahead_begin_ + bytes);
  }
  // So many bytes that are `at` behind the next, likewise, without taking them; skip() does.
  std::byte* ahead(size_t at, size_t bytes) {
    const size_t n = ahead_end_ - ahead_begin_;
    if (at > n || bytes > n - at || ahead_begin_ % limits::kSectionBytes != 0) return nullptr;
    return ahead_.data() + ahead_begin_ + at;
  }
  void skip(size_t bytes) { ahead_begin_ += bytes; }
  // Whether the stream must not stall: who reads holds memory that others may be waiting for.
  void hurry(bool hurried) { hurried_ = hurried; }
  // The files that came and have not been taken yet.
  os::Files& files() { return files_; }

  // A client takes its time for each part of an answer, and for each of the next request, which is often alike.
  void expect_pause(uint32_t parts) { pause_ns_ = parts * limits::kSpinNsPerPart; }
  void count_requests(uint64_t n) { requests_.fetch_add(n, std::memory_order_relaxed); }
  Traffic traffic() const { return {requests_, bytes_in_, bytes_out_}; }

  // A whole frame; false when the peer is gone or does not read.
  bool send(const std::byte* frame, size_t bytes);
  // The same without waiting for the peer: what the socket does not take is kept, and sent before anything else is.
  // False when somebody must see to that, by flush(): higher priorities first, equal ones in their order.
  bool send_now(const std::byte* frame, size_t bytes, uint8_t priority = 0);
  void flush();  // waits for the peer
  // The same in pieces, of memory that is only lent: it is given back before anything waits for the peer. What the
  // socket does not take at once is copied to `spare`.
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
  int64_t pause_ns_ = 0;  // the connection's thread's: what a client takes for what it has been sent, but for bytes
  bool busy_ = false;     // the last request came soon after the one before
  std::atomic<int64_t> sent_bytes_{0};  // since a frame was last waited for
  std::atomic<uint64_t> requests_{0}, bytes_in_{0}, bytes_out_{0};

  std::mutex sending_;
  std::vector<std::byte> rest_;  // of a frame that is half out; with sending_
  std::mutex later_mutex_;       // of what follows, after sending_
  struct Later {
    uint8_t priority;
    std::vector<std::byte> frame;
  };
  std::deque<Later> later_;  // frames that wait for somebody to send them, in the order in which they will be
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
  if (rest == nullptr) {  // there is no memory, and half a frame is out
    broken_ = true;
    shut_down();
    return false;
  }
  if (!lock.owns_lock()) lock.lock();
  return send_locked(rest, left);
}

}  // namespace windlass
