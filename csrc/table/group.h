// Groups: the keys of a request, grouped by shard.
//
// A shard is worked on by one thread at a time, so a request is cut by shard first: one pass counts, one pass places.
// Within a shard the keys keep their order.
//
// Keys are bit patterns: -1 and 2^64-1 are one key, an int32 is sign-extended first, and none is reserved.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.h"
#include "base/limits.h"

namespace windlass {

enum class KeyType : uint8_t { kInt64, kUint64, kInt32 };

struct Keys {
  const void* data = nullptr;
  KeyType type = KeyType::kInt64;
  uint64_t n = 0;

  uint64_t bytes_of(uint64_t keys) const {
    return keys * (type == KeyType::kInt32 ? sizeof(int32_t) : sizeof(uint64_t));
  }
  uint64_t bytes() const { return bytes_of(n); }
  Keys some(uint64_t first, uint64_t count) const {
    return {static_cast<const std::byte*>(data) + bytes_of(first), type, count};
  }
  uint64_t at(uint64_t i) const {
    return type == KeyType::kInt32 ? static_cast<uint64_t>(static_cast<int64_t>(static_cast<const int32_t*>(data)[i]))
                                   : static_cast<const uint64_t*>(data)[i];
  }
};

// The high bits of a hash say which shard, the rest is the place within it.
inline uint32_t shard_of_hash(uint64_t hash) { return static_cast<uint32_t>(hash >> 56); }
inline uint64_t place_of(uint64_t hash) { return hash << 8; }
inline uint64_t key_of(uint32_t shard, uint64_t place) { return unmix(place >> 8 | uint64_t{shard} << 56); }

// A key by its hash, and its place in the request.
struct Keyed {
  uint64_t hash;
  uint32_t at;
};

class Groups {
 public:
  explicit Groups(const Keys& keys);
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;
  ~Groups();

  bool ok() const { return ok_; }  // false: there was no memory, and all groups are empty
  const Keyed* begin(uint32_t shard) const { return keyed_ + start_[shard]; }
  size_t size(uint32_t shard) const { return start_[shard + 1] - start_[shard]; }
  uint64_t total() const { return start_[limits::kTableShards]; }

 private:
  Keyed* keyed_ = nullptr;
  uint64_t room_ = 0;
  bool ok_;
  uint32_t start_[limits::kTableShards + 1];
};

// Removes repeated keys. Writes each key once to `unique` (room for keys.n) and, for every key of the request, its
// place there to `inverse`. Returns how many there are, or kNoMemory. The order is that of the shards, so it is the
// same each time.
inline constexpr uint64_t kNoMemory = ~uint64_t{0};
uint64_t unique(const Keys& keys, uint64_t* unique, int64_t* inverse);

// Puts the `n` different keys that unique() found into ascending order, as signed numbers, and the `places` numbers of
// `inverse` with them. Returns false if there was no memory; then nothing has changed.
bool sort_unique(uint64_t* unique, uint64_t n, int64_t* inverse, uint64_t places);

}  // namespace windlass
