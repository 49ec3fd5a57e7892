#include "table/group.h"

#include <map>
#include <thread>
#include <vector>

#include "base/test.h"

namespace windlass::group_test {
namespace {

std::vector<uint64_t> some_keys(test::Random& random, size_t n, uint64_t range) {
  std::vector<uint64_t> keys(n);
  for (uint64_t& k : keys) k = range == 0 ? random.next() : random.below(range) - range / 2;
  return keys;
}

// Each key once, in the group of its shard, in the order of the request.
void check_groups(const Keys& keys) {
  const Groups groups(keys);
  CHECK(groups.ok());
  CHECK_EQ(groups.total(), keys.n);
  std::vector<bool> seen(keys.n);
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    int64_t last = -1;
    for (size_t i = 0; i < groups.size(s); ++i) {
      const Keyed& k = groups.begin(s)[i];
      CHECK_EQ(k.hash, mix(keys.at(k.at)));
      CHECK_EQ(shard_of_hash(k.hash), s);
      CHECK(static_cast<int64_t>(k.at) > last);
      last = k.at;
      CHECK(!seen[k.at]);
      seen[k.at] = true;
    }
  }
}

void check_unique(const Keys& keys) {
  std::vector<uint64_t> found(keys.n + 1, 7);
  std::vector<int64_t> inverse(keys.n, -1);
  const uint64_t n = unique(keys, found.data(), inverse.data());
  std::map<uint64_t, uint64_t> places;
  for (uint64_t i = 0; i < n; ++i) CHECK(places.emplace(found[i], i).second);
  std::map<uint64_t, int> wanted;
  for (uint64_t i = 0; i < keys.n; ++i) {
    wanted[keys.at(i)] = 1;
    CHECK_EQ(found[static_cast<size_t>(inverse[i])], keys.at(i));
  }
  CHECK_EQ(wanted.size(), n);
  CHECK_EQ(found[keys.n], 7u);  // nothing written beyond the room
}

}  // namespace

TEST(a_key_is_its_shard_and_its_place) {
  test::Random random(test::seed());
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t key = i < 2 ? uint64_t{0} - static_cast<uint64_t>(i) : random.next() >> random.below(64);
    const uint64_t hash = mix(key);
    CHECK_EQ(key_of(shard_of_hash(hash), place_of(hash)), key);
  }
}

TEST(groups_hold_each_key_once_and_in_order) {
  test::Random random(test::seed());
  for (const size_t n : {0, 1, 2, 3, 4, 5, 100, 1000, 20'000, 7, 0}) {  // a small request after a large one, too
    const std::vector<uint64_t> wide = some_keys(random, n, n % 2 == 0 ? 0 : 50);
    check_groups({wide.data(), KeyType::kUint64, n});
    check_groups({wide.data(), KeyType::kInt64, n});
    std::vector<int32_t> narrow(n);
    for (int32_t& k : narrow) k = static_cast<int32_t>(random.next());
    check_groups({narrow.data(), KeyType::kInt32, n});
  }
}

TEST(a_request_without_keys_needs_no_memory) {
  std::thread([] {  // a new thread has no buffer from an earlier request
    check_groups({nullptr, KeyType::kInt64, 0});
    CHECK_EQ(unique({nullptr, KeyType::kInt64, 0}, nullptr, nullptr), 0u);
  })
      .join();
}

TEST(minus_one_is_one_key_whatever_its_type) {
  const int32_t narrow[] = {-1, INT32_MIN, INT32_MAX, 0};
  const int64_t wide[] = {-1, INT32_MIN, INT32_MAX, 0};
  const uint64_t plain[] = {~uint64_t{0}, 0xFFFFFFFF80000000u, 0x7FFFFFFFu, 0};
  const Groups a({narrow, KeyType::kInt32, 4}), b({wide, KeyType::kInt64, 4}), c({plain, KeyType::kUint64, 4});
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    CHECK(a.size(s) == b.size(s) && b.size(s) == c.size(s));
    for (size_t i = 0; i < a.size(s); ++i) {
      CHECK_EQ(a.begin(s)[i].hash, b.begin(s)[i].hash);
      CHECK_EQ(b.begin(s)[i].hash, c.begin(s)[i].hash);
    }
  }
}

TEST(groups_live_on_while_others_are_made) {
  test::Random random(test::seed());
  const std::vector<uint64_t> keys = some_keys(random, 3000, 0);
  const Groups first({keys.data(), KeyType::kUint64, 3000});
  std::vector<uint64_t> hashes;
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    for (size_t i = 0; i < first.size(s); ++i) hashes.push_back(first.begin(s)[i].hash);
  }
  for (int i = 0; i < 20; ++i) {  // those take over each other's buffer, never this one's
    const std::vector<uint64_t> others = some_keys(random, random.below(4000), 0);
    const Groups second({others.data(), KeyType::kUint64, others.size()});
    if (i % 5 == 0) std::thread([&] { check_groups({others.data(), KeyType::kUint64, others.size()}); }).join();
  }
  size_t at = 0;
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    for (size_t i = 0; i < first.size(s); ++i) CHECK_EQ(first.begin(s)[i].hash, hashes[at++]);
  }
}

TEST(unique_names_each_key_once_and_where_it_went) {
  test::Random random(test::seed());
  for (const uint64_t range : {1u, 2u, 10u, 1000u, 1000'000u, 0u}) {
    for (const size_t n : {0, 1, 2, 17, 500, 20'000}) {
      const std::vector<uint64_t> keys = some_keys(random, n, range);
      check_unique({keys.data(), KeyType::kInt64, n});
    }
  }
}

TEST(sorted_keys_are_in_order_and_the_inverse_follows) {
  test::Random random(test::seed());
  for (const uint64_t range : {1u, 300u, 1000'000u, 0u}) {
    for (const size_t n : {0, 1, 2, 17, 20'000}) {
      const std::vector<uint64_t> keys = some_keys(random, n, range);
      std::vector<uint64_t> found(n);
      std::vector<int64_t> inverse(n);
      const uint64_t m = unique({keys.data(), KeyType::kInt64, n}, found.data(), inverse.data());
      CHECK(sort_unique(found.data(), m, inverse.data(), n));
      for (uint64_t i = 1; i < m; ++i) CHECK(static_cast<int64_t>(found[i - 1]) < static_cast<int64_t>(found[i]));
      for (size_t i = 0; i < n; ++i) CHECK_EQ(found[static_cast<size_t>(inverse[i])], keys[i]);
    }
  }
}

TEST(unique_extends_the_sign_of_narrow_keys) {
  const int32_t narrow[] = {-1, 5, -1, INT32_MIN, 5, 0};
  check_unique({narrow, KeyType::kInt32, 6});
  uint64_t found[6];
  int64_t inverse[6];
  CHECK_EQ(unique({narrow, KeyType::kInt32, 6}, found, inverse), 4u);
  CHECK_EQ(found[inverse[0]], ~uint64_t{0});
  CHECK_EQ(found[inverse[3]], 0xFFFFFFFF80000000u);
  CHECK_EQ(inverse[0], inverse[2]);
}

TEST(unique_gives_the_same_order_each_time) {
  test::Random random(test::seed());
  const std::vector<uint64_t> keys = some_keys(random, 5000, 3000);
  std::vector<uint64_t> a(5000), b(5000);
  std::vector<int64_t> inverse(5000);
  const uint64_t n = unique({keys.data(), KeyType::kInt64, 5000}, a.data(), inverse.data());
  unique({keys.data(), KeyType::kUint64, 5000}, b.data(), inverse.data());
  for (uint64_t i = 0; i < n; ++i) {
    CHECK_EQ(a[i], b[i]);
    if (i > 0) CHECK(shard_of_hash(mix(a[i - 1])) <= shard_of_hash(mix(a[i])));
  }
}

}  // namespace windlass::group_test
