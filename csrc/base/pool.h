// Budget and Pool: where a server's memory comes from, and how much of it there may be.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/status.h"

namespace windlass {

// Limits the bytes that a server may hold, or a part of it (then `above` is the whole). charge() fails when a limit
// would be exceeded.
// Thread safety: every method from any thread.
class Budget {
 public:
  explicit Budget(uint64_t bytes_max = ~uint64_t{0}, Budget* above = nullptr) : bytes_max_(bytes_max), above_(above) {}
  bool charge(uint64_t bytes);
  void refund(uint64_t bytes) {
    used_.fetch_sub(bytes, std::memory_order_relaxed);
    if (above_ != nullptr) above_->refund(bytes);
  }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t bytes_max() const { return bytes_max_; }
  Status exhausted(uint64_t wanted, const std::string& what) const;

 private:
  const uint64_t bytes_max_;
  Budget* const above_;
  std::atomic<uint64_t> used_{0};
};

// Blocks of a few sizes, carved from huge pages. Tables take their index pages and slabs here: small blocks, so that
// a shard with few rows is cheap, yet all on huge pages, so that a random row costs no walk of the page table.
//
// Freed blocks are kept for the next request of the same size. The memory goes back when the pool is destroyed, or by
// trim().
//
// Thread safety: every method from any thread.
class Pool {
 public:
  explicit Pool(Budget* budget) : budget_(budget) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  // A zeroed block on a cache line boundary, or nullptr when memory or budget is used up.
  std::byte* take(size_t bytes);
  void give(std::byte* block, size_t bytes);
  // Gives memory back of which no block is in use. For when many were given at once: it looks at all free blocks.
  void trim();

 private:
  struct Mapping {
    std::byte* base;
    size_t bytes;
    size_t carved;  // of them into blocks
  };
  std::byte* map_charged(size_t bytes);
  void note_carved();  // of the newest chunk

  Budget* const budget_;
  std::mutex mutex_;
  std::byte* next_ = nullptr;  // of the newest chunk
  std::byte* chunk_ = nullptr;
  size_t left_ = 0;
  size_t mapped_ = 0;
  std::unordered_map<size_t, std::vector<std::byte*>> free_;
  std::vector<Mapping> mappings_;
};

}  // namespace windlass
