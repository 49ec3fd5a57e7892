// Block: some rows of a tensor or a table, as a query sees them. Rows of a tensor are its slices along the first
// dimension; their keys are the numbers of the slices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "rule/rule.h"

namespace windlass {

// What is true of all rows of an object.
struct RowType {
  Dtype dtype = Dtype::kFloat32;
  uint64_t dim = 1;     // numbers in a row
  bool counts = false;  // whether updates are counted for each row
  bool whole = true;    // whether every row lies in one shard
};

struct Block {
  static constexpr size_t kRowsMax = 256;
  const uint64_t* keys = nullptr;
  const void* const* rows = nullptr;
  const RowHead* const* heads = nullptr;  // where updates are counted
  size_t n = 0;
};

}  // namespace windlass
