// Mixing of 64-bit numbers.
//
// mix() is a bijection: a key and its hash are two names for one thing, so the table stores only the hash and recovers
// the key with unmix(). Three rounds of xor-shift and multiply by odd constants, each of which can be undone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace windlass {

[[gnu::always_inline]] constexpr uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93u;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93u;
  x ^= x >> 32;
  return x;
}

[[gnu::always_inline]] constexpr uint64_t unmix(uint64_t x) {
  x ^= x >> 32;
  x *= 0xCFEE444D8B59A89Bu;  // the inverse of the odd constant modulo 2^64
  x ^= x >> 32;
  x *= 0xCFEE444D8B59A89Bu;
  x ^= x >> 32;
  return x;
}

static_assert(unmix(mix(0)) == 0 && unmix(mix(~uint64_t{0})) == ~uint64_t{0} && unmix(mix(123456789)) == 123456789);

// Joins a number to a hash; the order matters.
[[gnu::always_inline]] constexpr uint64_t mix_in(uint64_t hash, uint64_t value) {
  return mix(hash * 0x9E3779B97F4A7C15u + value + 1);
}

constexpr uint64_t mix_text(std::string_view text) {
  uint64_t h = mix(text.size());
  for (const char c : text) h = mix_in(h, static_cast<unsigned char>(c));
  return h;
}

// The high half of a 64 x 64 bit product: scales a hash onto [0, n) and keeps its order.
[[gnu::always_inline]] constexpr uint64_t scale(uint64_t hash, uint64_t n) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
}

}  // namespace windlass
