#include <cmath>

#include "rule/kernels_test.h"

namespace windlass::reduce_test {
namespace {

using test::same_bits;

constexpr Reduce kAll[] = {Reduce::kSum, Reduce::kSquares, Reduce::kAbsolutes, Reduce::kNonzero,
                           Reduce::kMin, Reduce::kMax,     Reduce::kAbsMax};
constexpr size_t kDims[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 100, 128, 1000};

template <class T>
struct Some {
  Some(const std::vector<T>& numbers, size_t dim) {
    for (size_t i = 0; i + dim <= numbers.size(); i += dim) rows.push_back(numbers.data() + i);
  }
  std::vector<double> reduced(const Kernels& k, Reduce what, Dtype dtype, size_t dim) const {
    std::vector<double> out(rows.size(), -7);
    k.reduce(what, dtype, rows.data(), rows.size(), dim, out.data());
    return out;
  }
  std::vector<const void*> rows;
};

// From left to right: not the same bits, but nearly, and exactly where nothing is rounded.
template <class T>
double naive(Reduce what, const T* row, size_t n) {
  double all = what == Reduce::kMin ? INFINITY : what == Reduce::kMax ? -INFINITY : 0;
  for (size_t i = 0; i < n; ++i) {
    const auto x = static_cast<double>(row[i]);
    switch (what) {
      case Reduce::kSum: all += x; break;
      case Reduce::kSquares: all += x * x; break;
      case Reduce::kAbsolutes: all += std::fabs(x); break;
      case Reduce::kNonzero: all += x != 0; break;
      case Reduce::kMin: all = std::isnan(x) || x < all ? x : all; break;
      case Reduce::kMax: all = std::isnan(x) || x > all ? x : all; break;
      case Reduce::kAbsMax: all = std::isnan(x) || std::fabs(x) > all ? std::fabs(x) : all; break;
    }
  }
  return all;
}

template <class T>
void check(const std::vector<T>& numbers, Dtype dtype, double tolerance) {
  for (const size_t dim : kDims) {
    const Some<T> some(numbers, dim);
    for (const Reduce what : kAll) {
      const std::vector<double> want = some.reduced(*every_kernels()[0], what, dtype, dim);
      for (const Kernels* k : every_kernels()) CHECK(same_bits(some.reduced(*k, what, dtype, dim), want));
      for (size_t r = 0; r < want.size(); ++r) {
        const double oracle = naive(what, static_cast<const T*>(some.rows[r]), dim);
        const bool rounded = what == Reduce::kSum || what == Reduce::kSquares || what == Reduce::kAbsolutes;
        const double scale =
            naive(what == Reduce::kSum ? Reduce::kAbsolutes : what, static_cast<const T*>(some.rows[r]), dim);
        CHECK(rounded ? std::fabs(want[r] - oracle) <= tolerance * scale : want[r] == oracle);
      }
    }
  }
}

}  // namespace

TEST(reductions_are_the_same_bits_on_every_instruction_set_and_near_a_plain_loop) {
  test::Random random(test::seed());
  std::vector<float> floats(5000);
  std::vector<double> doubles(5000);
  std::vector<int64_t> wholes(5000);
  for (size_t i = 0; i < floats.size(); ++i) {
    floats[i] = random.below(20) == 0 ? 0 : random.unit() * 2 - 1;
    doubles[i] = random.below(20) == 0 ? 0 : static_cast<double>(random.next()) * 0x1p-63 - 1;
    wholes[i] = random.below(20) == 0 ? 0 : static_cast<int64_t>(random.next() >> random.below(60)) - 1000;
  }
  check(floats, Dtype::kFloat32, 1e-12);
  check(doubles, Dtype::kFloat64, 1e-12);
  check(wholes, Dtype::kInt64, 1e-12);
}

TEST(a_nan_anywhere_is_the_smallest_and_the_largest_and_is_no_zero) {
  for (const size_t dim : kDims) {
    for (size_t at = 0; at < dim; ++at) {
      std::vector<float> row(dim, 1.0f);
      row[at] = NAN;
      const void* const p = row.data();
      for (const Kernels* k : every_kernels()) {
        double out = 0;
        for (const Reduce what : {Reduce::kMin, Reduce::kMax, Reduce::kAbsMax, Reduce::kSum}) {
          k->reduce(what, Dtype::kFloat32, &p, 1, dim, &out);
          CHECK(std::isnan(out));
        }
        k->reduce(Reduce::kNonzero, Dtype::kFloat32, &p, 1, dim, &out);
        CHECK(out == static_cast<double>(dim));
      }
    }
  }
}

}  // namespace windlass::reduce_test
