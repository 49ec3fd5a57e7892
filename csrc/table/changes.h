// Changes: which keys of a shard have been touched while it is being copied. Rows made, updated and taken out alike;
// what became of a key is found out when it is copied again.
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
  // Each once, and none from now on. Not in the order of their hashes: an index that is filled in that order has all of
  // it in one place.
  std::vector<uint64_t> take() {
    compact();
    std::sort(hashes_.begin(), hashes_.end(), [](uint64_t a, uint64_t b) { return mix(a) < mix(b); });
    compact_at_ = kCompactMin;
    return std::exchange(hashes_, {});
  }
  size_t size() const { return hashes_.size(); }  // at least as many as there are

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
