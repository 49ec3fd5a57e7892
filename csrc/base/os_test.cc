#include "base/os.h"

#include <thread>
#include <vector>

#include "base/limits.h"
#include "base/test.h"

namespace windlass::os_test {

TEST(mapped_memory_is_zeroed_and_large_blocks_start_on_a_huge_page) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{5000}, limits::kHugePageBytes - 1, limits::kHugePageBytes,
                             3 * limits::kHugePageBytes + 1}) {
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 5; ++i) {
      std::byte* p = os::map(bytes);
      CHECK(p != nullptr);
      CHECK_EQ(reinterpret_cast<uintptr_t>(p) % (bytes >= limits::kHugePageBytes ? limits::kHugePageBytes : 4096), 0u);
      CHECK(p[0] == std::byte{0} && p[bytes - 1] == std::byte{0});
      p[0] = p[bytes - 1] = std::byte(i + 1);
      blocks.push_back(p);
    }
    for (int i = 0; i < 5; ++i) {
      CHECK(blocks[static_cast<size_t>(i)][0] == std::byte(i + 1));
      os::unmap(blocks[static_cast<size_t>(i)], bytes);
    }
  }
  CHECK(os::map(0) == nullptr);
  CHECK(os::map(~size_t{0}) == nullptr);
  os::unmap(nullptr, 4096);
}

TEST(a_wait_ends_at_its_time_at_a_wake_or_when_the_word_has_changed) {
  std::atomic<uint32_t> word{1};
  int64_t start = os::now_ns();
  os::wait(word, 2, -1);  // another number: no wait at all
  os::wait(word, 1, 0);
  CHECK(os::now_ns() - start < 5'000'000'000);
  start = os::now_ns();
  while (os::now_ns() - start < 10'000'000) os::wait(word, 1, 10'000'000);
  std::thread other([&] {
    word.store(2);
    os::wake_all(word);
  });
  while (word.load() == 1) os::wait(word, 1, -1);
  other.join();
}

TEST(time_goes_on_and_incarnations_differ) {
  const int64_t before = os::now_ns();
  CHECK(os::random_u64() != os::random_u64());
  CHECK(os::now_ns() >= before);
  CHECK(os::cores() >= 1);
}

}  // namespace windlass::os_test
