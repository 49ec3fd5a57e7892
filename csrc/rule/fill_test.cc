#include <algorithm>
#include <cmath>

#include "rule/kernels_test.h"

namespace windlass::fill_test {
namespace {

using test::same_bits;

constexpr Init kInits[] = {{InitKind::kZeros, 0, 0},
                           {InitKind::kConstant, 0.5, 0},
                           {InitKind::kUniform, -0.25, 0.75},
                           {InitKind::kNormal, 0.1, 2.0}};

std::vector<float> filled(const Kernels& k, const Init& init, uint64_t seed, uint64_t first, size_t n) {
  std::vector<float> out(n, -7.0f);
  k.fill(init, seed, first, out.data(), n);
  return out;
}

struct Moments {
  double mean = 0, variance = 0, skew = 0, kurtosis = 0;
};

Moments moments(const std::vector<float>& x) {
  Moments m;
  const double n = static_cast<double>(x.size());
  for (const float v : x) m.mean += v / n;
  for (const float v : x) m.variance += (v - m.mean) * (v - m.mean) / n;
  for (const float v : x) {
    const double z = (v - m.mean) / std::sqrt(m.variance);
    m.skew += z * z * z / n;
    m.kurtosis += z * z * z * z / n;
  }
  return m;
}

double correlation(const float* x, const float* y, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * y[i];
  return sum / static_cast<double>(n);
}

}  // namespace

TEST(initial_values_are_the_same_bits_on_every_instruction_set) {
  test::Random random(test::seed());
  for (const Init& init : kInits) {
    for (const size_t n : {0, 1, 3, 15, 16, 17, 100, 1003}) {
      const uint64_t seed = random.next(), first = random.next() >> (24 + random.below(30));
      const std::vector<float> want = filled(*every_kernels()[0], init, seed, first, n);
      for (const Kernels* k : every_kernels()) CHECK(same_bits(filled(*k, init, seed, first, n), want));
    }
  }
}

// Runs of 2^20 numbers have dice of their own, so a cut at and across their ends is the one to try.
TEST(initial_values_do_not_depend_on_how_the_range_is_cut) {
  test::Random random(test::seed());
  constexpr uint64_t kRun = uint64_t{1} << 20;
  for (const Init& init : kInits) {
    for (const uint64_t first : {uint64_t{0}, kRun - 700, 5 * kRun - 1, (uint64_t{1} << 40) - kRun - 333}) {
      const uint64_t seed = random.next();
      const std::vector<float> whole = filled(kernels(), init, seed, first, 3000);
      std::vector<float> pieces(whole.size(), -7.0f);
      for (size_t at = 0; at < pieces.size();) {
        const size_t n = std::min<size_t>(random.below(4) == 0 ? 1 : random.below(900), pieces.size() - at);
        kernels().fill(init, seed, first + at, pieces.data() + at, n);
        at += n;
      }
      CHECK(same_bits(pieces, whole));
    }
  }
}

TEST(normal_values_have_the_moments_of_the_normal_distribution) {
  const size_t n = test::accurate() ? size_t{1} << 25 : size_t{1} << 20;
  const double root = std::sqrt(static_cast<double>(n));
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const std::vector<float> x = filled(kernels(), {InitKind::kNormal, 0, 1}, seed + test::seed(), 0, n);
    const Moments m = moments(x);
    CHECK(std::abs(m.mean) < 5 / root);
    CHECK(std::abs(m.variance - 1) < 5 * std::sqrt(2.0) / root);
    CHECK(std::abs(m.skew) < 5 * std::sqrt(6.0) / root);
    CHECK(std::abs(m.kurtosis - 3) < 5 * std::sqrt(24.0) / root);
    const double share = 1 / static_cast<double>(n);
    double beyond1 = 0, beyond3 = 0;
    for (const float v : x) beyond1 += (std::abs(v) > 1) * share, beyond3 += (std::abs(v) > 3) * share;
    CHECK(std::abs(beyond1 - 0.3173105) < 5 * std::sqrt(0.317 * 0.683) / root);
    CHECK(std::abs(beyond3 - 0.0026998) < 5 * std::sqrt(0.0027) / root);
    CHECK(std::abs(correlation(x.data(), x.data() + 1, n - 1)) < 5 / root);
    CHECK(*std::max_element(x.begin(), x.end()) < 5.8f);  // 24 random bits reach no further
  }
}

TEST(mean_and_deviation_shift_and_stretch) {
  const std::vector<float> plain = filled(kernels(), {InitKind::kNormal, 0, 1}, 9, 0, 1000);
  const std::vector<float> moved = filled(kernels(), {InitKind::kNormal, 3, 0.5}, 9, 0, 1000);
  for (size_t i = 0; i < plain.size(); ++i) CHECK(std::abs(moved[i] - (3 + 0.5f * plain[i])) < 1e-6f);
}

TEST(uniform_values_fill_their_range_evenly) {
  const size_t n = size_t{1} << 20;
  const std::vector<float> x = filled(kernels(), {InitKind::kUniform, -0.25, 0.75}, test::seed(), 0, n);
  std::vector<int> count(64);
  for (const float v : x) {
    CHECK(v >= -0.25f && v <= 0.75f);
    ++count[std::min<size_t>(static_cast<size_t>((v + 0.25f) * 64), 63)];
  }
  const double expected = static_cast<double>(n) / 64;
  for (const int c : count) CHECK(std::abs(c - expected) < 6 * std::sqrt(expected));
}

TEST(zeros_and_constants_are_just_that) {
  for (const float v : filled(kernels(), {InitKind::kZeros, 3, 4}, 1, 0, 100)) CHECK(v == 0.0f);
  for (const float v : filled(kernels(), {InitKind::kConstant, -1.5, 4}, 1, 0, 100)) CHECK(v == -1.5f);
}

// Rows of a table have seeds that differ in a few bits, and only their first numbers are used.
TEST(neighbouring_seeds_are_unrelated) {
  constexpr size_t kRows = 1 << 16;
  std::vector<float> first(kRows), second(kRows);
  for (size_t i = 0; i < kRows; ++i) {
    const std::vector<float> row = filled(kernels(), {InitKind::kNormal, 0, 1}, i, 0, 2);
    first[i] = row[0];
    second[i] = row[1];
  }
  const double root = std::sqrt(static_cast<double>(kRows));
  CHECK(std::abs(moments(first).mean) < 5 / root);
  CHECK(std::abs(moments(first).variance - 1) < 5 * std::sqrt(2.0) / root);
  CHECK(std::abs(correlation(first.data(), second.data(), kRows)) < 5 / root);
  CHECK(std::abs(correlation(first.data(), first.data() + 1, kRows - 1)) < 5 / root);
}

}  // namespace windlass::fill_test
