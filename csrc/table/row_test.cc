// The life of a row: where its first value comes from, when it is stored, and what remains when memory or the row
// itself goes.
#include <algorithm>
#include <random>

#include "rule/kernels_test.h"
#include "table/table_test.h"

namespace windlass::row_test {
namespace {

using test::same_bits;
using test::Tabled;

TableSpec normal(uint32_t dim, uint64_t seed, RuleKind rule = RuleKind::kAdam) {
  return {.dim = dim, .rule = {rule, 0}, .init = {InitKind::kNormal, 0, 1}, .seed = seed};
}

// Keys of one shard, so that a failure there is about all of them.
std::vector<uint64_t> keys_of_shard(uint32_t shard, uint64_t first, size_t n) {
  std::vector<uint64_t> keys;
  for (uint64_t i = first; i < first + n; ++i) keys.push_back(unmix(i | uint64_t{shard} << 56));
  return keys;
}

}  // namespace

TEST(a_row_starts_with_a_value_of_its_seed_name_and_key_alone) {
  std::vector<uint64_t> keys(3000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 3 - 1000;
  Tabled first(normal(5, 1)), other_order(normal(5, 1)), other_rule(normal(5, 1, RuleKind::kSum));
  Tabled other_seed(normal(5, 2)), other_name(normal(5, 1), "u");
  const std::vector<float> values = first.read(keys);
  std::vector<uint64_t> shuffled = keys;
  std::shuffle(shuffled.begin(), shuffled.end(), std::minstd_rand(static_cast<unsigned>(test::seed())));
  (void)other_order.read({12345678});
  (void)other_order.read(shuffled);
  CHECK(same_bits(other_order.read(keys), values));
  CHECK(same_bits(other_rule.read(keys), values));
  const std::vector<float> seeded = other_seed.read(keys), named = other_name.read(keys);
  std::map<std::vector<float>, int> different;
  for (size_t i = 0; i < keys.size(); ++i) {
    for (const std::vector<float>* v : {&values, &seeded, &named})
      different[std::vector<float>(v->begin() + static_cast<ptrdiff_t>(i * 5),
                                   v->begin() + static_cast<ptrdiff_t>(i * 5 + 5))] = 1;
  }
  CHECK_EQ(different.size(), 3 * keys.size());
}

TEST(a_longer_row_begins_like_a_shorter_one) {
  Tabled narrow(normal(3, 1)), wide(normal(17, 1));
  for (uint64_t key = 0; key < 100; ++key) {
    const std::vector<float> a = narrow.read({key}), b = wide.read({key});
    CHECK(same_bits(a, std::vector<float>(b.begin(), b.begin() + 3)));
  }
}

TEST(a_look_without_create_stores_nothing) {
  Tabled t(normal(16, 1)), made(normal(16, 1));
  const std::vector<uint64_t> keys = {1, 2, 3, ~uint64_t{0}, 2};
  const std::vector<float> looked = t.read(keys, false);
  CHECK_EQ(t.rows(), 0u);
  CHECK_EQ(t.budget.used(), 0u);
  CHECK(same_bits(made.read(keys), looked));
  CHECK_EQ(made.rows(), 4u);
}

TEST(an_erased_row_starts_anew) {
  Tabled t(normal(16, 1));
  const Hyper hyper = test::hyper_of(RuleKind::kAdam, 0);
  const std::vector<uint64_t> keys = {1, 2, 3};
  const std::vector<float> initial = t.read(keys), g(3 * 16, 0.25f);
  t.apply(keys, hyper, g);
  const std::vector<float> once = t.read(keys);
  const uint64_t print = t.fingerprint();
  for (int i = 0; i < 5; ++i) t.apply(keys, hyper, g);
  CHECK_EQ(t.erase({2, 3, 1, 2, 99}), 3u);
  CHECK_EQ(t.rows(), 0u);
  CHECK(same_bits(t.read(keys), initial));
  t.apply(keys, hyper, g);  // state and count are new as well
  CHECK(same_bits(t.read(keys), once));
  CHECK_EQ(t.fingerprint(), print);
}

TEST(erased_rows_make_room_for_others) {
  Tabled t(normal(16, 1), "t", uint64_t{4} << 20);
  for (uint64_t round = 0; round < 20; ++round) {
    const std::vector<uint64_t> keys = keys_of_shard(3, round * 1'000'000, 3000);
    const std::vector<float> values = t.read(keys);
    CHECK(same_bits(t.read(keys, false), values));
    CHECK_EQ(t.erase(keys), keys.size());
  }
  CHECK_EQ(t.rows(), 0u);
}

// Both pools take two megabytes at once, so that little is left to grow.
TEST(a_push_without_memory_changes_no_weight) {
  for (const uint64_t bytes_max : {uint64_t{0}, uint64_t{3} << 20, uint64_t{4} << 20}) {
    Tabled t(normal(16, 1), "t", bytes_max), roomy(normal(16, 1));
    const Hyper hyper = test::hyper_of(RuleKind::kAdam, 0);
    uint64_t made = 0;
    Status status;
    while (status.ok()) {
      const std::vector<uint64_t> keys = keys_of_shard(9, made, 500);
      std::vector<float> g(keys.size() * 16, 0.5f);
      Arrays arrays;
      arrays.in = g.data();
      std::vector<uint64_t> mixed = keys;  // in front of the new keys those that are there
      for (size_t i = 0; i < 100 && made >= 500; ++i) mixed[i] = keys_of_shard(9, made - 1 - i, 1)[0];
      const auto before = t.scan(1000);
      const uint64_t print = t.fingerprint();
      t.each(mixed, [&](uint32_t s, const Keyed* k, size_t n) { status = t.table->apply(s, hyper, k, n, arrays); });
      if (status.ok()) {
        made += 500;
        continue;
      }
      CHECK(status.code() == Code::kResourceExhausted);
      CHECK(status.message().find("table 't' cannot grow") != std::string::npos);
      CHECK_EQ(t.fingerprint(), print);
      const auto after = t.scan(1000);
      for (const auto& [key, row] : before) CHECK(after.count(key) == 1 && same_bits(after.at(key), row));
      // What was made on the way has the value it always has, and counts as never updated.
      for (const auto& [key, row] : after) CHECK(before.count(key) == 1 || same_bits(row, roomy.read({key})));
    }
    CHECK_EQ(made == 0, bytes_max < (uint64_t{4} << 20));
    CHECK(t.budget.used() <= bytes_max);
    if (made == 0) continue;
    // Room again: the same table goes on.
    CHECK(t.erase(keys_of_shard(9, 0, 500)) > 0);
    const std::vector<uint64_t> one = keys_of_shard(9, 1'000'000, 1);
    t.apply(one, hyper, std::vector<float>(16, 0.5f));
    roomy.apply(one, hyper, std::vector<float>(16, 0.5f));
    CHECK(same_bits(t.read(one), roomy.read(one)));
  }
}

TEST(a_dead_table_leaves_its_blocks_to_the_next) {
  Budget budget(uint64_t{4} << 20);
  TablePools pools(&budget);
  for (int round = 0; round < 10; ++round) {
    std::unique_ptr<Table> table;
    CHECK_OK(Table::create("t", normal(64, 1), &pools, &table));
    const std::vector<uint64_t> keys = keys_of_shard(1, 0, 1000);
    const Groups groups({keys.data(), KeyType::kUint64, keys.size()});
    std::vector<float> out(keys.size() * 64);
    Arrays arrays;
    arrays.out = out.data();
    CHECK_OK(table->read(1, groups.begin(1), groups.size(1), arrays, true));
  }
}

TEST(the_fingerprint_depends_on_what_the_rows_hold_and_on_nothing_else) {
  test::Random random(test::seed());
  const Hyper hyper = test::hyper_of(RuleKind::kAdam, 0);
  std::vector<uint64_t> keys(2000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 7;
  std::vector<float> g(keys.size() * 3);
  for (float& x : g) x = random.unit() - 0.5f;

  Tabled a(normal(3, 1)), b(normal(3, 1));
  CHECK_EQ(a.fingerprint(), 0u);
  a.apply(keys, hyper, g);
  (void)b.read({5, 6, 8});  // only looked at
  for (size_t i = keys.size(); i-- > 0;)
    b.apply({keys[i]}, hyper,
            {g.begin() + static_cast<ptrdiff_t>(i * 3), g.begin() + static_cast<ptrdiff_t>(i * 3 + 3)});
  CHECK_EQ(a.fingerprint(), b.fingerprint());
  const std::vector<float> swapped = {g[3], g[4], g[5], g[0], g[1], g[2]};
  a.apply({keys[0], keys[1]}, hyper, std::vector<float>(g.begin(), g.begin() + 6));
  b.apply({keys[0], keys[1]}, hyper, swapped);
  CHECK(a.fingerprint() != b.fingerprint());
  // The state counts as well as the weights.
  Tabled c({.dim = 1, .rule = {RuleKind::kMomentum, 0}, .init = {}, .seed = 0}), d(c.table->spec());
  c.apply({1}, {{0.0, 0, 0.9}}, std::vector<float>{1});
  d.apply({1}, {{0.0, 0, 0.9}}, std::vector<float>{2});
  CHECK(same_bits(c.read({1}), d.read({1})));
  CHECK(c.fingerprint() != d.fingerprint());
}

TEST(a_table_of_no_or_too_large_a_dim_is_refused) {
  Budget budget;
  TablePools pools(&budget);
  std::unique_ptr<Table> table;
  CHECK_CODE(Table::create("t", normal(0, 1), &pools, &table), Code::kInvalidArgument);
  CHECK_CODE(Table::create("t", normal(limits::kTableDimMax + 1, 1), &pools, &table), Code::kInvalidArgument);
  CHECK_OK(Table::create("t", normal(limits::kTableDimMax, 1), &pools, &table));
}

}  // namespace windlass::row_test
