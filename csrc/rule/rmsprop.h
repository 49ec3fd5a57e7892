// RMSProp: torch.optim.RMSprop. One rule for each combination of state arrays, so that none is kept in vain.
//
//   d = g + weight_decay * w;  v = alpha * v + (1 - alpha) * d^2
//   root = sqrt(v) + eps          centered: a += (1 - alpha) * (d - a);  root = sqrt(v - a^2) + eps
//   w -= lr * d / root            with momentum: m = momentum * m + d / root;  w -= lr * m
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

template <bool kCentered, bool kWithMomentum>
struct RmsPropFamily {
  enum Number { kLr, kAlpha, kEps, kWeightDecay, kMomentum, kHypers };
  // v, then the mean of gradients, then momentum, each where there is one.
  static constexpr Layout kLayout{.vectors = 1 + kCentered + kWithMomentum,
                                  .hypers = kWithMomentum ? kHypers : kMomentum};

  static Step prepare(const Hyper& h, uint64_t) {
    Step s;
    s.f[0] = static_cast<float>(h.v[kLr]);
    s.f[1] = static_cast<float>(h.v[kAlpha]);
    s.f[2] = static_cast<float>(1.0 - h.v[kAlpha]);
    s.f[3] = static_cast<float>(h.v[kEps]);
    s.f[4] = static_cast<float>(h.v[kWeightDecay]);
    s.f[5] = static_cast<float>(h.v[kMomentum]);
    return s;
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT v = state[0];
    float* WL_RESTRICT mean = kCentered ? state[1] : nullptr;
    float* WL_RESTRICT m = kWithMomentum ? state[1 + kCentered] : nullptr;
    const float lr = s.f[0], alpha = s.f[1], share = s.f[2], eps = s.f[3], decay = s.f[4], momentum = s.f[5];
    for (size_t i = 0; i < n; ++i) {
      const float d = g[i] + decay * w[i];
      v[i] = alpha * v[i] + share * (d * d);
      float square = v[i];
      if constexpr (kCentered) {
        mean[i] += share * (d - mean[i]);
        square -= mean[i] * mean[i];
        square = square < 0.0f ? 0.0f : square;  // a variance that rounding has taken below zero
      }
      const float root = sqrt_of(square) + eps;
      if constexpr (kWithMomentum) {
        m[i] = momentum * m[i] + d / root;
        w[i] -= lr * m[i];
      } else {
        w[i] -= lr * d / root;
      }
    }
  }
};

using RmsProp = RmsPropFamily<false, false>;
using RmsPropMomentum = RmsPropFamily<false, true>;
using RmsPropCentered = RmsPropFamily<true, false>;
using RmsPropCenteredMomentum = RmsPropFamily<true, true>;

}  // namespace windlass::WL_ISA
