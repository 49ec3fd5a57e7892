// Init: the values that weights start with. A value depends on the seed, the object's name, and its key or position,
// and on nothing else: not on the cut, the server, the order of requests, or the machine.
#pragma once

#include <cstdint>

namespace windlass {

enum class InitKind : uint8_t { kZeros = 0, kConstant, kUniform, kNormal };

struct Init {
  InitKind kind = InitKind::kZeros;
  double a = 0;  // constant; low; mean
  double b = 0;  // -; high; standard deviation
  friend bool operator==(const Init&, const Init&) = default;
};

}  // namespace windlass
