#include <cmath>

#include "rule/kernels_test.h"

namespace windlass::convert_test {
namespace {

using test::number_of;
using test::same_bits;

// A small float type by its definition, in double arithmetic that is exact for it.
struct Half {
  Dtype dtype;
  int mantissa;  // bits
  int lowest;    // exponent of the smallest normal number

  uint16_t infinity() const { return static_cast<uint16_t>(0x7FFF >> mantissa << mantissa); }
  bool is_nan(uint16_t h) const { return (h & 0x7FFF) > infinity(); }

  double decode(uint16_t h) const {
    const int body = h & 0x7FFF, exponent = body >> mantissa, fraction = body & ((1 << mantissa) - 1);
    const double size = body == infinity() ? INFINITY
                        : exponent == 0    ? std::ldexp(fraction, lowest - mantissa)
                                           : std::ldexp((1 << mantissa) + fraction, exponent - 1 + lowest - mantissa);
    return h >> 15 != 0 ? -size : size;
  }
  // To the nearest, ties to the even one: nearbyint() in the default mode. Numbers of one exponent have one spacing,
  // and the patterns of positive numbers count up with them, so a carry into the next exponent, or into infinity, is
  // just the next pattern.
  uint16_t encode(double x) const {
    const int sign = std::signbit(x) ? 0x8000 : 0;
    if (x == 0) return static_cast<uint16_t>(sign);
    const double size = std::fabs(x);
    if (std::isinf(size)) return static_cast<uint16_t>(sign | infinity());
    const int exponent = std::max(std::ilogb(size), lowest);
    const double steps = std::nearbyint(std::ldexp(size, mantissa - exponent));
    const double pattern = steps + std::ldexp(exponent - lowest, mantissa);
    return static_cast<uint16_t>(sign | static_cast<int>(std::min<double>(pattern, infinity())));
  }
};

constexpr Half kHalves[] = {{Dtype::kFloat16, 10, -14}, {Dtype::kBfloat16, 7, -126}};

std::vector<uint16_t> every_pattern() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

void check_rounding(const Half& half, const std::vector<float>& numbers) {
  std::vector<uint16_t> want(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) want[i] = half.encode(numbers[i]);
  for (const Kernels* k : every_kernels()) {
    std::vector<uint16_t> got(numbers.size());
    k->from_f32(half.dtype, numbers.data(), got.data(), numbers.size());
    CHECK(same_bits(got, want));
  }
}

}  // namespace

TEST(every_half_pattern_has_its_value) {
  const std::vector<uint16_t> all = every_pattern();
  for (const Half& half : kHalves) {
    for (const Kernels* k : every_kernels()) {
      std::vector<float> values(all.size());
      k->to_f32(half.dtype, all.data(), values.data(), all.size());
      size_t wrong = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        const float want = static_cast<float>(half.decode(all[i]));
        wrong += half.is_nan(all[i]) ? !std::isnan(values[i]) : std::memcmp(&want, &values[i], 4) != 0;
      }
      CHECK_EQ(wrong, 0u);
    }
  }
}

TEST(every_half_pattern_survives_the_way_there_and_back) {
  const std::vector<uint16_t> all = every_pattern();
  for (const Half& half : kHalves) {
    for (const Kernels* k : every_kernels()) {
      std::vector<float> values(all.size());
      std::vector<uint16_t> back(all.size());
      k->to_f32(half.dtype, all.data(), values.data(), all.size());
      k->from_f32(half.dtype, values.data(), back.data(), all.size());
      size_t wrong = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        const bool kept = half.is_nan(all[i]) ? half.is_nan(back[i]) && (back[i] ^ all[i]) < 0x8000 : back[i] == all[i];
        wrong += !kept;
      }
      CHECK_EQ(wrong, 0u);
    }
  }
}

// Between any two neighbours: the middle, and the floats on both sides of it.
TEST(numbers_between_two_halves_go_to_the_nearest_or_the_even_one) {
  for (const Half& half : kHalves) {
    std::vector<float> numbers;
    for (int h = 0; h < half.infinity(); ++h) {
      const double here = half.decode(static_cast<uint16_t>(h));
      const double next = h + 1 == half.infinity() ? 2 * here - half.decode(static_cast<uint16_t>(h - 1))
                                                   : half.decode(static_cast<uint16_t>(h + 1));
      const float middle = static_cast<float>((here + next) / 2);
      for (const float x : {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, INFINITY)}) {
        numbers.push_back(x);
        numbers.push_back(-x);
      }
    }
    check_rounding(half, numbers);
  }
}

TEST(any_float_goes_to_the_nearest_half) {
  test::Random random(test::seed());
  for (int round = 0; round < (test::accurate() ? 200 : 4); ++round) {
    std::vector<float> numbers = {0.0f, -0.0f, INFINITY, -INFINITY, 65504.0f, 65519.996f, 65520.0f, 65536.0f, 3.4e38f};
    while (numbers.size() < 50'000) {
      const float x = number_of(static_cast<uint32_t>(random.next()));
      if (!std::isnan(x)) numbers.push_back(x);
      numbers.push_back(std::ldexp(random.unit() - 0.5f, static_cast<int>(random.below(44)) - 26));  // float16's range
    }
    for (const Half& half : kHalves) check_rounding(half, numbers);
  }
}

TEST(a_nan_stays_a_nan) {
  test::Random random(test::seed());
  std::vector<float> nans = {number_of(0x7F800001u), number_of(0xFF800001u), number_of(0x7FFFFFFFu), NAN, -NAN};
  while (nans.size() < 4000) nans.push_back(number_of(static_cast<uint32_t>(random.next()) | 0x7F800001u));
  for (const Half& half : kHalves) {
    for (const Kernels* k : every_kernels()) {
      std::vector<uint16_t> got(nans.size());
      k->from_f32(half.dtype, nans.data(), got.data(), nans.size());
      for (const uint16_t h : got) CHECK(half.is_nan(h));
    }
  }
}

TEST(conversions_give_the_same_bits_at_any_length_and_place) {
  test::Random random(test::seed());
  std::vector<uint16_t> halves(400);
  for (uint16_t& h : halves) h = static_cast<uint16_t>(random.next());
  std::vector<float> floats(400);
  for (float& x : floats) x = number_of(static_cast<uint32_t>(random.next()));
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    const bool wide = dtype == Dtype::kFloat32;
    for (size_t n = 0; n < 150; n += 1 + random.below(4)) {
      const size_t from = random.below(40), to = random.below(40);
      const void* in = wide ? static_cast<const void*>(floats.data() + from) : halves.data() + from;
      std::vector<float> first_out(400, 7.0f);
      std::vector<uint16_t> first_back(800, 7);
      every_kernels()[0]->to_f32(dtype, in, first_out.data() + to, n);
      every_kernels()[0]->from_f32(dtype, floats.data() + from, first_back.data() + 2 * to, n);
      for (const Kernels* k : every_kernels()) {
        std::vector<float> out(400, 7.0f);
        std::vector<uint16_t> back(800, 7);
        k->to_f32(dtype, in, out.data() + to, n);
        k->from_f32(dtype, floats.data() + from, back.data() + 2 * to, n);
        CHECK(same_bits(out, first_out));
        CHECK(same_bits(back, first_back));
        CHECK(out[to + n] == 7.0f && (to == 0 || out[to - 1] == 7.0f));
        if (wide) CHECK(std::memcmp(out.data() + to, floats.data() + from, 4 * n) == 0);
      }
    }
  }
}

TEST(finite_sees_one_bad_number_anywhere) {
  struct Case {
    Dtype dtype;
    uint64_t good[3], bad[4];
  };
  constexpr Case kCases[] = {
      {Dtype::kFloat32, {0x7F7FFFFF, 0xFF7FFFFF, 1}, {0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF}},
      {Dtype::kFloat64,
       {0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 1},
       {0x7FF0000000000000, 0xFFF0000000000000, 0x7FF0000000000001, ~uint64_t{0}}},
      {Dtype::kBfloat16, {0x7F7F, 0xFF7F, 1}, {0x7F80, 0xFF80, 0x7F81, 0xFFFF}},
      {Dtype::kFloat16, {0x7BFF, 0xFBFF, 1}, {0x7C00, 0xFC00, 0x7C01, 0xFFFF}},
      {Dtype::kInt64, {~uint64_t{0}, 0x7FF0000000000000, 1}, {}},
  };
  for (const Case& c : kCases) {
    const size_t size = size_of(c.dtype);
    for (const size_t n : {1, 2, 15, 33, 70, 129}) {
      std::vector<std::byte> numbers((n + 1) * size);  // from the second on: not where a vector would start
      for (size_t i = 0; i <= n; ++i) std::memcpy(&numbers[i * size], &c.good[i % 3], size);
      for (const Kernels* k : every_kernels()) {
        CHECK(k->finite(c.dtype, &numbers[size], n));
        CHECK(k->finite(c.dtype, &numbers[size], 0));
        for (size_t i = 0; i <= n && c.dtype != Dtype::kInt64; ++i) {
          std::vector<std::byte> spoiled = numbers;
          std::memcpy(&spoiled[i * size], &c.bad[i % 4], size);
          CHECK_EQ(k->finite(c.dtype, &spoiled[size], n), i == 0);
        }
      }
    }
  }
}

}  // namespace windlass::convert_test
