// Cut: how a tensor is divided into shards. Fixed by shape and dtype alone, so it is the same for any number of
// servers, and two tensors of the same shape and dtype are cut alike.
//
//     shard bytes = bytes / 64, at least 64 KiB, at most 4 MiB; between rows where a row fits, else anywhere
//
// A rule that needs the whole tensor makes it one shard.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/limits.h"

namespace windlass {

struct Cut {
  uint64_t elements = 0;
  uint64_t row = 1;        // elements per row
  uint64_t per_shard = 1;  // elements per shard; the last may have fewer
  uint32_t shards = 0;
  bool whole_rows = true;  // no row lies in two shards

  static Cut whole(uint64_t elements, uint64_t row) {
    Cut c;
    c.elements = elements;
    c.row = std::max<uint64_t>(row, 1);
    if (elements == 0) return c;
    c.per_shard = elements;
    c.shards = 1;
    return c;
  }

  static Cut of(uint64_t elements, uint64_t row, uint64_t element_bytes) {
    Cut c;
    c.elements = elements;
    c.row = std::max<uint64_t>(row, 1);
    if (elements == 0) return c;
    const uint64_t target_bytes =
        std::clamp(elements * element_bytes / limits::kTensorPieces, limits::kShardBytesMin, limits::kShardBytesMax);
    const uint64_t target = target_bytes / element_bytes;
    c.whole_rows = c.row * element_bytes <= limits::kShardBytesMax;
    c.per_shard = c.whole_rows ? std::max<uint64_t>(target / c.row, 1) * c.row : target;
    c.shards = static_cast<uint32_t>((elements + c.per_shard - 1) / c.per_shard);
    return c;
  }

  uint64_t first_of(uint32_t shard) const { return shard * per_shard; }
  uint64_t end_of(uint32_t shard) const { return std::min(elements, (shard + uint64_t{1}) * per_shard); }
  uint32_t shard_of(uint64_t element) const { return static_cast<uint32_t>(element / per_shard); }
};

}  // namespace windlass
