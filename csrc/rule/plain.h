// Sum, Assign, Max, Min: rules without hyperparameters and state, for any dtype.
#pragma once

#include "rule/vector.h"

namespace windlass::WL_ISA {

struct Sum {
  static constexpr Layout kLayout{.any_dtype = true};
  static Step prepare(const Hyper&, uint64_t) { return {}; }
  template <class T>
  static void apply(const Step&, T* WL_RESTRICT w, float* const*, const T* WL_RESTRICT g, size_t n) {
    for (size_t i = 0; i < n; ++i) w[i] = add(w[i], g[i]);
  }

 private:
  static float add(float a, float b) { return a + b; }
  static double add(double a, double b) { return a + b; }
  static int64_t add(int64_t a, int64_t b) {  // wraps around, as numpy does
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};

struct Assign {
  static constexpr Layout kLayout{.any_dtype = true, .combine = Combine::kLast};
  static Step prepare(const Hyper&, uint64_t) { return {}; }
  template <class T>
  static void apply(const Step&, T* WL_RESTRICT w, float* const*, const T* WL_RESTRICT g, size_t n) {
    std::memcpy(w, g, n * sizeof(T));
  }
};

// The larger one; NaN wins, as in numpy.maximum.
struct Max {
  static constexpr Layout kLayout{.any_dtype = true, .combine = Combine::kMax};
  static Step prepare(const Hyper&, uint64_t) { return {}; }
  template <class T>
  static T larger(T a, T b) {
    return (b > a) | (b != b) ? b : a;
  }
  template <class T>
  static void apply(const Step&, T* WL_RESTRICT w, float* const*, const T* WL_RESTRICT g, size_t n) {
    for (size_t i = 0; i < n; ++i) w[i] = larger(w[i], g[i]);
  }
};

// The smaller one; NaN wins, as in numpy.minimum.
struct Min {
  static constexpr Layout kLayout{.any_dtype = true, .combine = Combine::kMin};
  static Step prepare(const Hyper&, uint64_t) { return {}; }
  template <class T>
  static T smaller(T a, T b) {
    return (b < a) | (b != b) ? b : a;
  }
  template <class T>
  static void apply(const Step&, T* WL_RESTRICT w, float* const*, const T* WL_RESTRICT g, size_t n) {
    for (size_t i = 0; i < n; ++i) w[i] = smaller(w[i], g[i]);
  }
};

}  // namespace windlass::WL_ISA
