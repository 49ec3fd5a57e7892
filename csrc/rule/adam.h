// Adam and AdamW: torch.optim.Adam, torch.optim.AdamW.
//
//   d = g + weight_decay * w          (Adam)        w *= 1 - lr * weight_decay   (AdamW)
//   m += (1 - beta1) * (d - m);  v = beta2 * v + (1 - beta2) * d^2
//   w -= lr / (1 - beta1^count) * m / (sqrt(v) / sqrt(1 - beta2^count) + eps)
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

template <bool kDecoupled>
struct AdamFamily {
  enum Number { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kHypers };
  static constexpr Layout kLayout{.vectors = 2, .counts = true, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t count) {
    Step s;
    const double correction1 = 1.0 - power(h.v[kBeta1], count);
    const double correction2 = 1.0 - power(h.v[kBeta2], count);
    s.f[0] = static_cast<float>(h.v[kLr] / correction1);
    s.f[1] = static_cast<float>(1.0 / __builtin_sqrt(correction2));
    s.f[2] = static_cast<float>(1.0 - h.v[kBeta1]);
    s.f[3] = static_cast<float>(h.v[kBeta2]);
    s.f[4] = static_cast<float>(1.0 - h.v[kBeta2]);
    s.f[5] = static_cast<float>(h.v[kEps]);
    s.f[6] = static_cast<float>(kDecoupled ? 1.0 - h.v[kLr] * h.v[kWeightDecay] : h.v[kWeightDecay]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT m = state[0];
    float* WL_RESTRICT v = state[1];
    const float rate = s.f[0], root = s.f[1], share1 = s.f[2], beta2 = s.f[3], share2 = s.f[4], eps = s.f[5];
    const float decay = s.f[6];
    for (size_t i = 0; i < n; ++i) {
      const float start = kDecoupled ? w[i] * decay : w[i];
      const float d = kDecoupled ? g[i] : g[i] + decay * w[i];
      m[i] += share1 * (d - m[i]);
      v[i] = beta2 * v[i] + share2 * (d * d);
      w[i] = start - rate * m[i] / (sqrt_of(v[i]) * root + eps);
    }
  }
};

using Adam = AdamFamily<false>;
using AdamW = AdamFamily<true>;

}  // namespace windlass::WL_ISA
