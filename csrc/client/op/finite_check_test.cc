#include "client/op/finite_check.h"

#include <cstring>
#include <limits>
#include <vector>

#include "base/test.h"
#include "exec/crew.h"

namespace windlass::finite_check_test {
namespace {

// One of `bits` among zeros, at `place`.
std::vector<std::byte> zeros_but(Dtype dtype, uint64_t n, uint64_t place, uint64_t bits) {
  std::vector<std::byte> numbers(n * size_of(dtype));
  std::memcpy(numbers.data() + place * size_of(dtype), &bits, size_of(dtype));
  return numbers;
}

struct Kind {
  Dtype dtype;
  uint64_t infinity, largest;  // bits
};
constexpr Kind kKinds[] = {
    {Dtype::kFloat32, 0x7F800000, 0x7F7FFFFF},
    {Dtype::kFloat64, 0x7FF0000000000000, 0x7FEFFFFFFFFFFFFF},
    {Dtype::kBfloat16, 0x7F80, 0x7F7F},
    {Dtype::kFloat16, 0x7C00, 0x7BFF},
};

}  // namespace

TEST(one_number_that_is_not_finite_is_found_wherever_it_is) {
  Crew crew(2);
  test::Random random(test::seed());
  for (const Kind& kind : kKinds) {
    const uint64_t piece = (uint64_t{256} << 10) / size_of(kind.dtype),
                   many = (uint64_t{3} << 20) / size_of(kind.dtype);
    for (const uint64_t n : {uint64_t{1}, uint64_t{17}, piece, piece + 1, 2 * piece - 1, many + 5}) {
      for (const uint64_t place : {uint64_t{0}, n - 1, n / 2, std::min(piece, n - 1), random.below(n)}) {
        for (Crew* const helpers : {static_cast<Crew*>(nullptr), &crew}) {
          CHECK(!are_finite(kind.dtype, zeros_but(kind.dtype, n, place, kind.infinity).data(), n, helpers));
          CHECK(!are_finite(kind.dtype, zeros_but(kind.dtype, n, place, kind.infinity | 1).data(), n, helpers));  // NaN
          CHECK(are_finite(kind.dtype, zeros_but(kind.dtype, n, place, kind.largest).data(), n, helpers));
        }
      }
    }
  }
}

TEST(nothing_is_finite_and_so_are_integers) {
  CHECK(are_finite(Dtype::kFloat32, nullptr, 0, nullptr));
  const std::vector<int64_t> numbers(100'000, -1);  // as float64 they would be NaN
  CHECK(are_finite(Dtype::kInt64, numbers.data(), numbers.size(), nullptr));
}

}  // namespace windlass::finite_check_test
