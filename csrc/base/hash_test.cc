#include "base/hash.h"

#include <cmath>
#include <vector>

#include "base/test.h"

namespace windlass::hash_test {

// The rounds of mix() are xor-shifts by half the width, their own inverse, and a product whose inverse is this one.
TEST(mix_is_a_bijection) {
  CHECK(uint64_t{0xD6E8FEB86659FD93u} * uint64_t{0xCFEE444D8B59A89Bu} == 1);
  for (int bit = 0; bit < 64; ++bit) {
    for (const uint64_t x : {uint64_t{1} << bit, (uint64_t{1} << bit) - 1, ~(uint64_t{1} << bit)}) {
      CHECK_EQ(unmix(mix(x)), x);
      CHECK_EQ(mix(unmix(x)), x);
    }
  }
  test::Random random(test::seed());
  for (int i = 0; i < 200'000; ++i) {
    const uint64_t x = random.next();
    CHECK_EQ(unmix(mix(x)), x);
    CHECK_EQ(mix(unmix(x)), x);
  }
}

// Ids are mostly small and dense; the top byte of the hash, which is the shard, must not show it.
TEST(mix_spreads_small_keys_over_all_shards) {
  for (const uint64_t stride : {uint64_t{1}, uint64_t{256}, uint64_t{1} << 32, uint64_t{1} << 44}) {
    constexpr uint64_t kKeys = 1 << 18;
    std::vector<uint64_t> count(256);
    for (uint64_t i = 0; i < kKeys; ++i) ++count[mix(i * stride) >> 56];
    for (const uint64_t n : count) CHECK(std::abs(static_cast<double>(n) - 1024.0) < 6 * 32.0);
  }
}

TEST(scale_keeps_the_order_and_stays_in_range) {
  test::Random random(test::seed());
  for (int i = 0; i < 200'000; ++i) {
    const uint64_t n = (random.next() >> random.below(64)) | 1;
    const uint64_t a = random.next() >> random.below(64), b = random.next() >> random.below(64);
    CHECK(scale(a, n) < n);
    CHECK((a < b) <= (scale(a, n) <= scale(b, n)));
    CHECK_EQ(scale(0, n), 0u);
    CHECK_EQ(scale(~uint64_t{0}, n), n - 1);
  }
}

TEST(scale_gives_every_bucket_its_share) {
  for (const uint64_t n : {1u, 7u, 56u, 70u}) {
    const uint64_t step = ~uint64_t{0} / (n * 1000);
    std::vector<uint64_t> count(n);
    for (uint64_t i = 0; i < n * 1000; ++i) ++count[scale(i * step, n)];
    for (const uint64_t c : count) CHECK(c >= 999 && c <= 1001);
  }
}

TEST(joined_hashes_depend_on_the_order) {
  test::Random random(test::seed());
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t h = random.next(), a = random.below(1000), b = a + 1 + random.below(1000);
    CHECK(mix_in(mix_in(h, a), b) != mix_in(mix_in(h, b), a));
    CHECK(mix_in(h, a) != mix_in(h, b));
  }
  CHECK(mix_text("ab") != mix_text("ba"));
  CHECK(mix_text("") != mix_text(std::string_view("\0", 1)));
}

}  // namespace windlass::hash_test
