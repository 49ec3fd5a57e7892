#include "client/settled_clock.h"

#include <unistd.h>

#include <set>
#include <thread>

#include "base/test.h"

namespace windlass::settled_clock_test {
namespace {

constexpr int64_t kFarNs = int64_t{60'000'000'000};

}  // namespace

TEST(what_has_no_answer_holds_the_settled_clock_and_nothing_else_does) {
  std::atomic<uint64_t> clock{0};
  SettledClock settled;
  CHECK_EQ(settled.lowest(clock, clock), 0u);
  const uint64_t first = settled.begin(clock), again = settled.begin(clock);
  clock = 5;
  const uint64_t later = settled.begin(clock);
  clock = 7;
  CHECK_EQ(settled.lowest(clock, clock), 0u);
  settled.end(first);
  CHECK_EQ(settled.lowest(clock, clock), 0u);
  settled.end(again);
  CHECK_EQ(settled.lowest(clock, clock), 5u);
  settled.end(later);
  CHECK_EQ(settled.lowest(clock, clock), 7u);
  CHECK_EQ(settled.lowest(8, clock), 8u);  // there is nothing at all
}

TEST(the_settled_clock_follows_however_far_the_clock_is_and_never_passes_what_has_no_answer) {
  test::Random random(test::seed());
  std::atomic<uint64_t> clock{0};
  SettledClock settled;
  std::multiset<uint64_t> open;
  for (int i = 0; i < 50'000; ++i) {
    switch (random.below(4)) {
      case 0: open.insert(settled.begin(clock)); break;
      case 1: clock += random.below(50) == 0 ? random.below(5000) : 1; break;
      default:
        if (!open.empty()) {
          settled.end(*open.begin());
          open.erase(open.begin());
        }
    }
    const uint64_t seen = settled.lowest(clock, clock);
    CHECK(seen <= (open.empty() ? clock.load() : *open.begin()));
    if (open.empty()) CHECK_EQ(seen, clock.load());
  }
}

TEST(who_waits_for_the_settled_clock_is_woken_by_the_last_answer) {
  std::atomic<uint64_t> clock{3};
  SettledClock settled;
  const uint64_t one = settled.begin(clock), other = settled.begin(clock);
  CHECK(settled.await(3, clock, os::now_ns() + kFarNs));
  CHECK(!settled.await(4, clock, os::now_ns() + 1'000'000));
  std::thread answers([&] {
    usleep(20'000);
    settled.end(one);
    usleep(20'000);
    settled.end(other);
  });
  CHECK(settled.await(4, clock, os::now_ns() + kFarNs));
  answers.join();
}

// A thread that pushes while another closes: what it begins after the clock has moved belongs to the new iteration.
TEST(a_request_that_begins_while_the_clock_moves_is_seen_or_belongs_to_the_new_iteration) {
  std::atomic<uint64_t> clock{0};
  SettledClock settled;
  std::atomic<bool> over{false};
  std::atomic<uint64_t> pushing{~uint64_t{0}};  // the iteration of the push that has no answer
  std::atomic<uint64_t> pushes{0};
  std::thread pusher([&] {
    while (!over) {
      const uint64_t began = settled.begin(clock);
      pushing = clock.load();
      ++pushes;
      pushing = ~uint64_t{0};
      settled.end(began);
    }
  });
  for (int i = 0; i < 20'000 || pushes < 1000; ++i) {
    ++clock;
    // Seen before and after, it has no answer in between.
    const uint64_t before = pushing, count = pushes;
    const uint64_t seen = settled.lowest(clock, clock);
    if (const uint64_t after = pushing; before != ~uint64_t{0} && before == after && count == pushes)
      CHECK(seen <= before);
  }
  over = true;
  pusher.join();
}

}  // namespace windlass::settled_clock_test
