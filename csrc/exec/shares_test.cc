#include "exec/shares.h"

#include <thread>
#include <vector>

#include "base/test.h"

namespace windlass::shares_test {

TEST(each_part_is_taken_once_whoever_takes_it) {
  test::Random random(test::seed());
  for (int turn = 0; turn < 200; ++turn) {
    const auto n = static_cast<uint32_t>(random.below(300));
    const size_t threads = 1 + random.below(20);
    const auto most = static_cast<uint32_t>(1 + random.below(16));
    Shares shares;
    shares.divide(n, threads);
    std::vector<int> taken(n, 0);
    uint32_t first = 0;
    while (const uint32_t got = shares.take(random.below(40), most, &first)) {
      CHECK(got <= most && first + got <= n);
      for (uint32_t i = first; i < first + got; ++i) ++taken[i];
    }
    for (const int times : taken) CHECK_EQ(times, 1);
  }
}

TEST(threads_at_once_take_each_part_once) {
  constexpr uint32_t kParts = 100'000;
  Shares shares;
  shares.divide(kParts, 4);
  std::vector<std::atomic<int>> taken(kParts);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      uint32_t first = 0;
      while (const uint32_t n = shares.take(t, 3, &first)) {
        for (uint32_t i = first; i < first + n; ++i) taken[i].fetch_add(1);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const auto& times : taken) CHECK_EQ(times.load(), 1);
}

TEST(one_thread_takes_its_own_share_first_and_in_order) {
  Shares shares;
  shares.divide(10, 2);
  uint32_t first = 0;
  for (uint32_t want = 5; want < 10; ++want) {
    CHECK_EQ(shares.take(1, 1, &first), 1u);
    CHECK_EQ(first, want);
  }
  for (uint32_t want = 4; want >= 3; --want) {  // then the other's, from its end
    CHECK_EQ(shares.take(1, 1, &first), 1u);
    CHECK_EQ(first, want);
  }
  CHECK_EQ(shares.take(0, 1, &first), 1u);
  CHECK_EQ(first, 0u);
}

}  // namespace windlass::shares_test
