#include "sync/gate.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>

#include "base/test.h"

namespace windlass::gate_test {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

Gate gate_of(const Sync& sync, std::vector<View::Worker> workers, int64_t now_ns = 0) {
  Gate gate(sync);
  gate.set_view({.known = true, .workers = std::move(workers)}, now_ns);
  return gate;
}
Gate gate_of(const Sync& sync, uint32_t workers) {
  std::vector<View::Worker> all;
  for (uint32_t rank = 0; rank < workers; ++rank) all.push_back({rank, 0});
  return gate_of(sync, std::move(all));
}

const Sync kAsp{}, kBsp{.kind = Sync::kBsp};
Sync ssp(uint32_t staleness) { return {.kind = Sync::kSsp, .number = staleness}; }
Sync spare(uint32_t number) { return {.kind = Sync::kBsp, .number = number}; }
Sync delay(double seconds) { return {.kind = Sync::kMaxDelay, .seconds = seconds}; }

// What a gate should know, recomputed from everything each time.
struct Plain {
  struct Worker {
    bool waited = false;
    uint64_t clock = 0;
    int64_t opened_ns = 0;
  };
  std::map<uint32_t, Worker> workers;

  void set_view(const View& view, int64_t now_ns) {
    std::map<uint32_t, Worker> before = workers;
    for (auto& [rank, w] : workers) w.waited = false;
    for (const View::Worker& v : view.workers) {
      Worker& w = workers[v.rank];
      w.waited = true;
      if (v.clock > w.clock || !before[v.rank].waited) w.opened_ns = now_ns;
      w.clock = std::max(w.clock, v.clock);
    }
  }
  bool close(uint32_t rank, uint64_t clock, int64_t now_ns) {
    Worker& w = workers[rank];
    if (clock <= w.clock) return false;
    w.clock = clock;
    w.opened_ns = now_ns;
    return true;
  }
  uint64_t lowest(uint32_t but) const {
    uint64_t least = Gate::kNone;
    for (const auto& [rank, w] : workers) {
      if (w.waited && rank != but) least = std::min(least, w.clock);
    }
    return least;
  }
  uint64_t highest() const {
    uint64_t most = 0;
    for (const auto& [rank, w] : workers) most = std::max(most, w.clock);
    return most;
  }
  bool waits_for(uint32_t rank) const { return workers.count(rank) != 0 && workers.at(rank).waited; }
  uint64_t complete(uint64_t made, size_t spare) const {
    std::vector<uint64_t> clocks;
    for (const auto& [rank, w] : workers) {
      if (w.waited) clocks.push_back(w.clock);
    }
    if (clocks.empty()) return std::max(made, highest());
    std::sort(clocks.begin(), clocks.end());
    return std::max(made, clocks[std::min(spare, clocks.size() - 1)]);
  }
  bool opens(const Sync& sync, uint32_t rank, uint64_t clock, int64_t now_ns) const {
    if (!waits_for(rank)) return true;
    for (const auto& [other, w] : workers) {
      if (!w.waited || other == rank) continue;
      if (sync.kind == Sync::kSsp && w.clock + sync.number < clock) return false;
      const bool long_open = static_cast<double>(now_ns - w.opened_ns) > sync.seconds * 1e9;
      if (sync.kind == Sync::kMaxDelay && w.clock < clock && long_open) return false;
    }
    return true;
  }
};

View random_view(test::Random* random, uint32_t world, uint64_t clocks) {
  View view{.known = true, .workers = {}};
  const uint64_t share = random->below(101);
  for (uint32_t rank = 0; rank < world; ++rank) {
    const uint64_t clock = random->below(4) == 0 ? random->below(clocks) : 0;
    if (random->below(100) < share) view.workers.push_back({rank, clock});
  }
  return view;
}

}  // namespace

TEST(a_gate_agrees_with_a_plain_recount_whatever_happened_before) {
  const int histories = test::accurate() ? 3000 : 300;
  uint64_t closed = 0, opened = 0, held = 0;
  for (int i = 0; i < histories; ++i) {
    test::Random random(test::seed() * 1'000'000 + static_cast<uint64_t>(i));
    const auto world = static_cast<uint32_t>(1 + random.below(20));
    const Sync syncs[] = {ssp(static_cast<uint32_t>(random.below(4))), delay(random.unit() * 20), kAsp};
    const Sync sync = syncs[random.below(3)];
    Gate gate(sync);
    Plain plain;
    int64_t now = 0;
    for (int step = 0; step < 300; ++step) {
      now += static_cast<int64_t>(random.below(2 * kSecond));
      const auto rank = static_cast<uint32_t>(random.below(world));
      if (step == 0 || random.below(12) == 0) {
        const View view = random_view(&random, world, plain.highest() + 2);
        gate.set_view(view, now);
        plain.set_view(view, now);
      } else {
        const uint64_t clock = gate.clock_of(rank) + random.below(3);
        const bool moved = plain.close(rank, clock, now);
        CHECK_EQ(gate.close(rank, clock, 1, now), moved);
        closed += moved;
      }
      CHECK_EQ(gate.lowest(), plain.lowest(Gate::kOutsider));
      CHECK_EQ(gate.highest(), plain.highest());
      for (uint32_t r = 0; r <= world; ++r) {
        CHECK_EQ(gate.waits_for(r), plain.waits_for(r));
        CHECK_EQ(gate.seen(r), plain.lowest(r));
        for (uint64_t clock = gate.clock_of(r); clock < gate.clock_of(r) + 3; ++clock) {
          const bool opens = gate.opens(r, clock, now);
          CHECK_EQ(opens, plain.opens(sync, r, clock, now));
          const View::Worker blocker = gate.blocker(r, clock, now);
          opens ? ++opened : ++held;
          if (opens) continue;
          CHECK(blocker.rank != r && gate.waits_for(blocker.rank) && gate.clock_of(blocker.rank) == blocker.clock);
          CHECK(blocker.clock < clock);
        }
      }
    }
  }
  const auto least = static_cast<uint64_t>(histories);
  CHECK(closed > 50 * least && opened > 100 * least && held > 100 * least);
}

TEST(ssp_opens_when_the_slowest_of_the_others_is_near_enough) {
  for (const uint32_t s : {0u, 1u, 3u}) {
    Gate gate = gate_of(ssp(s), 3);
    CHECK(gate.close(0, 10, 0, 0) && gate.close(1, 20, 0, 0));
    CHECK(!gate.opens(0, 1 + s, 0));  // rank 2 has closed nothing
    CHECK(gate.opens(0, s, 0));
    CHECK_EQ(gate.blocker(0, 1 + s, 0).rank, 2u);
    CHECK(gate.close(2, 7, 0, 0));
    CHECK(gate.opens(0, 7 + s, 0) && !gate.opens(0, 8 + s, 0));
    CHECK(gate.opens(2, 10 + s, 0) && !gate.opens(2, 11 + s, 0));  // its own clock does not count
  }
  Gate far = gate_of(ssp(~0u), 2);
  CHECK(far.opens(0, ~0u, 0) && !far.opens(0, uint64_t{1} << 32, 0));
}

TEST(whoever_is_not_waited_for_does_not_wait_and_nobody_waits_before_the_first_view_is_known) {
  for (const Sync& sync : {kBsp, spare(1), ssp(0), ssp(2), delay(0)}) {
    Gate gate(sync);
    CHECK(!gate.opens(0, 0, 0) && !gate.opens(0, 5, 0));
    CHECK(waits_for(gate.blocker(0, 5, 0)) == "for the first view of its app");
    CHECK(gate.opens(Gate::kOutsider, 5, 0));
    CHECK(!gate.close(Gate::kOutsider, 5, 1, 0));
    CHECK(gate.close(0, 2, 1, 0));  // it counts all the same
    CHECK_EQ(gate.complete(), 0u);
    gate.set_view({.known = true, .workers = {{0, 0}, {1, 0}}}, 0);
    CHECK_EQ(gate.clock_of(0), 2u);
    CHECK(!gate.opens(0, 5, kSecond) && gate.opens(2, 5, kSecond));
    gate.set_view({.known = true, .workers = {{1, 0}}}, 0);
    CHECK(gate.opens(0, 5, kSecond));
    CHECK_EQ(gate.opens(1, 5, kSecond), !sync.rounds());  // there is nobody else
    CHECK(waits_for({.rank = 1, .clock = 3}) == "for rank 1, whose clock is 3");
  }
  CHECK(Gate(kAsp).opens(0, 5, 0));
}

TEST(a_view_puts_a_worker_ahead_but_never_back) {
  Gate gate = gate_of(ssp(0), {{0, 5}, {3, 2}, {7, 9}});
  CHECK_EQ(gate.lowest(), 2u);
  CHECK_EQ(gate.seen(3), 5u);
  gate.set_view({.known = true, .workers = {{0, 1}, {3, 4}, {9, 1}}}, 0);
  CHECK(gate.clock_of(0) == 5 && gate.clock_of(3) == 4 && gate.clock_of(7) == 9 && gate.clock_of(9) == 1);
  CHECK(gate.waits_for(9) && !gate.waits_for(7) && !gate.waits_for(1));
  CHECK_EQ(gate.lowest(), 1u);
  gate.set_view({.known = true, .workers = {{3, 0}}}, 0);
  CHECK(gate.lowest() == 4 && gate.seen(3) == Gate::kNone && gate.seen(0) == 4);
  gate.set_view({.known = true, .workers = {}}, 0);
  CHECK_EQ(gate.lowest(), Gate::kNone);
}

TEST(a_bsp_update_is_complete_when_everybody_has_closed_it) {
  Gate gate = gate_of(kBsp, 3);
  CHECK(gate.close(0, 1, 2, 0) && gate.close(1, 1, 3, 0));
  CHECK_EQ(gate.complete(), 0u);
  CHECK(gate.close(1, 2, 5, 0));
  CHECK(gate.close(2, 1, 0, 0));  // it pushed nothing
  CHECK_EQ(gate.complete(), 1u);
  CHECK(gate.weight(0) == 5 && gate.weight(1) == 5 && gate.weight(2) == 0);
  CHECK(!gate.opens(0, 1, 0));  // complete is not made
  CHECK_EQ(gate.seen(0), 0u);
  gate.advance(1);
  CHECK(gate.opens(0, 1, 0) && !gate.opens(1, 2, 0));
  CHECK_EQ(gate.blocker(1, 2, 0).rank, 0u);
  gate.forget(1);
  CHECK(gate.weight(0) == 0 && gate.weight(1) == 5);
  CHECK(!gate.close(1, 2, 7, 0) && !gate.close(1, 1, 7, 0));  // repeats change nothing
  CHECK_EQ(gate.weight(1), 5.0);
  CHECK(gate.has_closed(1, 1) && !gate.has_closed(0, 1) && gate.has_closed(0, 0) && !gate.has_closed(8, 0));
  gate.set_view({.known = true, .workers = {{1, 0}}}, 0);
  CHECK_EQ(gate.complete(), 2u);  // nobody else is waited for any more
  gate.set_view({.known = true, .workers = {}}, 0);
  CHECK(gate.close(0, 4, 1, 0));
  CHECK_EQ(gate.complete(), 4u);
}

TEST(what_a_view_puts_a_worker_past_was_not_closed) {
  Gate gate = gate_of(kBsp, 2);
  CHECK(gate.close(1, 2, 1, 0));
  gate.set_view({.known = true, .workers = {{0, 0}, {1, 4}}}, 0);
  gate.set_view({.known = true, .workers = {{0, 0}, {1, 6}}}, 0);
  CHECK(gate.close(1, 7, 1, 0));
  gate.set_view({.known = true, .workers = {{0, 0}, {1, 9}}}, 0);
  for (const uint64_t iteration : {0u, 1u, 6u}) CHECK(gate.has_closed(1, iteration));
  for (const uint64_t iteration : {2u, 3u, 4u, 5u, 7u, 8u, 9u}) CHECK(!gate.has_closed(1, iteration));
  gate.advance(6);
  gate.forget(6);
  CHECK_EQ(gate.workers()[1].skipped.size(), 1u);
  CHECK(gate.has_closed(1, 6) && !gate.has_closed(1, 7));
}

TEST(what_comes_after_its_update_has_no_weight) {
  Gate gate = gate_of(spare(1), 2);
  CHECK(gate.close(0, 1, 2, 0));
  gate.advance(gate.complete());
  CHECK_EQ(gate.made(), 1u);
  CHECK(gate.close(1, 1, 9, 0));
  CHECK_EQ(gate.weight(0), 2.0);
}

TEST(an_update_goes_without_the_slowest_that_are_spare_but_never_without_all) {
  for (const uint32_t b : {0u, 1u, 2u, 3u, 4u, 100u}) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
      test::Random random(test::seed() * 1000 + seed);
      Gate gate(spare(b));
      Plain plain;
      const auto world = static_cast<uint32_t>(1 + random.below(6));
      for (int step = 0; step < 60; ++step) {
        if (step == 0 || random.below(10) == 0) {
          const View view = random_view(&random, world, 5);
          gate.set_view(view, 0);
          plain.set_view(view, 0);
        } else {
          const auto rank = static_cast<uint32_t>(random.below(world));
          const uint64_t clock = gate.clock_of(rank) + 1;
          gate.close(rank, clock, 1, 0);
          plain.close(rank, clock, 0);
        }
        CHECK_EQ(gate.complete(), plain.complete(gate.made(), b));
        if (random.below(2) == 0) gate.advance(gate.complete());
        for (uint32_t r = 0; r < world; ++r) {
          CHECK_EQ(gate.opens(r, gate.clock_of(r), 0), !plain.waits_for(r) || gate.made() >= gate.clock_of(r));
        }
      }
    }
  }
}

TEST(max_delay_waits_only_for_lower_clocks_that_are_open_for_too_long) {
  Gate gate = gate_of(delay(1.5), {{0, 0}, {1, 0}}, 10 * kSecond);
  CHECK(gate.close(0, 1, 0, 11 * kSecond));
  CHECK(gate.opens(0, 1, 11 * kSecond) && gate.opens(0, 1, 11 * kSecond + kSecond / 2));
  CHECK(!gate.opens(0, 1, 11 * kSecond + kSecond / 2 + 1));
  CHECK(gate.opens(1, 0, 100 * kSecond));
  CHECK_EQ(gate.blocker(0, 1, 100 * kSecond).rank, 1u);
  CHECK(gate.close(1, 1, 0, 50 * kSecond));
  CHECK(gate.opens(0, 1, 100 * kSecond));
  CHECK(gate.close(0, 2, 0, 50 * kSecond));
  CHECK(gate.opens(0, 2, 51 * kSecond) && !gate.opens(0, 2, 52 * kSecond));
  // Who comes back into a view begins then.
  gate.set_view({.known = true, .workers = {{0, 0}}}, 60 * kSecond);
  gate.set_view({.known = true, .workers = {{0, 0}, {1, 0}}}, 70 * kSecond);
  CHECK(gate.opens(0, 2, 71 * kSecond) && !gate.opens(0, 2, 72 * kSecond));
}

// A worker that never opened the object closes it by its ticks alone.
TEST(an_iteration_that_a_view_closes_is_followed_by_one_that_begins_then) {
  Gate gate = gate_of(delay(1), 2);
  CHECK(gate.close(0, 3, 0, 9 * kSecond));
  gate.set_view({.known = true, .workers = {{0, 0}, {1, 2}}}, 10 * kSecond);
  CHECK(gate.opens(0, 3, 10 * kSecond + 1) && !gate.opens(0, 3, 12 * kSecond));
  gate.set_view({.known = true, .workers = {{0, 0}, {1, 2}}}, 13 * kSecond);  // nothing new
  CHECK(!gate.opens(0, 3, 13 * kSecond));
}

TEST(an_iteration_that_began_before_a_gate_moved_is_not_younger_for_it) {
  Gate gate(delay(2.0));
  gate.restore(0,
               {{.rank = 0, .clock = 5, .opened_ns = 1 * kSecond}, {.rank = 1, .clock = 3, .opened_ns = 1 * kSecond}});
  gate.set_view({.known = true, .workers = {{0, 5}, {1, 3}, {2, 3}}}, 2 * kSecond);
  CHECK(!gate.opens(0, 5, 4 * kSecond));  // rank 1 has had its iteration open for three seconds
  gate.close(1, 5, 0, 4 * kSecond);
  CHECK(gate.opens(0, 5, 4 * kSecond));
  CHECK(!gate.opens(0, 5, 4 * kSecond + 1));  // rank 2 came with the view
}

TEST(under_max_delay_the_worker_with_the_lowest_clock_always_passes) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    test::Random random(test::seed() * 1000 + seed);
    const auto world = static_cast<uint32_t>(1 + random.below(8));
    Gate gate = gate_of(delay(random.unit()), world);
    int64_t now = 0;
    for (int step = 0; step < 200; ++step) {
      now += static_cast<int64_t>(random.below(3 * kSecond));
      bool passes = false;
      for (uint32_t rank = 0; rank < world; ++rank) {
        const bool opens = gate.opens(rank, gate.clock_of(rank), now);
        CHECK(opens || gate.clock_of(rank) > gate.lowest());
        passes = passes || opens;
      }
      CHECK(passes);
      const auto rank = static_cast<uint32_t>(random.below(world));
      if (gate.opens(rank, gate.clock_of(rank), now)) gate.close(rank, gate.clock_of(rank) + 1, 0, now);
    }
  }
}

TEST(policies_say_what_they_are_and_what_they_cannot_be) {
  CHECK(describe(kAsp) == "ASP()");
  CHECK(describe(kBsp) == "BSP()");
  CHECK(describe(spare(2)) == "BSP(spare=2)");
  CHECK(describe(ssp(3)) == "SSP(3)");
  CHECK(describe(delay(0.5)) == "MaxDelay(0.5)");
  for (const Sync& sync : {kAsp, kBsp, spare(2), ssp(0), ssp(3), delay(0), delay(1e9)}) CHECK_OK(check_sync("w", sync));
  const Sync wrong[] = {{.kind = Sync::kAsp, .number = 1},
                        {.kind = Sync::kMaxDelay, .number = 1},
                        {.kind = Sync::kSsp, .seconds = 1},
                        delay(-1),
                        delay(2e9),
                        delay(std::numeric_limits<double>::quiet_NaN()),
                        {.kind = static_cast<Sync::Kind>(Sync::kKinds)}};
  for (const Sync& sync : wrong) CHECK(check_sync("w", sync).code() == Code::kInvalidArgument);
}

}  // namespace windlass::gate_test
