#include "table/table.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "rule/kernels_test.h"
#include "table/table_test.h"

namespace windlass::table_test {
namespace {

using test::same_bits;
using test::Tabled;

constexpr Init kNormal{InitKind::kNormal, 0, 0.1};

TableSpec spec_of(RuleKind rule, uint32_t dim, float initial_state = 0.0f) {
  return {.dim = dim, .rule = {rule, initial_state}, .init = kNormal, .seed = 5};
}

std::vector<uint64_t> random_keys(test::Random& random, size_t n, uint64_t range) {
  std::vector<uint64_t> keys(n);
  for (uint64_t& k : keys) k = random.below(range) - range / 2;
  return keys;
}

std::vector<float> random_floats(test::Random& random, size_t n) {
  std::vector<float> v(n);
  for (float& x : v) x = random.unit() - 0.5f;
  return v;
}

// A table in the plainest form: a map of rows, each updated alone by the dense kernel.
struct Oracle {
  struct Row {
    std::vector<float> w, state, scalars;
    uint32_t count = 0;
  };
  TableSpec spec;
  std::map<uint64_t, Row> rows;

  void make(uint64_t key, const float* initial) {
    Row row;
    row.w.assign(initial, initial + spec.dim);
    row.state.assign(limits::kRuleVectorsMax * spec.dim, spec.rule.initial_state);
    row.scalars.assign(1, spec.rule.initial_state);
    rows.emplace(key, row);
  }
  void push(const std::vector<uint64_t>& keys, const Hyper& hyper, const std::vector<float>& g) {
    std::map<uint64_t, std::vector<float>> combined;
    const RuleKernels& rule = kernels(spec.rule.kind);
    for (size_t i = 0; i < keys.size(); ++i) {
      const std::vector<float> one(g.begin() + static_cast<ptrdiff_t>(i * spec.dim),
                                   g.begin() + static_cast<ptrdiff_t>((i + 1) * spec.dim));
      const auto [it, fresh] = combined.emplace(keys[i], one);
      if (!fresh) kernels().combine(rule.layout.combine, it->second.data(), one.data(), spec.dim);
    }
    if (rule.layout.combine == Combine::kMean) {
      for (auto& [key, sum] : combined) {
        const auto times = std::count(keys.begin(), keys.end(), key);
        for (float& x : sum) x /= static_cast<float>(times);
      }
    }
    for (const auto& [key, gradient] : combined) {
      Row& row = rows.at(key);
      Dense d;
      d.w = row.w.data();
      for (uint32_t v = 0; v < limits::kRuleVectorsMax; ++v) d.state[v] = row.state.data() + v * spec.dim;
      d.scalars = row.scalars.data();
      d.g = gradient.data();
      d.n = d.row = spec.dim;
      rule.dense(rule.prepare(hyper, ++row.count), d);
    }
  }
};

void check_against_oracle(RuleKind kind, uint32_t dim, test::Random& random) {
  const TableSpec spec = spec_of(kind, dim, kind == RuleKind::kAdagrad ? 0.1f : 0.0f);
  Tabled t(spec);
  Oracle oracle{spec, {}};
  const uint64_t range = 3000;
  for (int step = 0; step < (test::accurate() ? 120 : test::kUnderTsan ? 3 : test::kSanitized ? 8 : 15); ++step) {
    const std::vector<uint64_t> keys = random_keys(random, 1 + random.below(1500), random.below(2) == 0 ? range : 20);
    const std::vector<float> initial = t.read(keys, false);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto it = oracle.rows.find(keys[i]);
      if (it != oracle.rows.end()) CHECK(std::memcmp(it->second.w.data(), &initial[i * dim], dim * 4) == 0);
    }
    const auto make_all = [&] {
      for (size_t i = 0; i < keys.size(); ++i) oracle.make(keys[i], &initial[i * dim]);
    };
    switch (random.below(4)) {
      case 0: {
        std::set<uint64_t> there;
        for (const uint64_t k : keys) {
          if (oracle.rows.erase(k) != 0) there.insert(k);
        }
        CHECK_EQ(t.erase(keys), there.size());
        break;
      }
      case 1:
        CHECK(same_bits(t.read(keys), initial));
        make_all();
        break;
      default: {
        const std::vector<float> g = random_floats(random, keys.size() * dim);
        make_all();
        oracle.push(keys, test::hyper_of(kind, step % 4), g);
        Arrays arrays;
        arrays.in = g.data();
        std::vector<float> out(keys.size() * dim);
        if (step % 2 == 0) arrays.out = out.data();
        arrays.stream = step % 4 == 0;
        t.apply(keys, test::hyper_of(kind, step % 4), arrays);
        for (size_t i = 0; i < keys.size() && arrays.out != nullptr; ++i)
          CHECK(std::memcmp(oracle.rows.at(keys[i]).w.data(), &out[i * dim], dim * 4) == 0);
      }
    }
    CHECK_EQ(t.rows(), oracle.rows.size());
  }
  const auto scanned = t.scan(1 + random.below(50));
  CHECK_EQ(scanned.size(), oracle.rows.size());
  for (const auto& [key, row] : oracle.rows) CHECK(scanned.count(key) == 1 && same_bits(scanned.at(key), row.w));
}

}  // namespace

TEST(a_table_agrees_with_a_map_of_rows) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    for (const uint32_t dim : {1, 3, 16, 17, 64, 128}) check_against_oracle(kind, dim, random);
  }
}

TEST(rows_and_bytes_are_counted_as_rows_come_and_go) {
  Tabled t(spec_of(RuleKind::kAdam, 8));
  CHECK_EQ(t.table->size().rows, 0u);
  CHECK_EQ(t.table->size().bytes, 0u);
  std::vector<uint64_t> keys(5000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  (void)t.read(keys, false);
  CHECK_EQ(t.table->size().rows, 0u);
  (void)t.read(keys);
  CHECK_EQ(t.table->size().rows, 5000u);
  const uint64_t bytes = t.table->size().bytes;
  CHECK(bytes >= 5000 * 3 * 8 * sizeof(float));
  CHECK(bytes <= t.budget.used());
  CHECK_EQ(t.erase({1, 2, 3, 99999}), 3u);
  CHECK_EQ(t.table->size().rows, 4997u);
  CHECK_EQ(t.table->size().bytes, bytes);  // kept for the next rows
  const uint32_t shard = shard_of_hash(mix(keys[0]));
  const uint64_t rows = t.table->rows(shard);
  std::vector<std::byte> copied((rows + 1) * t.table->copy_bytes());
  Table::CopyCursor cursor = t.table->begin_copy(shard);
  size_t n = 0;
  CHECK(!t.table->copy(shard, &cursor, rows + 1, copied.data(), &n));
  t.table->clear(shard);
  CHECK_EQ(t.table->size().rows, 4997u - rows);
  CHECK(t.table->size().bytes < bytes);
  CHECK_OK(t.table->put(shard, copied.data(), n));
  CHECK_EQ(t.table->size().rows, 4997u);
}

TEST(repeated_keys_of_one_push_are_combined_in_order) {
  const std::vector<uint64_t> keys = {7, 8, 7, 7, 9, 8};
  const std::vector<float> g = {1, 10, 5, 3, 100, 20};
  struct Case {
    RuleKind rule;
    float seven, eight, nine;
  };
  for (const Case& c :
       {Case{RuleKind::kSum, 9, 30, 100}, Case{RuleKind::kMax, 5, 20, 100}, Case{RuleKind::kAssign, 3, 20, 100},
        Case{RuleKind::kAverage, 3, 15, 100}, Case{RuleKind::kMin, 1, 10, 100}}) {
    const double start = c.rule == RuleKind::kMin ? 1000 : 0;
    Tabled t({.dim = 1, .rule = {c.rule, 0}, .init = {InitKind::kConstant, start, 0}, .seed = 0});
    t.apply(keys, {}, g);
    const std::vector<float> want = {c.seven, c.eight, c.nine};
    CHECK(same_bits(t.read({7, 8, 9}), want));
    CHECK_EQ(t.rows(), 3u);
  }
  // One update, not three: Adagrad's accumulator has the square of the sum.
  Tabled t({.dim = 1, .rule = {RuleKind::kAdagrad, 0}, .init = {}, .seed = 0});
  t.apply({7, 7}, {{1.0, 0, 0, 0}}, std::vector<float>{3, 1});
  t.apply({7}, {{1.0, 0, 0, 0}}, std::vector<float>{3});
  CHECK(same_bits(t.read({7}), std::vector<float>{-1.0f - 3.0f / 5.0f}));
}

TEST(more_repeats_than_a_block_are_combined_too) {
  test::Random random(test::seed());
  const std::vector<uint64_t> keys = random_keys(random, 20'000, 300);
  Tabled t({.dim = 3, .rule = {RuleKind::kSum, 0}, .init = {}, .seed = 0});
  std::vector<float> g(keys.size() * 3);
  std::map<uint64_t, float> sums;
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t j = 0; j < 3; ++j) g[i * 3 + j] = static_cast<float>(i % 100 + j);
    sums[keys[i]] += static_cast<float>(i % 100);
  }
  t.apply(keys, {}, g);
  for (const auto& [key, row] : t.scan(1000)) CHECK(row[0] == sums.at(key));
}

// Rows of a shard are told apart by a bit each while they are few, then by a hash table of the request's.
TEST(repeats_are_found_in_a_shard_of_any_size) {
  Tabled t({.dim = 1, .rule = {RuleKind::kAdagrad, 0}, .init = {}, .seed = 0});
  constexpr uint64_t kRows = (uint64_t{1} << 20) + 1000;
  const auto key = [](uint64_t i) { return unmix(i * 0x9E3779B97F4A7C15u >> 8); };  // all of shard 0
  std::vector<uint64_t> keys;
  for (uint64_t i = 0;;) {
    const std::vector<uint64_t> twice = {key(i), key(i / 2), key(i)};
    t.apply(twice, {{1.0, 0, 0, 0}}, std::vector<float>{1, 1, 1});
    CHECK(same_bits(t.read({key(i)}), std::vector<float>{-1.0f}));  // one update: its gradient over its own size
    if (i == kRows) break;
    keys.clear();
    for (const uint64_t end = std::min(kRows, i + kRows / 8); i < end; ++i) keys.push_back(key(i));
    (void)t.read(keys);
  }
  CHECK_EQ(t.table->rows(0), kRows + 1);
}

TEST(keys_are_bit_patterns_and_none_is_reserved) {
  Tabled t({.dim = 1, .rule = {RuleKind::kAssign, 0}, .init = {}, .seed = 0});
  const std::vector<uint64_t> keys = {0, ~uint64_t{0}, uint64_t{1} << 63, unmix(0), unmix(~uint64_t{0}), unmix(255)};
  t.apply(keys, {}, std::vector<float>{1, 2, 3, 4, 5, 6});  // the key 0 has the hash 0: the last of the two counts
  CHECK_EQ(t.rows(), 5u);
  CHECK(same_bits(t.read(keys), std::vector<float>{4, 2, 3, 4, 5, 6}));
  CHECK_EQ(t.scan(2).size(), 5u);
  CHECK_EQ(t.erase({~uint64_t{0}}), 1u);
  CHECK_EQ(t.erase({~uint64_t{0}}), 0u);
}

TEST(short_dtypes_travel_and_the_rows_stay_float32) {
  test::Random random(test::seed());
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    for (const uint32_t dim : {1, 3, 16, 17}) {
      const TableSpec spec = spec_of(RuleKind::kAdagrad, dim);
      const Hyper hyper = test::hyper_of(RuleKind::kAdagrad, 0);
      Tabled narrow(spec), plain(spec);
      const std::vector<uint64_t> keys = random_keys(random, 700, 400);  // with repeats
      std::vector<uint16_t> g(keys.size() * dim), out(g.size());
      std::vector<float> wide = random_floats(random, g.size()), want(g.size());
      kernels().from_f32(dtype, wide.data(), g.data(), g.size());
      kernels().to_f32(dtype, g.data(), wide.data(), g.size());
      narrow.apply(keys, hyper, Arrays{g.data(), out.data(), dtype, dtype, false});
      plain.apply(keys, hyper, wide);
      CHECK(same_bits(narrow.read(keys), plain.read(keys)));
      CHECK_EQ(narrow.fingerprint(), plain.fingerprint());
      std::vector<uint16_t> rounded(g.size());
      kernels().from_f32(dtype, plain.read(keys).data(), rounded.data(), g.size());
      CHECK(same_bits(out, rounded));
      narrow.read(keys, Arrays{nullptr, out.data(), Dtype::kFloat32, dtype, false});
      CHECK(same_bits(out, rounded));
    }
  }
}

TEST(gradients_and_rows_may_share_one_array) {
  test::Random random(test::seed());
  Tabled shared(spec_of(RuleKind::kAdam, 17)), apart(spec_of(RuleKind::kAdam, 17));
  const std::vector<uint64_t> keys = random_keys(random, 2000, 500);
  std::vector<float> both = random_floats(random, keys.size() * 17);
  apart.apply(keys, test::hyper_of(RuleKind::kAdam, 1), both);
  Arrays arrays;
  arrays.in = arrays.out = both.data();
  shared.apply(keys, test::hyper_of(RuleKind::kAdam, 1), arrays);
  CHECK(same_bits(both, apart.read(keys)));
}

}  // namespace windlass::table_test
