#include "exec/shard_work.h"

#include "base/os.h"
#include "exec/crew.h"

namespace windlass {

void ShardWork::set_parts(uint32_t n) {
  n_ = n;
  if (n > 1) {
    many_ = std::make_unique<Part[]>(n);
    part_ = many_.get();
  }
  for (uint32_t i = 0; i < n; ++i) {
    part_[i].work = this;
    part_[i].index = i;
  }
}

void ShardWork::begin(Crew* helpers) {
  future_.expect(n_);
  if (n_ == 0) return;
  share(helpers != nullptr && n_ > 1, helpers);
  if (shared_) helpers->post(Ref<Counted>(&future_), this);
  help();
}

void ShardWork::share(bool shared, const Crew* crew) {
  shared_ = shared;
  shares_.divide(n_, shared ? crew->size() + 1 : 1);
}

void ShardWork::begin_kept(Crew* helpers) {
  mode_ = kRunOrKeep;
  borrowing_.store(n_, std::memory_order_relaxed);
  begin(helpers);
  while (borrowing_.load(std::memory_order_acquire) != 0) {
    // A helper is in the middle of a part: one pass over one shard.
    os::wait(borrowing_, borrowing_.load(std::memory_order_relaxed), 50'000);
  }
}

void ShardWork::run_or_keep(uint32_t i) {
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

void ShardWork::begin_later(Crew* crew, bool shared) {
  const Ref<Counted> alive(&future_);
  future_.expect(n_);
  if (n_ == 0) return;
  share(shared, crew);
  mode_ = kDrain;
  for (uint32_t i = 0; i < n_; ++i) turn(i).post(part_[i]);
  crew->post(alive, this);
}

void ShardWork::help() {
  if (!shared_ && helped_.exchange(true, std::memory_order_relaxed)) return;
  for (uint32_t i = 0; shares_.take(Crew::number(), 1, &i) != 0;) {
    switch (mode_) {
      case kRun: turn(i).run(part_[i]); break;
      case kRunOrKeep: run_or_keep(i); break;
      case kDrain: turn(i).drain(); break;
    }
  }
}

void ShardWork::run_part(Part& part) {
  uint8_t queued = kQueued;
  while (!part.state.compare_exchange_weak(queued, kRunning, std::memory_order_acq_rel) && queued != kCancelled) {
    queued = kQueued;  // let_go() is copying its input: a moment
  }
  if (queued == kCancelled) {
    skip(part.index);
    return future_.end({});
  }
  Status status;
  if (run(part.index, part.kept, &status) == Ran::kStopped) {
    part.state.store(kStoppedAtGate, std::memory_order_release);  // the turn is still ours: nobody has claimed it
    return;
  }
  part.state.store(kOver, std::memory_order_release);
  future_.end(status);
}

void ShardWork::end_stopped(uint32_t i, const Status& status) {
  part_[i].state.store(kOver, std::memory_order_release);
  future_.end(status);
}

bool ShardWork::cancel_stopped(uint32_t i) {
  if (!is_stopped(i) || !leave_gate(i)) return false;
  part_[i].state.store(kCancelled, std::memory_order_release);
  future_.end({});
  return true;
}

// Whoever writes its output for it, as part of a larger pass, does so with the shard's turn.
void ShardWork::detach_stopped(uint32_t i) {
  if (is_stopped(i)) detach(i);
  wait_while_running(part_[i]);
}

void ShardWork::cancel() {
  for (uint32_t i = 0; i < n_; ++i) {
    uint8_t state = kQueued;
    if (!part_[i].state.compare_exchange_strong(state, kCancelled, std::memory_order_acq_rel) && !cancel_stopped(i)) {
      detach_stopped(i);
    }
  }
}

bool ShardWork::cancel_queued(bool* any) {
  bool all = true;
  *any = false;
  for (uint32_t i = 0; i < n_; ++i) {
    uint8_t state = kQueued;
    const bool taken =
        part_[i].state.compare_exchange_strong(state, kCancelled, std::memory_order_acq_rel) || cancel_stopped(i);
    all = all && taken;
    *any = *any || taken;
  }
  return all;
}

void ShardWork::let_go() {
  for (uint32_t i = 0; i < n_; ++i) {
    uint8_t state = kQueued;
    if (part_[i].state.compare_exchange_strong(state, kKeeping, std::memory_order_acq_rel)) {
      if (!part_[i].kept) keep(i);
      part_[i].kept = true;
      part_[i].state.store(kQueued, std::memory_order_release);
    } else {
      detach_stopped(i);
    }
  }
}

void ShardWork::wait_while_running(const Part& part) {
  static const std::atomic<uint32_t> never{0};
  while (part.state.load(std::memory_order_acquire) == kRunning) os::wait(never, 0, 100'000);  // one pass over a shard
}

}  // namespace windlass
