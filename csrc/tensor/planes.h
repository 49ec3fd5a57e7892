// Planes: the arrays of numbers that a tensor is made of, in this order: its weights, each state array of its rule, the
// rule's numbers per row. Where a shard's part of each lies in the whole array:
//
//     weights   | shard 0 | shard 1 | shard 2 |      float32, float64 or int64
//     exp_avg   | shard 0 | shard 1 | shard 2 |      state is float32
//     ...
//
// and last the rule's numbers per shard, where it has any.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace windlass {

struct Plane {
  uint64_t at = 0;  // in the whole array, in bytes
  uint64_t bytes = 0;
};

inline std::vector<Plane> planes_of(const TensorSpec& spec, const Cut& cut, uint32_t shard) {
  const Layout layout = layout_of(spec.rule);
  const uint64_t first = cut.first_of(shard), n = cut.end_of(shard) - first, size = size_of(spec.dtype);
  std::vector<Plane> planes = {{first * size, n * size}};
  for (int v = 0; v < layout.vectors; ++v) planes.push_back({first * sizeof(float), n * sizeof(float)});
  if (layout.row_scalars != 0) {
    const uint64_t row = layout.row_scalars * sizeof(float);
    planes.push_back({first / cut.row * row, n / cut.row * row});
  }
  if (layout.shard_scalars != 0) {
    const uint64_t bytes = layout.shard_scalars * sizeof(float);
    planes.push_back({shard * bytes, bytes});
  }
  return planes;
}

// The whole arrays: bytes of each.
inline std::vector<uint64_t> plane_bytes(const TensorSpec& spec, const Cut& cut) {
  const Layout layout = layout_of(spec.rule);
  std::vector<uint64_t> bytes = {cut.elements * size_of(spec.dtype)};
  for (int v = 0; v < layout.vectors; ++v) bytes.push_back(cut.elements * sizeof(float));
  if (layout.row_scalars != 0) bytes.push_back(cut.elements / cut.row * layout.row_scalars * sizeof(float));
  if (layout.shard_scalars != 0) bytes.push_back(uint64_t{cut.shards} * layout.shard_scalars * sizeof(float));
  return bytes;
}

}  // namespace windlass
