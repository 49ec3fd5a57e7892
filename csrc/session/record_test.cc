#include "session/record.h"

#include <map>

#include "base/test.h"

namespace windlass::record_test {

TEST(the_next_push_is_applied_an_old_one_repeated_and_a_later_one_leaves_a_gap) {
  Record r;
  CHECK(r.admit(0) == Admission::kRepeat);  // sequences start at 1
  CHECK(r.admit(1) == Admission::kApply);
  CHECK(r.admit(2) == Admission::kGap);
  r.sequence = 7;
  for (uint64_t n = 0; n <= 7; ++n) CHECK(r.admit(n) == Admission::kRepeat);
  CHECK(r.admit(8) == Admission::kApply);
  CHECK(r.admit(9) == Admission::kGap);
  CHECK(r.admit(~uint64_t{0}) == Admission::kGap);
  r.sequence = ~uint64_t{0} - 1;
  CHECK(r.admit(~uint64_t{0}) == Admission::kApply);
}

TEST(asking_changes_nothing) {
  const Record r{.sequence = 3, .clock = 2};
  CHECK(r.admit(4) == Admission::kApply);
  CHECK(r.admit(4) == Admission::kApply);
  CHECK_EQ(r.sequence, 3u);
  CHECK_EQ(r.clock, 2u);
}

// Frames may be doubled, lost and late; each push still counts once and none is skipped.
TEST(each_push_is_applied_once_whatever_the_order_of_arrival) {
  test::Random random(test::seed());
  Record r;
  std::map<uint64_t, int> applied;
  constexpr uint64_t kPushes = 500;
  while (r.sequence < kPushes) {
    const uint64_t n = r.sequence + random.below(8) < 3 ? 1 : r.sequence + random.below(8) - 2;
    if (n > kPushes || r.admit(n) != Admission::kApply) continue;
    ++applied[n];
    r.sequence = n;
  }
  CHECK_EQ(applied.size(), kPushes);
  for (const auto& [n, times] : applied) CHECK_EQ(times, 1);
}

TEST(a_clock_never_goes_back) {
  Record r;
  r.close(3);
  CHECK_EQ(r.clock, 3u);
  r.close(1);
  r.close(3);
  CHECK_EQ(r.clock, 3u);
  r.close(4);
  CHECK_EQ(r.clock, 4u);
}

TEST(sessions_have_records_of_their_own_which_start_at_zero) {
  Records records;
  CHECK(records.find(0) == nullptr);
  records.of(5).sequence = 9;
  CHECK_EQ(records.of(5).sequence, 9u);
  for (uint32_t s = 0; s < 5; ++s) CHECK(records.find(s) != nullptr && records.find(s)->sequence == 0);
  CHECK(records.find(6) == nullptr);
  records.of(1000).clock = 1;
  CHECK_EQ(records.find(5)->sequence, 9u);
  CHECK_EQ(records.find(1000)->clock, 1u);
}

TEST(a_record_that_came_with_its_shard_waits_for_its_session) {
  Records records;
  records.of(0, 11).sequence = 1;
  Record came;
  came.incarnation = 77;
  came.sequence = 9;
  came.clock = 2;
  came.keep(9, Status(Code::kNonFinite, "no"), 5);
  records.add(std::move(came));
  uint64_t seen = 0;
  records.each([&](const Record& r) { seen += r.incarnation; });
  CHECK_EQ(seen, 88u);
  CHECK_EQ(records.of(3, 12).sequence, 0u);   // somebody else
  const Record& claimed = records.of(3, 77);  // the number is the server's own
  CHECK_EQ(claimed.sequence, 9u);
  CHECK_EQ(claimed.clock, 2u);
  CHECK(claimed.find(9) != nullptr && claimed.find(9)->value == 5);
  CHECK_EQ(records.of(4, 77).sequence, 0u);  // there was one
  seen = 0;
  records.each([&](const Record& r) { seen += r.incarnation; });
  CHECK_EQ(seen, 88u);
  records.clear();
  records.each([](const Record&) { CHECK(false); });
  CHECK_EQ(records.of(3, 77).sequence, 0u);
}

}  // namespace windlass::record_test
