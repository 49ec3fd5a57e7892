// NAdam: torch.optim.NAdam, Adam with Nesterov's momentum, which grows from half of beta1 to all of it:
//
//   mu(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2),  product(t) = mu(1) * ... * mu(t)
//
//   d = g + weight_decay * w, or decoupled w *= 1 - lr * weight_decay
//   m += (1 - beta1) * (d - m);  v = beta2 * v + (1 - beta2) * d^2;  root = sqrt(v / (1 - beta2^t)) + eps
//   w -= lr * (1 - mu(t)) / (1 - product(t)) * d / root + lr * mu(t + 1) / (1 - product(t + 1)) * m / root
//
// The product uses this update's beta1 and momentum_decay, as Adam's powers use this update's betas.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

struct NAdam {
  enum Number { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kMomentumDecay, kDecoupled, kHypers };
  static constexpr Layout kLayout{.vectors = 2, .counts = true, .hypers = kHypers};
  static constexpr double kRate = 0.040821994520255166;  // -ln(0.96)

  // product(t), where q = 0.96^momentum_decay = e^-y. This needs no state and does not multiply t numbers: with the
  // series of ln(1 - x),
  //
  //   -ln of the product of all 1 - q^s / 2  =  sum over k of 2^-k / k * (q^k + q^2k + ... + q^tk)
  //
  // and the sum in parentheses is q^k * (1 - q^tk) / (1 - q^k). Terms after k = 40 add nothing, since t is small
  // wherever the product matters.
  static double product(double beta1, double y, uint64_t t, double mu_t) {
    if (power(mu_t, t) < 0x1p-60) return 0.0;  // no factor is larger than the last, and 1 - product is 1
    const double powers = power(beta1, t);
    const double fall = fallen(y), falls = fallen(y * static_cast<double>(t));
    double one = fall, all = falls;  // 1 - q^k, 1 - q^tk
    double half = 0.5, sum = 0.0;
    for (int k = 1; k <= 40; ++k, half *= 0.5) {
      sum += half / k * (1.0 - one) * (one > 0.0 ? all / one : static_cast<double>(t));
      one += (1.0 - one) * fall;
      all += (1.0 - all) * falls;
    }
    return powers * (1.0 - fallen(sum));
  }
  static double mu(double beta1, double y, double t) { return beta1 * (0.5 + 0.5 * fallen(y * t)); }

  static Step prepare(const Hyper& h, uint64_t count) {
    Step s;
    const double lr = h.v[kLr], beta1 = h.v[kBeta1], y = h.v[kMomentumDecay] * kRate, t = static_cast<double>(count);
    const double now = mu(beta1, y, t), next = mu(beta1, y, t + 1), so_far = product(beta1, y, count, now);
    s.f[0] = static_cast<float>(lr * (1.0 - now) / (1.0 - so_far));
    s.f[1] = static_cast<float>(lr * next / (1.0 - so_far * next));
    s.f[2] = static_cast<float>(1.0 / __builtin_sqrt(1.0 - power(h.v[kBeta2], count)));
    s.f[3] = static_cast<float>(1.0 - beta1);
    s.f[4] = static_cast<float>(h.v[kBeta2]);
    s.f[5] = static_cast<float>(1.0 - h.v[kBeta2]);
    s.f[6] = static_cast<float>(h.v[kEps]);
    s.flags = h.v[kDecoupled] != 0.0;
    s.f[7] = static_cast<float>(s.flags != 0 ? 1.0 - lr * h.v[kWeightDecay] : h.v[kWeightDecay]);
    return s;
  }
  template <bool kApart>
  static void apply_as(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    float* WL_RESTRICT m = state[0];
    float* WL_RESTRICT v = state[1];
    const float of_d = s.f[0], of_m = s.f[1], correction = s.f[2], share1 = s.f[3], beta2 = s.f[4], share2 = s.f[5];
    const float eps = s.f[6], decay = s.f[7];
    for (size_t i = 0; i < n; ++i) {
      const float start = kApart ? w[i] * decay : w[i];
      const float d = kApart ? g[i] : g[i] + decay * w[i];
      m[i] += share1 * (d - m[i]);
      v[i] = beta2 * v[i] + share2 * (d * d);
      w[i] = start - (of_d * d + of_m * m[i]) / (sqrt_of(v[i]) * correction + eps);
    }
  }
  static void apply(const Step& s, float* WL_RESTRICT w, float* const* state, const float* WL_RESTRICT g, size_t n) {
    s.flags != 0 ? apply_as<true>(s, w, state, g, n) : apply_as<false>(s, w, state, g, n);
  }
};

}  // namespace windlass::WL_ISA
