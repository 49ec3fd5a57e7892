#include "base/fingerprint.h"

#include <cmath>

#include "rule/kernels_test.h"

namespace windlass::fingerprint_test {
namespace {

TEST(fingerprints_of_every_instruction_set_are_those_of_one_number_after_the_other) {
  test::Random random(test::seed());
  std::vector<float> values(1000);
  for (float& value : values) value = test::any_number(random);
  values[3] = test::number_of(0x7FC00000u);
  values[20] = test::number_of(0xFFC00001u);
  values[21] = test::number_of(0x7F800001u);
  for (const Kernels* k : every_kernels()) {
    for (const size_t n : {0, 1, 15, 16, 17, 64, 1000})
      CHECK_EQ(k->fingerprint(7, 1234567, values.data(), n), fingerprint_of(7, 1234567, values.data(), n));
  }
}

TEST(a_place_a_salt_and_a_bit_change_the_fingerprint_and_another_nan_does_not) {
  std::vector<float> values(64, 1.0f);
  const auto of = [&](uint64_t salt, uint64_t first) {
    return kernels().fingerprint(salt, first, values.data(), values.size());
  };
  const uint64_t before = of(1, 0);
  CHECK(of(1, 1) != before);
  CHECK(of(2, 0) != before);
  values[17] = std::nextafter(1.0f, 2.0f);
  CHECK(of(1, 0) != before);
  values[17] = test::number_of(0x7FC00000u);
  const uint64_t nan = of(1, 0);
  values[17] = test::number_of(0xFFC00001u);
  CHECK_EQ(of(1, 0), nan);
}

}  // namespace
}  // namespace windlass::fingerprint_test
