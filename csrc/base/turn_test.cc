#include "base/turn.h"

#include <memory>
#include <thread>
#include <vector>

#include "base/test.h"

namespace windlass::turn_test {
namespace {

struct Append final : Job {
  Append(std::vector<int>* list, int number) : list(list), number(number) {}
  void run() override { list->push_back(number); }
  std::vector<int>* list;
  int number;
};

// What only the holder of a turn may touch: plain numbers, so that ThreadSanitizer sees two holders at once.
struct Guarded {
  explicit Guarded(size_t threads) : last(threads) {}
  Turn turn;
  uint64_t jobs = 0;
  bool inside = false;
  std::vector<uint64_t> last;  // of each thread: the number of its job that ran last
  uint64_t wrong = 0;
};

struct Numbered final : Job {
  void run() override {
    if (guarded->inside) ++guarded->wrong;
    guarded->inside = true;
    if (number != guarded->last[thread] + 1) ++guarded->wrong;  // out of order, missed or repeated
    guarded->last[thread] = number;
    ++guarded->jobs;
    guarded->inside = false;
    if (mine) delete this;
  }
  Guarded* guarded = nullptr;
  size_t thread = 0;
  uint64_t number = 0;
  bool mine = true;
};

}  // namespace

TEST(a_free_turn_runs_a_job_at_once) {
  Turn turn;
  std::vector<int> ran;
  Append one(&ran, 1), two(&ran, 2);
  turn.run(one);
  CHECK((ran == std::vector<int>{1}));
  turn.run(two);
  CHECK((ran == std::vector<int>{1, 2}));
}

TEST(the_holder_runs_what_was_left_with_it_before_it_lets_go) {
  Turn turn;
  std::vector<int> ran;
  Append one(&ran, 1), two(&ran, 2), three(&ran, 3), four(&ran, 4);
  CHECK(turn.try_take());
  CHECK(!turn.try_take());
  turn.run(one);
  turn.post(two);
  turn.drain();
  turn.run(three);
  CHECK(ran.empty());
  turn.release();
  CHECK((ran == std::vector<int>{1, 2, 3}));
  turn.run(four);
  CHECK((ran == std::vector<int>{1, 2, 3, 4}));
}

TEST(posted_jobs_wait_for_a_drain_and_go_first) {
  Turn turn;
  std::vector<int> ran;
  Append one(&ran, 1), two(&ran, 2), three(&ran, 3), four(&ran, 4);
  turn.drain();
  turn.post(one);
  turn.post(two);
  CHECK(ran.empty());
  CHECK(!turn.try_take());  // it would overtake them
  turn.drain();
  CHECK((ran == std::vector<int>{1, 2}));
  turn.post(three);
  turn.run(four);
  CHECK((ran == std::vector<int>{1, 2, 3, 4}));
  CHECK(turn.try_take());
  turn.release();
}

TEST(a_job_may_bring_another_to_its_own_turn) {
  struct Nested final : Job {
    void run() override {
      turn->run(*next);
      list->push_back(0);
    }
    Turn* turn = nullptr;
    Job* next = nullptr;
    std::vector<int>* list = nullptr;
  };
  Turn turn;
  std::vector<int> ran;
  Append one(&ran, 1);
  Nested nested;
  nested.turn = &turn;
  nested.next = &one;
  nested.list = &ran;
  turn.run(nested);
  CHECK((ran == std::vector<int>{0, 1}));
}

// Every thread brings numbered jobs to a few turns in every way there is. Jobs delete themselves, so that a touch
// after the run is a use after free.
TEST(one_thread_at_a_time_runs_each_job_once_and_in_its_order) {
  constexpr size_t kThreads = 8, kTurns = 3;
  const uint64_t jobs = test::accurate() ? 400'000 : 20'000;
  std::vector<std::unique_ptr<Guarded>> guarded;
  for (size_t i = 0; i < kTurns; ++i) guarded.push_back(std::make_unique<Guarded>(kThreads));
  uint64_t sent[kThreads][kTurns] = {};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      test::Random random(test::seed() * 1000 + t);
      for (uint64_t i = 0; i < jobs; ++i) {
        const size_t which = random.below(kTurns);
        Guarded& g = *guarded[which];
        auto* job = new Numbered;
        job->guarded = &g;
        job->thread = t;
        job->number = ++sent[t][which];
        switch (random.below(4)) {
          case 0: g.turn.post(*job); break;
          case 1:
            g.turn.post(*job);
            g.turn.drain();
            break;
          case 2:
            if (g.turn.try_take()) {
              job->run();
              g.turn.release();
              break;
            }
            [[fallthrough]];
          default: g.turn.run(*job);
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  uint64_t total = 0;
  for (size_t i = 0; i < kTurns; ++i) {
    guarded[i]->turn.drain();
    CHECK_EQ(guarded[i]->wrong, 0u);
    for (size_t t = 0; t < kThreads; ++t) CHECK_EQ(guarded[i]->last[t], sent[t][i]);
    total += guarded[i]->jobs;
  }
  CHECK_EQ(total, jobs * kThreads);
}

}  // namespace windlass::turn_test
