// Reductions: one number from many, in float64. Sixteen lanes and a fixed tree, so that every instruction set gives the
// same bits; shorter rows are reduced from left to right.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

// Eight of the sixteen lanes.
typedef double Wide __attribute__((vector_size(64), aligned(8)));
typedef float Narrow __attribute__((vector_size(32), aligned(4)));
typedef int64_t Whole __attribute__((vector_size(64), aligned(8)));

inline Wide load_wide(const float* p) { return __builtin_convertvector(*reinterpret_cast<const Narrow*>(p), Wide); }
inline Wide load_wide(const double* p) { return *reinterpret_cast<const Wide*>(p); }
inline Wide load_wide(const int64_t* p) { return __builtin_convertvector(*reinterpret_cast<const Whole*>(p), Wide); }

// Each reduction has a start, a step that takes in a number, and a join of two partial results. The fill pads the last
// sixteen numbers and changes nothing. A NaN wins, as in numpy.
struct Added {
  static constexpr double kStart = 0, kFill = 0;
  template <class V>
  static V step(V sum, V x) {
    return sum + x;
  }
  template <class V>
  static V join(V a, V b) {
    return a + b;
  }
};
struct Squared : Added {
  template <class V>
  static V step(V sum, V x) {
    return sum + x * x;
  }
};
struct Absolute : Added {
  template <class V>
  static V step(V sum, V x) {
    return sum + (x < V{} ? -x : x);
  }
};
struct Nonzero : Added {
  template <class V>
  static V step(V sum, V x) {
    return sum + (x != V{} ? V{} + 1 : V{});
  }
};
struct Least {
  static constexpr double kStart = __builtin_inf(), kFill = __builtin_inf();
  template <class V>
  static V step(V a, V b) {
    return (b < a) | (b != b) ? b : a;
  }
  template <class V>
  static V join(V a, V b) {
    return step(a, b);
  }
};
struct Greatest {
  static constexpr double kStart = -__builtin_inf(), kFill = -__builtin_inf();
  template <class V>
  static V step(V a, V b) {
    return (b > a) | (b != b) ? b : a;
  }
  template <class V>
  static V join(V a, V b) {
    return step(a, b);
  }
};
struct Largest {  // of absolute values
  static constexpr double kStart = 0, kFill = 0;
  template <class V>
  static V step(V a, V x) {
    return Greatest::step(a, x < V{} ? -x : x);
  }
  template <class V>
  static V join(V a, V b) {
    return Greatest::step(a, b);
  }
};

template <class R, class T>
inline __attribute__((always_inline)) double reduce_run(const T* p, size_t n) {
  if (n < 16) {
    double all = R::kStart;
    for (size_t i = 0; i < n; ++i) all = R::step(all, static_cast<double>(p[i]));
    return all;
  }
  Wide low = Wide{} + R::kStart, high = low;
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    low = R::step(low, load_wide(p + i));
    high = R::step(high, load_wide(p + i + 8));
  }
  if (i < n) {
    double last[16];
    for (size_t j = 0; j < 16; ++j) last[j] = i + j < n ? static_cast<double>(p[i + j]) : R::kFill;
    low = R::step(low, load_wide(last));
    high = R::step(high, load_wide(last + 8));
  }
  const Wide joined = R::join(low, high);
  double lane[8];
  std::memcpy(lane, &joined, sizeof lane);
  for (int width = 4; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] = R::join(lane[j], lane[j + width]);
  }
  return lane[0];
}

template <class R, class T, size_t kDim>
inline void reduce_each(const void* const* rows, size_t n, size_t dim, double* out) {
  if (kDim != 0) dim = kDim;
  for (size_t r = 0; r < n; ++r) {
    if (r + kNear < n) ask_near(rows[r + kNear], dim * sizeof(T));
    out[r] = reduce_run<R>(static_cast<const T*>(rows[r]), dim);
  }
}

// With a constant length the loops are unrolled.
template <class R, class T>
void reduce_of(const void* const* rows, size_t n, size_t dim, double* out) {
  switch (dim) {
    case 1: return reduce_each<R, T, 1>(rows, n, dim, out);
    case 16: return reduce_each<R, T, 16>(rows, n, dim, out);
    case 32: return reduce_each<R, T, 32>(rows, n, dim, out);
    case 64: return reduce_each<R, T, 64>(rows, n, dim, out);
    default: return reduce_each<R, T, 0>(rows, n, dim, out);
  }
}

template <class T>
void reduce_as(Reduce what, const void* const* rows, size_t n, size_t dim, double* out) {
  switch (what) {
    case Reduce::kSum: return reduce_of<Added, T>(rows, n, dim, out);
    case Reduce::kSquares: return reduce_of<Squared, T>(rows, n, dim, out);
    case Reduce::kAbsolutes: return reduce_of<Absolute, T>(rows, n, dim, out);
    case Reduce::kNonzero: return reduce_of<Nonzero, T>(rows, n, dim, out);
    case Reduce::kMin: return reduce_of<Least, T>(rows, n, dim, out);
    case Reduce::kMax: return reduce_of<Greatest, T>(rows, n, dim, out);
    case Reduce::kAbsMax: return reduce_of<Largest, T>(rows, n, dim, out);
  }
}

inline void reduce(Reduce what, Dtype dtype, const void* const* rows, size_t n, size_t dim, double* out) {
  switch (dtype) {
    case Dtype::kFloat64: return reduce_as<double>(what, rows, n, dim, out);
    case Dtype::kInt64: return reduce_as<int64_t>(what, rows, n, dim, out);
    default: return reduce_as<float>(what, rows, n, dim, out);
  }
}

}  // namespace windlass::WL_ISA
