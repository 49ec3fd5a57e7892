// Copying entries that do not lie one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace windlass {

// Copies n entries of `bytes` each; the next one lies `to_step` and `from_step` bytes further on. Words, which most
// arrays of rows have, are moved without a call for each.
inline void copy_strided(std::byte* to, uint64_t to_step, const std::byte* from, uint64_t from_step, uint64_t bytes,
                         uint64_t n) {
  const auto run = [&](auto size) {
    for (uint64_t i = 0; i < n; ++i) std::memcpy(to + i * to_step, from + i * from_step, size);
  };
  switch (bytes) {
    case 4: return run(std::integral_constant<size_t, 4>());
    case 8: return run(std::integral_constant<size_t, 8>());
    default: return run(bytes);
  }
}

}  // namespace windlass
