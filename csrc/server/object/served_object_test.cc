#include "server/object/served_object.h"

#include <cstring>
#include <thread>

#include "server/object/scene_test.h"

namespace windlass::served_object_test {
namespace {

using test::kAsp;
using test::kBsp;
using test::kBytes;
using test::kN;
using test::kRank0;
using test::kRank1;
using test::kSpare;
using test::kSsp;
using test::kSuccessor;
using test::Ran;
using test::Scene;
using wire::Op;

const Status kRefusal(Code::kNonFinite, "it has NaN");

}  // namespace

TEST(a_push_is_applied_once_in_the_order_of_its_sequence) {
  Scene s(kAsp);
  CHECK(s.push(2, 1).verdict == Verdict::kEarly);
  CHECK_EQ(s.weight(), 0.0f);
  CHECK_EQ(s.sequence(), 0u);
  CHECK(s.push(1, 1).ok());
  CHECK_EQ(s.weight(), -1.0f);
  const Ran again = s.push(1, 1);
  CHECK(again.ok());
  CHECK_EQ(again.outcome.sequence, 1u);
  CHECK_EQ(s.weight(), -1.0f);
  CHECK_EQ(s.push(2, 2).outcome.sequence, 2u);
  CHECK_EQ(s.weight(), -3.0f);
  CHECK(s.push(1, 4, 0, 0, kRank1).ok());  // another session has its own
  CHECK_EQ(s.weight(), -7.0f);
  CHECK(s.push(Entry::kNextSequence, 8).ok());
  CHECK_EQ(s.sequence(), 3u);
}

TEST(a_refused_push_uses_up_its_sequence_changes_nothing_and_is_refused_again) {
  Scene s(kAsp);
  CHECK(s.run(Scene::batch(Op::kPush), s.entry(1, 0, 1), kRefusal).refused(Code::kNonFinite));
  CHECK_EQ(s.weight(), 0.0f);
  CHECK_EQ(s.shard().version, 0u);
  CHECK_EQ(s.sequence(), 1u);
  CHECK(s.push(2, 1).ok());
  CHECK(s.push(1, 1).refused(Code::kNonFinite));  // whatever a second look says
  CHECK_EQ(s.weight(), -1.0f);
}

TEST(a_repeat_gets_the_answer_that_was_kept) {
  Scene s(kAsp, RuleKind::kSum, true);
  CHECK(s.push(1, 1).ok());
  const Batch erase = Scene::batch(Op::kErase);
  CHECK_EQ(s.run(erase, s.entry(2)).outcome.value, kN);
  CHECK(s.push(3, 1).ok());
  const Ran again = s.run(erase, s.entry(2));
  CHECK(again.ok());
  CHECK_EQ(again.outcome.value, kN);
  CHECK_EQ(s.object->table()->rows(s.index), kN);
}

TEST(an_entry_under_another_term_changes_nothing_and_learns_where_the_shard_is) {
  Scene s(kAsp);
  Entry e = s.entry(1, 0, 1);
  ++e.term;
  Ran ran = s.run(Scene::batch(Op::kPush), e);
  CHECK(ran.refused(Code::kStaleMap));
  CHECK_EQ(ran.outcome.term, Map::kFirstTerm);
  CHECK_EQ(ran.outcome.value, 0u);  // this server
  CHECK_EQ(s.weight(), 0.0f);
  CHECK_EQ(s.sequence(), 0u);
  Residence& home = s.shard().home;
  home = {.state = Residence::kElsewhere, .server = 5, .term = 4};
  ran = s.run(Scene::batch(Op::kPush), s.entry(1, 0, 1));
  CHECK(ran.refused(Code::kStaleMap));
  CHECK_EQ(ran.outcome.term, 4u);
  CHECK_EQ(ran.outcome.value, 5u);
  CHECK_EQ(s.sequence(), 0u);
  home.state = Residence::kArrived;  // a copy, of which the first request under its term is the proof
  home.next_term = 6;
  CHECK(s.push(1, 1).refused(Code::kStaleMap));
  e.term = 6;
  CHECK(s.run(Scene::batch(Op::kPush), e).ok());
  CHECK(home.state == Residence::kHere);
}

TEST(a_frozen_shard_is_not_touched_and_whoever_comes_is_early) {
  Scene s(kBsp);
  s.shard().home.state = Residence::kFrozen;
  CHECK(s.push(1, 1, 0, wire::kCloses).verdict == Verdict::kEarly);
  CHECK(s.close(kRank0, 1, 0).verdict == Verdict::kEarly);
  CHECK(s.run(Scene::batch(Op::kPull), s.entry(0)).verdict == Verdict::kEarly);
  CHECK_EQ(s.out[0], 77.0f);
  CHECK_EQ(s.shard().gate->clock_of(0), 0u);
  CHECK(s.shard().staged == nullptr);
  s.shard().home.state = Residence::kHere;
  CHECK_EQ(s.sequence(), 0u);
  CHECK(s.run(Scene::batch(Op::kPull), s.entry(0)).ok());
}

TEST(equal_versions_mean_equal_bits) {
  Scene s(kAsp, RuleKind::kSum, true);
  uint64_t version = 0, bits = s.object->table()->fingerprint(s.index), sequence = 0;
  const auto look = [&](const Ran& ran, bool moves) {
    CHECK(ran.ok() || ran.refused(Code::kNonFinite));
    CHECK_EQ(s.shard().version, version + (moves ? 1 : 0));
    const uint64_t now = s.object->table()->fingerprint(s.index);
    CHECK((now != bits) == moves);
    version = s.shard().version;
    bits = now;
  };
  look(s.push(++sequence, 1), true);
  look(s.push(sequence, 1), false);
  look(s.push(++sequence, 1, 0, wire::kEmpty), false);
  look(s.run(Scene::batch(Op::kPush), s.entry(++sequence, 0, 1), kRefusal), false);
  look(s.run(Scene::batch(Op::kPull), s.entry(sequence)), false);
  look(s.run(Scene::batch(Op::kErase), s.entry(++sequence)), true);
  look(s.run(Scene::batch(Op::kErase), s.entry(sequence)), false);
  const Ran last = s.push(++sequence, 3);
  look(last, true);
  CHECK_EQ(last.outcome.value, version + 1);
}

TEST(a_pull_of_a_version_that_its_caller_has_brings_no_numbers) {
  Scene s(kAsp);
  CHECK(s.push(1, 1).ok());
  Entry e = s.entry(1);
  e.value = 2;  // the version, plus one
  const Ran same = s.run(Scene::batch(Op::kPull), e);
  CHECK_EQ(same.outcome.flags, wire::kUnchanged);
  CHECK_EQ(s.out[0], 77.0f);
  CHECK(s.push(2, 1).ok());
  const Ran newer = s.run(Scene::batch(Op::kPull), e);
  CHECK_EQ(newer.outcome.flags, 0u);
  CHECK_EQ(newer.outcome.value, 3u);
  CHECK_EQ(s.out[0], -2.0f);
}

TEST(an_outcome_says_up_to_which_clock_everybody_elses_pushes_were_seen) {
  const Batch pull = Scene::batch(Op::kPull);
  Scene ssp({Sync::kSsp, 2, 0});
  CHECK_EQ(ssp.run(pull, ssp.entry(0, 2)).outcome.clock, 0u);
  CHECK(ssp.close(kRank1, 5, 0).ok());
  CHECK_EQ(ssp.run(pull, ssp.entry(0, 2)).outcome.clock, 5u);
  CHECK_EQ(ssp.push(1, 1, 2).outcome.clock, 2u);  // which sees nothing
  ssp.set_view({{0, kRank0, true}});
  CHECK_EQ(ssp.run(pull, ssp.entry(0, 3)).outcome.clock, 3u);  // there is nobody else
  Scene bsp(kBsp);
  for (const uint64_t by : {kRank0, kRank1}) CHECK(bsp.close(by, 4, 0).ok());
  CHECK_EQ(bsp.run(pull, bsp.entry(0, 2)).outcome.clock, 4u);  // updates that were made
}

TEST(under_ssp_a_pull_waits_for_the_slowest_and_reads_nothing_before) {
  Scene s(kSsp);
  const Batch pull = Scene::batch(Op::kPull);
  CHECK(s.run(pull, s.entry(0, 1)).verdict == Verdict::kGated);
  CHECK_EQ(s.out[0], 77.0f);
  CHECK(s.run(pull, s.entry(0, 0)).ok());
  Entry e = s.entry(1, 0, 1);
  e.flags = wire::kCloses;
  s.out.assign(kN, 77.0f);
  const Batch push_pull = Scene::batch(Op::kPushPull);
  CHECK(s.run(push_pull, e).verdict == Verdict::kGated);
  CHECK_EQ(s.weight(), -1.0f);  // its push has been taken
  CHECK_EQ(s.out[0], 77.0f);
  CHECK_EQ(s.shard().gate->clock_of(0), 1u);
  CHECK(s.push(1, 4, 0, wire::kCloses, kRank1).ok());
  CHECK(s.run(push_pull, e, {}, Stage::kTaken).ok());
  CHECK_EQ(s.out[0], -5.0f);  // what it sees is of then, and it was applied once
  CHECK_EQ(s.weight(), -5.0f);
}

TEST(under_bsp_a_push_waits_for_its_update_and_changes_nothing_before) {
  Scene s(kBsp);
  Entry e = s.entry(1, 0, 2);
  e.flags = wire::kCloses;
  const Batch push = Scene::batch(Op::kPush);
  CHECK(s.run(push, e).verdict == Verdict::kGated);
  CHECK(s.run(Scene::batch(Op::kPull), s.entry(1, 1)).verdict == Verdict::kGated);
  CHECK_EQ(s.out[0], 77.0f);
  CHECK_EQ(s.weight(), 0.0f);
  CHECK_EQ(s.shard().version, 0u);
  CHECK(s.push(1, 4, 0, wire::kCloses, kRank1).ok());  // the last one makes it
  CHECK_EQ(s.weight(), -3.0f);
  const Ran ran = s.run(push, e, {}, Stage::kTaken);
  CHECK(ran.ok());
  CHECK_EQ(ran.outcome.value, 2u);
  CHECK_EQ(s.weight(), -3.0f);
}

TEST(the_error_of_an_update_is_told_to_everybody_who_contributed) {
  Scene s(kBsp, RuleKind::kSgd, true, {.memory = 0});
  CHECK(s.push(1, 1, 0, wire::kCloses).verdict == Verdict::kGated);
  CHECK(s.push(1, 1, 0, wire::kCloses, kRank1).refused(Code::kResourceExhausted));
  CHECK(s.run(Scene::batch(Op::kPush), s.entry(1), {}, Stage::kTaken).refused(Code::kResourceExhausted));
  CHECK_EQ(s.shard().version, 0u);
}

TEST(under_bsp_an_outsiders_push_is_refused) {
  Scene s(kBsp);
  Batch b = Scene::batch(Op::kPush);
  b.caller.rank = Gate::kOutsider;
  CHECK(s.run(b, s.entry(1, 0, 1)).refused(Code::kInvalidArgument));
  CHECK(s.shard().staged == nullptr);
}

TEST(without_room_for_its_copy_a_push_is_full_and_nothing_has_happened_unless_it_must_go_on) {
  Scene s(kBsp, RuleKind::kSgd, false, {.staging = kBytes});
  CHECK(s.push(1, 1, 0, 0, kRank1).verdict == Verdict::kGated);
  CHECK_EQ(s.server.staging().used(), kBytes);
  CHECK(s.push(2, 1, 0, 0, kRank1).verdict == Verdict::kFull);
  CHECK_EQ(s.sequence(kRank1), 1u);
  CHECK_EQ(s.server.staging().used(), kBytes);
  const uint64_t objects = s.server.budget().used();
  const Batch push = Scene::batch(Op::kPush, kRank1);
  CHECK(s.run(push, s.entry(2, 0, 3), {}, Stage::kParked).verdict == Verdict::kGated);  // it has waited already
  CHECK_EQ(s.server.budget().used(), objects + kBytes);
  CHECK(s.push(1, 2).verdict == Verdict::kGated);  // the lowest rank waits for nobody's room
  CHECK_EQ(s.server.budget().used(), objects + 2 * kBytes);
  CHECK_EQ(s.server.staging().used(), kBytes);
  CHECK(s.close(kRank0, 1, 1).ok());
  CHECK(s.close(kRank1, 1, 2).ok());
  CHECK_EQ(s.weight(), -2.0f);
  CHECK_EQ(s.server.staging().used(), 0u);
  CHECK_EQ(s.server.budget().used(), objects);
}

TEST(a_push_that_must_go_on_is_refused_when_there_is_no_memory_at_all_and_the_update_goes_without_it) {
  Scene s(kBsp, RuleKind::kSgd, false, {.staging = 0});
  const uint64_t left = s.server.budget().bytes_max() - s.server.budget().used();
  CHECK(s.server.budget().charge(left));
  CHECK(s.push(1, 1000).refused(Code::kResourceExhausted));
  CHECK_EQ(s.sequence(kRank0), 1u);  // it has used up its number
  s.server.budget().refund(left);
  CHECK(s.push(2, 2, 0, wire::kCloses).verdict == Verdict::kGated);
  CHECK(s.push(1, 4, 0, wire::kCloses, kRank1).ok());
  CHECK_EQ(s.weight(), -3.0f);
  CHECK_EQ(s.server.budget().used(), s.server.budget().bytes_max() - left);
}

TEST(a_push_that_is_late_for_its_update_is_counted_and_its_worker_learns_how_many_were_made) {
  Scene s(kSpare);
  CHECK(s.push(1, 2, 0, wire::kCloses).ok());
  CHECK_EQ(s.weight(), -2.0f);
  const Ran late = s.push(1, 100, 0, wire::kCloses, kRank1);
  CHECK(late.ok());
  CHECK_EQ(late.outcome.clock, 1u);
  CHECK_EQ(s.weight(), -2.0f);
  CHECK_EQ(s.server.workers()->stats().late, 1u);
}

TEST(who_was_given_up_closes_nothing_in_place_of_who_takes_its_rank) {
  for (const Sync& sync : {kSsp, kBsp}) {
    Scene s(sync);
    s.set_view({{0, kRank0, true}}, {1});  // rank 1 is lost, and waited for
    CHECK(s.push(1, 1000, 1, wire::kCloses, kRank1).refused(Code::kClosed));
    CHECK(s.close(kRank1, 2, 1).verdict == Verdict::kDone);
    CHECK_EQ(s.shard().gate->clock_of(1), 0u);
  }
}

TEST(who_takes_the_rank_of_a_worker_that_was_given_up_contributes_in_its_place) {
  Scene s(kBsp);
  s.set_view({{0, kRank0, true}}, {1});
  CHECK(s.push(1, 1000, 0, wire::kCloses, kRank1).refused(Code::kClosed));
  s.set_view({{0, kRank0, true}, {1, kSuccessor, true}});
  CHECK(s.push(1, 2, 0, wire::kCloses).verdict == Verdict::kGated);
  CHECK(s.push(1, 4, 0, wire::kCloses, kSuccessor).ok());
  CHECK_EQ(s.weight(), -3.0f);
}

TEST(what_a_lost_worker_has_not_closed_ends_when_who_took_its_rank_closes_without_a_push) {
  Scene s(kBsp);
  CHECK(s.push(1, 1000, 0, 0, kRank1).verdict == Verdict::kGated);
  s.set_view({{0, kRank0, true}, {1, kSuccessor, true}});
  CHECK(s.close(kSuccessor, 1, 1).ok());
  CHECK(s.push(1, 4, 0, wire::kCloses).ok());
  CHECK_EQ(s.weight(), -2.0f);  // the other counts in the mean
}

TEST(what_a_lost_worker_has_closed_is_acknowledged_and_not_counted_when_redone) {
  Scene s(kBsp);
  CHECK(s.push(1, 2, 0, wire::kCloses, kRank1).verdict == Verdict::kGated);
  s.set_view({{0, kRank0, true}, {1, kSuccessor, true}});
  CHECK(s.push(1, 1000, 0, wire::kCloses, kSuccessor).verdict == Verdict::kGated);
  CHECK_EQ(s.sequence(kSuccessor), 1u);
  CHECK(s.push(1, 4, 0, wire::kCloses).ok());
  CHECK_EQ(s.weight(), -3.0f);
  CHECK_EQ(s.server.workers()->stats().late, 0u);
  Scene ssp(kSsp);
  CHECK(ssp.push(1, 2, 0, wire::kCloses, kRank1).ok());
  ssp.set_view({{0, kRank0, true}, {1, kSuccessor, true}});
  CHECK(ssp.push(1, 1000, 0, wire::kCloses, kSuccessor).ok());
  CHECK_EQ(ssp.weight(), -2.0f);
}

TEST(settle_waits_for_the_last_push_of_its_session) {
  Scene s(kAsp);
  const Batch settle = Scene::batch(Op::kSettle);
  CHECK(s.push(1, 1).ok());
  CHECK(s.run(settle, s.entry(2)).verdict == Verdict::kEarly);
  CHECK(s.push(1, 1, 0, 0, kRank1).ok());
  CHECK(s.run(settle, s.entry(2)).verdict == Verdict::kEarly);
  CHECK(s.run(Scene::batch(Op::kPush), s.entry(2), kRefusal).refused(Code::kNonFinite));  // that will do
  const Ran settled = s.run(settle, s.entry(2));
  CHECK(settled.ok());
  CHECK_EQ(settled.outcome.sequence, 2u);
}

TEST(operations_that_an_object_does_not_have_are_refused_by_the_check) {
  Scene tensor(kAsp), table(kAsp, RuleKind::kSum, true);
  const auto refused = [](Scene& s, Op op) {
    Entry e = s.entry(1);
    e.items = 0;
    uint64_t bytes = 0;
    Batch b = Scene::batch(op);
    b.in_place = false;
    return s.object->check(b, &e, &bytes).code() == Code::kInvalidArgument;
  };
  for (const Op op : {Op::kErase, Op::kRows}) CHECK(refused(tensor, op));
  for (const Op op : {Op::kVector, Op::kDot, Op::kSnapshot}) CHECK(refused(table, op));
  for (const Op op : {Op::kSettle, Op::kClose, Op::kFingerprint}) CHECK(!refused(tensor, op) && !refused(table, op));
}

// On a thread of its own: memory for items is a thread's, and others before it may have made room.
TEST(entries_of_a_block_are_checked_before_the_first_runs_and_keep_their_items) {
  Scene s(kAsp, RuleKind::kSum);
  std::thread([&] {
    constexpr uint64_t kSpans[][2] = {{0, 2}, {4, 1}, {7, 1}};
    constexpr size_t kEntries = 100;  // of which every third has two spans, the others none: they are whole
    Batch b = Scene::batch(Op::kPush);
    b.in_place = false;
    const std::vector<float> ones(kN, 1.0f);
    std::vector<Entry> entries;
    ServedObject::begin_checks(2 * (kEntries / 3 + 1));
    for (size_t i = 0; i < kEntries; ++i) {
      Entry e = s.entry(i + 1);
      const bool some = i % 3 == 0;
      e.spans = nullptr;
      e.in = reinterpret_cast<const std::byte*>(ones.data());
      e.items = some ? 2 : 0;
      e.flags = some ? 0 : wire::kWhole;
      e.encoded = reinterpret_cast<const std::byte*>(kSpans[i % 2]);
      e.numbers_bytes = some ? (i % 2 == 0 ? 3 : 2) * sizeof(float) : kBytes;
      uint64_t bytes = 0;
      CHECK_OK(s.object->check(b, &e, &bytes));
      if (i != 0) CHECK(e.spans == entries.back().spans + entries.back().items);
      entries.push_back(e);
    }
    for (const Entry& e : entries) CHECK(s.run(b, e).ok());
  }).join();
  std::vector<float> weights(kN);
  std::memcpy(weights.data(), s.object->tensor().weights_of(0), kBytes);
  // 66 were whole; 17 had 0, 1 and 4, and 17 had 4 and 7.
  CHECK(weights == (std::vector<float>{83, 83, 66, 66, 100, 66, 66, 83}));
}

}  // namespace windlass::served_object_test
