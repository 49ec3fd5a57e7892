// Vector operations: every copy of a kernel gives the same bits, at any length and place, and they are the right ones.
#include <bit>

#include "rule/kernels_test.h"

namespace windlass::vector_ops_test {
namespace {

using test::any_number;
using test::same_bits;

constexpr VectorOp kWrites[] = {VectorOp::kAxpy, VectorOp::kScale,    VectorOp::kCopy,
                                VectorOp::kAdd,  VectorOp::kMultiply, VectorOp::kFill};

template <class T>
constexpr Dtype dtype_of() {
  if (std::is_same_v<T, double>) return Dtype::kFloat64;
  return std::is_same_v<T, int64_t> ? Dtype::kInt64 : Dtype::kFloat32;
}

template <class T>
std::vector<T> some(test::Random& random, size_t n) {
  std::vector<T> all(n);
  for (T& x : all) x = std::is_same_v<T, int64_t> ? static_cast<T>(random.next()) : static_cast<T>(any_number(random));
  return all;
}

template <class T>
uint64_t bits_of(T a) {
  if constexpr (std::is_same_v<T, int64_t>) return static_cast<uint64_t>(a);
  return std::bit_cast<uint64_t>(static_cast<double>(a));
}

// int64 wraps around, which only unsigned numbers may.
template <class T>
T one(VectorOp op, T y, T x, T a) {
  using U = std::conditional_t<std::is_same_v<T, int64_t>, uint64_t, T>;
  const U v = static_cast<U>(y), u = static_cast<U>(x), b = static_cast<U>(a);
  switch (op) {
    case VectorOp::kAxpy: {
      const U product = b * u;
      return static_cast<T>(v + product);
    }
    case VectorOp::kScale: return static_cast<T>(v * b);
    case VectorOp::kCopy: return x;
    case VectorOp::kAdd: return static_cast<T>(v + u);
    case VectorOp::kMultiply: return static_cast<T>(v * u);
    default: return a;
  }
}

template <class T>
bool is_nan(T x) {
  return x != x;
}

template <class T>
void check_writes(test::Random& random) {
  for (int round = 0; round < 60; ++round) {
    const size_t skip = random.below(5), n = random.below(200);
    const std::vector<T> y = some<T>(random, skip + n), x = some<T>(random, skip + n);
    const T a = some<T>(random, 1)[0];
    for (const VectorOp op : kWrites) {
      for (const bool self : {false, true}) {
        std::vector<T> first;
        for (const Kernels* k : every_kernels()) {
          std::vector<T> got = y;
          k->vector(op, dtype_of<T>(), got.data() + skip, self ? got.data() + skip : x.data() + skip, bits_of(a), n);
          for (size_t i = 0; i < skip + n; ++i) {
            const T want = i < skip ? y[i] : one(op, y[i], self ? y[i] : x[i], a);
            CHECK(is_nan(want) ? is_nan(got[i]) : std::memcmp(&want, &got[i], sizeof want) == 0);
            if (is_nan(got[i])) got[i] = 0;  // which NaN it is may differ
          }
          if (first.empty()) first = got;
          CHECK(same_bits(got, first));
        }
      }
    }
  }
}

// The sum as the document has it: sixteen lanes in float64, then a tree.
template <class T>
double dot_by_lanes(const T* y, const T* x, size_t n) {
  double lane[16] = {};
  for (size_t i = 0; i < (n + 15) / 16 * 16; ++i)
    lane[i % 16] += i < n ? static_cast<double>(y[i]) * static_cast<double>(x[i]) : 0.0;
  for (int width = 8; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  }
  return lane[0];
}

template <class T>
void check_dots(test::Random& random) {
  for (int round = 0; round < 200; ++round) {
    const size_t skip = random.below(5), n = random.below(300);
    std::vector<T> y(skip + n), x(skip + n);
    for (T& v : y) v = static_cast<T>(random.unit() * 2 - 1);
    for (T& v : x) v = static_cast<T>(random.unit() * 2 - 1);
    const double want = dot_by_lanes(y.data() + skip, x.data() + skip, n);
    for (const Kernels* k : every_kernels())
      CHECK_EQ(k->dot(dtype_of<T>(), y.data() + skip, x.data() + skip, n), std::bit_cast<uint64_t>(want));
  }
}

}  // namespace

TEST(vector_operations_give_the_same_bits_on_every_instruction_set) {
  test::Random random(test::seed());
  check_writes<float>(random);
  check_writes<double>(random);
  check_writes<int64_t>(random);
}

TEST(a_dot_product_is_summed_in_sixteen_lanes_of_float64) {
  test::Random random(test::seed());
  check_dots<float>(random);
  check_dots<double>(random);
}

TEST(a_dot_product_of_int64_wraps_around) {
  test::Random random(test::seed());
  const std::vector<int64_t> y = some<int64_t>(random, 1000), x = some<int64_t>(random, 1000);
  uint64_t want = 0;
  for (size_t i = 0; i < y.size(); ++i) want += static_cast<uint64_t>(y[i]) * static_cast<uint64_t>(x[i]);
  for (const Kernels* k : every_kernels()) CHECK_EQ(k->dot(Dtype::kInt64, y.data(), x.data(), y.size()), want);
}

}  // namespace windlass::vector_ops_test
