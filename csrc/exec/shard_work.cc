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
  if (helpers != nullptr && n_ > 1) borrowing_.store(n_, std::memory_order_relaxed);
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
    leave(i, t);
    borrowing_.fetch_sub(1, std::memory_order_release);
    t.drain();
  }
}

// Queues the part at a busy shard before the caller may go on: the caller's next request must find it there.
void ShardWork::leave(uint32_t i, Turn& turn) {
  if (mode_ == kRunOrKeep) {
    keep(i);
    part_[i].kept = true;
  }
  turn.post(part_[i]);
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
  if (!shared_) {
    if (!helped_.exchange(true, std::memory_order_relaxed)) start_all();
    return;
  }
  for (uint32_t i = 0; shares_.take(Crew::number(), 1, &i) != 0;) {
    switch (mode_) {
      case kRun: turn(i).run(part_[i]); break;
      case kRunOrKeep: run_or_keep(i); break;
      case kDrain: turn(i).drain(); break;
    }
  }
}

// Starts all parts from one thread. Nobody can cancel a part before this thread has queued it, so those it runs itself
// need no claim, and end together. That counts in a request for few keys per shard: one atomic operation per part is a
// fifteenth of its time.
void ShardWork::start_all() {
  uint32_t ended = 0;
  for (uint32_t i = 0; i < n_; ++i) {
    Turn& t = turn(i);
    if (mode_ != kDrain && t.try_take()) {
      if (run_in_turn(part_[i])) ++ended;
      t.release();
      continue;
    }
    if (mode_ != kDrain) leave(i, t);
    t.drain();
  }
  future_.end_well(ended);
}

// False: the part has stopped, and this work may be destroyed.
bool ShardWork::run_in_turn(Part& part) {
  Status status;
  if (run(part.index, part.kept, &status) == Ran::kStopped) return false;
  part.state.store(kOver, std::memory_order_release);
  if (!status.ok()) future_.fail(status);
  return true;
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
  if (run_in_turn(part)) future_.end_well(1);
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

// Whoever writes the part's output in a larger pass has the shard's turn, which detach() takes: nothing is written
// after it.
void ShardWork::detach_stopped(uint32_t i) {
  wait_while(kRunning, part_[i]);
  if (is_stopped(i) && !detach(i)) wait_while(kStoppedAtGate, part_[i]);
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

// Waits for a moment: one pass over a shard.
void ShardWork::wait_while(State state, const Part& part) {
  static const std::atomic<uint32_t> never{0};
  while (part.state.load(std::memory_order_acquire) == state) os::wait(never, 0, 100'000);
}

}  // namespace windlass
