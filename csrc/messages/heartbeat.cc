#include "messages/heartbeat.h"

#include <algorithm>

#include "base/limits.h"
#include "base/thread.h"

namespace windlass {
namespace {

constexpr size_t kReadBytes = 256;

}  // namespace

Heartbeat::Heartbeat(int fd, std::string beat, int64_t period_ns) : shared_(std::make_shared<Shared>()) {
  shared_->fd = fd;
  shared_->beat = std::move(beat);
  shared_->period_ns = period_ns;
  // The other end takes ten periods of silence for a death; this end notices no later that it is cut off.
  os::set_up_socket(fd, static_cast<int>(std::clamp<int64_t>(10 * period_ns / 1'000'000, 100, limits::kStallMs)));
  os::close_after_fork(fd, true);
  shared_->watch.add(fd, 0);
  shared_->watch.change(fd, 0, true, false);
  const auto end = [](Shared& shared) {
    os::close_socket(shared.fd);
    shared.running.store(0, std::memory_order_release);
    os::wake_all(shared.running);
  };
  const auto beat_until_broken = [end, shared = shared_] {
    run(*shared);
    end(*shared);
  };
  if (!start_detached(beat_until_broken)) end(*shared_);  // its owner makes another, as for any that is broken
}

Heartbeat::~Heartbeat() {
  if (os::fork_generation() == generation_) stop();
}

// Ignores what the other end sends, but notices at once when it closes.
void Heartbeat::run(Shared& shared) {
  int64_t next_ns = os::now_ns();
  size_t sent = 0;  // of a beat that was sent in part: its rest goes first
  while (!shared.stopped.load(std::memory_order_acquire)) {
    const int64_t now = os::now_ns();
    if (now >= next_ns) {
      const os::Piece rest{shared.beat.data() + sent, shared.beat.size() - sent};
      const long n = os::send_pieces(shared.fd, &rest, 1, false);
      if (n == os::kBroken) return;
      sent = (sent + static_cast<size_t>(n)) % shared.beat.size();
      next_ns = now + shared.period_ns;
    }
    uint64_t tag = 0;
    if (shared.watch.wait(&tag, 1, std::max<int64_t>(next_ns - os::now_ns(), 0)) == 0) continue;
    char unread[kReadBytes];
    if (os::receive(shared.fd, unread, sizeof unread, false) == os::kBroken) return;
  }
}

bool Heartbeat::ended() const { return shared_->running.load(std::memory_order_acquire) == 0; }

bool Heartbeat::wait(int64_t deadline_ns) const {
  while (!ended()) {
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    os::wait(shared_->running, 1, left);
  }
  return true;
}

void Heartbeat::stop() {
  shared_->stopped.store(true, std::memory_order_release);
  shared_->watch.wake();
}

}  // namespace windlass
