#include "tensor/cut.h"

#include "base/test.h"

namespace windlass::cut_test {
namespace {

constexpr uint64_t kKiB = 1024, kMiB = 1024 * 1024;

uint64_t bytes_of(const Cut& c, uint32_t shard, uint64_t element_bytes) {
  return (c.end_of(shard) - c.first_of(shard)) * element_bytes;
}

void check_cut(uint64_t rows, uint64_t row, uint64_t element_bytes) {
  const uint64_t elements = rows * row;
  const Cut c = Cut::of(elements, row, element_bytes);
  uint64_t at = 0;
  for (uint32_t s = 0; s < c.shards; ++s) {
    CHECK_EQ(c.first_of(s), at);
    CHECK(c.end_of(s) > at);
    CHECK_EQ(c.shard_of(at), s);
    CHECK_EQ(c.shard_of(c.end_of(s) - 1), s);
    at = c.end_of(s);
    CHECK(bytes_of(c, s, element_bytes) <= limits::kShardBytesMax);
    if (c.whole_rows) CHECK_EQ(c.first_of(s) % row, 0u);
    // One more row would have passed the target, which is at least 64 KiB.
    if (s + 1 < c.shards) {
      CHECK(bytes_of(c, s, element_bytes) + (c.whole_rows ? row * element_bytes : element_bytes) >
            limits::kShardBytesMin);
    }
  }
  CHECK_EQ(at, elements);
  CHECK_EQ(c.whole_rows, row * element_bytes <= limits::kShardBytesMax);
}

}  // namespace

TEST(shards_follow_each_other_and_keep_to_their_limits) {
  test::Random random(test::seed());
  for (int i = 0; i < 3000; ++i) {
    const uint64_t row = 1 + (random.next() >> (41 + random.below(23)));
    const uint64_t rows = 1 + random.below((uint64_t{1} << (4 + random.below(26))) / row + 2);
    check_cut(rows, row, random.below(2) == 0 ? 4 : 8);
  }
  for (const uint64_t row : {16384u, 16383u, 16385u, 1048576u, 1048575u, 1048577u}) check_cut(70, row, 4);
}

TEST(a_small_tensor_is_one_shard_and_a_large_one_about_64) {
  CHECK_EQ(Cut::of(1, 1, 4).shards, 1u);
  CHECK_EQ(Cut::of(64 * kKiB / 4, 1, 4).shards, 1u);
  CHECK_EQ(Cut::of(64 * kKiB / 4 + 1, 1, 4).shards, 2u);
  for (const uint64_t bytes : {4 * kMiB, 64 * kMiB, 256 * kMiB}) {
    const Cut c = Cut::of(bytes / 4, 1, 4);
    CHECK_EQ(c.shards, 64u);
    CHECK_EQ(c.per_shard * 4, bytes / 64);
  }
  CHECK_EQ(Cut::of(1024 * kMiB / 4, 1, 4).per_shard * 4, 4 * kMiB);
  CHECK_EQ(Cut::of(1024 * kMiB / 8, 1, 8).shards, 256u);
}

TEST(a_row_of_more_than_a_shard_is_cut_anywhere) {
  const uint64_t row = 4 * kMiB / 4 + 1;
  const Cut c = Cut::of(3 * row, row, 4);
  CHECK(!c.whole_rows);
  CHECK(c.per_shard < row);
  const Cut fits = Cut::of(3 * (row - 1), row - 1, 4);
  CHECK(fits.whole_rows);
  CHECK_EQ(fits.shards, 3u);
}

TEST(nothing_is_no_shard_and_the_largest_tensor_can_be_cut) {
  const Cut none = Cut::of(0, 10, 4);
  CHECK_EQ(none.shards, 0u);
  CHECK_EQ(Cut::of(0, 0, 4).row, 1u);
  const Cut all = Cut::of(limits::kTensorElementsMax, 1, 8);
  CHECK_EQ(all.end_of(all.shards - 1), limits::kTensorElementsMax);
  CHECK_EQ(all.per_shard * 8, limits::kShardBytesMax);
}

}  // namespace windlass::cut_test
