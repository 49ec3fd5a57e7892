#include "client/net/owners.h"

#include <thread>
#include <vector>

#include "base/test.h"

namespace windlass::owners_test {

TEST(owners_learn_higher_terms_and_no_lower_ones) {
  Map map;
  map.object = 7;
  map.runs = {{0, 2, 1}, {5, 0, 4}};
  Owners owners(map, 10);
  CHECK_EQ(owners.object(), 7u);
  CHECK_EQ(owners.of(4).server, 2u);
  CHECK_EQ(owners.of(5).term, 4u);
  CHECK(!owners.has_moved(4));
  owners.learn(4, {1, 3});
  owners.learn(4, {0, 2});
  owners.learn(4, {0, 3});
  CHECK_EQ(owners.of(4).server, 1u);
  CHECK_EQ(owners.of(4).term, 3u);
  CHECK(owners.has_moved(4));
  owners.learn(map);  // the object is opened again
  CHECK_EQ(owners.of(4).term, 3u);
}

TEST(of_many_that_teach_at_once_the_highest_term_counts) {
  Map map;
  map.runs = {{0, 0, 1}};
  Owners owners(map, 4);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&owners, t] {
      for (uint32_t i = 0; i < 1000; ++i) owners.learn(i % 4, {t, 2 + i * 4 + t});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t shard = 0; shard < 4; ++shard) {
    CHECK_EQ(owners.of(shard).term, 2 + (996 + shard) * 4 + 3);
    CHECK_EQ(owners.of(shard).server, 3u);
  }
}

}  // namespace windlass::owners_test
