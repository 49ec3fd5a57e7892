// A checksum of numbers that does not depend on the order in which they are visited: a sum of mixed (place, bits).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/hash.h"

namespace windlass {

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
    uint64_t x = (salt + (first + i) * 0x9E3779B97F4A7C15u) ^ (bits * 0xC2B2AE3D27D4EB4Fu);
    x ^= x >> 29;
    x *= 0xD6E8FEB86659FD93u;
    sum += x ^ (x >> 32);
  }
  return sum;
}

}  // namespace windlass
