// Turn: one thread at a time works on a shard, and nobody waits for it.
//
// A thread that brings a job runs it at once if nobody has the turn; else it leaves the job in the queue, and the
// thread that has the turn runs it before releasing the turn. So a shard needs no lock, an idle shard costs one
// exchange, and a busy one no hand-over to another thread. Jobs run in the order they were queued.
//
//     word_:   0            free, nothing waits
//              kHeld        held, nothing waits
//              job          free, jobs wait (post() left them for a later drain())
//              job | kHeld  held, jobs wait: a stack, newest first
//
// Thread safety: every method from any thread. A job must live until it has run.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "base/os.h"

namespace windlass {

class Job {
 public:
  virtual void run() = 0;

 protected:
  ~Job() = default;

 private:
  friend class Turn;
  Job* next_ = nullptr;
};

class Turn {
 public:
  // Runs the job now, after those that wait, or leaves it to the thread that has the turn.
  void run(Job& job) {
    uintptr_t free = 0;
    if (word_.compare_exchange_strong(free, kHeld, std::memory_order_acquire)) {
      job.run();
      release();
      return;
    }
    post(job);
    drain();
  }

  // Leaves the job for a later drain().
  void post(Job& job) {
    uintptr_t word = word_.load(std::memory_order_relaxed);
    do {
      job.next_ = reinterpret_cast<Job*>(word & ~kHeld);
    } while (!word_.compare_exchange_weak(word, reinterpret_cast<uintptr_t>(&job) | (word & kHeld),
                                          std::memory_order_release, std::memory_order_relaxed));
  }

  // Runs queued jobs, unless another thread has the turn and will run them.
  void drain() {
    uintptr_t word = word_.load(std::memory_order_relaxed);
    do {
      if (word == 0 || (word & kHeld) != 0) return;
    } while (!word_.compare_exchange_weak(word, kHeld, std::memory_order_acquire, std::memory_order_relaxed));
    run_list(reinterpret_cast<Job*>(word));
    release();
  }

  // For a caller that cannot queue a job: true when it now has the turn and nothing was queued. It must then call
  // release().
  [[nodiscard]] bool try_take() {
    uintptr_t free = 0;
    return word_.compare_exchange_strong(free, kHeld, std::memory_order_acquire);
  }

  void release() {
    for (;;) {
      uintptr_t word = kHeld;
      if (word_.compare_exchange_strong(word, 0, std::memory_order_release, std::memory_order_relaxed)) return;
      word = word_.exchange(kHeld, std::memory_order_acquire);
      run_list(reinterpret_cast<Job*>(word & ~kHeld));
    }
  }

 private:
  static constexpr uintptr_t kHeld = 1;

  static void run_list(Job* newest) {
    Job* oldest = nullptr;
    while (newest != nullptr) {
      Job* next = newest->next_;
      newest->next_ = oldest;
      oldest = newest;
      newest = next;
    }
    while (oldest != nullptr) {
      Job* next = oldest->next_;  // the job may be gone after it has run
      oldest->run();
      oldest = next;
    }
  }

  std::atomic<uintptr_t> word_{0};
};

// Runs f with the turn held, and returns when it has run; if another thread has the turn, that one runs it. If f runs
// out of memory, the turn is released and only this caller hears of it.
template <class F>
void with_turn(Turn& turn, F f) {
  if (turn.try_take()) {
    struct Held {
      Turn& turn;
      ~Held() { turn.release(); }
    } const held{turn};
    return f();
  }
  struct Left final : Job {
    explicit Left(F& of) : f(of) {}
    void run() override {
      try {
        f();
      } catch (...) {  // the other thread has nothing to do with it
        failure = std::current_exception();
      }
      done.store(1, std::memory_order_release);
      os::wake_all(done);
    }
    F& f;
    std::exception_ptr failure;
    std::atomic<uint32_t> done{0};
  };
  Left left(f);
  turn.run(left);
  while (left.done.load(std::memory_order_acquire) == 0) os::wait(left.done, 0, -1);
  if (left.failure != nullptr) std::rethrow_exception(left.failure);
}

}  // namespace windlass
