// Vector operations on the weights of a shard, with those of another that is alike.
//
// They compute in the tensor's own dtype; `a` is rounded to it first, as numpy does. A dot product is summed in float64
// whatever the dtype: sixteen lanes, then a fixed tree. int64 wraps around.
#pragma once

#include "base/vector_op.h"
#include "rule/vector.h"

namespace windlass::WL_ISA {

// Sixteen float64, whatever the width of the machine.
typedef double WideLanes __attribute__((vector_size(128), aligned(8)));

template <class T>
inline WideLanes widened(const T* x) {
  WideLanes lanes;
  for (int j = 0; j < 16; ++j) lanes[j] = static_cast<double>(x[j]);
  return lanes;
}

template <class T>
inline double dot_of(const T* y, const T* x, size_t n) {
  WideLanes sum = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16) sum += widened(y + i) * widened(x + i);
  if (i < n) {
    T last_y[16] = {}, last_x[16] = {};
    for (size_t j = 0; i + j < n; ++j) {
      last_y[j] = y[i + j];
      last_x[j] = x[i + j];
    }
    sum += widened(last_y) * widened(last_x);
  }
  double lane[16];
  std::memcpy(lane, &sum, sizeof lane);
  for (int width = 8; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  }
  return lane[0];
}

// The bits of a float64, or of an int64 where the numbers are int64.
inline uint64_t dot(Dtype dtype, const void* y, const void* x, size_t n) {
  if (dtype == Dtype::kInt64) {
    const auto *a = static_cast<const uint64_t*>(y), *b = static_cast<const uint64_t*>(x);
    uint64_t sum = 0;
    for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  }
  const double sum = dtype == Dtype::kFloat64 ? dot_of(static_cast<const double*>(y), static_cast<const double*>(x), n)
                                              : dot_of(static_cast<const float*>(y), static_cast<const float*>(x), n);
  return __builtin_bit_cast(uint64_t, sum);
}

// T: float, double, or uint64_t for int64, which has the same bits and wraps around. x may be y.
template <class T>
inline void vector_as(VectorOp op, T* y, const T* x, T a, size_t n) {
  switch (op) {
    case VectorOp::kDot: return;
    case VectorOp::kAxpy:
      for (size_t i = 0; i < n; ++i) y[i] += a * x[i];
      return;
    case VectorOp::kScale:
      for (size_t i = 0; i < n; ++i) y[i] *= a;
      return;
    case VectorOp::kCopy:
      if (x != y) std::memcpy(y, x, n * sizeof(T));
      return;
    case VectorOp::kAdd:
      for (size_t i = 0; i < n; ++i) y[i] += x[i];
      return;
    case VectorOp::kMultiply:
      for (size_t i = 0; i < n; ++i) y[i] *= x[i];
      return;
    case VectorOp::kFill:
      for (size_t i = 0; i < n; ++i) y[i] = a;
      return;
  }
}

// a: the bits of a float64, or of an int64.
inline void vector(VectorOp op, Dtype dtype, void* y, const void* x, uint64_t a, size_t n) {
  if (dtype == Dtype::kInt64) return vector_as(op, static_cast<uint64_t*>(y), static_cast<const uint64_t*>(x), a, n);
  const double number = __builtin_bit_cast(double, a);
  if (dtype == Dtype::kFloat64) return vector_as(op, static_cast<double*>(y), static_cast<const double*>(x), number, n);
  vector_as(op, static_cast<float*>(y), static_cast<const float*>(x), static_cast<float>(number), n);
}

}  // namespace windlass::WL_ISA
