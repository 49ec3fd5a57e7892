// Adagrad (torch.optim.Adagrad) and RowAdagrad, which keeps one accumulator per row.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

// d = g + weight_decay * w;  a += d^2;  w -= lr / (1 + (count - 1) * lr_decay) * d / (sqrt(a) + eps)
struct Adagrad {
  enum Number { kLr, kLrDecay, kWeightDecay, kEps, kHypers };
  static constexpr Layout kLayout{.vectors = 1, .counts = true, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t count) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr] / (1.0 + static_cast<double>(count - 1) * h.v[kLrDecay]));
    s.f[1] = static_cast<float>(h.v[kWeightDecay]);
    s.f[2] = static_cast<float>(h.v[kEps]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT a = state[0];
    const float lr = s.f[0], decay = s.f[1], eps = s.f[2];
    for (size_t i = 0; i < n; ++i) {
      const float d = g[i] + decay * w[i];
      a[i] += d * d;
      w[i] -= lr * d / (sqrt_of(a[i]) + eps);
    }
  }
};

// a += mean of g^2 over the row;  w -= lr * g / (sqrt(a) + eps)
struct RowAdagrad {
  enum Number { kLr, kEps, kHypers };
  static constexpr Layout kLayout{.row_scalars = 1, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr]);
    s.f[1] = static_cast<float>(h.v[kEps]);
    return s;
  }
  static void apply_row(const Step& s, float* WL_RESTRICT w, float* scalars, const float* WL_RESTRICT g, size_t n) {
    scalars[0] += sum_of_squares(g, n) / static_cast<float>(n);
    const float rate = s.f[0] / (sqrt_of(scalars[0]) + s.f[1]);
    for (size_t i = 0; i < n; ++i) w[i] -= rate * g[i];
  }
};

}  // namespace windlass::WL_ISA
