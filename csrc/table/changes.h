// Changes: the keys of a shard that were touched while it is being copied, whether their rows were made, updated or
// deleted. Copying a key again finds out which.
//
// Thread safety: none; the holder of the shard's turn.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "table/group.h"

namespace windlass {

class Changes {
 public:
  void add(const Keyed* keyed, size_t n) {
    for (size_t i = 0; i < n; ++i) hashes_.push_back(keyed[i].hash);
    if (hashes_.size() >= compact_at_) compact();
  }
  // Returns the hashes, each once, and forgets them. They are not in order: an index that is filled in hash order has
  // all entries in one place.
  std::vector<uint64_t> take() {
    compact();
    std::sort(hashes_.begin(), hashes_.end(), [](uint64_t a, uint64_t b) { return mix(a) < mix(b); });
    compact_at_ = kCompactMin;
    return std::exchange(hashes_, {});
  }
  size_t size() const { return hashes_.size(); }  // an upper bound: repeats count

 private:
  static constexpr size_t kCompactMin = 1 << 16;
  void compact() {
    std::sort(hashes_.begin(), hashes_.end());
    hashes_.erase(std::unique(hashes_.begin(), hashes_.end()), hashes_.end());
    compact_at_ = std::max(kCompactMin, 2 * hashes_.size());
  }

  std::vector<uint64_t> hashes_;
  size_t compact_at_ = kCompactMin;
};

}  // namespace windlass
