// Adadelta: torch.optim.Adadelta.
//
//   d = g + weight_decay * w;  v = rho * v + (1 - rho) * d^2
//   x = sqrt(a + eps) / sqrt(v + eps) * d;  a = rho * a + (1 - rho) * x^2;  w -= lr * x
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

struct Adadelta {
  enum Number { kLr, kRho, kEps, kWeightDecay, kHypers };
  static constexpr Layout kLayout{.vectors = 2, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr]);
    s.f[1] = static_cast<float>(h.v[kRho]);
    s.f[2] = static_cast<float>(1.0 - h.v[kRho]);
    s.f[3] = static_cast<float>(h.v[kEps]);
    s.f[4] = static_cast<float>(h.v[kWeightDecay]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT v = state[0];
    float* WL_RESTRICT a = state[1];
    const float lr = s.f[0], rho = s.f[1], share = s.f[2], eps = s.f[3], decay = s.f[4];
    for (size_t i = 0; i < n; ++i) {
      const float d = g[i] + decay * w[i];
      v[i] = rho * v[i] + share * (d * d);
      const float x = sqrt_of(a[i] + eps) / sqrt_of(v[i] + eps) * d;
      a[i] = rho * a[i] + share * (x * x);
      w[i] -= lr * x;
    }
  }
};

}  // namespace windlass::WL_ISA
