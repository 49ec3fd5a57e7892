#include "server/work.h"

#include "base/limits.h"
#include "base/os.h"
#include "server/crew.h"

namespace windlass {

void Work::set_parts(uint32_t n) {
  n_ = n;
  if (n > 1) {
    many_ = std::make_unique<Part[]>(n);
    part_ = many_.get();
  }
  for (uint32_t i = 0; i < n; ++i) {
    part_[i].work = this;
    part_[i].index = i;
  }
  unfinished_.store(n, std::memory_order_relaxed);
}

void Work::begin(Crew* helpers) {
  if (n_ == 0) return complete();
  retain();  // until the last part is over
  share(helpers != nullptr && n_ > 1, helpers);
  if (shared_) helpers->post(Ref<Work>(this));
  help();
}

void Work::share(bool shared, const Crew* crew) {
  shared_ = shared;
  shares_.divide(n_, shared ? crew->size() + 1 : 1);
}

void Work::begin_kept(Crew* helpers) {
  mode_ = kRunOrKeep;
  borrowing_.store(n_, std::memory_order_relaxed);
  begin(helpers);
  while (borrowing_.load(std::memory_order_acquire) != 0) {
    // A helper is in the middle of a part: one pass over one shard.
    os::wait(borrowing_, borrowing_.load(std::memory_order_relaxed), 50'000);
  }
}

void Work::run_or_keep(uint32_t i) {
  Turn& t = turn(i);
  if (t.try_take()) {
    run_part(part_[i]);
    t.release();
    borrowing_.fetch_sub(1, std::memory_order_release);
  } else {
    keep(i);
    part_[i].kept = true;
    t.post(part_[i]);  // before the caller may go on: its next request must find this one in the queue
    borrowing_.fetch_sub(1, std::memory_order_release);
    t.drain();
  }
}

void Work::begin_later(Crew* crew, bool shared) {
  if (n_ == 0) return complete();
  retain();
  share(shared, crew);
  mode_ = kDrain;
  const Ref<Work> self(this);
  for (uint32_t i = 0; i < n_; ++i) turn(i).post(part_[i]);
  crew->post(self);
}

void Work::help() {
  if (!shared_ && helped_.exchange(true, std::memory_order_relaxed)) return;
  for (uint32_t i = 0; shares_.take(Crew::number(), 1, &i) != 0;) {
    switch (mode_) {
      case kRun: turn(i).run(part_[i]); break;
      case kRunOrKeep: run_or_keep(i); break;
      case kDrain: turn(i).drain(); break;
    }
  }
}

void Work::run_part(Part& part) {
  uint8_t queued = kQueued;
  while (!part.state.compare_exchange_weak(queued, kRunning, std::memory_order_acq_rel) && queued != kCancelled) {
    queued = kQueued;  // let_go() is copying its input: a moment
  }
  if (queued != kCancelled) {
    const Status s = run(part.index, part.kept);
    if (part.state.load(std::memory_order_relaxed) == kWaiting)
      return;  // the turn is still ours: nobody has resumed it
    if (!s.ok()) fail(s);
    part.state.store(kOver, std::memory_order_release);
  } else {
    skip(part.index);
  }
  end_part();
}

void Work::end_part() {
  if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    complete();
    release();
  }
}

void Work::resume(uint32_t i) {
  uint8_t waiting = kWaiting;
  if (!part_[i].state.compare_exchange_strong(waiting, kRunning, std::memory_order_acq_rel)) return;
  if (const Status s = pass(i); !s.ok()) fail(s);
  part_[i].state.store(kOver, std::memory_order_release);
  end_part();
}

void Work::abandon(uint32_t i, const Status& status) {
  uint8_t waiting = kWaiting;
  if (!part_[i].state.compare_exchange_strong(waiting, kOver, std::memory_order_acq_rel)) return;
  fail(status);
  end_part();
}

bool Work::cancel_waiting(uint32_t i) {
  uint8_t waiting = kWaiting;
  if (!may_leave_gate() || !part_[i].state.compare_exchange_strong(waiting, kCancelled, std::memory_order_acq_rel))
    return false;
  leave_gate(i);
  end_part();
  return true;
}

void Work::begin_away(uint32_t parts) {
  if (parts == 0) return complete();
  retain();
  n_ = 0;
  unfinished_.store(parts, std::memory_order_relaxed);
}

bool Work::stay_open() {
  uint32_t left = unfinished_.load(std::memory_order_relaxed);
  while (left != 0) {
    if (unfinished_.compare_exchange_weak(left, left + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void Work::end_away(const Status& status) {
  if (!status.ok()) fail(status);
  if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    complete();
    release();
  }
}

void Work::fail(const Status& status) {
  std::lock_guard lock(mutex_);
  if (error_.ok()) error_ = status;
  failed_.store(true, std::memory_order_release);
}

void Work::complete() {
  finished();
  if (state_.exchange(kDone, std::memory_order_acq_rel) == kAwaited) os::wake_all(state_);
  over();
}

Status Work::status() const {
  if (!failed_.load(std::memory_order_acquire)) return {};
  std::lock_guard lock(mutex_);
  return error_;
}

bool Work::wait_until(int64_t deadline_ns) {
  if (done()) return true;
  help();
  // What is left is with other threads. They are usually nearly there, and a wake-up costs more than a short spin.
  static const bool may_spin = os::cores() > 1;
  if (may_spin) {
    const int64_t spin_end = os::now_ns() + limits::kSpinNs;
    while (!done() && os::now_ns() < spin_end) {
    }
  }
  return sleep_until(deadline_ns);
}

bool Work::sleep_until(int64_t deadline_ns) {
  for (;;) {
    uint32_t state = state_.load(std::memory_order_acquire);
    if (state == kDone) return true;
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    if (state == kPending && !state_.compare_exchange_strong(state, kAwaited, std::memory_order_acq_rel)) continue;
    os::wait(state_, kAwaited, left);
  }
}

void Work::cancel() {
  for (uint32_t i = 0; i < n_; ++i) {
    uint8_t state = kQueued;
    if (!part_[i].state.compare_exchange_strong(state, kCancelled, std::memory_order_acq_rel) && !cancel_waiting(i)) {
      wait_while_running(part_[i]);
    }
  }
}

bool Work::cancel_queued(bool* any) {
  bool all = true;
  *any = false;
  for (uint32_t i = 0; i < n_; ++i) {
    uint8_t state = kQueued;
    const bool taken =
        part_[i].state.compare_exchange_strong(state, kCancelled, std::memory_order_acq_rel) || cancel_waiting(i);
    all = all && taken;
    *any = *any || taken;
  }
  return all;
}

void Work::let_go() {
  for (uint32_t i = 0; i < n_; ++i) {
    uint8_t state = kQueued;
    if (part_[i].state.compare_exchange_strong(state, kKeeping, std::memory_order_acq_rel)) {
      if (!part_[i].kept) keep(i);
      part_[i].kept = true;
      part_[i].state.store(kQueued, std::memory_order_release);
    } else {
      wait_while_running(part_[i]);
    }
  }
}

void Work::wait_while_running(const Part& part) {
  while (part.state.load(std::memory_order_acquire) == kRunning) {
    os::wait(state_, state_.load(std::memory_order_acquire), 100'000);  // one pass over one shard
  }
}

}  // namespace windlass
