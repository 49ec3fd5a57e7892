// Schedules: what the step size of an update is multiplied by, from the number of the update alone. So a server
// computes it by itself, whoever pushes, and a replica or a shard that has moved gets the same numbers.
//
//     1 |    ____            linear, cosine: fall from 1 to `end` over `updates`, and stay there
//       |   /    \           inverse root:   1 / sqrt(1 + t / updates) after t updates, never below `end`;
//       |  /      \                          `updates` = 0: as many as the warm-up has
//       | /        \___ end  steps:          times `end` after every `updates`
//       +/-------------      constant:       stays at 1
//       warmup  updates
//
// During warm-up the factor of update n is n / warmup: the first already has an effect, the last its full one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "rule/rule.h"

namespace windlass {

inline bool scheduled(const RuleSpec& rule) { return rule.schedule != Schedule{}; }

// cos(pi * p) for p in [0, 1], in our own arithmetic: a library's may round differently on the next machine. It is the
// sine of the distance to the middle, at most pi / 2.
inline double cos_half_turn(double p) {
  const double x = (0.5 - p) * 3.14159265358979323846, z = x * x;
  double series = 1.0;
  for (int k = 20; k >= 2; k -= 2) series = 1.0 - z / (k * (k + 1)) * series;
  return x * series;
}

// The factor of update `count`, counted from 1.
inline double factor(const Schedule& s, uint64_t count) {
  const uint64_t before = count == 0 ? 0 : count - 1;
  if (before < s.warmup) return static_cast<double>(before + 1) / static_cast<double>(s.warmup);
  const uint64_t t = before - s.warmup;
  const double share =
      s.updates != 0 ? static_cast<double>(std::min(t, s.updates)) / static_cast<double>(s.updates) : 1;
  switch (s.kind) {
    case Schedule::kLinear: return 1.0 + (s.end - 1.0) * share;
    case Schedule::kCosine: return s.end + (1.0 - s.end) * (0.5 + 0.5 * cos_half_turn(share));
    case Schedule::kInverseRoot: {
      const auto over = static_cast<double>(s.updates != 0 ? s.updates : std::max<uint64_t>(s.warmup, 1));
      return std::max(s.end, 1.0 / __builtin_sqrt(1.0 + static_cast<double>(t) / over));
    }
    case Schedule::kSteps: {
      double result = 1.0, base = s.end;
      for (uint64_t n = s.updates != 0 ? t / s.updates : 0; n != 0; n >>= 1, base *= base) {
        if (n & 1) result *= base;
      }
      return result;
    }
    case Schedule::kConstant:
    case Schedule::kKinds: break;
  }
  return 1.0;
}

// The hyperparameters of update `count`.
inline Hyper at_update(const RuleSpec& rule, const Hyper& hyper, uint64_t count) {
  Hyper h = hyper;
  if (scheduled(rule)) h.v[Hyper::kStepSize] *= factor(rule.schedule, count);
  return h;
}

}  // namespace windlass
