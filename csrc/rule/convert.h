// bfloat16 and float16 to float32 and back, rounding to nearest even; branch-free, so that the loops vectorise.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

inline float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

inline uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

inline float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t body = h & 0x7FFFu;
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(body)) * 0x1p-24f);  // exponent 0
  const uint32_t normal = (body << 13) + (112u << 23);
  const uint32_t special = (body << 13) | 0x7F800000u;  // infinity, NaN
  return float_of(sign | (body < 0x0400u ? small : body < 0x7C00u ? normal : special));
}

inline uint16_t to_f16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7FFFFFFFu;
  // Below 2^-14 the result counts in steps of 2^-24, which is what adding 0.5 rounds to.
  const uint32_t small = bits_of(float_of(a) + 0.5f) - 0x3F000000u;
  const uint32_t shifted = a - (112u << 23);
  const uint32_t normal = (shifted + 0xFFFu + ((shifted >> 13) & 1u)) >> 13;
  const uint32_t special = a > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return static_cast<uint16_t>(sign | (a < 0x38800000u ? small : a < 0x47800000u ? normal : special));
}

inline void to_f32(Dtype from, const void* in, float* WL_RESTRICT out, size_t n) {
  if (from == Dtype::kFloat32) {
    std::memcpy(out, in, n * sizeof(float));
  } else {
    const uint16_t* WL_RESTRICT h = static_cast<const uint16_t*>(in);
    if (from == Dtype::kBfloat16) {
      for (size_t i = 0; i < n; ++i) out[i] = from_bf16(h[i]);
    } else {
      for (size_t i = 0; i < n; ++i) out[i] = from_f16(h[i]);
    }
  }
}

inline void from_f32(Dtype to, const float* WL_RESTRICT in, void* out, size_t n) {
  if (to == Dtype::kFloat32) {
    std::memcpy(out, in, n * sizeof(float));
  } else {
    uint16_t* WL_RESTRICT h = static_cast<uint16_t*>(out);
    if (to == Dtype::kBfloat16) {
      for (size_t i = 0; i < n; ++i) h[i] = to_bf16(in[i]);
    } else {
      for (size_t i = 0; i < n; ++i) h[i] = to_f16(in[i]);
    }
  }
}

// True when no number is infinite or NaN: their exponents are all ones.
inline bool finite(Dtype dtype, const void* in, size_t n) {
  if (dtype == Dtype::kInt64) return true;
  if (dtype == Dtype::kFloat64) {
    const double* x = static_cast<const double*>(in);
    uint64_t bad = 0;
    for (size_t i = 0; i < n; ++i)
      bad |= (__builtin_bit_cast(uint64_t, x[i]) & 0x7FF0000000000000u) == 0x7FF0000000000000u;
    return bad == 0;
  }
  if (dtype == Dtype::kFloat32) {
    const float* x = static_cast<const float*>(in);
    uint32_t bad = 0;
    for (size_t i = 0; i < n; ++i) bad |= (bits_of(x[i]) & 0x7F800000u) == 0x7F800000u;
    return bad == 0;
  }
  const uint16_t exponent = dtype == Dtype::kBfloat16 ? 0x7F80u : 0x7C00u;
  const uint16_t* x = static_cast<const uint16_t*>(in);
  uint16_t bad = 0;
  for (size_t i = 0; i < n; ++i) bad |= (x[i] & exponent) == exponent;
  return bad == 0;
}

}  // namespace windlass::WL_ISA
