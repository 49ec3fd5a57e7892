// Lion: every weight moves by lr, in the direction of a mean of gradients; one state array.
//
//   c = beta1 * m + (1 - beta1) * g;  w = w * (1 - lr * weight_decay) - lr * sign(c)
//   m = beta2 * m + (1 - beta2) * g
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

struct Lion {
  enum Number { kLr, kBeta1, kBeta2, kWeightDecay, kHypers };
  static constexpr Layout kLayout{.vectors = 1, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr]);
    s.f[1] = static_cast<float>(h.v[kBeta1]);
    s.f[2] = static_cast<float>(1.0 - h.v[kBeta1]);
    s.f[3] = static_cast<float>(h.v[kBeta2]);
    s.f[4] = static_cast<float>(1.0 - h.v[kBeta2]);
    s.f[5] = static_cast<float>(1.0 - h.v[kLr] * h.v[kWeightDecay]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT m = state[0];
    const float lr = s.f[0], beta1 = s.f[1], share1 = s.f[2], beta2 = s.f[3], share2 = s.f[4], decay = s.f[5];
    for (size_t i = 0; i < n; ++i) {
      const float c = beta1 * m[i] + share1 * g[i];
      const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;  // 0 for 0, NaN for NaN
      w[i] = w[i] * decay - lr * sign;
      m[i] = beta2 * m[i] + share2 * g[i];
    }
  }
};

}  // namespace windlass::WL_ISA
