// SGD, plain and with a momentum buffer: torch.optim.SGD.
//
// The pattern of every rule: a struct with its layout, the meaning of its numbers, prepare() and apply(). apply() is
// a plain loop over arrays that do not overlap; the compiler makes vector code of it, and with a constant n (the
// row kernels) unrolls it.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

// w -= lr * (g + weight_decay * w)
struct Sgd {
  enum Number { kLr, kWeightDecay, kHypers };
  static constexpr Layout kLayout{.hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr]);
    s.f[1] = static_cast<float>(h.v[kWeightDecay]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const*, const float* WL_RESTRICT g, size_t n) {
    const float lr = s.f[0], decay = s.f[1];
    if (decay == 0.0f) {
      for (size_t i = 0; i < n; ++i) w[i] -= lr * g[i];
    } else {
      for (size_t i = 0; i < n; ++i) w[i] -= lr * (g[i] + decay * w[i]);
    }
  }
};

// d = g + weight_decay * w;  m = momentum * m + (1 - dampening) * d, the first time m = d;
// w -= lr * m, or with nesterov w -= lr * (d + momentum * m)
struct Momentum {
  enum Number { kLr, kWeightDecay, kMomentum, kDampening, kNesterov, kHypers };
  static constexpr Layout kLayout{.vectors = 1, .counts = true, .hypers = kHypers};

  static Step prepare(const Hyper& h, uint64_t count) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr]);
    s.f[1] = static_cast<float>(h.v[kWeightDecay]);
    s.f[2] = static_cast<float>(h.v[kMomentum]);
    s.f[3] = count <= 1 ? 1.0f : static_cast<float>(1.0 - h.v[kDampening]);
    s.flags = h.v[kNesterov] != 0.0;
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT m = state[0];
    const float lr = s.f[0], decay = s.f[1], momentum = s.f[2], share = s.f[3];
    if (s.flags != 0) {
      for (size_t i = 0; i < n; ++i) {
        const float d = g[i] + decay * w[i];
        m[i] = momentum * m[i] + share * d;
        w[i] -= lr * (d + momentum * m[i]);
      }
    } else {
      for (size_t i = 0; i < n; ++i) {
        const float d = g[i] + decay * w[i];
        m[i] = momentum * m[i] + share * d;
        w[i] -= lr * m[i];
      }
    }
  }
};

}  // namespace windlass::WL_ISA
