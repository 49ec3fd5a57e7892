#include "client/arena/arena.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <thread>

#include "base/limits.h"
#include "base/test.h"

namespace windlass::arena_test {
namespace {

Range part(const std::byte* block, size_t first, size_t bytes) { return {block + first, bytes}; }

size_t address_space_bytes() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

}  // namespace

TEST(a_block_is_registered_from_its_first_byte_to_its_last) {
  Arena arena;
  std::byte* block = arena.take(1000);
  CHECK(reinterpret_cast<uintptr_t>(block) % limits::kCacheLineBytes == 0);
  CHECK(arena.registered({block, 1000}));
  CHECK(arena.registered({block + 999, 1}));
  CHECK(arena.registered({block + 500, 500}));
  CHECK(!arena.registered({block, 1001}));
  CHECK(!arena.registered({block + 500, 501}));
  CHECK(!arena.registered({block + 1000, 1}));
  CHECK(!arena.registered({block - 1, 2}));
  const std::byte ordinary[8] = {};
  CHECK(!arena.registered({ordinary, 8}));
  CHECK(!arena.registered({block, ~size_t{0}}));
  arena.give(block);
  CHECK(!arena.registered({block, 1}));
}

TEST(a_freed_block_serves_the_next_request_of_its_size) {
  Arena arena;
  std::byte* block = arena.take(100'000);
  arena.give(block);
  CHECK(arena.take(10) != block);  // a fraction of it would waste it
  std::byte* again = arena.take(99'000);
  CHECK(again == block);
  CHECK(arena.registered({again, 99'000}));
  CHECK(!arena.registered({again, 99'001}));
}

TEST(too_much_memory_is_refused_and_no_memory_is_a_block_too) {
  Arena arena;
  CHECK(arena.take(~size_t{0}) == nullptr);
  CHECK(arena.take((size_t{1} << 46) + 1) == nullptr);
  std::byte* empty = arena.take(0);
  CHECK(empty != nullptr);
  arena.give(empty);
  arena.give(empty);  // not ours any more: nothing happens
}

TEST(a_lent_range_is_refused_to_a_second_request) {
  Arena arena;
  std::byte* block = arena.take(1000);
  const Range loan = part(block, 100, 100);
  CHECK_OK(arena.lend(&loan, 1, "first"));
  for (const Range r : {loan, part(block, 0, 1000), part(block, 199, 1), part(block, 50, 51), part(block, 120, 10)}) {
    const Status refused = arena.lend(&r, 1, "second");
    CHECK(refused.code() == Code::kBufferInUse);
    CHECK(refused.message().find("second") == 0);
  }
  for (const Range r : {part(block, 0, 100), part(block, 200, 800)}) {
    CHECK_OK(arena.lend(&r, 1, "beside it"));
    arena.end(&r, 1);
  }
  arena.end(&loan, 1);
  CHECK_OK(arena.lend(&loan, 1, "after it"));
  arena.end(&loan, 1);
}

TEST(a_refused_request_borrows_nothing) {
  Arena arena;
  std::byte *a = arena.take(100), *b = arena.take(100);
  const Range taken = {b, 100}, both[] = {{a, 100}, {b, 100}};
  CHECK_OK(arena.lend(&taken, 1, "first"));
  CHECK_CODE(arena.lend(both, 2, "second"), Code::kBufferInUse);
  CHECK_OK(arena.lend(both, 1, "third"));
  arena.end(both, 2);
  CHECK_OK(arena.lend(both, 2, "fourth"));
  arena.end(both, 2);
}

TEST(ranges_of_one_request_are_the_same_or_apart) {
  Arena arena;
  std::byte* block = arena.take(1000);
  std::byte ordinary[100];
  const Range same[] = {{block, 100}, {block, 100}};
  CHECK_OK(arena.lend(same, 2, "push_pull in place"));
  CHECK_CODE(arena.lend(same, 1, "another"), Code::kBufferInUse);
  arena.end(same, 2);
  CHECK_OK(arena.lend(same, 1, "another"));
  arena.end(same, 1);
  for (const std::byte* base : {static_cast<const std::byte*>(block), static_cast<const std::byte*>(ordinary)}) {
    const Range crossing[] = {{base, 50}, {base + 49, 50}}, apart[] = {{base, 50}, {base + 50, 50}};
    CHECK_CODE(arena.lend(crossing, 2, "crossing"), Code::kInvalidArgument);
    CHECK_OK(arena.lend(apart, 2, "apart"));
    arena.end(apart, 2);
  }
}

TEST(ordinary_and_empty_ranges_are_passed_over) {
  Arena arena;
  std::byte* block = arena.take(100);
  std::byte ordinary[100];
  bool some_ordinary = false;
  const Range empty = {block, 0}, mixed[] = {{ordinary, 100}, {block, 100}};
  CHECK_OK(arena.lend(&empty, 1, "empty", &some_ordinary));
  CHECK_OK(arena.lend(&mixed[1], 1, "registered", &some_ordinary));
  CHECK(!some_ordinary);
  arena.end(&mixed[1], 1);
  CHECK_OK(arena.lend(mixed, 2, "mixed", &some_ordinary));
  CHECK(some_ordinary);
  CHECK_OK(arena.lend(mixed, 1, "the same ordinary array"));
  CHECK_CODE(arena.lend(mixed, 2, "again"), Code::kBufferInUse);
  arena.end(mixed, 2);
  CHECK_OK(arena.lend(mixed, 2, "again"));
  arena.end(mixed, 2);
}

TEST(a_block_given_while_on_loan_is_freed_when_the_last_loan_ends) {
  Arena arena;
  std::byte* block = arena.take(50'000);
  const Range first = part(block, 0, 100), second = part(block, 100, 100);
  CHECK_OK(arena.lend(&first, 1, "first"));
  CHECK_OK(arena.lend(&second, 1, "second"));
  arena.give(block);
  CHECK(arena.take(50'000) != block);
  arena.end(&first, 1);
  CHECK(arena.take(50'000) != block);
  std::memset(block, 1, 50'000);  // still mapped
  arena.end(&second, 1);
  CHECK(!arena.registered({block, 1}));
  CHECK(arena.take(50'000) == block);
}

TEST(what_is_kept_for_reuse_is_limited) {
  Arena arena;
  constexpr size_t kBytes = limits::kArenaCacheBytesMax / 4;
  const size_t before = address_space_bytes();
  std::vector<std::byte*> blocks(9);  // never touched, so they cost no memory
  for (std::byte*& b : blocks) b = arena.take(kBytes);
  CHECK(address_space_bytes() >= before + 9 * kBytes);
  for (std::byte* b : blocks) arena.give(b);
  CHECK(address_space_bytes() <= before + limits::kArenaCacheBytesMax + kBytes / 2);
  CHECK(address_space_bytes() >= before + 3 * kBytes);
}

// Loans of many threads: who was granted a range is its only writer.
TEST(no_two_threads_are_lent_the_same_bytes) {
  Arena arena;
  constexpr size_t kBytes = 512;
  std::byte* block = arena.take(kBytes);
  std::memset(block, 0, kBytes);
  std::atomic<uint64_t> granted{0}, wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      test::Random random(test::seed() + t);
      for (int i = 0; i < 5000; ++i) {
        const size_t first = random.below(kBytes), bytes = 1 + random.below(std::min<size_t>(kBytes - first, 64));
        const Range r = part(block, first, bytes);
        if (!arena.lend(&r, 1, "x").ok()) continue;
        ++granted;
        std::memset(block + first, static_cast<int>(t + 1), bytes);
        for (size_t j = 0; j < bytes; ++j) wrong += block[first + j] != std::byte(t + 1);
        arena.end(&r, 1);
        std::byte* other = arena.take(1 + random.below(9000));
        arena.give(other);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(granted > 0);
  CHECK_EQ(wrong.load(), 0u);
}

// What a server sees of a segment: the file, mapped once more.
struct Stranger {
  explicit Stranger(const Segment& segment)
      : bytes(segment.bytes()), memory(os::map_shared(segment.file(), segment.bytes())) {}
  ~Stranger() { os::unmap_shared(memory, bytes); }
  const size_t bytes;
  std::byte* const memory;
};

TEST(a_block_that_is_lent_as_a_whole_moves_to_fresh_pages_that_can_be_shared) {
  Arena arena(true);
  constexpr size_t kBytes = 3 << 20;
  std::byte* const block = arena.take(kBytes);
  std::memset(block, 1, kBytes);
  Place before, after;
  CHECK(arena.locate({block, kBytes}, &before));
  const Stranger server(*before.segment);
  const Range halves[] = {part(block, 0, kBytes / 2), part(block, kBytes / 2, kBytes / 2)};
  CHECK_OK(arena.lend(halves, 2, "x"));
  CHECK_EQ(arena.renewals(), 0u);
  arena.renew({before.segment});
  arena.renew({before.segment});  // once is enough
  CHECK_EQ(arena.renewals(), 1u);
  CHECK(before.segment->withdrawn());
  CHECK(std::all_of(block, block + kBytes, [](std::byte b) { return b == std::byte{1}; }));
  std::memset(server.memory, 9, server.bytes);
  CHECK(std::all_of(block, block + kBytes, [](std::byte b) { return b == std::byte{1}; }));
  arena.end(halves, 2);
  CHECK(arena.locate({block, kBytes}, &after));
  CHECK(after.segment != before.segment && after.segment->id() != before.segment->id() && !after.segment->withdrawn());
  const Stranger anew(*after.segment);
  block[5] = std::byte{7};
  CHECK(anew.memory[after.offset + 5] == std::byte{7});
  before.segment = nullptr;  // which must leave the addresses alone
  CHECK(block[5] == std::byte{7});
  arena.give(block);
}

TEST(where_only_a_part_is_lent_pages_become_private_and_no_write_is_lost) {
  Arena arena(true);
  for (const size_t bytes : {size_t{2000}, size_t{3} << 20}) {
    std::byte* const block = arena.take(bytes);
    std::byte* const beside = arena.take(2000);
    std::memset(block, 1, bytes);
    Place before, after;
    CHECK(arena.locate({block, bytes}, &before));
    const Stranger server(*before.segment);
    const Range lent = part(block, 0, bytes / 2);
    CHECK_OK(arena.lend(&lent, 1, "x"));
    std::atomic<bool> stop{false};
#if defined(__SANITIZE_THREAD__)
    stop = true;  // to that sanitizer a new mapping is a write of every byte, which races with any other
#endif
    std::thread writer([&] {
      for (uint8_t n = 0; !stop; ++n) {
        for (size_t i = bytes / 2; i < bytes; i += 97) {
          const std::atomic_ref<unsigned char> byte(*reinterpret_cast<unsigned char*>(block + i));
          byte.store(n, std::memory_order_relaxed);
          if (byte.load(std::memory_order_relaxed) != n) test::fail(__FILE__, __LINE__, "a write was lost");
        }
      }
    });
    arena.renew({before.segment});
    stop = true;
    writer.join();
    std::memset(server.memory, 9, server.bytes);
    CHECK(std::all_of(block, block + bytes / 2, [](std::byte b) { return b == std::byte{1}; }));
    arena.end(&lent, 1);
    CHECK(arena.registered({block, bytes}));
    CHECK(!arena.locate({block, bytes}, &after));  // it is copied from now on
    CHECK_OK(arena.lend(&lent, 1, "x"));
    arena.end(&lent, 1);
    arena.give(block);
    arena.give(beside);
    std::byte* const next = arena.take(bytes);
    CHECK(arena.locate({next, bytes}, &after));  // and what comes later can be shared again
    arena.give(next);
  }
}

}  // namespace windlass::arena_test
