#include "base/crc32c.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/test.h"

namespace windlass::crc32c_test {
namespace {

// By the definition, bit by bit: the checksums of the first 0, 1, 2 ... n bytes.
std::vector<uint32_t> reference(const uint8_t* data, size_t n, uint32_t so_far = 0) {
  std::vector<uint32_t> prefixes = {so_far};
  uint32_t c = ~so_far;
  for (size_t i = 0; i < n; ++i) {
    c ^= data[i];
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? (c >> 1) ^ 0x82F63B78u : c >> 1;
    prefixes.push_back(~c);
  }
  return prefixes;
}

std::vector<uint8_t> random_bytes(test::Random* random, size_t n) {
  std::vector<uint8_t> data(n);
  for (uint8_t& b : data) b = static_cast<uint8_t>(random->next());
  return data;
}

void check(const crc::Implementation& by, const uint8_t* data, size_t n, uint32_t so_far, uint32_t expected) {
  const uint32_t seen = by.run(data, n, so_far);
  if (seen == expected) return;
  test::fail(__FILE__, __LINE__,
             std::string(by.name) + ": " + std::to_string(n) + " bytes at ..." +
                 std::to_string(reinterpret_cast<uintptr_t>(data) % 64) + " after " + std::to_string(so_far) + ": " +
                 std::to_string(seen) + " and not " + std::to_string(expected));
}

}  // namespace

TEST(crc32c_gives_the_published_values) {
  const std::vector<uint8_t> zeros(32), ones(32, 0xFF);
  std::vector<uint8_t> up(32), down(32);
  for (uint8_t i = 0; i < 32; ++i) up[i] = i, down[i] = 31 - i;
  std::vector<crc::Implementation> all = crc::implementations();
  all.push_back({"crc32c", crc32c});
  for (const crc::Implementation& by : all) {
    CHECK_EQ(by.run(nullptr, 0, 0), 0u);
    CHECK_EQ(by.run("a", 1, 0), 0xC1D04330u);
    CHECK_EQ(by.run("123456789", 9, 0), 0xE3069283u);
    CHECK_EQ(by.run(zeros.data(), 32, 0), 0x8A9136AAu);
    CHECK_EQ(by.run(ones.data(), 32, 0), 0x62A8AB43u);
    CHECK_EQ(by.run(up.data(), 32, 0), 0x46DD794Eu);
    CHECK_EQ(by.run(down.data(), 32, 0), 0x113FDB5Cu);
  }
}

// Each message ends with its allocation (and begins with it at offset 0), so that the sanitizer sees a read too many.
TEST(crc32c_equals_the_definition_at_all_short_lengths) {
  test::Random random(test::seed());
  constexpr size_t kMost = 1100;
  for (const size_t offset : {0, 1, 2, 4, 7, 8, 15, 31, 33, 63}) {
    const std::vector<uint8_t> data = random_bytes(&random, kMost);
    const uint32_t so_far = offset == 0 ? 0 : static_cast<uint32_t>(random.next());
    const std::vector<uint32_t> expected = reference(data.data(), kMost, so_far);
    for (size_t n = 0; n <= kMost; ++n) {
      const std::unique_ptr<uint8_t[]> exact(new uint8_t[offset + n]);
      if (n > 0) std::memcpy(exact.get() + offset, data.data(), n);
      for (const crc::Implementation& by : crc::implementations()) {
        check(by, exact.get() + offset, n, so_far, expected[n]);
      }
    }
  }
}

TEST(crc32c_equals_the_definition_at_large_lengths) {
  test::Random random(test::seed());
  constexpr size_t kMost = (1 << 20) + 100;
  const std::vector<uint8_t> data = random_bytes(&random, 64 + kMost);
  for (int round = 0; round < (test::accurate() ? 20 : 2); ++round) {
    const size_t offset = random.below(64);
    const std::vector<uint32_t> expected = reference(data.data() + offset, kMost);
    std::vector<size_t> lengths = {2015, 2016, 2017, 4095, 4096, 4097, 65536, 65537, 262144, 1 << 20, kMost};
    for (int i = 0; i < 50; ++i) lengths.push_back(random.below(kMost >> random.below(10)));
    for (const size_t n : lengths) {
      for (const crc::Implementation& by : crc::implementations()) check(by, data.data() + offset, n, 0, expected[n]);
    }
  }
}

TEST(crc32c_is_the_same_wherever_the_message_is_split) {
  test::Random random(test::seed());
  for (const size_t n : {1, 9, 64, 200, 1000, 5000}) {
    const std::vector<uint8_t> data = random_bytes(&random, n);
    const uint32_t whole = reference(data.data(), n).back();
    for (const crc::Implementation& by : crc::implementations()) {
      for (size_t at = 0; at <= n; ++at) {
        check(by, data.data() + at, n - at, by.run(data.data(), at, 0), whole);
      }
      uint32_t c = 0;
      for (size_t at = 0, step = 0; at < n; at += step) {
        step = 1 + random.below(n - at);
        c = by.run(data.data() + at, step, c);
      }
      CHECK_EQ(c, whole);
    }
  }
}

TEST(crc32c_notices_every_flipped_bit) {
  test::Random random(test::seed());
  for (const size_t n : {1, 60, 64, 300, 1100}) {
    std::vector<uint8_t> data = random_bytes(&random, n);
    for (const crc::Implementation& by : crc::implementations()) {
      const uint32_t before = by.run(data.data(), n, 0);
      for (size_t bit = 0; bit < 8 * n; ++bit) {
        data[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
        CHECK(by.run(data.data(), n, 0) != before);
        data[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
      }
      CHECK_EQ(by.run(data.data(), n, 0), before);
    }
  }
}

}  // namespace windlass::crc32c_test
