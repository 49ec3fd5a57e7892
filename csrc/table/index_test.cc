#include "table/index.h"

#include <algorithm>
#include <map>

#include "base/test.h"

namespace windlass::index_test {
namespace {

using Oracle = std::map<uint64_t, uint32_t>;

// Where the hashes of a test lie. Real ones are spread evenly; apps_workers make long runs of full buckets, and at the
// top of the range they run over the end of the array.
enum class Spread { kEven, kLow, kHigh, kCrowds };
constexpr Spread kSpreads[] = {Spread::kEven, Spread::kLow, Spread::kHigh, Spread::kCrowds};

uint64_t hash_in(Spread spread, test::Random& random) {
  switch (spread) {
    case Spread::kEven: return place_of(random.next());
    case Spread::kLow: return random.below(1 << 20) << 8;
    case Spread::kHigh: return ~uint64_t{0} - 255 - (random.below(1 << 20) << 8);
    case Spread::kCrowds:
      return random.below(5) * (uint64_t{0xFFFFFFFFFFFFFFFF} / 5) / 256 * 256 + random.below(3000) * 256;
  }
  return 0;
}

// A hash as a request brings it: the shard's byte in front.
Keyed keyed_of(uint64_t place, uint32_t at) { return {place >> 8 | uint64_t{0xAB} << 56, at}; }

void check_scan(const Index& index, const Oracle& oracle, size_t most) {
  std::vector<Index::Entry> all;
  uint64_t from = 0;
  for (bool more = true; more;) {
    const size_t before = all.size();
    more = index.scan(from, most, &all);
    CHECK(all.size() - before <= most);
    if (more) CHECK(all.size() > before);
    if (all.size() > before) from = all.back().hash + 1;
  }
  CHECK_EQ(all.size(), oracle.size());
  auto it = oracle.begin();
  bool same = true;
  for (size_t i = 0; i < all.size() && it != oracle.end(); ++i, ++it) {
    same = same && all[i].hash == it->first && all[i].row == it->second;
  }
  CHECK(same);
}

void check_find(const Index& index, const Oracle& oracle, Spread spread, test::Random& random) {
  std::vector<Keyed> keyed;
  std::vector<uint32_t> want;
  const auto ask = [&](uint64_t place) {
    const auto it = oracle.find(place);
    keyed.push_back(keyed_of(place, static_cast<uint32_t>(keyed.size())));
    want.push_back(it == oracle.end() ? Index::kAbsent : it->second);
  };
  for (const auto& [place, row] : oracle) {
    if (oracle.size() < 2000 || random.below(oracle.size()) < 2000) ask(place);
  }
  for (int i = 0; i < 300; ++i) ask(hash_in(spread, random));
  std::vector<uint32_t> rows(keyed.size(), 12345);
  index.find_all(keyed.data(), keyed.size(), rows.data());
  CHECK(rows == want);
  for (size_t i = 0; i < keyed.size(); ++i) CHECK_EQ(index.find(place_of(keyed[i].hash)), want[i]);
  CHECK_EQ(index.size(), oracle.size());
}

}  // namespace

TEST(an_empty_index_holds_nothing) {
  Index index;
  const Keyed one = keyed_of(0, 0);
  uint32_t row = 0;
  std::vector<Index::Entry> all;
  CHECK_EQ(index.find(0), Index::kAbsent);
  CHECK_EQ(index.remove(0), Index::kAbsent);
  index.find_all(&one, 1, &row);
  CHECK_EQ(row, Index::kAbsent);
  CHECK(!index.scan(0, 10, &all));
  CHECK(all.empty());
}

TEST(a_search_finds_every_key_while_the_index_grows) {
  Budget budget;
  Pool pool(&budget);
  Index index;
  test::Random random(test::seed());
  std::vector<uint64_t> places;
  const uint32_t keys = test::accurate() ? 1'000'000 : 60'000;
  for (uint32_t row = 0; row < keys; ++row) {
    places.push_back(place_of(mix(row + test::seed() * keys)));
    CHECK(index.insert(pool, places[row], row));
    for (int i = 0; i < 4; ++i) {
      const uint32_t other = static_cast<uint32_t>(random.below(row + 1));
      CHECK_EQ(index.find(places[other]), other);
    }
    CHECK_EQ(index.find(place_of(random.next())), Index::kAbsent);
  }
  for (uint32_t row = 0; row < keys; ++row) CHECK_EQ(index.find(places[row]), row);
  // A bucket of five takes one cache line; at least half of the places are in use.
  CHECK(budget.used() <= (uint64_t{2} << 20) + keys * 64 / 5 * 2);
  index.clear(pool);
}

TEST(as_many_hashes_as_were_expected_need_no_growth_whatever_their_order) {
  test::Random random(test::seed());
  for (const uint64_t n : {0, 1, 100, 50'000}) {
    for (const bool sorted : {false, true}) {
      Budget budget;
      Pool pool(&budget);
      Index index;
      std::vector<uint64_t> places;
      for (uint64_t i = 0; i < n; ++i) places.push_back(hash_in(Spread::kEven, random));
      if (sorted) std::sort(places.begin(), places.end());
      CHECK(index.expect(pool, n));
      const uint64_t bytes = index.bytes();
      for (uint64_t i = 0; i < n; ++i) CHECK(index.insert(pool, places[i], static_cast<uint32_t>(i)));
      CHECK_EQ(index.bytes(), bytes);
      CHECK(index.expect(pool, 1 << 20));
      CHECK(n == 0 || index.bytes() == bytes);  // too late
      for (uint64_t i = 0; i < n; ++i) CHECK_EQ(index.find(places[i]), static_cast<uint32_t>(i));
      for (uint64_t i = 0; i < n; ++i)
        CHECK(index.insert(pool, hash_in(Spread::kEven, random), 0));  // and as many more
      for (uint64_t i = 0; i < n; ++i) CHECK_EQ(index.find(places[i]), static_cast<uint32_t>(i));
      index.clear(pool);
    }
  }
}

TEST(an_index_agrees_with_a_map) {
  test::Random random(test::seed());
  for (const Spread spread : kSpreads) {
    const uint32_t steps = test::accurate() && spread == Spread::kEven ? 1'500'000 : test::accurate() ? 40'000 : 8'000;
    Budget budget;
    Pool pool(&budget);
    Index index;
    Oracle oracle;
    bool growing = true;
    for (uint32_t step = 0; step < steps; ++step) {
      // Seasons of growth and of decline, so that growths are met half way by removals.
      if (random.below(2000) == 0) growing = !growing;
      uint64_t place = hash_in(spread, random);
      if (random.below(10) < (growing ? 8 : 3)) {
        if (oracle.emplace(place, step).second) CHECK(index.insert(pool, place, step));
      } else {
        if (const auto it = oracle.lower_bound(place); it != oracle.end() && random.below(10) != 0) place = it->first;
        const auto it = oracle.find(place);
        CHECK_EQ(index.remove(place), it == oracle.end() ? Index::kAbsent : it->second);
        if (it != oracle.end()) oracle.erase(it);
      }
      if (random.below(steps / 40) == 0) check_find(index, oracle, spread, random);
      if (random.below(steps / 20) == 0) check_scan(index, oracle, 1 + random.below(300));
    }
    check_find(index, oracle, spread, random);
    check_scan(index, oracle, oracle.size() + 1);
    while (!oracle.empty()) {
      CHECK_EQ(index.remove(oracle.begin()->first), oracle.begin()->second);
      oracle.erase(oracle.begin());
    }
    check_find(index, oracle, spread, random);
    index.clear(pool);
  }
}

// An export: what is there from the first page to the last comes once and in order, whatever comes and goes meanwhile.
TEST(a_scan_goes_on_where_it_stopped_while_the_index_grows) {
  test::Random random(test::seed());
  for (const Spread spread : kSpreads) {
    for (const size_t base : {0, 1, 30, 1000, 20'000}) {
      if (spread != Spread::kEven && base > 1000 && !test::accurate()) continue;
      Budget budget;
      Pool pool(&budget);
      Index index;
      Oracle constant, passing;
      const auto add = [&](Oracle& to, size_t n) {
        for (size_t i = 0; i < n; ++i) {
          const uint64_t place = hash_in(spread, random);
          if (constant.count(place) != 0 || !passing.emplace(place, 7).second) continue;
          CHECK(index.insert(pool, place, 7));
          if (&to == &constant) constant.insert(passing.extract(place));
        }
      };
      add(constant, base);
      Oracle seen;
      uint64_t from = 0;
      for (bool more = true; more;) {
        std::vector<Index::Entry> page;
        more = index.scan(from, 1 + random.below(base / 20 + 2), &page);
        for (const Index::Entry& e : page) {
          CHECK(e.hash >= from);
          from = e.hash + 1;
          CHECK(constant.count(e.hash) + passing.count(e.hash) == 1);
          CHECK(seen.emplace(e.hash, e.row).second);
        }
        add(passing, random.below(base / 10 + 3));
        for (size_t i = 0; i < base / 40 && !passing.empty(); ++i) {
          auto it = passing.lower_bound(hash_in(spread, random));
          if (it == passing.end()) it = passing.begin();
          CHECK_EQ(index.remove(it->first), 7u);
          passing.erase(it);
        }
      }
      for (const auto& [place, row] : constant) CHECK(seen.count(place) == 1);
      index.clear(pool);
    }
  }
}

// A hog has all pages of the pool and gives back one at a time, so that memory runs out at every step of growth.
TEST(an_insertion_without_memory_loses_nothing_and_works_later) {
  test::Random random(test::seed());
  for (const Spread spread : kSpreads) {
    constexpr size_t kPageBytes = 4096;
    Budget budget(uint64_t{2} << 20);
    Pool pool(&budget);
    std::vector<std::byte*> hog;
    while (std::byte* page = pool.take(kPageBytes)) hog.push_back(page);
    Index index;
    Oracle oracle;
    uint32_t refused = 0, row = 0;
    for (const size_t pages : {0, 1, 1, 2, 3, 1, 1, 5, 1, 1, 20, 1, 1, 1}) {
      for (size_t i = 0; i < pages; ++i) {
        pool.give(hog.back(), kPageBytes);
        hog.pop_back();
      }
      for (int failures = 0; failures < 5;) {
        const uint64_t place = hash_in(spread, random);
        if (oracle.count(place) != 0) continue;
        if (index.insert(pool, place, row)) {
          oracle.emplace(place, row++);
        } else {
          CHECK_EQ(index.find(place), Index::kAbsent);
          ++failures;
          ++refused;
        }
        if (oracle.size() > 15'000) break;  // a workers fills less than it could
      }
      check_find(index, oracle, spread, random);
      check_scan(index, oracle, 100);
      // Removal needs no memory.
      for (size_t i = 0; i < oracle.size() / 50; ++i) {
        auto it = oracle.lower_bound(hash_in(spread, random));
        if (it == oracle.end()) continue;
        CHECK_EQ(index.remove(it->first), it->second);
        oracle.erase(it);
      }
    }
    CHECK(refused > 5);
    CHECK(!oracle.empty());
    index.clear(pool);
  }
}

// More entries past one bucket than its counter counts: it stays at its end, and searches still stop.
TEST(a_crowd_beyond_the_counter_is_found_and_removed) {
  const uint32_t workers = test::accurate() ? 70'000 : 7'000;
  Budget budget;
  Pool pool(&budget);
  Index index;
  for (uint32_t i = 0; i < workers; ++i) CHECK(index.insert(pool, uint64_t{i} << 8, i));
  for (uint32_t i = 0; i < workers; i += 97) CHECK_EQ(index.find(uint64_t{i} << 8), i);
  for (uint32_t i = 0; i < workers / 10; ++i) CHECK_EQ(index.remove(uint64_t{i} << 8), i);
  CHECK_EQ(index.size(), workers - workers / 10);
  CHECK_EQ(index.find(0), Index::kAbsent);
  CHECK_EQ(index.find(uint64_t{workers} << 8), Index::kAbsent);
  CHECK_EQ(index.find(uint64_t{workers - 1} << 8), workers - 1);
  CHECK(index.insert(pool, 0, 1));
  CHECK_EQ(index.find(0), 1u);
  index.clear(pool);
}

TEST(a_cleared_index_gives_its_pages_back_and_starts_anew) {
  Budget budget(uint64_t{2} << 20);
  Pool pool(&budget);
  for (int round = 0; round < 20; ++round) {
    Index index;
    for (uint32_t row = 0; row < 3000; ++row) CHECK(index.insert(pool, place_of(mix(row)), row));
    index.clear(pool);
    CHECK_EQ(index.size(), 0u);
    CHECK_EQ(index.find(place_of(mix(1))), Index::kAbsent);
    CHECK(index.insert(pool, place_of(mix(1)), 1));
    index.clear(pool);
  }
}

}  // namespace windlass::index_test
