// What rule headers build on. Included only in files that are compiled once per instruction set, rule/kernels.cc and
// bench/loops.cc, where WL_ISA names the set; everything here is in that namespace, so that the linker cannot merge two
// copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rule/kernels.h"

#ifndef WL_ISA
#error "compile rule/kernels.cc with -DWL_ISA=<namespace>"
#endif

#define WL_RESTRICT __restrict__

namespace windlass::WL_ISA {

inline float sqrt_of(float x) { return __builtin_sqrtf(x); }
inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t x) { return __builtin_bit_cast(float, x); }

// Scattered rows are prefetched twice: kFar rows before their use into the second-level cache, which can have many more
// requests under way than the first, and kNear rows before into the first.
inline constexpr size_t kFar = 48, kNear = 8;
inline void ask_far(const void* p, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at, 0, 2);
}
inline void ask_near(const void* p, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at);
}

// base^n by squaring, in our own arithmetic: a library's pow may round differently on the next machine.
inline double power(double base, uint64_t n) {
  double result = 1.0;
  for (; n != 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

// 1 - e^-x for x >= 0, without losing the digits of a small x; in our own arithmetic, for the same reason. Halves x
// until the series is short, then goes back: 1 - (1 - f)^2 = f + (1 - f) * f, which only adds.
inline double fallen(double x) {
  if (!(x > 0.0)) return 0.0;
  if (x > 700.0) return 1.0;
  int halves = 0;
  for (; x > 0.25; x *= 0.5) ++halves;
  double series = 1.0;
  for (int k = 12; k >= 2; --k) series = 1.0 - x / k * series;
  double f = x * series;
  for (; halves != 0; --halves) f += (1.0 - f) * f;
  return f;
}

// Sixteen numbers at a time, whatever the width of the machine: sums come out the same everywhere.
typedef float Lanes __attribute__((vector_size(64), aligned(4)));

// sum of g[i]^2: sixteen lanes, then a fixed tree.
inline float sum_of_squares(const float* g, size_t n) {
  Lanes sum = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const Lanes x = *reinterpret_cast<const Lanes*>(g + i);
    sum += x * x;
  }
  if (i < n) {
    float last[16] = {};
    for (size_t j = 0; i + j < n; ++j) last[j] = g[i + j];
    const Lanes x = *reinterpret_cast<const Lanes*>(last);
    sum += x * x;
  }
  float lane[16];
  std::memcpy(lane, &sum, sizeof lane);
  for (int width = 8; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  }
  return lane[0];
}

}  // namespace windlass::WL_ISA
