// The limits of rules: their own kernels on plain arrays, without a server, an index or a session.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rule/kernels.h"

namespace windlass {

inline constexpr uint64_t kBareCount = 1000;  // the number of the update, for rules that count

// Applies the rule to elements [at, at + n). Where it has numbers per row, they follow the state arrays. looks: at
// every number it uses, as for reject_nonfinite; false if one is not finite.
bool bare_dense(RuleKind kind, const Hyper& hyper, float* w, float* const* state, const float* g, size_t at, size_t n,
                size_t row, bool looks);

// Rows by their numbers: weights, state and heads of row r at r times their strides.
struct BareRows {
  float* w = nullptr;
  float* state = nullptr;
  std::byte* heads = nullptr;
  size_t head_bytes = 0;
  const uint32_t* numbers = nullptr;
  const float* g = nullptr;
  size_t n = 0;
  uint32_t dim = 0;
  bool looks = false;
};
bool bare_rows(RuleKind kind, const Hyper& hyper, const BareRows& rows);

}  // namespace windlass
