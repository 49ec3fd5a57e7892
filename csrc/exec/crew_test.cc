#include "exec/crew.h"

#include <thread>

#include "exec/shard_work_test.h"

namespace windlass::crew_test {

using test::check_each_ran_once;
using test::Counting;
using test::kSecond;
using test::Turns;

TEST(every_part_runs_once_however_the_work_begins) {
  Crew crew(2);
  for (const size_t parts : {0, 1, 2, 7, 100}) {
    for (int i = 0; i < 50; ++i) {
      const Turns turns(parts);
      const Ref<Counting> alone(new Counting(turns)), helped(new Counting(turns)), kept(new Counting(turns)),
          later(new Counting(turns));
      alone->begin(nullptr);
      check_each_ran_once(*alone);
      helped->begin(&crew);
      CHECK(helped->wait_until(os::now_ns() + 10 * kSecond));
      check_each_ran_once(*helped);
      kept->begin_kept(&crew);
      CHECK(kept->wait_until(os::now_ns() + 10 * kSecond));
      check_each_ran_once(*kept);
      later->begin_later(&crew, i % 2 == 0);
      CHECK(later->wait_until(os::now_ns() + 10 * kSecond));
      check_each_ran_once(*later);
    }
  }
}

TEST(later_work_runs_in_the_order_it_was_begun) {
  Crew crew(2);
  for (int round = 0; round < 200; ++round) {
    const Turns turns(5);
    std::vector<std::vector<int>> order(turns.size());  // of each shard: its turn protects it
    std::vector<Ref<Counting>> works;
    for (int i = 0; i < 8; ++i) {
      works.push_back(Ref<Counting>(new Counting(turns)));
      works.back()->on_run = [&order, i](uint32_t part) {
        order[part].push_back(i);
        return Status();
      };
      i % 4 == 3 ? works.back()->begin(nullptr) : works.back()->begin_later(&crew, round % 2 == 0);
    }
    for (const Ref<Counting>& w : works) CHECK(w->wait_until(os::now_ns() + 10 * kSecond));
    for (const std::vector<int>& o : order) CHECK(o == (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  }
}

TEST(kept_work_is_not_overtaken_by_what_follows) {
  Crew crew(3);
  const Turns turns(16);
  std::atomic<bool> stop{false};
  std::thread rival([&] {  // keeps the shards busy, each for a moment
    test::Random random(test::seed());
    while (!stop) {
      Turn& t = turns[random.below(turns.size())];
      if (!t.try_take()) continue;
      for (const int64_t until = os::now_ns() + 2000; os::now_ns() < until;) {
      }
      t.release();
    }
  });
  int wrong = 0;
  const int64_t end = os::now_ns() + (test::accurate() ? 20 : 1) * kSecond;
  while (os::now_ns() < end) {
    std::vector<int> last(turns.size());
    std::vector<int> overtaken(turns.size());
    std::vector<Ref<Counting>> works;
    for (int i = 1; i <= 6; ++i) {
      works.push_back(Ref<Counting>(new Counting(turns)));
      works.back()->on_run = [&, i](uint32_t part) {
        if (last[part] != i - 1) overtaken[part] = 1;
        last[part] = i;
        return Status();
      };
      works.back()->begin_kept(&crew);
    }
    for (const Ref<Counting>& w : works) CHECK(w->wait_until(os::now_ns() + 10 * kSecond));
    for (const int o : overtaken) wrong += o;
  }
  stop = true;
  rival.join();
  CHECK_EQ(wrong, 0);
}

TEST(work_of_many_threads_on_the_same_shards_adds_up) {
  constexpr int kThreads = 6;
  const int rounds = test::accurate() ? 20'000 : 600;
  Crew crew(2);
  const Turns turns(8);
  std::vector<uint64_t> sums(turns.size());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<Ref<Counting>> works;
      for (int i = 0; i < rounds; ++i) {
        works.push_back(Ref<Counting>(new Counting(turns)));
        works.back()->on_run = [&](uint32_t part) { return ++sums[part], Status(); };
        switch ((i + t) % 4) {
          case 0: works.back()->begin(nullptr); break;
          case 1: works.back()->begin(&crew); break;
          case 2: works.back()->begin_kept(&crew); break;
          default: works.back()->begin_later(&crew, i % 8 < 4);
        }
        if (i % 5 == 0) (void)works.back()->wait_until(os::now_ns() + 60 * kSecond);
      }
      for (const Ref<Counting>& w : works) (void)w->wait_until(os::now_ns() + 60 * kSecond);
    });
  }
  for (std::thread& t : threads) t.join();
  for (const uint64_t sum : sums) CHECK_EQ(sum, static_cast<uint64_t>(rounds * kThreads));
}

}  // namespace windlass::crew_test
