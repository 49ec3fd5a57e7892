#include "server/net/channel.h"

#include <algorithm>
#include <utility>

#include "server/host.h"

namespace windlass {

namespace {

constexpr int64_t kStallNs = int64_t{limits::kStallMs} * 1'000'000;
constexpr int64_t kSoonNs = 2 * limits::kSpinNs;
constexpr int64_t kTakeInNsPerKiB = 100;  // how long a client may take to receive an answer and check it
constexpr int64_t kTakeInNsMax = 200'000;

}  // namespace

Channel::Channel(Host& host, int fd) : host_(host), fd_(fd), local_(os::same_host(fd)) {
  os::set_up_socket(fd_, limits::kStallMs);
}

Channel::~Channel() {
  os::close_socket(fd_);
  for (size_t i = 0; i < files_.n; ++i) os::close_file(files_.fds[i]);
}

bool Channel::send(const std::byte* frame, size_t bytes) {
  std::lock_guard lock(sending_);
  return send_locked(frame, bytes);
}

std::unique_lock<std::mutex> Channel::try_hold() {
  std::unique_lock lock(sending_, std::try_to_lock);
  if (lock.owns_lock() && !rest_.empty()) lock.unlock();
  return lock;
}

bool Channel::send_held(const std::byte* frame, size_t bytes) {
  while (bytes != 0 && rest_.empty()) {
    const os::Piece piece{const_cast<std::byte*>(frame), bytes};
    const long n = os::send_pieces(fd_, &piece, 1, false);
    if (n <= 0) break;
    sent_bytes_.fetch_add(n, std::memory_order_relaxed);
    bytes_out_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    frame += n;
    bytes -= static_cast<size_t>(n);
  }
  if (bytes == 0) return rest_.empty();
  rest_.insert(rest_.end(), frame, frame + bytes);
  host_.answers().force(rest_.size(), &rest_room_);
  return false;
}

void Channel::flush() {
  std::lock_guard lock(sending_);
  (void)send_locked(nullptr, 0);
}

bool Channel::send_locked(const std::byte* frame, size_t bytes) {
  if (!rest_.empty()) {
    const std::vector<std::byte> rest = std::exchange(rest_, {});
    send_locked(rest.data(), rest.size());
    rest_room_.give_back();
  }
  const int64_t begin = bytes > limits::kBulkBytesMin ? os::now_ns() : 0;
  while (bytes != 0 && !broken_) {
    const os::Piece piece{const_cast<std::byte*>(frame), bytes};
    const long n = os::send_pieces(fd_, &piece, 1, true);
    if (n <= 0) {  // gone, or it has not read for too long
      broken_ = true;
      shut_down();
      break;
    }
    sent_bytes_.fetch_add(n, std::memory_order_relaxed);
    bytes_out_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    frame += n;
    bytes -= static_cast<size_t>(n);
    // Nor may a client hold room for ever, byte by byte, while others wait for it.
    if (bytes != 0 && begin != 0 && host_.answers().contended() && os::now_ns() - begin > kStallNs) {
      broken_ = true;
      shut_down();
    }
  }
  return bytes == 0;
}

// Spins for a moment, unless another thread does, then blocks. `rest`: more of a frame that is arriving already. Spins
// for a new request by receiving, which is quickest, and for the rest of one by polling, since receiving takes a lock
// that the sender needs, too.
long Channel::receive(const os::Piece* pieces, size_t n, bool rest, int64_t spin_ns) {
  long got = receive_some(pieces, n, false);
  if (got != os::kWouldBlock) return got;
  if (host_.begin_spin()) {
    const int64_t end = os::now_ns() + spin_ns;
    os::Polled socket{fd_, false, !rest};
    do {
      if (rest) os::poll(&socket, 1, 0);
      if (socket.ready) got = receive_some(pieces, n, false);
    } while (got == os::kWouldBlock && os::now_ns() < end);
    host_.end_spin();
  }
  if (got != os::kWouldBlock) return got;
  if (hurried_) {  // the reader holds memory that others wait for
    os::Polled socket{fd_, false, false};
    os::poll(&socket, 1, limits::kStagedStallMs * int64_t{1'000'000});
    if (!socket.ready) return os::kBroken;
  }
  return receive_some(pieces, n, true);
}

bool Channel::read(void* to, size_t bytes, size_t behind) {
  auto* at = static_cast<std::byte*>(to);
  while (bytes != 0) {
    if (ahead_begin_ != ahead_end_) {
      const size_t n = std::min(bytes, ahead_end_ - ahead_begin_);
      std::memcpy(at, ahead_.data() + ahead_begin_, n);
      ahead_begin_ += n;
      at += n;
      bytes -= n;
      continue;
    }
    // Large reads go straight to their destination, and read no more ahead than `behind` and the next headers.
    const bool direct = bytes >= limits::kDirectBytesMin;
    const size_t ahead = direct ? behind + 2 * limits::kSectionBytes : limits::kReadAheadBytes;
    if (ahead_.room(std::max(ahead, limits::kReadAheadBytes)) == nullptr) return false;
    const os::Piece pieces[2] = {{at, bytes}, {ahead_.data(), ahead}};
    const long n = receive(direct ? pieces : pieces + 1, direct ? 2 : 1, true, limits::kSpinNs);
    if (n <= 0) return false;
    const size_t straight = direct ? std::min(bytes, static_cast<size_t>(n)) : 0;
    at += straight;
    bytes -= straight;
    ahead_begin_ = 0;
    ahead_end_ = static_cast<size_t>(n) - straight;
  }
  return true;
}

// Spins if requests come quickly: being woken costs 20 us.
bool Channel::wait_for_frame() {
  if (ahead_begin_ != ahead_end_) return true;
  if (ahead_.room(limits::kReadAheadBytes) == nullptr) return false;
  const os::Piece piece{ahead_.data(), limits::kReadAheadBytes};
  const int64_t begin = os::now_ns();
  // A client sends its next request once it has received what it was sent.
  const int64_t parts_ns = std::min(std::exchange(pause_ns_, 0), limits::kSpinNsMax - limits::kSpinNs);
  const int64_t taking_in =
      std::min<int64_t>(sent_bytes_.exchange(0) * kTakeInNsPerKiB / 1024, kTakeInNsMax) + parts_ns;
  long n = os::kWouldBlock;
  while (n == os::kWouldBlock) {
    n = busy_ ? receive(&piece, 1, taking_in - parts_ns > limits::kSpinNs, limits::kSpinNs + taking_in)
              : receive_some(&piece, 1, true);
  }
  busy_ = os::now_ns() - begin < kSoonNs + taking_in;
  if (n <= 0) return false;
  ahead_begin_ = 0;
  ahead_end_ = static_cast<size_t>(n);
  return true;
}

}  // namespace windlass
