// A checksum of numbers that does not depend on the order in which they are visited: a sum of mixed (place, bits).
// For many float32, kernels().fingerprint is the same and faster.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/hash.h"

namespace windlass {

inline constexpr uint64_t kFingerprintPlace = 0x9E3779B97F4A7C15u, kFingerprintBits = 0xC2B2AE3D27D4EB4Fu;

// What a number adds, from its place and its bits.
inline __attribute__((always_inline)) uint64_t fingerprint_mix(uint64_t x) {
  x ^= x >> 29;
  x *= 0xD6E8FEB86659FD93u;
  return x ^ (x >> 32);
}

// The numbers [first, first + n) of something whose identity is `salt`.
template <class T>
uint64_t fingerprint_of(uint64_t salt, uint64_t first, const T* values, size_t n) {
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) {
    uint64_t bits = 0;
    std::memcpy(&bits, &values[i], sizeof(T));
    if constexpr (std::is_floating_point_v<T>) {
      if (values[i] != values[i]) bits = ~uint64_t{0};  // which NaN it is differs between instruction sets
    }
    sum += fingerprint_mix((salt + (first + i) * kFingerprintPlace) ^ (bits * kFingerprintBits));
  }
  return sum;
}

}  // namespace windlass
