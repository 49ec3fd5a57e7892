#include "session/parked.h"

#include "base/test.h"

namespace windlass {
namespace {

class Note final : public Waiting {
 public:
  Note(uint32_t session, uint64_t after, int number, int* alive = nullptr)
      : Waiting(session, after), number(number), alive_(alive) {
    if (alive_ != nullptr) ++*alive_;
  }
  ~Note() override {
    if (alive_ != nullptr) --*alive_;
  }
  const int number;

 private:
  int* const alive_;
};

bool park(Parked* parked, uint32_t session, uint64_t after, int number, int* alive = nullptr) {
  std::unique_ptr<Waiting> note = std::make_unique<Note>(session, after, number, alive);
  const bool taken = parked->park(&note);
  CHECK(taken == (note == nullptr));  // what found no room is still the caller's
  return taken;
}

int number_of(const std::unique_ptr<Waiting>& waiting) {
  return waiting == nullptr ? -1 : static_cast<const Note&>(*waiting).number;
}

}  // namespace

TEST(what_is_parked_comes_out_when_its_time_has_come_lowest_first) {
  Parked parked;
  CHECK(parked.empty());
  CHECK(parked.take(1, ~uint64_t{0}) == nullptr);
  CHECK(park(&parked, 1, 7, 70) && park(&parked, 1, 5, 50) && park(&parked, 1, 5, 51) && park(&parked, 1, 6, 60));
  CHECK_EQ(number_of(parked.take(1, 4)), -1);
  CHECK_EQ(number_of(parked.take(1, 6)), 50);
  CHECK_EQ(number_of(parked.take(1, 6)), 51);  // of two that wait for the same, the first to come
  CHECK_EQ(number_of(parked.take(1, 6)), 60);
  CHECK_EQ(number_of(parked.take(1, 6)), -1);
  CHECK_EQ(number_of(parked.take(1, 100)), 70);
  CHECK(parked.empty());
}

TEST(sessions_do_not_wait_for_each_other) {
  Parked parked;
  CHECK(park(&parked, 1, 3, 13) && park(&parked, 2, 1, 21));
  CHECK_EQ(number_of(parked.take(1, 2)), -1);
  CHECK_EQ(number_of(parked.take(3, 100)), -1);
  CHECK_EQ(number_of(parked.take(2, 1)), 21);
  CHECK_EQ(number_of(parked.take(1, 3)), 13);
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
    CHECK(parked.take(0, 10) != nullptr);
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
  for (int i = 0; i < 34; ++i) CHECK_EQ(number_of(parked.take(1, 5)), 3 * i);
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
          if (best == plain.size() || plain[i].after < plain[best].after) best = i;
        }
        CHECK_EQ(number_of(parked.take(session, number)), best == plain.size() ? -1 : plain[best].number);
        if (best != plain.size()) plain.erase(plain.begin() + static_cast<ptrdiff_t>(best));
      } else {
        parked.drop_if([&](const Waiting& w) { return w.session() == session; });
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
  CHECK_EQ(number_of(parked.take_if([](const Waiting& w) { return w.after() > 5; })), 70);
  CHECK_EQ(number_of(parked.take_if([](const Waiting& w) { return w.session() == 3; })), 90);
  CHECK(parked.take_if([](const Waiting& w) { return w.session() == 3; }) == nullptr);
  CHECK_EQ(number_of(parked.take_if([](const Waiting&) { return true; })), 50);
  CHECK(parked.empty());
}

}  // namespace windlass
