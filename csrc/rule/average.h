// Average: the weights become the mean of what is pushed. For float32.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

// w = g, where g is already the mean of all that belongs to the update (Combine::kMean)
struct Average {
  static constexpr Layout kLayout{.combine = Combine::kMean};
  static Step prepare(const Hyper&, uint64_t) { return {}; }
  static void apply(const Step&, float* WL_RESTRICT w, float* const*, const float* WL_RESTRICT g, size_t n) {
    std::memcpy(w, g, n * sizeof(float));
  }
};

}  // namespace windlass::WL_ISA
