#include "server/net/answer_quota.h"

#include <thread>
#include <vector>

#include "base/test.h"
#include "server/net/peer_test.h"

namespace windlass::answer_quota_test {
namespace {

constexpr uint64_t kMost = 100;
const auto kStays = [] { return false; };

// Stands in line until told to go, and notes when it had room.
struct InLine {
  InLine(AnswerQuota& quota, const AnswerQuota::Whose& whose, uint64_t bytes)
      : thread([this, &quota, whose, bytes] {
          got = quota.await(bytes, whose, [this] { return gone.load(); }, &room);
          done = true;
        }) {}
  ~InLine() {
    gone = true;
    thread.join();
  }
  AnswerQuota::Room room;
  std::atomic<bool> gone{false}, got{false}, done{false};
  std::thread thread;
};

}  // namespace

TEST(an_answer_quota_gives_room_up_to_its_limit_and_takes_it_back) {
  AnswerQuota quota(kMost);
  AnswerQuota::Room first, second, third;
  CHECK(quota.take(60, &first));
  CHECK(quota.take(40, &second));
  CHECK(!quota.take(1, &third));
  first.give_back();
  CHECK(quota.take(60, &third));
  CHECK_EQ(quota.used(), 100u);
  AnswerQuota::Room moved = std::move(third);
  moved.give_back();
  second.give_back();
  second.give_back();
  CHECK_EQ(quota.used(), 0u);
}

TEST(an_answer_larger_than_the_quota_is_made_alone) {
  AnswerQuota quota(kMost);
  AnswerQuota::Room large, small;
  CHECK(quota.take(5 * kMost, &large));
  CHECK(!quota.take(1, &small));
}

TEST(the_lowest_rank_in_line_for_room_never_waits_for_who_does_not_read) {
  AnswerQuota quota(kMost);
  AnswerQuota::Room reader, third, lowest, other_app;
  CHECK(quota.take(kMost, &reader));
  CHECK(quota.await(10, {3, 1}, kStays, &third));
  CHECK(quota.await(80, {0, 1}, kStays, &lowest));
  CHECK(quota.await(5, {0, 2}, kStays, &other_app));
  CHECK_EQ(quota.used(), kMost + 95);
}

// Readers and higher ranks stand behind lower ones, whoever came first.
TEST(who_asks_for_more_room_waits_in_line_workers_before_readers_and_lower_ranks_first) {
  AnswerQuota quota(kMost);
  AnswerQuota::Room reader, overdraft;
  CHECK(quota.take(kMost, &reader));
  CHECK(quota.await(10, {1, 1}, kStays, &overdraft));
  InLine outsider(quota, {}, 10);
  CHECK(test::eventually([&] { return quota.contended(); }));
  InLine high(quota, {5, 1}, 10);
  InLine low(quota, {2, 1}, 10);
  usleep(20'000);
  CHECK(!outsider.done && !high.done && !low.done);
  CHECK_EQ(quota.used(), kMost + 10);
  overdraft.give_back();
  CHECK(test::eventually([&] { return low.got.load(); }));
  usleep(20'000);
  CHECK(!outsider.done && !high.done);
  low.room.give_back();
  CHECK(test::eventually([&] { return high.got.load(); }));
  CHECK(!outsider.done);
  reader.give_back();
  CHECK(test::eventually([&] { return outsider.got.load(); }));
}

TEST(who_is_gone_leaves_the_line_for_room) {
  AnswerQuota quota(kMost);
  AnswerQuota::Room reader, overdraft;
  CHECK(quota.take(kMost, &reader));
  CHECK(quota.await(10, {0, 1}, kStays, &overdraft));
  {
    InLine gone(quota, {1, 1}, 10);
    gone.gone = true;
    CHECK(test::eventually([&] { return gone.done.load(); }));
    CHECK(!gone.got);
  }
  CHECK(!quota.contended());
}

}  // namespace windlass::answer_quota_test
