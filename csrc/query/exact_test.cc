#include "query/exact.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/test.h"

namespace windlass::exact_test {
namespace {

double sum_of(const std::vector<double>& all) {
  ExactSum sum;
  for (const double x : all) sum.add(x);
  return sum.value();
}

// Of every size that a float64 has.
double any_double(test::Random& random) {
  for (;;) {
    const auto x = std::bit_cast<double>(random.next());
    if (std::isfinite(x) && std::fabs(x) < 0x1p1000) return x;
  }
}

}  // namespace

TEST(an_exact_sum_does_not_depend_on_the_order) {
  test::Random random(test::seed());
  for (int round = 0; round < 200; ++round) {
    std::vector<double> all(1 + random.below(300));
    const bool wide = round % 2 == 0;
    for (double& x : all) x = wide ? any_double(random) : random.unit() - 0.5;
    const double want = sum_of(all);
    for (int again = 0; again < 3; ++again) {
      for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random.below(i)]);
      CHECK(std::bit_cast<uint64_t>(sum_of(all)) == std::bit_cast<uint64_t>(want));
    }
    // What is added and taken away again leaves nothing.
    const size_t n = all.size();
    for (size_t i = 0; i < n; ++i) all.push_back(-all[i]);
    CHECK(sum_of(all) == 0);
  }
}

TEST(an_exact_sum_of_two_is_what_the_processor_rounds_to) {
  test::Random random(test::seed());
  for (int round = 0; round < 20'000; ++round) {
    const double a = any_double(random);
    // LocalRoute enough for both to matter, down to denormal numbers.
    const double b = round % 2 == 0 ? any_double(random)
                                    : std::ldexp(a, static_cast<int>(random.below(130)) - 65) * (random.unit() - 0.5);
    CHECK(sum_of({a, b}) == a + b);
  }
  CHECK(sum_of({0x1p-1074, 0x1p-1074}) == 0x1p-1073);
  CHECK(sum_of({0x1p1023, 0x1p1023}) == INFINITY);
  CHECK(sum_of({0x1p1023, 0x1p1023, -0x1p1023}) == 0x1p1023);
  CHECK(sum_of({1e308, 1, -1e308}) == 1);
  CHECK(sum_of({1, 0x1p-53, 0x1p-106}) == 1 + 0x1p-52);  // the last one decides
  CHECK(sum_of({}) == 0);
}

TEST(an_exact_sum_with_infinities_is_what_ieee_says) {
  CHECK(sum_of({1, INFINITY}) == INFINITY);
  CHECK(sum_of({-INFINITY, 1}) == -INFINITY);
  CHECK(std::isnan(sum_of({INFINITY, -INFINITY})));
  CHECK(std::isnan(sum_of({1, NAN})));
}

}  // namespace windlass::exact_test
