// SettledClock: the clock below which everything that a worker has pushed and closed is answered.
//
// A request that changes shards counts from begin() to end(), under the clock that its worker had at begin(); so the
// iteration that it belongs to is that one or a later one. The counts are a ring: clocks that are far apart share one,
// which only makes the answer more careful.
//
//     clock      5   6   7   8          lowest(8) is 6: a push of iteration 6 has no answer yet
//     requests   0   2   0   1
//
// Thread safety: every method from any thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "base/os.h"

namespace windlass {

class SettledClock {
 public:
  // Read the clock of the request's iteration only after this. The result is for end().
  uint64_t begin(const std::atomic<uint64_t>& clock) {
    const uint64_t now = clock.load(std::memory_order_acquire);
    at(now).fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before the clock is read again, see lowest()
    return now;
  }
  void end(uint64_t began) {
    if (at(began).fetch_sub(1, std::memory_order_seq_cst) != 1 || waiters_.load(std::memory_order_seq_cst) == 0) return;
    changes_.fetch_add(1, std::memory_order_seq_cst);
    os::wake_all(changes_);
  }
  // The lowest clock with a request that has no answer, at most `limit`. clock: the worker's present one.
  uint64_t lowest(uint64_t limit, const std::atomic<uint64_t>& clock) {
    const uint64_t now = clock.load(std::memory_order_acquire);
    // Whoever begins after this fence sees this clock, and belongs to it or to a later one.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint64_t from = floor_.load(std::memory_order_acquire);
    uint64_t clear = from;
    while (clear < from + kSlots && at(clear).load(std::memory_order_seq_cst) == 0) ++clear;
    if (clear == from + kSlots) clear = std::max(limit, now);  // after one round there is nothing new to see
    uint64_t floor = from;
    const uint64_t past = std::min(clear, now);
    while (floor < past && !floor_.compare_exchange_weak(floor, past, std::memory_order_acq_rel)) {
    }
    return std::min(clear, limit);
  }
  // Waits until it is at least `limit`; false if that takes longer than until the deadline.
  bool await(uint64_t limit, const std::atomic<uint64_t>& clock, int64_t deadline_ns) {
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    bool settled = false;
    for (;;) {
      const uint32_t seen = changes_.load(std::memory_order_seq_cst);
      settled = lowest(limit, clock) >= limit;
      const int64_t left = deadline_ns - os::now_ns();
      if (settled || left <= 0) break;
      os::wait(changes_, seen, left);
    }
    waiters_.fetch_sub(1, std::memory_order_seq_cst);
    return settled;
  }

 private:
  static constexpr uint64_t kSlots = 1024;
  std::atomic<uint32_t>& at(uint64_t clock) { return counts_[clock % kSlots]; }

  std::array<std::atomic<uint32_t>, kSlots> counts_{};
  std::atomic<uint64_t> floor_{0};  // nothing below it is without an answer
  std::atomic<uint32_t> changes_{0}, waiters_{0};
};

}  // namespace windlass
