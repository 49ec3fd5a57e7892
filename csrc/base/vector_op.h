// Vector operations on a tensor y and, for most of them, a tensor x that is alike. The numbers are on the wire.
#pragma once

#include <cstdint>

namespace windlass {

enum class VectorOp : uint8_t {
  kDot = 1,   // the sum of y[i] * x[i]
  kAxpy,      // y += a * x
  kScale,     // y *= a
  kCopy,      // y = x
  kAdd,       // y += x
  kMultiply,  // y *= x
  kFill,      // y = a
};
inline constexpr uint8_t kVectorOpMax = static_cast<uint8_t>(VectorOp::kFill);

constexpr bool writes(VectorOp op) { return op != VectorOp::kDot; }
constexpr bool has_other(VectorOp op) { return op != VectorOp::kScale && op != VectorOp::kFill; }
constexpr bool has_number(VectorOp op) {
  return op == VectorOp::kAxpy || op == VectorOp::kScale || op == VectorOp::kFill;
}

constexpr const char* name_of(VectorOp op) {
  switch (op) {
    case VectorOp::kDot: return "dot";
    case VectorOp::kAxpy: return "axpy";
    case VectorOp::kScale: return "scale";
    case VectorOp::kCopy: return "copy_from";
    case VectorOp::kAdd: return "add";
    case VectorOp::kMultiply: return "multiply";
    case VectorOp::kFill: return "fill";
  }
  return "?";
}

}  // namespace windlass
