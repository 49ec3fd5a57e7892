// Rows as queries see them.
#include <algorithm>
#include <map>

#include "query/query_test.h"
#include "table/table_test.h"

namespace windlass::walk_test {
namespace {

constexpr uint32_t kDim = 3;

Program predicate(const std::string& bytes) {
  Program program;
  CHECK_OK(Program::parse(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(),
                          {Dtype::kFloat32, kDim, true, true}, Program::Type::kBool, "where", &program));
  return program;
}

// A table in which key k has a row of numbers of its own, after rows have come and gone.
struct Fixture {
  Fixture() : tabled(spec()) {
    test::Random random(test::seed());
    std::vector<uint64_t> keys;
    std::vector<float> g;
    for (int i = 0; i < 20'000; ++i) {
      keys.push_back(random.below(4) == 0 ? random.below(1 << 16) : random.next());
      rows[keys.back()] = {random.unit(), random.unit(), random.unit()};
    }
    std::vector<uint64_t> first;
    for (const auto& [key, row] : rows) {
      first.push_back(key);
      g.insert(g.end(), row.begin(), row.end());
    }
    tabled.apply(first, {}, g);
    std::vector<uint64_t> gone;
    for (size_t i = 0; i < first.size(); i += 3) gone.push_back(first[i]);
    CHECK_EQ(tabled.erase(gone), gone.size());
    for (const uint64_t key : gone) rows.erase(key);
    // Some places are used again.
    keys.clear(), g.clear();
    for (int i = 0; i < 3000; ++i) {
      const uint64_t key = random.next();
      rows[key] = {random.unit(), 1, 1};
      keys.push_back(key);
      g.insert(g.end(), rows[key].begin(), rows[key].end());
    }
    tabled.apply(keys, {}, g);
  }
  static TableSpec spec() {
    TableSpec s;
    s.dim = kDim;
    s.rule.kind = RuleKind::kAssign;
    return s;
  }
  std::map<uint64_t, std::vector<float>> rows;
  test::Tabled tabled;
};

}  // namespace

TEST(a_walk_sees_every_row_once_with_its_key) {
  const Fixture f;
  std::map<uint64_t, std::vector<float>> seen;
  size_t n = 0;
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    f.tabled.table->walk(s, [&](const Block& block) {
      CHECK(block.n >= 1 && block.n <= Block::kRowsMax);
      for (size_t i = 0; i < block.n; ++i) {
        const auto* const row = static_cast<const float*>(block.rows[i]);
        seen[block.keys[i]].assign(row, row + kDim);
        CHECK_EQ(block.heads[i]->count, 1u);
        ++n;
      }
    });
  }
  CHECK(seen == f.rows);
  CHECK_EQ(n, f.rows.size());
}

TEST(a_scan_with_a_predicate_gives_those_rows_once_in_any_chunks) {
  const Fixture f;
  const Program where = predicate(test::above(0, 0.7));
  std::map<uint64_t, std::vector<float>> want;
  for (const auto& [key, row] : f.rows) {
    if (static_cast<double>(row[0]) > 0.7) want[key] = row;
  }
  for (const size_t most : {1, 7, 1000}) {
    std::map<uint64_t, std::vector<float>> seen;
    size_t n = 0;
    for (uint32_t s = 0; s < limits::kTableShards; ++s) {
      uint64_t from = 0;
      for (bool more = true; more;) {
        std::vector<uint64_t> keys;
        std::vector<float> weights;
        more = f.tabled.table->scan(s, &from, most, where, &keys, &weights);
        CHECK(keys.size() <= most && weights.size() == keys.size() * kDim);
        for (size_t i = 0; i < keys.size(); ++i)
          seen[keys[i]].assign(weights.begin() + static_cast<long>(i * kDim),
                               weights.begin() + static_cast<long>((i + 1) * kDim));
        n += keys.size();
      }
    }
    CHECK(seen == want);
    CHECK_EQ(n, want.size());
  }
}

TEST(a_scan_looks_at_so_many_rows_in_one_turn_and_no_more) {
  test::Tabled tabled(Fixture::spec());
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; keys.size() < limits::kScanRowsMax + 10; ++key) {
    if (shard_of_hash(mix(key)) == 7) keys.push_back(key);
  }
  (void)tabled.read(keys);
  const Program none = predicate(test::above(0, 1e9));
  uint64_t from = 0;
  std::vector<uint64_t> found;
  CHECK(tabled.table->scan(7, &from, 100, none, &found, nullptr));
  CHECK(!tabled.table->scan(7, &from, 100, none, &found, nullptr));
  CHECK(found.empty());
}

TEST(only_rows_that_satisfy_the_predicate_are_erased) {
  Fixture f;
  const Program where = predicate(test::above(0, 0.5));
  std::vector<uint64_t> keys = {1, 2, 3};  // probably not there
  size_t want = 0;
  for (const auto& [key, row] : f.rows) {
    keys.push_back(key);
    if (key % 5 == 0) keys.push_back(key);  // twice
    want += static_cast<double>(row[0]) > 0.5;
  }
  uint64_t erased = 0;
  f.tabled.each(keys, [&](uint32_t s, const Keyed* k, size_t n) { erased += f.tabled.table->erase(s, k, n, &where); });
  CHECK_EQ(erased, want);
  std::erase_if(f.rows, [](const auto& row) { return static_cast<double>(row.second[0]) > 0.5; });
  CHECK(f.tabled.scan(100) == f.rows);
}

}  // namespace windlass::walk_test
