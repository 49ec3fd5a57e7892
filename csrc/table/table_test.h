// What the tests of tables share: a table with its memory, and requests on all of its shards.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/test.h"
#include "table/table.h"

namespace windlass::test {

struct Tabled {
  Budget budget;
  TablePools pools{&budget};
  std::unique_ptr<Table> table;

  explicit Tabled(const TableSpec& spec, const std::string& name = "t", uint64_t bytes_max = ~uint64_t{0})
      : budget(bytes_max) {
    CHECK_OK(Table::create(name, spec, &pools, &table));
  }

  template <class F>
  void each(const std::vector<uint64_t>& keys, F f) {
    const Groups groups({keys.data(), KeyType::kUint64, keys.size()});
    for (uint32_t s = 0; s < limits::kTableShards; ++s) {
      if (groups.size(s) != 0) f(s, groups.begin(s), groups.size(s));
    }
  }
  void read(const std::vector<uint64_t>& keys, const Arrays& arrays, bool create = true) {
    each(keys, [&](uint32_t s, const Keyed* k, size_t n) { CHECK_OK(table->read(s, k, n, arrays, create)); });
  }
  std::vector<float> read(const std::vector<uint64_t>& keys, bool create = true) {
    std::vector<float> out(keys.size() * table->spec().dim, -77.0f);
    Arrays arrays;
    arrays.out = out.data();
    read(keys, arrays, create);
    return out;
  }
  void apply(const std::vector<uint64_t>& keys, const Hyper& hyper, const Arrays& arrays) {
    each(keys, [&](uint32_t s, const Keyed* k, size_t n) { CHECK_OK(table->apply(s, hyper, k, n, arrays)); });
  }
  void apply(const std::vector<uint64_t>& keys, const Hyper& hyper, const std::vector<float>& g) {
    Arrays arrays;
    arrays.in = g.data();
    apply(keys, hyper, arrays);
  }
  uint64_t erase(const std::vector<uint64_t>& keys) {
    uint64_t n = 0;
    each(keys, [&](uint32_t s, const Keyed* k, size_t m) { n += table->erase(s, k, m); });
    return n;
  }
  std::map<uint64_t, std::vector<float>> scan(size_t most) {
    std::map<uint64_t, std::vector<float>> all;
    for (uint32_t s = 0; s < limits::kTableShards; ++s) {
      uint64_t from = 0;
      for (bool more = true; more;) {
        std::vector<uint64_t> keys;
        std::vector<float> weights;
        more = table->scan(s, &from, most, &keys, &weights);
        CHECK_EQ(weights.size(), keys.size() * table->spec().dim);
        for (size_t i = 0; i < keys.size(); ++i) {
          const float* w = weights.data() + i * table->spec().dim;
          CHECK(all.emplace(keys[i], std::vector<float>(w, w + table->spec().dim)).second);
        }
      }
    }
    return all;
  }
  uint64_t rows() const {
    uint64_t n = 0;
    for (uint32_t s = 0; s < limits::kTableShards; ++s) n += table->rows(s);
    return n;
  }
  uint64_t fingerprint() const {
    uint64_t sum = 0;
    for (uint32_t s = 0; s < limits::kTableShards; ++s) sum += table->fingerprint(s);
    return sum;
  }
};

}  // namespace windlass::test
