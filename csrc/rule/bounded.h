// Bounds: options of any rule that clip gradients and weights, around the rule's own kernel.
//
//     gradient --clip--> small buffer --rule--> weights --clip--> weights, copies
//
// It works piece by piece, so that a pass stays one pass: clipped numbers are still in the first-level cache when they
// are used. A rule without bounds never comes here. A NaN stays a NaN: no bound hides it.
//
// Thread safety: pure functions.
#pragma once

#include "rule/kernels.h"

namespace windlass {

struct Bounds {
  float clip = std::numeric_limits<float>::infinity();  // of each number of a gradient, in both directions
  float lowest = -std::numeric_limits<float>::infinity();
  float highest = std::numeric_limits<float>::infinity();

  explicit Bounds(const RuleSpec& rule);
  // Whether there are any.
  static bool any(const RuleSpec& rule);

  void gradient(const float* g, float* to, size_t n) const { kernels().clamp(g, to, -clip, clip, n); }
  void weights(float* w, size_t n) const { kernels().clamp(w, w, lowest, highest, n); }

  // What the kernels of the same names do, within the bounds. All float32.
  void dense(const RuleKernels& rule, const Step& step, const Dense& d) const;
  void mean(const RuleKernels& rule, const Step& step, const Mean& m) const;
  void rows(const RuleKernels& rule, const Hyper& hyper, const Rows& rows) const;
};

}  // namespace windlass
