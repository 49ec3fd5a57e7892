#include "session/parked.h"

#include "base/test.h"
#include "session/shard.h"

namespace windlass::parked_test {
namespace {

class Note final : public Waiting {
 public:
  Note(uint32_t session, uint64_t after, int number, int* alive = nullptr)
      : session(session), after(after), number(number), alive_(alive) {
    if (alive_ != nullptr) ++*alive_;
  }
  ~Note() override {
    if (alive_ != nullptr) --*alive_;
  }
  bool ready(Shard& shard) override { return shard.version >= after; }
  bool run(Shard& shard) override {
    shard.version += opens;
    if (then == 0) return true;
    after = std::exchange(then, 0);
    return false;
  }
  const uint32_t session;
  uint64_t after;
  const int number;
  uint64_t opens = 0;  // what its run makes ready
  uint64_t then = 0;   // what it waits for next

 private:
  int* const alive_;
};

bool park(Parked* parked, uint32_t session, uint64_t after, int number, int* alive = nullptr) {
  std::unique_ptr<Waiting> note = std::make_unique<Note>(session, after, number, alive);
  const bool taken = parked->park(&note);
  CHECK(taken == (note == nullptr));  // what found no room is still the caller's
  return taken;
}

const Note& note_of(const Waiting& waiting) { return static_cast<const Note&>(waiting); }

// The first of a session that has nothing to wait for any more.
std::unique_ptr<Waiting> take(Parked* parked, uint32_t session, uint64_t sequence) {
  return parked->take_if([&](const Waiting& w) {
    const auto& note = static_cast<const Note&>(w);
    return note.session == session && note.after <= sequence;
  });
}

int number_of(const std::unique_ptr<Waiting>& waiting) {
  return waiting == nullptr ? -1 : static_cast<const Note&>(*waiting).number;
}

}  // namespace

TEST(what_is_parked_comes_out_when_its_time_has_come) {
  Parked parked;
  CHECK(parked.empty());
  CHECK(take(&parked, 1, ~uint64_t{0}) == nullptr);
  CHECK(park(&parked, 1, 7, 70) && park(&parked, 1, 5, 50) && park(&parked, 1, 5, 51) && park(&parked, 1, 6, 60));
  CHECK_EQ(number_of(take(&parked, 1, 4)), -1);
  CHECK_EQ(number_of(take(&parked, 1, 6)), 50);
  CHECK_EQ(number_of(take(&parked, 1, 6)), 51);  // of two that wait for the same, the first to come
  CHECK_EQ(number_of(take(&parked, 1, 6)), 60);
  CHECK_EQ(number_of(take(&parked, 1, 6)), -1);
  CHECK_EQ(number_of(take(&parked, 1, 100)), 70);
  CHECK(parked.empty());
}

TEST(sessions_do_not_wait_for_each_other) {
  Parked parked;
  CHECK(park(&parked, 1, 3, 13) && park(&parked, 2, 1, 21));
  CHECK_EQ(number_of(take(&parked, 1, 2)), -1);
  CHECK_EQ(number_of(take(&parked, 3, 100)), -1);
  CHECK_EQ(number_of(take(&parked, 2, 1)), 21);
  CHECK_EQ(number_of(take(&parked, 1, 3)), 13);
}

TEST(parking_has_room_for_so_many_and_refuses_the_next_without_a_change) {
  int alive = 0;
  {
    Parked parked;
    for (size_t i = 0; i < limits::kParkedMax; ++i) {
      CHECK(park(&parked, static_cast<uint32_t>(i % 3), 10, static_cast<int>(i), &alive));
    }
    CHECK(!park(&parked, 1, 0, -5, &alive));
    CHECK_EQ(static_cast<size_t>(alive), limits::kParkedMax);
    CHECK(take(&parked, 0, 10) != nullptr);
    CHECK(park(&parked, 1, 10, 5, &alive));
    CHECK_EQ(static_cast<size_t>(alive), limits::kParkedMax);
  }
  CHECK_EQ(alive, 0);
}

TEST(what_is_dropped_is_gone_and_the_rest_keeps_its_order) {
  int alive = 0;
  Parked parked;
  for (int i = 0; i < 100; ++i) CHECK(park(&parked, 1, 5, i, &alive));
  parked.drop_if([](const Waiting& w) { return static_cast<const Note&>(w).number % 3 != 0; });
  CHECK_EQ(alive, 34);
  int visited = 0;
  parked.each([&](const Waiting& w) { CHECK_EQ(static_cast<const Note&>(w).number, 3 * visited++); });
  CHECK_EQ(visited, 34);
  for (int i = 0; i < 34; ++i) CHECK_EQ(number_of(take(&parked, 1, 5)), 3 * i);
  CHECK(parked.empty());
  CHECK_EQ(alive, 0);
}

// Against a list that is searched in the plainest way.
TEST(parking_agrees_with_a_plain_list_whatever_happens) {
  struct Entry {
    uint32_t session;
    uint64_t after;
    int number;
  };
  for (uint64_t round = 0; round < 100; ++round) {
    test::Random random(test::seed() * 1000 + round);
    Parked parked;
    std::vector<Entry> plain;
    for (int step = 0; step < 300; ++step) {
      const auto session = static_cast<uint32_t>(random.below(3));
      const uint64_t number = random.below(20);
      if (random.below(5) < 3) {
        CHECK(park(&parked, session, number, step));
        plain.push_back({session, number, step});
      } else if (random.below(10) != 0) {
        size_t best = plain.size();
        for (size_t i = 0; i < plain.size(); ++i) {
          if (plain[i].session != session || plain[i].after > number) continue;
          if (best == plain.size()) best = i;
        }
        CHECK_EQ(number_of(take(&parked, session, number)), best == plain.size() ? -1 : plain[best].number);
        if (best != plain.size()) plain.erase(plain.begin() + static_cast<ptrdiff_t>(best));
      } else {
        parked.drop_if([&](const Waiting& w) { return note_of(w).session == session; });
        std::erase_if(plain, [&](const Entry& e) { return e.session == session; });
      }
      CHECK(parked.empty() == plain.empty());
    }
  }
}

TEST(what_is_parked_can_be_taken_out_whoever_it_is_of) {
  Parked parked;
  CHECK(parked.take_if([](const Waiting&) { return true; }) == nullptr);
  CHECK(park(&parked, 1, 7, 70) && park(&parked, 2, 5, 50) && park(&parked, 3, 9, 90));
  CHECK_EQ(number_of(parked.take_if([](const Waiting& w) { return note_of(w).after > 5; })), 70);
  CHECK_EQ(number_of(parked.take_if([](const Waiting& w) { return note_of(w).session == 3; })), 90);
  CHECK(parked.take_if([](const Waiting& w) { return note_of(w).session == 3; }) == nullptr);
  CHECK_EQ(number_of(parked.take_if([](const Waiting&) { return true; })), 50);
  CHECK(parked.empty());
}

TEST(whoever_is_ready_runs_and_so_does_whom_that_makes_ready) {
  Shard shard;
  CHECK(park(&shard.parked, 1, 2, 20) && park(&shard.parked, 1, 1, 10) && park(&shard.parked, 1, 3, 30));
  std::vector<std::unique_ptr<Waiting>> freed;
  shard.parked.free(shard, &freed);
  CHECK(freed.empty());
  shard.parked.each([](const Waiting& w) { const_cast<Note&>(note_of(w)).opens = note_of(w).number == 10 ? 1 : 0; });
  shard.version = 1;
  shard.parked.free(shard, &freed);
  CHECK_EQ(freed.size(), 2u);
  CHECK_EQ(number_of(freed[0]), 10);
  CHECK_EQ(number_of(freed[1]), 20);
  // One that waits for something else then stays.
  shard.parked.each([](const Waiting& w) { const_cast<Note&>(note_of(w)).then = 4; });
  shard.version = 3;
  freed.clear();
  shard.parked.free(shard, &freed);
  CHECK(freed.empty());
  shard.version = 4;
  shard.parked.free(shard, &freed);
  CHECK_EQ(freed.size(), 1u);
  CHECK(shard.parked.empty());
}

}  // namespace windlass::parked_test
