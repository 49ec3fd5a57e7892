#include "base/pool.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "base/limits.h"
#include "base/test.h"

namespace windlass::pool_test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

bool is_zero(const std::byte* p, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (p[i] != std::byte{0}) return false;
  }
  return true;
}

}  // namespace

TEST(a_part_of_a_budget_is_bound_by_both_limits) {
  Budget whole(100);
  Budget part(60, &whole);
  CHECK(part.charge(50));
  CHECK(!part.charge(20));
  CHECK(part.exhausted(20, "t").message().find("of its app's share of this server, 60") != std::string::npos);
  CHECK(whole.charge(45));
  CHECK(!part.charge(8));  // it fits the part, not the whole
  CHECK(part.exhausted(8, "t").message().find("of memory_bytes_max=100") != std::string::npos);
  CHECK_EQ(part.used(), 50u);
  CHECK_EQ(whole.used(), 95u);
  part.refund(50);
  CHECK_EQ(whole.used(), 45u);
}

TEST(a_charge_beyond_the_limit_is_refused_and_changes_nothing) {
  Budget budget(1000);
  CHECK(budget.charge(600));
  CHECK(!budget.charge(401));
  CHECK(!budget.charge(~uint64_t{0}));
  CHECK(!budget.charge(~uint64_t{0} - 599));  // 600 + this wraps around to 0
  CHECK_EQ(budget.used(), 600u);
  CHECK(budget.charge(400));
  CHECK(!budget.charge(1));
  budget.refund(1000);
  CHECK_EQ(budget.used(), 0u);
  const Status refused = budget.exhausted(77, "table 'x'");
  CHECK(refused.code() == Code::kResourceExhausted);
  CHECK(refused.message().find("table 'x'") != std::string::npos);
  CHECK(refused.message().find("77") != std::string::npos && refused.message().find("1000") != std::string::npos);
}

TEST(charges_of_many_threads_never_pass_the_limit) {
  Budget budget(1000);
  std::atomic<bool> passed{false};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      test::Random random(test::seed() + t);
      for (int i = 0; i < 20'000; ++i) {
        const uint64_t bytes = 1 + random.below(600);
        if (!budget.charge(bytes)) continue;
        if (budget.used() > budget.bytes_max()) passed = true;
        budget.refund(bytes);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(!passed);
  CHECK_EQ(budget.used(), 0u);
}

TEST(blocks_are_zeroed_on_cache_lines_and_apart) {
  Budget budget;
  Pool pool(&budget);
  test::Random random(test::seed());
  struct Block {
    std::byte* at;
    size_t bytes;
    unsigned char mark;
  };
  std::vector<Block> blocks;
  for (int i = 0; i < 3000; ++i) {
    if (!blocks.empty() && random.below(3) == 0) {
      std::swap(blocks[random.below(blocks.size())], blocks.back());
      pool.give(blocks.back().at, blocks.back().bytes);
      blocks.pop_back();
      continue;
    }
    const size_t bytes = random.below(100) == 0 ? kMiB / 2 + random.below(kMiB) : 1 + random.below(8192);
    const Block b{pool.take(bytes), bytes, static_cast<unsigned char>(1 + random.below(255))};
    CHECK(b.at != nullptr);
    if (b.at == nullptr) return;
    CHECK_EQ(reinterpret_cast<uintptr_t>(b.at) % limits::kCacheLineBytes, 0u);
    CHECK(is_zero(b.at, bytes));
    std::memset(b.at, b.mark, bytes);
    blocks.push_back(b);
  }
  for (const Block& b : blocks) {
    bool whole = true;
    for (size_t i = 0; i < b.bytes; ++i) whole = whole && b.at[i] == std::byte{b.mark};
    CHECK(whole);
  }
}

TEST(a_given_block_is_the_next_one_of_its_size) {
  Budget budget;
  Pool pool(&budget);
  std::byte* a = pool.take(4096);
  std::memset(a, 0xAB, 4096);
  pool.give(a, 4096);
  const uint64_t used = budget.used();
  CHECK(pool.take(8192) != a);
  std::byte* b = pool.take(4090);  // the same in whole cache lines
  CHECK(b == a);
  CHECK(is_zero(b, 4096));
  CHECK_EQ(budget.used(), used);
  pool.give(nullptr, 4096);
}

TEST(a_pool_takes_nothing_beyond_its_budget_and_gives_it_all_back) {
  Budget budget(5 * kMiB);
  {
    Pool pool(&budget);
    std::vector<std::byte*> blocks;
    while (std::byte* block = pool.take(64 << 10)) blocks.push_back(block);
    CHECK_EQ(blocks.size(), 64u);  // two chunks; a third would pass the budget
    CHECK_EQ(budget.used(), 4 * kMiB);
    CHECK(pool.take(2 * kMiB) == nullptr);
    CHECK(pool.take(64) == nullptr);
    CHECK_EQ(budget.used(), 4 * kMiB);
    std::byte* large = pool.take(kMiB);  // not from a chunk
    CHECK(large != nullptr);
    CHECK_EQ(budget.used(), 5 * kMiB);
    pool.give(blocks.back(), 64 << 10);
    CHECK(pool.take(64 << 10) == blocks.back());
    CHECK(pool.take(64 << 10) == nullptr);
  }
  CHECK_EQ(budget.used(), 0u);
}

TEST(a_large_chunk_that_is_refused_gives_way_to_a_small_one) {
  Budget budget(69 * kMiB);  // after 66 MiB the pool wants chunks of 4
  Pool pool(&budget);
  size_t blocks = 0;
  while (pool.take(256 << 10) != nullptr) ++blocks;
  CHECK_EQ(blocks, 68u * 4);
  CHECK_EQ(budget.used(), 68 * kMiB);
}

TEST(threads_share_a_pool) {
  Budget budget(64 * kMiB);
  Pool pool(&budget);
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      test::Random random(test::seed() + t);
      std::vector<std::byte*> mine;
      for (int i = 0; i < 3000; ++i) {
        if (mine.size() < 50 && random.below(2) == 0) {
          std::byte* block = pool.take(1024);
          if (block == nullptr || !is_zero(block, 1024)) ++wrong;
          std::memset(block, static_cast<int>(t + 1), 1024);
          mine.push_back(block);
        } else if (!mine.empty()) {
          if (mine.back()[1023] != std::byte(t + 1)) ++wrong;
          pool.give(mine.back(), 1024);
          mine.pop_back();
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK_EQ(wrong.load(), 0u);
  CHECK(budget.used() <= 2 * kMiB);
}

TEST(trim_gives_back_what_nobody_uses_and_nothing_else) {
  Budget budget;
  Pool pool(&budget);
  std::vector<std::byte*> mine, others;
  for (int i = 0; i < 20'000; ++i) {
    (i < 10'000 ? mine : others).push_back(pool.take(512));
    if (i % 5000 == 0) (i < 10'000 ? mine : others).push_back(pool.take(kMiB));
  }
  const uint64_t before = budget.used();
  pool.trim();
  CHECK_EQ(budget.used(), before);
  for (std::byte* p : others) std::memset(p, 7, 512);
  for (size_t i = 0; i < mine.size(); ++i) pool.give(mine[i], i == 1 || i == 5002 ? kMiB : 512);
  pool.trim();
  CHECK(budget.used() <= before - 4 * kMiB);
  for (const std::byte* p : others) CHECK(p[0] == std::byte{7} && p[511] == std::byte{7});
  std::vector<std::byte*> again;
  for (int i = 0; i < 10'000; ++i) {
    again.push_back(pool.take(512));
    CHECK(is_zero(again.back(), 512));
    std::memset(again.back(), 9, 512);
  }
  for (const std::byte* p : others) CHECK(p[0] == std::byte{7} && p[511] == std::byte{7});
  for (std::byte* p : again) pool.give(p, 512);
  for (size_t i = 0; i < others.size(); ++i) pool.give(others[i], i == 1 || i == 5002 ? kMiB : 512);
  pool.trim();
  CHECK_EQ(budget.used(), 0u);
  pool.trim();
}

}  // namespace windlass::pool_test
