#include "exec/future.h"

#include "base/breaks.h"
#include "base/limits.h"
#include "base/os.h"

namespace windlass {

void Future::expect(uint32_t parts) {
  if (parts == 0) return complete();
  retain();
  unfinished_.store(parts, std::memory_order_relaxed);
}

bool Future::stay_open() {
  uint32_t left = unfinished_.load(std::memory_order_relaxed);
  while (left != 0) {
    if (unfinished_.compare_exchange_weak(left, left + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void Future::end(const Status& status) {
  if (!status.ok()) fail(status);
  end_well(1);
}

void Future::end_well(uint32_t parts) {
  if (parts != 0 && unfinished_.fetch_sub(parts, std::memory_order_acq_rel) == parts) {
    complete();
    release();
  }
}

void Future::fail(const Status& status) {
  std::lock_guard lock(mutex_);
  if (error_.ok()) error_ = status;
  failed_.store(true, std::memory_order_release);
}

void Future::complete() {
  finished();
  if (state_.exchange(kDone, std::memory_order_acq_rel) == kAwaited) os::wake_all(state_);
  over();
}

Status Future::status() const {
  if (!failed_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mutex_);
  return error_;
}

bool Future::wait_until(int64_t deadline_ns) {
  // Other threads are usually nearly done, and a wake-up costs more than a short spin.
  static const bool may_spin = os::cores() > 1;
  if (may_spin && !done()) {
    const int64_t spin_end = os::now_ns() + limits::kSpinNs;
    while (!done() && os::now_ns() < spin_end) {
    }
  }
  return sleep_until(deadline_ns);
}

bool Future::sleep_until(int64_t deadline_ns) {
  if (broken(Break::kDeadlines)) deadline_ns = limits::kNoDeadline;
  for (;;) {
    uint32_t state = state_.load(std::memory_order_acquire);
    if (state == kDone) return true;
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    if (state == kPending && !state_.compare_exchange_strong(state, kAwaited, std::memory_order_acq_rel)) continue;
    os::wait(state_, kAwaited, left);
  }
}

}  // namespace windlass
