// The number types that are sent and stored. Master weights are float32; float64 and int64 are for sums and counts.
#pragma once

#include <cstddef>
#include <cstdint>

namespace windlass {

enum class Dtype : uint8_t { kFloat32 = 0, kFloat64, kInt64, kBfloat16, kFloat16 };

constexpr size_t size_of(Dtype t) {
  switch (t) {
    case Dtype::kFloat32: return 4;
    case Dtype::kFloat64: return 8;
    case Dtype::kInt64: return 8;
    case Dtype::kBfloat16: return 2;
    case Dtype::kFloat16: return 2;
  }
  return 0;
}

constexpr const char* name_of(Dtype t) {
  switch (t) {
    case Dtype::kFloat32: return "float32";
    case Dtype::kFloat64: return "float64";
    case Dtype::kInt64: return "int64";
    case Dtype::kBfloat16: return "bfloat16";
    case Dtype::kFloat16: return "float16";
  }
  return "?";
}

// What a server may store, and what may be sent to an object that stores `stored`.
constexpr bool storable(Dtype t) { return t == Dtype::kFloat32 || t == Dtype::kFloat64 || t == Dtype::kInt64; }
constexpr bool may_travel(Dtype sent, Dtype stored) {
  if (stored != Dtype::kFloat32) return sent == stored;
  return sent == Dtype::kFloat32 || sent == Dtype::kBfloat16 || sent == Dtype::kFloat16;
}

}  // namespace windlass
