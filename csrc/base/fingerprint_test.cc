#include "base/fingerprint.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "base/test.h"

namespace windlass::fingerprint_test {

TEST(a_fingerprint_is_the_sum_over_any_cut) {
  test::Random random(test::seed());
  std::vector<float> values(1000);
  for (float& x : values) x = random.unit();
  const uint64_t whole = fingerprint_of(7, 100, values.data(), values.size());
  uint64_t sum = 0;
  for (size_t at = 0; at < values.size();) {
    const size_t n = std::min<size_t>(1 + random.below(50), values.size() - at);
    sum += fingerprint_of(7, 100 + at, &values[at], n);
    at += n;
  }
  CHECK_EQ(sum, whole);
}

TEST(a_fingerprint_sees_every_bit_every_place_and_whose_it_is) {
  std::set<uint64_t> seen;
  std::vector<uint64_t> values(20, 5);
  seen.insert(fingerprint_of(1, 0, values.data(), values.size()));
  seen.insert(fingerprint_of(2, 0, values.data(), values.size()));
  seen.insert(fingerprint_of(1, 1, values.data(), values.size()));
  for (uint64_t& x : values) {
    for (int bit = 0; bit < 64; ++bit) {
      x ^= uint64_t{1} << bit;
      seen.insert(fingerprint_of(1, 0, values.data(), values.size()));
      x ^= uint64_t{1} << bit;
    }
  }
  values[3] = 6;
  seen.insert(fingerprint_of(1, 0, values.data(), values.size()));
  std::swap(values[3], values[4]);
  seen.insert(fingerprint_of(1, 0, values.data(), values.size()));
  CHECK_EQ(seen.size(), 3 + 20 * 64 + 2u);
  const float zeros[] = {0.0f, -0.0f};
  CHECK(fingerprint_of(1, 0, &zeros[0], 1) != fingerprint_of(1, 0, &zeros[1], 1));
}

TEST(a_fingerprint_does_not_depend_on_which_nan_it_is) {
  const uint32_t bits[] = {0x7FC00000u, 0xFFC00000u, 0x7FC01234u};
  float nans[3];
  std::memcpy(nans, bits, sizeof nans);
  CHECK_EQ(fingerprint_of(1, 0, &nans[0], 1), fingerprint_of(1, 0, &nans[1], 1));
  CHECK_EQ(fingerprint_of(1, 0, &nans[0], 1), fingerprint_of(1, 0, &nans[2], 1));
}

}  // namespace windlass::fingerprint_test
