// Adamax: torch.optim.Adamax, Adam with the largest gradient in place of the mean square.
//
//   d = g + weight_decay * w;  m += (1 - beta1) * (d - m);  u = max(beta2 * u, |d| + eps)
//   w -= lr / (1 - beta1^count) * m / u
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

struct Adamax {
  enum Number { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kHypers };
  static constexpr Layout kLayout{.vectors = 2, .counts = true, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t count) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr] / (1.0 - power(h.v[kBeta1], count)));
    s.f[1] = static_cast<float>(1.0 - h.v[kBeta1]);
    s.f[2] = static_cast<float>(h.v[kBeta2]);
    s.f[3] = static_cast<float>(h.v[kEps]);
    s.f[4] = static_cast<float>(h.v[kWeightDecay]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT m = state[0];
    float* WL_RESTRICT u = state[1];
    const float rate = s.f[0], share = s.f[1], beta2 = s.f[2], eps = s.f[3], decay = s.f[4];
    for (size_t i = 0; i < n; ++i) {
      const float d = g[i] + decay * w[i];
      m[i] += share * (d - m[i]);
      const float before = beta2 * u[i], now = __builtin_fabsf(d) + eps;
      u[i] = (now > before) | (now != now) ? now : before;
      w[i] -= rate * m[i] / u[i];
    }
  }
};

}  // namespace windlass::WL_ISA
