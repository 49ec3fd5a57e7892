// StagingQuota: limits the memory of all pushes that wait for their update. A caller that finds no room can wait for
// it; one that must not wait, since others wait for it, may take from what the server has left for objects.
//
//     take()         | staged pushes      | max
//     take_beyond()  | tensors, tables, running sums  | memory_bytes_max
//
// So the two limits hold together, and nobody waits in a circle: without room in either the push is refused.
//
// Thread safety: every method from any thread; a Room is one thread's at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "base/os.h"
#include "base/pool.h"

namespace windlass {

class StagingQuota {
 public:
  // beyond: nullptr: unlimited, and counted here.
  explicit StagingQuota(uint64_t bytes_max, Budget* beyond = nullptr) : bytes_max_(bytes_max), beyond_(beyond) {}

  // Memory that was taken, given back at its end.
  class Room {
   public:
    Room() = default;
    Room(Room&& other) noexcept { *this = std::move(other); }
    Room& operator=(Room&& other) noexcept {
      give_back();
      quota_ = std::exchange(other.quota_, nullptr);
      staged_ = std::exchange(other.staged_, 0);
      beyond_ = std::exchange(other.beyond_, 0);
      return *this;
    }
    ~Room() { give_back(); }
    uint64_t bytes() const { return staged_ + beyond_; }
    void give_back() { shrink(0); }
    // Gives back what is more than so many bytes.
    void shrink(uint64_t most) {
      if (bytes() <= most) return;
      const uint64_t staged = std::min(staged_, bytes() - most);
      staged_ -= staged;
      const uint64_t beyond = bytes() - most;
      beyond_ -= beyond;
      if (beyond != 0) quota_->beyond_->refund(beyond);
      if (staged != 0) quota_->refund(staged);
    }

   private:
    friend class StagingQuota;
    StagingQuota* quota_ = nullptr;
    uint64_t staged_ = 0, beyond_ = 0;
  };

  // Adds to *room; false if there is not so much.
  bool take(uint64_t bytes, Room* room) {
    if (!charge(bytes)) return false;
    room->quota_ = this;
    room->staged_ += bytes;
    return true;
  }
  bool take_beyond(uint64_t bytes, Room* room) {
    if (beyond_ != nullptr && !beyond_->charge(bytes)) return false;
    if (beyond_ == nullptr) force(bytes);
    room->quota_ = this;
    (beyond_ != nullptr ? room->beyond_ : room->staged_) += bytes;
    return true;
  }

  bool charge(uint64_t bytes) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (used + bytes > bytes_max_) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_seq_cst));
    return true;
  }
  // Charges beyond the limit: inside the process, whose memory is one's own, and for what is limited by number.
  void force(uint64_t bytes) { used_.fetch_add(bytes, std::memory_order_seq_cst); }
  void refund(uint64_t bytes) {
    used_.fetch_sub(bytes, std::memory_order_seq_cst);
    changed();
  }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t bytes_max() const { return bytes_max_; }

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
  Budget* const beyond_;
  std::atomic<uint64_t> used_{0};
  std::atomic<uint32_t> changes_{0}, waiters_{0};
};

}  // namespace windlass
