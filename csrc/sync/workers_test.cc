#include "sync/workers.h"

#include <string>
#include <thread>

#include "base/limits.h"
#include "base/test.h"

namespace windlass::workers_test {
namespace {

using Members = std::vector<Workers::Member>;

std::string text(const View& view) {
  std::string out = view.known ? "" : "unknown";
  for (const View::Worker& w : view.workers)
    out += (out.empty() ? "" : " ") + std::to_string(w.rank) + "@" + std::to_string(w.clock);
  return out;
}
std::string text(const Workers& workers, uint32_t object = 1) { return text(workers.view(object)); }

const Members kTwo = {{0, 100, true}, {1, 101, true}};

}  // namespace

TEST(views_have_numbers_and_an_older_one_changes_nothing) {
  Workers workers("app");
  CHECK(workers.app() == "app" && text(workers) == "unknown" && workers.alone() && workers.world_size() == 0);
  CHECK(workers.set_view(3, kTwo, {}));
  CHECK(text(workers) == "0@0 1@0" && !workers.alone());
  CHECK(!workers.set_view(3, {}, {}) && !workers.set_view(2, {}, {}));
  CHECK(text(workers) == "0@0 1@0");
  CHECK(workers.set_view(4, {{1, 101, true}}, {}));
  CHECK(text(workers) == "1@0" && workers.alone() && workers.world_size() == 2);
  CHECK(!workers.waits_for(0) && workers.waits_for(1) && !workers.waits_for(7));
  CHECK(workers.set_view(5, {}, {}));
  CHECK(text(workers).empty() && workers.view(1).known);
}

TEST(who_starts_is_waited_for_at_once_and_who_comes_late_when_it_has_entered) {
  Workers workers("app");
  CHECK(workers.set_view(1, {{0, 100, true}, {1, 101, true}, {2, 102, false}}, {}));
  CHECK(workers.starts(0) && workers.starts(1) && !workers.starts(2) && !workers.starts(3));
  CHECK(text(workers) == "0@0 1@0" && !workers.waits_for(2));
  CHECK(workers.enter(2, 102, 5));
  CHECK(text(workers) == "0@0 1@0 2@5" && workers.waits_for(2));
  CHECK(workers.enter(3, 103, 6));  // before this server has heard of it
  CHECK(text(workers) == "0@0 1@0 2@5");
  CHECK(workers.set_view(2, {{0, 100, true}, {2, 102, false}, {3, 103, false}}, {}));
  CHECK(text(workers) == "0@0 2@5 3@6");
  // Another process under the same rank has to enter anew.
  CHECK(workers.set_view(3, {{0, 100, true}, {2, 202, false}, {3, 103, false}}, {}));
  CHECK(text(workers) == "0@0 3@6");
  CHECK(workers.enter(2, 202, 7));
  CHECK(text(workers) == "0@0 2@7 3@6");
}

TEST(a_place_that_is_kept_is_waited_for_from_the_loss_to_the_replacement) {
  Workers workers("app");
  CHECK(workers.set_view(1, kTwo, {}));
  CHECK(workers.tick(1, 4, {}));
  CHECK(workers.set_view(2, {{0, 100, true}}, {1}));
  CHECK(text(workers) == "0@0 1@4" && workers.waits_for(1) && !workers.starts(1) && !workers.alone());
  CHECK_EQ(workers.world_size(), 2u);
  CHECK(workers.set_view(3, {{0, 100, true}, {1, 201, false}}, {1}));  // it is there, and has not begun
  CHECK(workers.waits_for(1) && !workers.starts(1));
  CHECK(workers.enter(1, 201, 4));
  CHECK(text(workers) == "0@0 1@4");
  CHECK(workers.set_view(4, {{0, 100, true}}, {}));  // nobody keeps it any more
  CHECK(text(workers) == "0@0");
}

TEST(given_up_is_who_was_in_a_view_and_is_not_any_more) {
  Workers workers("app");
  CHECK(workers.set_view(1, {{0, 300, true}, {1, 200, true}, {2, 100, true}}, {}));
  CHECK(!workers.given_up(100) && !workers.given_up(200) && !workers.given_up(300) && !workers.given_up(0));
  CHECK(workers.set_view(2, {{0, 300, true}, {1, 201, false}}, {}));
  CHECK(workers.given_up(100) && workers.given_up(200) && !workers.given_up(201) && !workers.given_up(300));
  CHECK(workers.set_view(3, {{1, 201, false}}, {0}));  // its place is kept, for another
  CHECK(workers.given_up(100) && workers.given_up(200) && workers.given_up(300) && !workers.given_up(201));
}

TEST(of_those_given_up_only_the_latest_are_known) {
  Workers workers("app");
  const uint64_t last = 1000 + limits::kGivenUpMax;
  CHECK(workers.set_view(1, {{0, 1000, true}}, {}));
  const auto replace = [&](uint64_t n) { return workers.set_view(n - 998, {{0, n ^ 1, false}}, {}); };  // in no order
  for (uint64_t n = 1002; n <= last + 2; ++n) CHECK(replace(n));
  // All but the one that is there now were given up: one more than are known.
  CHECK(!workers.given_up((last + 2) ^ 1) && workers.given_up((last + 1) ^ 1));
  CHECK(!workers.given_up(1000) && workers.given_up(1002) && workers.given_up(1003));
  CHECK(workers.set_view(last + 10, {}, {}));
  CHECK(!workers.given_up(1002 ^ 1) && workers.given_up(1003 ^ 1) && workers.given_up((last + 2) ^ 1));
  // One that comes and goes takes one place.
  for (uint64_t n = 0; n < 10; ++n) {
    CHECK(workers.set_view(last + 11 + 2 * n, {{0, 7, true}}, {}));
    CHECK(workers.set_view(last + 12 + 2 * n, {}, {}));
  }
  CHECK(workers.given_up(7) && workers.given_up(1004 ^ 1) && !workers.given_up(1003 ^ 1));
}

TEST(a_tick_closes_every_object_but_those_it_names) {
  Workers workers("app");
  CHECK(workers.set_view(1, kTwo, {}));
  CHECK(workers.tick(0, 3, {2, 5, 9}));
  CHECK(text(workers, 1) == "0@3 1@0" && text(workers, 5) == "0@0 1@0" && text(workers, 9) == "0@0 1@0");
  CHECK(!workers.tick(0, 3, {2, 5, 9}) && !workers.tick(0, 2, {}));  // repeats
  CHECK(text(workers, 5) == "0@0 1@0");
  CHECK(workers.tick(0, 4, {2}));
  CHECK(text(workers, 5) == "0@4 1@0" && text(workers, 2) == "0@0 1@0");
}

TEST(a_tick_that_overtakes_the_first_view_counts) {
  Workers workers("app");
  CHECK(workers.tick(1, 2, {4}));
  CHECK(text(workers) == "unknown" && !workers.waits_for(1));
  CHECK(workers.set_view(1, kTwo, {}));
  CHECK(text(workers, 1) == "0@0 1@2" && text(workers, 4) == "0@0 1@0" && workers.slowest(0) == 2);
}

// Who is in the place of a lost worker does its iteration again, and may have other objects open.
TEST(the_ticks_of_a_lost_worker_say_nothing_of_what_its_replacement_has_open) {
  Workers workers("app");
  CHECK(workers.set_view(1, kTwo, {}));
  CHECK(workers.tick(1, 7, {4, 5}));
  CHECK(workers.set_view(2, {{0, 100, true}, {1, 201, false}}, {1}));
  CHECK(workers.enter(1, 201, 5));
  CHECK(text(workers, 4) == "0@0 1@5");
  CHECK(workers.tick(1, 6, {5}));
  CHECK(text(workers, 4) == "0@0 1@6" && text(workers, 5) == "0@0 1@5");
  workers.enter(1, 201, 5);  // said twice
  CHECK(text(workers, 4) == "0@0 1@6");
  // One that begins at clock 0 does not enter; the same clock with fewer objects open closes the others.
  Workers fresh("app");
  CHECK(fresh.set_view(1, kTwo, {}));
  CHECK(fresh.tick(1, 1, {4, 5}) && fresh.tick(1, 1, {5, 6}));
  CHECK(text(fresh, 4) == "0@0 1@1" && text(fresh, 5) == "0@0 1@0" && text(fresh, 6) == "0@0 1@1");
}

TEST(without_a_scheduler_everybody_who_was_counted_is_waited_for_until_it_leaves) {
  Workers workers("app");
  CHECK(workers.assume(3));
  CHECK(text(workers) == "0@0 1@0 2@0" && workers.world_size() == 3 && !workers.alone());
  CHECK(workers.starts(0) && workers.starts(2) && !workers.starts(3));
  CHECK(!workers.assume(3) && !workers.assume(2));  // a smaller world does not replace a larger one
  CHECK(workers.rank_of(1, 3) == 1 && workers.rank_of(1, 2) == Gate::kOutsider);
  for (const uint32_t rank : {0, 1, 2}) workers.came(rank, 100 + rank);
  workers.came(0, 100);  // said twice
  CHECK(workers.starts(0));
  workers.came(0, 150);  // another under its rank, in its place
  CHECK(!workers.starts(0) && workers.waits_for(0) && workers.starts(1));
  CHECK(workers.left(0, 150) && !workers.left(0, 150) && !workers.left(9, 109));
  CHECK(text(workers) == "1@0 2@0" && !workers.waits_for(0));
  CHECK(workers.enter(0, 200, 6));  // it comes back
  CHECK(text(workers) == "0@6 1@0 2@0");
  CHECK(workers.left(0, 200) && workers.left(1, 101));
  CHECK(workers.alone() && text(workers) == "2@0");
  CHECK(!workers.assume(3));
  CHECK(workers.left(2, 102) && text(workers).empty());
  CHECK(workers.assume(2, 8));  // it is over, and others begin
  CHECK(text(workers) == "0@8 1@8" && workers.rank_of(1, 2) == 1);
  CHECK(workers.assume(4));
  CHECK(text(workers) == "0@0 1@0 2@0 3@0");
}

TEST(a_worker_is_known_by_rank_and_incarnation_while_a_view_has_it) {
  Workers workers("app");
  CHECK(!workers.knows(0, 100));
  CHECK(workers.set_view(1, {{1, 101, true}}, {0}));  // a place is kept for rank 0, but that is not it
  CHECK(!workers.knows(0, 100) && workers.knows(1, 101) && !workers.knows(1, 100));
  CHECK(workers.set_view(2, kTwo, {}) && workers.knows(0, 100));
  CHECK(workers.left(0, 100) && workers.knows(0, 100));  // what it has under way still counts
  CHECK(workers.set_view(3, {{1, 101, true}}, {}) && !workers.knows(0, 100));
  Workers assumed("app");
  CHECK(assumed.assume(1) && assumed.knows(0, 100));
}

TEST(a_view_ends_what_was_assumed) {
  Workers workers("app");
  CHECK(workers.assume(3));
  CHECK(workers.set_view(1, kTwo, {}));
  CHECK(text(workers) == "0@0 1@0" && !workers.assume(5) && !workers.left(0, 999));
  CHECK(workers.rank_of(1, 9) == 1);
  workers.came(0, 500);
  workers.came(0, 501);
  CHECK(workers.starts(0));
  CHECK(workers.left(0, 100) && text(workers) == "1@0");  // who says so is waited for no more, before a view does
}

TEST(without_a_scheduler_the_late_goodbye_of_a_first_session_leaves_its_successor) {
  Workers workers("app");
  CHECK(workers.assume(2));
  workers.came(0, 100);
  workers.came(1, 101);
  workers.came(0, 200);
  CHECK(workers.enter(0, 200, 3));
  CHECK(!workers.left(0, 100) && workers.waits_for(0));
  CHECK(workers.left(0, 200) && !workers.waits_for(0));
  // One that comes back is there from then on, whatever was said of it before.
  workers.came(0, 300);
  CHECK(workers.enter(0, 300, 4) && !workers.left(0, 200) && workers.waits_for(0));
  CHECK(workers.left(0, 300) && workers.left(1, 101));
  // Others begin. Who is expected has not come yet, and nobody says goodbye for it.
  CHECK(workers.assume(2, 5));
  workers.came(0, 400);
  CHECK(!workers.left(1, 101) && !workers.left(0, 300) && text(workers) == "0@5 1@5");
}

TEST(objects_without_gates_know_the_slowest_of_the_others_by_its_ticks) {
  Workers workers("app");
  CHECK_EQ(workers.slowest(0), Gate::kNone);
  CHECK(workers.set_view(1, {{0, 100, true}, {1, 101, true}, {2, 102, true}}, {}));
  CHECK(workers.tick(0, 5, {1}) && workers.tick(1, 3, {}));
  CHECK(workers.slowest(0) == 0 && workers.slowest(2) == 3);
  CHECK(workers.tick(2, 4, {}));
  CHECK(workers.slowest(0) == 3 && workers.slowest(1) == 4 && workers.slowest(Gate::kOutsider) == 3);
  CHECK(workers.set_view(2, {{0, 100, true}, {2, 102, true}}, {}));
  CHECK(workers.slowest(0) == 4 && workers.slowest(2) == 5);
  CHECK(workers.set_view(3, {{0, 100, true}}, {}));
  CHECK_EQ(workers.slowest(0), Gate::kNone);
}

TEST(pulls_and_waits_are_counted) {
  Workers workers("app");
  workers.count_pull(5, 5);
  workers.count_pull(5, 9);  // others are ahead
  workers.count_pull(5, 3);
  workers.count_pull(500, 3);
  workers.count_waits(2, 1, 1'500'000'000);
  workers.count_waits(2, 1, 500'000'000);
  workers.count_waits(Gate::kOutsider, 1, 1'000'000'000);
  workers.count_late();
  const SyncStats s = workers.stats();
  CHECK(s.reads == 4 && s.staleness[0] == 2 && s.staleness[2] == 1 && s.staleness[SyncStats::kBuckets - 1] == 1);
  CHECK(s.waits == 3 && s.waited_seconds == 3 && s.late == 1);
  CHECK(s.waited_for.size() == 1 && s.waited_for.at(2) == 2);
}

TEST(a_server_that_came_later_hears_who_entered_and_what_they_have_open) {
  Workers before("app"), after("app");
  for (Workers* const w : {&before, &after}) w->set_view(1, {{0, 100, true}, {1, 101, false}}, {});
  CHECK(before.enter(1, 101, 7));
  CHECK(before.tick(0, 9, {1}));
  CHECK(before.tick(1, 9, {}));
  CHECK(text(after) == "0@0");  // nobody has told it of rank 1
  CHECK(after.hear(before.heard()));
  CHECK(text(after) == text(before) && text(before) == "0@0 1@9");
  CHECK(text(after, 2) == "0@9 1@9");
  CHECK(!after.hear(before.heard()));
  // What it has heard since by itself counts more than what comes late, and less than what is newer.
  CHECK(after.tick(0, 12, {1, 2}));
  CHECK(!after.hear(before.heard()));
  CHECK(text(after, 2) == "0@0 1@9");
  CHECK(before.tick(0, 13, {}));
  CHECK(after.hear(before.heard()));
  CHECK(text(after, 2) == "0@13 1@9");
  // Nor does it believe anything of a worker that was replaced.
  after.set_view(2, {{0, 100, true}, {1, 201, false}}, {});
  CHECK(after.enter(1, 201, 20));
  CHECK(!after.hear(before.heard()));
  CHECK(text(after, 2) == "0@13 1@20");
}

}  // namespace windlass::workers_test
