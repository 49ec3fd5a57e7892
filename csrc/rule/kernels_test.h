// What the tests of kernels share: numbers and hyperparameters to run them on.
#pragma once

#include <cstring>
#include <vector>

#include "base/test.h"
#include "rule/kernels.h"

namespace windlass {

namespace test {

inline float number_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Mostly around one; some tiny, huge, denormal, zero or infinite, so that every path of a kernel is taken. No NaN:
// which of two different NaNs comes out of a sum is the compiler's choice, and no promise covers it.
inline float any_number(Random& random) {
  const float x = random.unit() * 2 - 1;
  switch (random.below(40)) {
    case 0: return 0.0f;
    case 1: return -0.0f;
    case 2: return x * 0x1p-140f;
    case 3: return x * 0x1p100f;
    case 4: return x * 0x1p-60f;
    case 5: return x < 0 ? -__builtin_inff() : __builtin_inff();
    default: return x;
  }
}

inline std::vector<float> any_numbers(Random& random, size_t n) {
  std::vector<float> v(n);
  for (float& x : v) x = any_number(random);
  return v;
}

// NaN equals itself here, and 0 is not -0.
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

constexpr size_t kRules = static_cast<size_t>(RuleKind::kCount);

// Hyperparameters under which a rule does all it can do, in a few variants.
inline Hyper hyper_of(RuleKind kind, int variant) {
  const double decay = variant % 2 == 0 ? 0.0 : 0.01;
  switch (kind) {
    case RuleKind::kSgd: return {{0.1, decay}};
    case RuleKind::kMomentum: return {{0.1, decay, 0.9, variant / 2 % 2 == 0 ? 0.0 : 0.3, variant >= 2 ? 1.0 : 0.0}};
    case RuleKind::kAdagrad: return {{0.1, variant / 2 == 0 ? 0.0 : 0.02, decay, 1e-10}};
    case RuleKind::kRowAdagrad: return {{0.1, 1e-8}};
    case RuleKind::kAdam:
    case RuleKind::kAdamW: return {{0.01, 0.9, 0.999, 1e-8, decay}};
    case RuleKind::kRmsProp:
    case RuleKind::kRmsPropMomentum:
    case RuleKind::kRmsPropCentered:
    case RuleKind::kRmsPropCenteredMomentum: return {{0.01, variant >= 2 ? 0.9 : 0.99, 1e-8, decay, 0.9}};
    case RuleKind::kAdadelta: return {{1.0, 0.9, 1e-6, decay}};
    case RuleKind::kAdamax: return {{0.01, 0.9, variant >= 2 ? 0.5 : 0.999, 1e-8, decay}};
    case RuleKind::kNAdam:
      return {{0.01, 0.9, 0.999, 1e-8, decay, variant == 0 ? 0.0 : 0.004, variant >= 2 ? 1.0 : 0.0}};
    case RuleKind::kLion: return {{0.001, 0.9, 0.99, decay}};
    case RuleKind::kFtrl: return {{0.1, 1.0, variant % 2 == 0 ? 0.0 : 0.05, variant >= 2 ? 0.1 : 0.0}};
    default: return {};
  }
}
constexpr int kVariants = 4;

}  // namespace test
}  // namespace windlass
