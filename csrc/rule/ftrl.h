// FTRL: FTRL-proximal, per coordinate, with L1 and L2 (McMahan and others 2013). lr is its alpha.
//
//   z += g - (sqrt(n + g^2) - sqrt(n)) / lr * w;  n += g^2
//   w = 0 where |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)
//
// New weights are a function of z, n and the hyperparameters: the old weights count only through z.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

struct Ftrl {
  enum Number { kLr, kBeta, kL1, kL2, kHypers };
  static constexpr Layout kLayout{.vectors = 2, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t) {
    Step s;
    s.f[0] = static_cast<float>(1.0 / h.v[kLr]);
    s.f[1] = static_cast<float>(h.v[kBeta]);
    s.f[2] = static_cast<float>(h.v[kL1]);
    s.f[3] = static_cast<float>(h.v[kL2]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT z = state[0];
    float* WL_RESTRICT squares = state[1];
    const float inverse = s.f[0], beta = s.f[1], l1 = s.f[2], l2 = s.f[3];
    for (size_t i = 0; i < n; ++i) {
      const float square = g[i] * g[i], before = sqrt_of(squares[i]);
      squares[i] += square;
      const float root = sqrt_of(squares[i]);
      // The difference of the roots without a subtraction, which would lose digits as n grows. Both roots may be zero.
      const float more = square / (root + before + 0x1p-126f);
      z[i] += g[i] - more * inverse * w[i];
      const float over = __builtin_fabsf(z[i]) - l1;
      const float moved = (z[i] < 0.0f ? over : -over) / ((beta + root) * inverse + l2);
      w[i] = over <= 0.0f ? 0.0f : moved;
    }
  }
};

}  // namespace windlass::WL_ISA
