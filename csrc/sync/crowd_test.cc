#include "sync/crowd.h"

#include <string>
#include <thread>

#include "base/limits.h"
#include "base/test.h"

namespace windlass {
namespace {

using Members = std::vector<Crowd::Member>;

std::string text(const View& view) {
  std::string out = view.known ? "" : "unknown";
  for (const View::Worker& w : view.workers)
    out += (out.empty() ? "" : " ") + std::to_string(w.rank) + "@" + std::to_string(w.clock);
  return out;
}
std::string text(const Crowd& crowd, uint32_t object = 1) { return text(crowd.view(object)); }

const Members kTwo = {{0, 100, true}, {1, 101, true}};

}  // namespace

TEST(views_have_numbers_and_an_older_one_changes_nothing) {
  Crowd crowd("app");
  CHECK(crowd.app() == "app" && text(crowd) == "unknown" && crowd.alone() && crowd.world_size() == 0);
  CHECK(crowd.set_view(3, kTwo, {}));
  CHECK(text(crowd) == "0@0 1@0" && !crowd.alone());
  CHECK(!crowd.set_view(3, {}, {}) && !crowd.set_view(2, {}, {}));
  CHECK(text(crowd) == "0@0 1@0");
  CHECK(crowd.set_view(4, {{1, 101, true}}, {}));
  CHECK(text(crowd) == "1@0" && crowd.alone() && crowd.world_size() == 2);
  CHECK(!crowd.waits_for(0) && crowd.waits_for(1) && !crowd.waits_for(7));
  CHECK(crowd.set_view(5, {}, {}));
  CHECK(text(crowd).empty() && crowd.view(1).known);
}

TEST(who_starts_is_waited_for_at_once_and_who_comes_late_when_it_has_entered) {
  Crowd crowd("app");
  CHECK(crowd.set_view(1, {{0, 100, true}, {1, 101, true}, {2, 102, false}}, {}));
  CHECK(crowd.starts(0) && crowd.starts(1) && !crowd.starts(2) && !crowd.starts(3));
  CHECK(text(crowd) == "0@0 1@0" && !crowd.waits_for(2));
  CHECK(crowd.enter(2, 102, 5));
  CHECK(text(crowd) == "0@0 1@0 2@5" && crowd.waits_for(2));
  CHECK(crowd.enter(3, 103, 6));  // before this server has heard of it
  CHECK(text(crowd) == "0@0 1@0 2@5");
  CHECK(crowd.set_view(2, {{0, 100, true}, {2, 102, false}, {3, 103, false}}, {}));
  CHECK(text(crowd) == "0@0 2@5 3@6");
  // Another process under the same rank has to enter anew.
  CHECK(crowd.set_view(3, {{0, 100, true}, {2, 202, false}, {3, 103, false}}, {}));
  CHECK(text(crowd) == "0@0 3@6");
  CHECK(crowd.enter(2, 202, 7));
  CHECK(text(crowd) == "0@0 2@7 3@6");
}

TEST(a_place_that_is_kept_is_waited_for_from_the_loss_to_the_replacement) {
  Crowd crowd("app");
  CHECK(crowd.set_view(1, kTwo, {}));
  CHECK(crowd.tick(1, 4, {}));
  CHECK(crowd.set_view(2, {{0, 100, true}}, {1}));
  CHECK(text(crowd) == "0@0 1@4" && crowd.waits_for(1) && !crowd.starts(1) && !crowd.alone());
  CHECK_EQ(crowd.world_size(), 2u);
  CHECK(crowd.set_view(3, {{0, 100, true}, {1, 201, false}}, {1}));  // it is there, and has not begun
  CHECK(crowd.waits_for(1) && !crowd.starts(1));
  CHECK(crowd.enter(1, 201, 4));
  CHECK(text(crowd) == "0@0 1@4");
  CHECK(crowd.set_view(4, {{0, 100, true}}, {}));  // nobody keeps it any more
  CHECK(text(crowd) == "0@0");
}

TEST(given_up_is_who_was_in_a_view_and_is_not_any_more) {
  Crowd crowd("app");
  CHECK(crowd.set_view(1, {{0, 300, true}, {1, 200, true}, {2, 100, true}}, {}));
  CHECK(!crowd.given_up(100) && !crowd.given_up(200) && !crowd.given_up(300) && !crowd.given_up(0));
  CHECK(crowd.set_view(2, {{0, 300, true}, {1, 201, false}}, {}));
  CHECK(crowd.given_up(100) && crowd.given_up(200) && !crowd.given_up(201) && !crowd.given_up(300));
  CHECK(crowd.set_view(3, {{1, 201, false}}, {0}));  // its place is kept, for another
  CHECK(crowd.given_up(100) && crowd.given_up(200) && crowd.given_up(300) && !crowd.given_up(201));
}

TEST(of_those_given_up_only_the_latest_are_known) {
  Crowd crowd("app");
  const uint64_t last = 1000 + limits::kGivenUpMax;
  CHECK(crowd.set_view(1, {{0, 1000, true}}, {}));
  const auto replace = [&](uint64_t n) { return crowd.set_view(n - 998, {{0, n ^ 1, false}}, {}); };  // in no order
  for (uint64_t n = 1002; n <= last + 2; ++n) CHECK(replace(n));
  // All but the one that is there now were given up: one more than are known.
  CHECK(!crowd.given_up((last + 2) ^ 1) && crowd.given_up((last + 1) ^ 1));
  CHECK(!crowd.given_up(1000) && crowd.given_up(1002) && crowd.given_up(1003));
  CHECK(crowd.set_view(last + 10, {}, {}));
  CHECK(!crowd.given_up(1002 ^ 1) && crowd.given_up(1003 ^ 1) && crowd.given_up((last + 2) ^ 1));
  // One that comes and goes takes one place.
  for (uint64_t n = 0; n < 10; ++n) {
    CHECK(crowd.set_view(last + 11 + 2 * n, {{0, 7, true}}, {}));
    CHECK(crowd.set_view(last + 12 + 2 * n, {}, {}));
  }
  CHECK(crowd.given_up(7) && crowd.given_up(1004 ^ 1) && !crowd.given_up(1003 ^ 1));
}

TEST(a_tick_closes_every_object_but_those_it_names) {
  Crowd crowd("app");
  CHECK(crowd.set_view(1, kTwo, {}));
  CHECK(crowd.tick(0, 3, {2, 5, 9}));
  CHECK(text(crowd, 1) == "0@3 1@0" && text(crowd, 5) == "0@0 1@0" && text(crowd, 9) == "0@0 1@0");
  CHECK(!crowd.tick(0, 3, {2, 5, 9}) && !crowd.tick(0, 2, {}));  // repeats
  CHECK(text(crowd, 5) == "0@0 1@0");
  CHECK(crowd.tick(0, 4, {2}));
  CHECK(text(crowd, 5) == "0@4 1@0" && text(crowd, 2) == "0@0 1@0");
}

TEST(a_tick_that_overtakes_the_first_view_counts) {
  Crowd crowd("app");
  CHECK(crowd.tick(1, 2, {4}));
  CHECK(text(crowd) == "unknown" && !crowd.waits_for(1));
  CHECK(crowd.set_view(1, kTwo, {}));
  CHECK(text(crowd, 1) == "0@0 1@2" && text(crowd, 4) == "0@0 1@0" && crowd.slowest(0) == 2);
}

// Who is in the place of a lost worker does its iteration again, and may have other objects open.
TEST(the_ticks_of_a_lost_worker_say_nothing_of_what_its_replacement_has_open) {
  Crowd crowd("app");
  CHECK(crowd.set_view(1, kTwo, {}));
  CHECK(crowd.tick(1, 7, {4, 5}));
  CHECK(crowd.set_view(2, {{0, 100, true}, {1, 201, false}}, {1}));
  CHECK(crowd.enter(1, 201, 5));
  CHECK(text(crowd, 4) == "0@0 1@5");
  CHECK(crowd.tick(1, 6, {5}));
  CHECK(text(crowd, 4) == "0@0 1@6" && text(crowd, 5) == "0@0 1@5");
  crowd.enter(1, 201, 5);  // said twice
  CHECK(text(crowd, 4) == "0@0 1@6");
  // One that begins at clock 0 does not enter; the same clock with fewer objects open closes the others.
  Crowd fresh("app");
  CHECK(fresh.set_view(1, kTwo, {}));
  CHECK(fresh.tick(1, 1, {4, 5}) && fresh.tick(1, 1, {5, 6}));
  CHECK(text(fresh, 4) == "0@0 1@1" && text(fresh, 5) == "0@0 1@0" && text(fresh, 6) == "0@0 1@1");
}

TEST(without_a_scheduler_everybody_who_was_counted_is_waited_for_until_it_leaves) {
  Crowd crowd("app");
  CHECK(crowd.assume(3));
  CHECK(text(crowd) == "0@0 1@0 2@0" && crowd.world_size() == 3 && !crowd.alone());
  CHECK(crowd.starts(0) && crowd.starts(2) && !crowd.starts(3));
  CHECK(!crowd.assume(3) && !crowd.assume(2));  // a smaller world does not replace a larger one
  CHECK(crowd.rank_of(1, 3) == 1 && crowd.rank_of(1, 2) == Gate::kOutsider);
  for (const uint32_t rank : {0, 1, 2}) crowd.came(rank, 100 + rank);
  crowd.came(0, 100);  // said twice
  CHECK(crowd.starts(0));
  crowd.came(0, 150);  // another under its rank, in its place
  CHECK(!crowd.starts(0) && crowd.waits_for(0) && crowd.starts(1));
  CHECK(crowd.left(0, 150) && !crowd.left(0, 150) && !crowd.left(9, 109));
  CHECK(text(crowd) == "1@0 2@0" && !crowd.waits_for(0));
  CHECK(crowd.enter(0, 200, 6));  // it comes back
  CHECK(text(crowd) == "0@6 1@0 2@0");
  CHECK(crowd.left(0, 200) && crowd.left(1, 101));
  CHECK(crowd.alone() && text(crowd) == "2@0");
  CHECK(!crowd.assume(3));
  CHECK(crowd.left(2, 102) && text(crowd).empty());
  CHECK(crowd.assume(2, 8));  // it is over, and others begin
  CHECK(text(crowd) == "0@8 1@8" && crowd.rank_of(1, 2) == 1);
  CHECK(crowd.assume(4));
  CHECK(text(crowd) == "0@0 1@0 2@0 3@0");
}

TEST(who_comes_waits_until_a_view_has_it) {
  Crowd crowd("app");
  CHECK(!crowd.await_view(0, 100, 1'000'000));
  std::thread scheduler([&] {
    crowd.set_view(1, {{1, 101, true}}, {0});  // its place is kept, but that is not it
    crowd.set_view(2, kTwo, {});
  });
  CHECK(crowd.await_view(0, 100, 60'000'000'000));
  scheduler.join();
  CHECK(crowd.await_view(1, 101, 0) && !crowd.await_view(1, 100, 1'000'000));
  Crowd assumed("app");
  CHECK(assumed.assume(1) && assumed.await_view(0, 100, 0));
}

TEST(a_view_ends_what_was_assumed) {
  Crowd crowd("app");
  CHECK(crowd.assume(3));
  CHECK(crowd.set_view(1, kTwo, {}));
  CHECK(text(crowd) == "0@0 1@0" && !crowd.assume(5) && !crowd.left(0, 999));
  CHECK(crowd.rank_of(1, 9) == 1);
  crowd.came(0, 500);
  crowd.came(0, 501);
  CHECK(crowd.starts(0));
  CHECK(crowd.left(0, 100) && text(crowd) == "1@0");  // who says so is waited for no more, before a view does
}

TEST(without_a_scheduler_the_late_goodbye_of_a_first_session_leaves_its_successor) {
  Crowd crowd("app");
  CHECK(crowd.assume(2));
  crowd.came(0, 100);
  crowd.came(1, 101);
  crowd.came(0, 200);
  CHECK(crowd.enter(0, 200, 3));
  CHECK(!crowd.left(0, 100) && crowd.waits_for(0));
  CHECK(crowd.left(0, 200) && !crowd.waits_for(0));
  // One that comes back is there from then on, whatever was said of it before.
  crowd.came(0, 300);
  CHECK(crowd.enter(0, 300, 4) && !crowd.left(0, 200) && crowd.waits_for(0));
  CHECK(crowd.left(0, 300) && crowd.left(1, 101));
  // Others begin. Who is expected has not come yet, and nobody says goodbye for it.
  CHECK(crowd.assume(2, 5));
  crowd.came(0, 400);
  CHECK(!crowd.left(1, 101) && !crowd.left(0, 300) && text(crowd) == "0@5 1@5");
}

TEST(objects_without_gates_know_the_slowest_of_the_others_by_its_ticks) {
  Crowd crowd("app");
  CHECK_EQ(crowd.slowest(0), Gate::kNone);
  CHECK(crowd.set_view(1, {{0, 100, true}, {1, 101, true}, {2, 102, true}}, {}));
  CHECK(crowd.tick(0, 5, {1}) && crowd.tick(1, 3, {}));
  CHECK(crowd.slowest(0) == 0 && crowd.slowest(2) == 3);
  CHECK(crowd.tick(2, 4, {}));
  CHECK(crowd.slowest(0) == 3 && crowd.slowest(1) == 4 && crowd.slowest(Gate::kOutsider) == 3);
  CHECK(crowd.set_view(2, {{0, 100, true}, {2, 102, true}}, {}));
  CHECK(crowd.slowest(0) == 4 && crowd.slowest(2) == 5);
  CHECK(crowd.set_view(3, {{0, 100, true}}, {}));
  CHECK_EQ(crowd.slowest(0), Gate::kNone);
}

TEST(pulls_and_waits_are_counted) {
  Crowd crowd("app");
  crowd.count_pull(5, 5);
  crowd.count_pull(5, 9);  // others are ahead
  crowd.count_pull(5, 3);
  crowd.count_pull(500, 3);
  crowd.count_wait(2, 1'500'000'000);
  crowd.count_wait(2, 500'000'000);
  crowd.count_wait(Gate::kOutsider, 1'000'000'000);
  crowd.count_late();
  const SyncStats s = crowd.stats();
  CHECK(s.pulls == 4 && s.staleness[0] == 2 && s.staleness[2] == 1 && s.staleness[SyncStats::kBuckets - 1] == 1);
  CHECK(s.waits == 3 && s.waited_seconds == 3 && s.late == 1);
  CHECK(s.waited_for.size() == 1 && s.waited_for.at(2) == 2);
}

}  // namespace windlass
