#include "base/strided.h"

#include <vector>

#include "base/test.h"

namespace windlass::strided_test {
namespace {

TEST(entries_of_any_size_are_copied_from_stride_to_stride_and_back) {
  for (const uint64_t bytes : {1, 4, 8, 12, 256}) {
    constexpr uint64_t kN = 5;
    const uint64_t wide = bytes + 3;
    std::vector<std::byte> dense(kN * bytes), strided(kN * wide), back(kN * bytes);
    for (size_t i = 0; i < dense.size(); ++i) dense[i] = static_cast<std::byte>(i + 1);
    copy_strided(strided.data(), wide, dense.data(), bytes, bytes, kN);
    for (uint64_t i = 0; i < kN; ++i) {
      CHECK(std::memcmp(strided.data() + i * wide, dense.data() + i * bytes, bytes) == 0);
      CHECK(strided[i * wide + bytes] == std::byte{0});
    }
    copy_strided(back.data(), bytes, strided.data(), wide, bytes, kN);
    CHECK(back == dense);
  }
}

}  // namespace
}  // namespace windlass::strided_test
