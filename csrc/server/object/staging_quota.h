// StagingQuota: limits the memory of all pushes that wait for their update. A caller that finds no room can wait for
// it.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/os.h"

namespace windlass {

class StagingQuota {
 public:
  explicit StagingQuota(uint64_t bytes_max) : bytes_max_(bytes_max) {}

  bool charge(uint64_t bytes) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (used + bytes > bytes_max_) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_seq_cst));
    return true;
  }
  // Charges beyond the limit, for a caller that must not wait.
  void force(uint64_t bytes) { used_.fetch_add(bytes, std::memory_order_seq_cst); }
  void refund(uint64_t bytes) {
    used_.fetch_sub(bytes, std::memory_order_seq_cst);
    changed();
  }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }

  // To wait for room: read changes() before charge(), and wait until it differs.
  uint32_t changes() const { return changes_.load(std::memory_order_seq_cst); }
  void wait(uint32_t seen, int64_t ns) {
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    os::wait(changes_, seen, ns);
    waiters_.fetch_sub(1, std::memory_order_seq_cst);
  }
  // Wakes all waiters: there may be room now, or they may need none.
  void changed() {
    changes_.fetch_add(1, std::memory_order_seq_cst);
    if (waiters_.load(std::memory_order_seq_cst) != 0) os::wake_all(changes_);
  }

 private:
  const uint64_t bytes_max_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint32_t> changes_{0}, waiters_{0};
};

}  // namespace windlass
