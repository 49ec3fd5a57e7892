// Owners: which server has each shard of an object, as far as this client knows. It learns from servers that refuse a
// request, and from Links::moved(); a higher term always wins, a lower one never.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "messages/messages.h"

namespace windlass {

class Owners {
 public:
  struct At {
    uint32_t server, term;
  };

  Owners(const Map& map, uint32_t shards)
      : first_(map), shards_(shards), all_(std::make_unique<std::atomic<uint64_t>[]>(shards)) {
    learn(map);
  }

  uint32_t object() const { return first_.object; }
  uint32_t shards() const { return shards_; }
  At of(uint32_t shard) const {
    const uint64_t packed = all_[shard].load(std::memory_order_acquire);
    return {static_cast<uint32_t>(packed), static_cast<uint32_t>(packed >> 32)};
  }
  // Whether it has moved since the object was made.
  bool has_moved(uint32_t shard) const { return of(shard).term > first_.run_of(shard).term; }
  void learn(uint32_t shard, At at) {
    const uint64_t packed = uint64_t{at.term} << 32 | at.server;
    uint64_t known = all_[shard].load(std::memory_order_relaxed);
    while (known >> 32 < at.term && !all_[shard].compare_exchange_weak(known, packed, std::memory_order_release)) {
    }
  }
  void learn(const Map& map) {
    for (uint32_t shard = 0; shard < shards_; ++shard) {
      const Map::Owned& run = map.run_of(shard);
      learn(shard, {run.server, run.term});
    }
  }

 private:
  const Map first_;
  const uint32_t shards_;
  const std::unique_ptr<std::atomic<uint64_t>[]> all_;  // term in the high half, server in the low one
};

}  // namespace windlass
