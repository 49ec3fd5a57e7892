// Queries, filtered scans and deletes, frame by frame.
#include "query/query_test.h"

#include <cstring>

#include "server/host.h"
#include "server/net/peer_test.h"

namespace windlass::query_test {
namespace {

using Function = Query::Function;
using test::a_query;
using test::a_table;
using test::a_tensor;
using test::about;
using test::above;
using test::bytes_of;
using test::Frame;
using test::FramePart;
using test::keys_in;
using test::on_keys;
using test::on_whole;
using test::Peer;
using test::the_norm;
using test::values_of;
using wire::Op;

constexpr uint32_t kShard = 7;

// Rows of four numbers: key i of the shard has i in its first.
struct Fixture {
  explicit Fixture(RuleKind rule = RuleKind::kSum) : host(2, ~uint64_t{0}), peer(Peer::greeted(host, "key")) {
    table = peer.made(a_table("t", 4, rule));
    tensor = peer.made(a_tensor("w", {1000}));
    keys = keys_in(kShard, 10);
  }
  Frame push(uint64_t sequence, float first) {
    std::vector<float> rows;
    for (size_t i = 0; i < keys.size(); ++i) rows.insert(rows.end(), {first * static_cast<float>(i), 0, 0, 0});
    return on_keys(Op::kPush, table, kShard, sequence, keys, bytes_of(rows));
  }
  Frame erase(uint64_t sequence, const std::string& where) {
    Frame f = on_keys(Op::kErase, table, kShard, sequence, keys);
    f.parts[0].items += where;
    return f;
  }
  uint64_t count(uint64_t sequence, const std::string& where = "") {
    const FramePart p = peer.call_one(about(Op::kQuery, table, kShard, sequence, a_query(Function::kCount, where)));
    CHECK_OK(p.status());
    return values_of<uint64_t>(p.items).at(0);
  }
  Host host;
  Peer peer;
  Map table, tensor;
  std::vector<uint64_t> keys;
};

}  // namespace

TEST(a_query_waits_for_the_push_that_it_must_see) {
  Fixture f;
  const uint64_t early = f.peer.start(about(Op::kQuery, f.table, kShard, 1, a_query(Function::kCount)));
  CHECK(f.peer.quiet(50));
  CHECK_OK(f.peer.call_one(f.push(1, 1)).status());
  CHECK_EQ(values_of<uint64_t>(f.peer.finish(early, 1).at(0).items).at(0), 10u);
  CHECK_EQ(f.count(1, above(0, 4.5)), 5u);
}

TEST(a_delete_with_a_predicate_is_applied_once_and_answers_the_same_again) {
  Fixture f;
  CHECK_OK(f.peer.call_one(f.push(1, 1)).status());
  const Frame erase = f.erase(2, above(0, 4.5));
  FramePart p = f.peer.call_one(erase);
  CHECK_OK(p.status());
  CHECK_EQ(p.part.value, 5u);
  CHECK_OK(f.peer.call_one(f.push(3, 1)).status());  // the rows are made again
  p = f.peer.call_one(erase);                        // as after a lost connection
  CHECK_OK(p.status());
  CHECK_EQ(p.part.value, 5u);
  CHECK_EQ(f.count(3), 10u);
}

TEST(a_row_that_satisfies_the_predicate_no_more_when_its_turn_comes_stays) {
  Fixture f;
  CHECK_OK(f.peer.call_one(f.push(1, 1)).status());
  CHECK_EQ(f.count(1, above(0, 4.5)), 5u);
  const uint64_t early = f.peer.start(f.erase(3, above(0, 4.5)));  // decided on, but not its turn
  CHECK(f.peer.quiet(50));
  CHECK_OK(f.peer.call_one(f.push(2, -0.5)).status());  // all are halved
  const FramePart p = f.peer.finish(early, 1).at(0);
  CHECK_OK(p.status());
  CHECK_EQ(p.part.value, 0u);
  CHECK_EQ(f.count(3), 10u);
}

TEST(a_delete_whose_predicate_makes_no_sense_uses_its_sequence_up_and_erases_nothing) {
  Fixture f;
  CHECK_OK(f.peer.call_one(f.push(1, 1)).status());
  uint64_t sequence = 1;
  for (const std::string& wrong :
       {std::string("x"), the_norm(), above(4, 0), std::string(limits::kQueryBytesMax + 1, '\3')}) {
    const Frame erase = f.erase(++sequence, wrong);
    CHECK_CODE(f.peer.call_one(erase).status(), Code::kInvalidArgument);
    CHECK_CODE(f.peer.call_one(erase).status(), Code::kInvalidArgument);
  }
  CHECK_EQ(f.count(sequence), 10u);
}

TEST(a_scan_with_a_predicate_gives_keys_or_rows) {
  Fixture f;
  CHECK_OK(f.peer.call_one(f.push(1, 1)).status());
  const auto body = [](uint64_t most, uint32_t flags, const std::string& where) {
    wire::Writer w;
    w.put(most), w.put(flags), w.put(uint32_t{0}), w.put_bytes(where);
    return w.take();
  };
  FramePart p = f.peer.call_one(about(Op::kScan, f.table, kShard, 1, body(100, 1, above(0, 4.5))));
  CHECK_OK(p.status());
  CHECK_EQ(p.items.size(), 5 * sizeof(uint64_t));
  CHECK(p.numbers.empty());
  p = f.peer.call_one(about(Op::kScan, f.table, kShard, 1, body(3, 0, above(0, 4.5))));
  CHECK_EQ(p.items.size(), 3 * sizeof(uint64_t));
  CHECK_EQ(p.numbers.size(), 3 * 4 * sizeof(float));
  CHECK((p.part.flags & wire::kMore) != 0);
  p = f.peer.call_one(about(Op::kScan, f.tensor, 0, 0, body(100, 1, "")));
  CHECK_EQ(p.items.size(), 100 * sizeof(uint64_t));
  CHECK_EQ(p.part.value, 100u);
  Frame beyond = about(Op::kScan, f.tensor, 0, 0, body(100, 1, ""));
  for (const uint64_t from : {uint64_t{1000}, ~uint64_t{0}}) {
    beyond.parts[0].part.value = from;
    p = f.peer.call_one(beyond);
    CHECK_OK(p.status());
    CHECK(p.items.empty() && (p.part.flags & wire::kMore) == 0);
  }
  for (const Frame& wrong :
       {about(Op::kScan, f.tensor, 0, 0, body(100, 0, "")), about(Op::kScan, f.table, kShard, 1, body(100, 3, "")),
        about(Op::kScan, f.tensor, 0, 0, body(100, Scan::kRowsWithState, "")),
        about(Op::kScan, f.table, kShard, 1, body(100, 1, "x")), about(Op::kScan, f.table, kShard, 1, body(0, 1, "")),
        about(Op::kScan, f.table, kShard, 1, body(~uint64_t{0}, 1, "")),
        about(Op::kScan, f.table, kShard, 1, body(100, 1, "").substr(0, 12))})
    CHECK_CODE(f.peer.call_one(wrong).status(), Code::kInvalidArgument);
}

TEST(a_query_that_makes_no_sense_is_refused_and_others_are_answered) {
  Fixture f;
  CHECK_OK(f.peer.call_one(f.push(1, 1)).status());
  Frame numbers = about(Op::kQuery, f.table, kShard, 1, a_query(Function::kCount), bytes_of<float>({1}));
  CHECK_CODE(f.peer.call_one(numbers).status(), Code::kShapeMismatch);
  Frame lying = about(Op::kQuery, f.table, kShard, 1, a_query(Function::kCount));
  lying.header.flags = wire::kInArenas;
  lying.places.emplace();
  CHECK_CODE(f.peer.call_one(lying).status(), Code::kInvalidArgument);
  const std::string user(1, '\xFF');
  for (const std::string& wrong : {std::string(), std::string("\1"), user, a_query(Function::kCount, "x"),
                                   a_query(Function::kTop, "", limits::kTopMax + 1, the_norm())}) {
    CHECK_CODE(f.peer.call_one(about(Op::kQuery, f.table, kShard, 1, wrong)).status(), Code::kInvalidArgument);
    CHECK_CODE(f.peer.call_one(about(Op::kQuery, f.tensor, 0, 0, wrong)).status(), Code::kInvalidArgument);
  }
  // Updates are counted in tables alone.
  const std::string updated = std::string(1, '\x0A') + std::string(1, '\x0A') + std::string(1, '\x2C');
  CHECK_EQ(f.count(1, updated), 10u);
  CHECK_CODE(f.peer.call_one(about(Op::kQuery, f.tensor, 0, 0, a_query(Function::kCount, updated))).status(),
             Code::kInvalidArgument);
  CHECK_EQ(f.count(1), 10u);
}

TEST(random_queries_are_refused_or_answered) {
  Fixture f;
  test::Random random(test::seed());
  CHECK_OK(f.peer.call_one(f.push(1, 1)).status());
  const std::string good[] = {a_query(Function::kCount, above(1, 0)),
                              a_query(Function::kTop, above(0, 1), 3, the_norm()),
                              a_query(Function::kHistogram, "", 0, "", false, {0, 1, 2}), a_query(Function::kSum)};
  for (int round = 0; round < (test::accurate() ? 50'000 : 3000); ++round) {
    std::string bytes = good[random.below(4)];
    for (uint64_t n = 1 + random.below(3); n != 0; --n) {
      switch (random.below(3)) {
        case 0: bytes[random.below(bytes.size())] = static_cast<char>(random.next()); break;
        case 1: bytes.resize(1 + random.below(bytes.size())); break;
        default: bytes += static_cast<char>(random.next());
      }
    }
    const FramePart p = f.peer.call_one(random.below(2) == 0 ? about(Op::kQuery, f.table, kShard, 1, bytes)
                                                             : about(Op::kQuery, f.tensor, 0, 0, bytes));
    CHECK(p.status().ok() || p.status().code() == Code::kInvalidArgument);
  }
  CHECK_EQ(f.count(1), 10u);
}

}  // namespace windlass::query_test
