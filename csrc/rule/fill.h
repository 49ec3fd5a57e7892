// Initialisers: counter-based random numbers, so that any value can be computed alone, in loops that vectorise.
//
// Number i of an object (or of a table row) comes from two 32-bit hashes of (seed, i). The normal distribution is
// Box and Muller's, with logarithm and sine in our own arithmetic: a library's may round differently elsewhere.
#pragma once

#include "base/hash.h"
#include "rule/vector.h"

namespace windlass::WL_ISA {

struct Dice {
  uint32_t a, b;
};

inline uint32_t scramble(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}
inline uint32_t roll(Dice d, uint32_t i) { return scramble(scramble(i * 0x9E3779B9u + d.a) ^ d.b); }

// 24 random bits: in [0, 1) and in (0, 1].
inline float unit(uint32_t x) { return static_cast<float>(static_cast<int32_t>(x >> 8)) * 0x1p-24f; }
inline float unit_above_zero(uint32_t x) { return static_cast<float>(static_cast<int32_t>(x >> 8) + 1) * 0x1p-24f; }

// ln(x) for normal x > 0: x = 2^e * m with m in [0.70, 1.41), ln(m) = 2 atanh((m - 1) / (m + 1)).
inline float log_of(float x) {
  const uint32_t shifted = bits_of(x) - 0x3F3504F3u;
  const int32_t e = static_cast<int32_t>(shifted) >> 23;
  const float m = float_of((shifted & 0x007FFFFFu) + 0x3F3504F3u);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  const float series = 2.0f + z * (0.66666667f + z * (0.4f + z * (0.28571429f + z * 0.22222222f)));
  return s * series + static_cast<float>(e) * 0.69314718f;
}

// cos(2 pi u) for u in [0, 1), as a sine of the distance to the quarter turn.
inline float cos_turn(float u) {
  const float t = u - 0.5f;
  const float q = 0.25f - (t < 0.0f ? -t : t);
  const float x = q * 6.2831853f;
  const float z = x * x;
  const float sine =
      x * (1.0f +
           z * (-0.16666667f + z * (8.3333333e-3f + z * (-1.9841270e-4f + z * (2.7557319e-6f - z * 2.5052108e-8f)))));
  return -sine;
}

// Fills out[0, n) with the numbers first, first + 1, ... of `seed`. Each run of 2^20 numbers has dice of its own, so
// that 32-bit counters serve tensors of any size.
inline void fill(const Init& init, uint64_t seed, uint64_t first, float* WL_RESTRICT out, size_t n) {
  if (init.kind == InitKind::kZeros || init.kind == InitKind::kConstant) {
    const float value = init.kind == InitKind::kZeros ? 0.0f : static_cast<float>(init.a);
    for (size_t i = 0; i < n; ++i) out[i] = value;
    return;
  }
  constexpr uint64_t kRun = uint64_t{1} << 20;
  while (n > 0) {
    const uint64_t h = mix_in(seed, first / kRun);
    const Dice one{static_cast<uint32_t>(h), static_cast<uint32_t>(h >> 32)};
    const Dice two{scramble(one.a ^ 0x68E31DA4u), scramble(one.b ^ 0xB5297A4Du)};
    const uint32_t start = static_cast<uint32_t>(first % kRun);
    const size_t count = n < kRun - start ? n : kRun - start;
    const uint32_t stop = static_cast<uint32_t>(count);
    if (init.kind == InitKind::kUniform) {
      const float low = static_cast<float>(init.a), width = static_cast<float>(init.b - init.a);
      for (uint32_t i = 0; i < stop; ++i) out[i] = low + width * unit(roll(one, start + i));
    } else {
      const float mean = static_cast<float>(init.a), std = static_cast<float>(init.b);
      for (uint32_t i = 0; i < stop; ++i) {
        const float radius = sqrt_of(-2.0f * log_of(unit_above_zero(roll(one, start + i))));
        out[i] = mean + std * (radius * cos_turn(unit(roll(two, start + i))));
      }
    }
    out += count;
    first += count;
    n -= count;
  }
}

}  // namespace windlass::WL_ISA
