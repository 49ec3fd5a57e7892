// ForeignRule: a user's rule. Its apply() calls a function of the user's, in a layer above.
//
// The function gets arrays of its own, filled from the shard; their contents are copied back once it has returned. So a
// function that fails changes nothing, and one that never returns can be given up.
#pragma once

#include <cstdint>
#include <functional>

#include "rule/rule.h"

namespace windlass {

// What one call works on.
struct ForeignCall {
  float* w = nullptr;
  float* g = nullptr;
  float* state[limits::kForeignVectorsMax] = {};
  float* row_scalars = nullptr;
  float* shard_scalars = nullptr;
  uint32_t* counts = nullptr;  // of a table's rows: how often each was updated, this time included
  uint64_t first = 0;          // element of the tensor
  uint64_t count = 0;          // updates of the shard, this one included; 0: the call before the first update
  Hyper hyper;
};

class ForeignRule {
 public:
  struct Size {
    uint64_t elements = 0;
    uint8_t vectors = 0, row_scalars = 0;
    uint64_t row = 1;  // elements per row
    uint32_t shard_scalars = 0;
    bool counted = false;  // rows have counts
  };
  virtual ~ForeignRule() = default;
  // Makes the arrays, fills them, calls the function and takes its results, unless it failed.
  virtual Status apply(const Size& size, const std::function<void(ForeignCall&)>& fill,
                       const std::function<void(const ForeignCall&)>& take) = 0;
};

}  // namespace windlass
