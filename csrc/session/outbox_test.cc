#include "session/outbox.h"

#include <map>
#include <set>
#include <string>

#include "base/test.h"

namespace windlass::outbox_test {
namespace {

// What an outbox should do, in the plainest words.
class Plain {
 public:
  void add(uint64_t id) { sent_[id] = false; }
  uint64_t next() {  // 0: none
    for (auto& [id, sent] : sent_) {
      if (sent) continue;
      sent = true;
      return id;
    }
    return 0;
  }
  void answered(uint64_t id) { sent_.erase(id); }
  void lost() {
    for (auto& [id, sent] : sent_) sent = false;
  }
  void again(uint64_t id) {
    if (sent_.count(id) != 0) sent_[id] = false;
  }
  bool there(uint64_t id) const { return sent_.count(id) != 0; }
  size_t size() const { return sent_.size(); }
  size_t queued() const {
    size_t n = 0;
    for (const auto& [id, sent] : sent_) n += !sent;
    return n;
  }
  std::vector<uint64_t> sent(size_t most) const {
    std::vector<uint64_t> ids;
    for (const auto& [id, s] : sent_) {
      if (s && ids.size() < most) ids.push_back(id);
    }
    return ids;
  }

 private:
  std::map<uint64_t, bool> sent_;
};

std::vector<uint64_t> all_next(Outbox<uint64_t>* outbox) {
  std::vector<uint64_t> ids;
  while (const uint64_t* id = outbox->next()) ids.push_back(*id);
  return ids;
}

}  // namespace

TEST(requests_leave_in_the_order_of_their_ids_and_go_when_they_are_answered) {
  Outbox<uint64_t> outbox;
  CHECK(outbox.idle() && !outbox.has_queued() && !outbox.has_sent());
  CHECK(outbox.next() == nullptr);
  for (const uint64_t id : {3u, 7u, 9u}) outbox.add(id, id);
  CHECK(outbox.has_queued() && !outbox.has_sent());
  CHECK(all_next(&outbox) == std::vector<uint64_t>({3, 7, 9}));
  CHECK(!outbox.has_queued() && outbox.has_sent());
  outbox.answered(7);
  CHECK(outbox.find(7) == nullptr);
  CHECK(outbox.find(3) != nullptr && *outbox.find(3) == 3);
  outbox.answered(7);  // an answer that comes twice
  outbox.answered(8);  // or to nothing
  CHECK_EQ(outbox.size(), 2u);
  outbox.answered(3);
  outbox.answered(9);
  CHECK(outbox.idle());
}

TEST(after_a_connection_broke_everything_without_an_answer_is_sent_again_lowest_first) {
  Outbox<uint64_t> outbox;
  for (uint64_t id = 1; id <= 5; ++id) outbox.add(id, id);
  CHECK_EQ(*outbox.next(), 1u);
  CHECK_EQ(*outbox.next(), 2u);
  outbox.answered(1);
  outbox.lost();
  CHECK(all_next(&outbox) == std::vector<uint64_t>({2, 3, 4, 5}));
  outbox.again(4);
  outbox.again(4);
  outbox.again(99);
  outbox.add(6, 6);
  CHECK(all_next(&outbox) == std::vector<uint64_t>({4, 6}));
}

TEST(a_request_that_the_server_does_not_hold_is_sent_again) {
  Outbox<uint64_t> outbox;
  for (uint64_t id = 1; id <= 6; ++id) outbox.add(id, id);
  for (int i = 0; i < 5; ++i) outbox.next();
  const std::vector<uint64_t> asked = outbox.to_ask(4);
  CHECK(asked == std::vector<uint64_t>({1, 2, 3, 4}));  // 5 is beyond the most, 6 was never sent
  outbox.answered(2);                                   // meanwhile
  CHECK_EQ(outbox.heard(asked, {1, 77}), 2u);
  CHECK(all_next(&outbox) == std::vector<uint64_t>({3, 4, 6}));
  CHECK_EQ(outbox.heard({}, {}), 0u);
  CHECK_EQ(outbox.heard({500}, {}), 0u);
}

TEST(a_request_can_be_answered_before_it_is_sent_again) {
  Outbox<std::string> outbox;
  outbox.add(1, "one");
  outbox.next();
  outbox.lost();
  outbox.answered(1);  // the answer was already here
  CHECK(outbox.idle() && !outbox.has_queued());
  CHECK(outbox.next() == nullptr);
}

TEST(an_outbox_agrees_with_a_plain_one_whatever_happens) {
  for (uint64_t round = 0; round < 200; ++round) {
    test::Random random(test::seed() * 1000 + round);
    Outbox<uint64_t> outbox;
    Plain plain;
    uint64_t last = 0;
    std::vector<uint64_t> asked;
    for (int step = 0; step < 300; ++step) {
      const uint64_t id = 1 + random.below(last + 2);
      switch (random.below(8)) {
        case 0:
        case 1:
          ++last;
          outbox.add(last, last * 10);
          plain.add(last);
          break;
        case 2:
        case 3: {
          const uint64_t* next = outbox.next();
          CHECK_EQ(next == nullptr ? 0 : *next, plain.next() * 10);
          break;
        }
        case 4:
          outbox.answered(id);
          plain.answered(id);
          break;
        case 5:
          if (random.below(4) != 0) break;
          outbox.lost();
          plain.lost();
          break;
        case 6:
          outbox.again(id);
          plain.again(id);
          break;
        default: {
          if (asked.empty()) {
            asked = outbox.to_ask(1 + random.below(10));
            break;
          }
          std::vector<uint64_t> held;
          size_t lost = 0;
          for (const uint64_t a : asked) {
            if (random.below(2) == 0) {
              held.push_back(a);
            } else if (plain.there(a)) {
              plain.again(a);
              ++lost;
            }
          }
          CHECK_EQ(outbox.heard(asked, held), lost);
          asked.clear();
        }
      }
      CHECK_EQ(outbox.size(), plain.size());
      CHECK(outbox.has_queued() == (plain.queued() != 0));
      CHECK(outbox.has_sent() == (plain.size() > plain.queued()));
      CHECK(outbox.to_ask(5) == plain.sent(5));
      CHECK((outbox.find(id) != nullptr) == plain.there(id));
    }
    std::set<uint64_t> seen;
    outbox.each([&](uint64_t id, uint64_t what) {
      CHECK_EQ(what, id * 10);
      seen.insert(id);
    });
    CHECK_EQ(seen.size(), plain.size());
  }
}

TEST(higher_priorities_leave_first_and_equal_ones_in_their_order) {
  Outbox<uint64_t> outbox;
  const uint8_t priorities[] = {0, 5, 0, 9, 5, 9};
  for (uint64_t id = 1; id <= 6; ++id) outbox.add(id, id, priorities[id - 1]);
  CHECK_EQ(*outbox.peek(), 4u);
  CHECK(all_next(&outbox) == std::vector<uint64_t>({4, 6, 2, 5, 1, 3}));
  outbox.lost();  // as before
  CHECK(outbox.answered(6) && outbox.answered(1));
  CHECK(all_next(&outbox) == std::vector<uint64_t>({4, 2, 5, 3}));
  outbox.again(3);
  outbox.again(5);
  CHECK(all_next(&outbox) == std::vector<uint64_t>({5, 3}));
}

TEST(nothing_overtakes_what_it_must_follow) {
  // A request is about shards, which are its bits, and follows every earlier one that shares one with it.
  const auto follows = [](uint64_t later, uint64_t earlier) { return (later & earlier) != 0; };
  Outbox<uint64_t> outbox;
  outbox.add(1, 0b0001, 0);
  outbox.add(2, 0b0010, 0);
  outbox.add(3, 0b0110, 0);
  outbox.add(4, 0b1000, 1);
  outbox.add(5, 0b0100, 9);  // follows 3, which follows 2
  std::vector<uint64_t> left;
  while (const uint64_t* what = outbox.next(follows)) left.push_back(*what);
  CHECK(left == std::vector<uint64_t>({0b0010, 0b0110, 0b0100, 0b1000, 0b0001}));
}

// Whatever the priorities are and however often connections break, requests of one shard leave in their order, and
// among those that may go the highest priority does.
TEST(random_priorities_keep_the_order_of_every_shard) {
  test::Random random(test::seed());
  const auto follows = [](const std::pair<uint64_t, uint64_t>& later, const std::pair<uint64_t, uint64_t>& earlier) {
    return (later.second & earlier.second) != 0;
  };
  for (int round = 0; round < 200; ++round) {
    Outbox<std::pair<uint64_t, uint64_t>> outbox;
    std::map<uint64_t, std::pair<uint64_t, uint8_t>> queued;  // shards and priority
    std::set<uint64_t> sent;
    for (uint64_t id = 1, steps = 0; steps < 60; ++steps) {
      const uint64_t dice = random.below(10);
      if (dice < 5) {
        const uint64_t shards = 1 + random.below(255);
        const auto priority = static_cast<uint8_t>(random.below(4));
        outbox.add(id, {id, shards}, priority);
        queued[id++] = {shards, priority};
      } else if (dice < 9) {
        const auto* const next = outbox.next(follows);
        CHECK_EQ(next == nullptr, queued.empty());
        if (next == nullptr) continue;
        for (const auto& [other, what] : queued) {
          if (other < next->first) CHECK((what.first & next->second) == 0);
        }
        queued.erase(next->first);
        sent.insert(next->first);
      } else if (!sent.empty()) {
        const uint64_t answered = *sent.begin();
        CHECK(outbox.answered(answered));
        sent.erase(answered);
      }
    }
  }
}

}  // namespace windlass::outbox_test
