// A shard that moves is the same at its new server: numbers, rule state, rows, and what it remembers of its sessions.
// The server that it leaves decides, and whatever goes wrong on the way leaves it where it was.
#include "server/move/move_test.h"

#include <algorithm>
#include <cmath>

#include "server/net/peer_test.h"

namespace windlass::move_test {
namespace {

using test::a_table;
using test::a_tensor;
using test::all_chunks;
using test::bytes_of;
using test::deliver;
using test::Frame;
using test::FramePart;
using test::hello_as;
using test::keys_in;
using test::move_shard;
using test::on_keys;
using test::on_whole;
using test::Peer;
using test::Sent;
using wire::Op;

constexpr uint64_t kNoLimit = ~uint64_t{0};
constexpr uint64_t kSession = 4711;

// Two hosts with one object, all of it on the first, and one client of both.
struct Pair {
  explicit Pair(const ObjectSpec& what, uint64_t memory = kNoLimit, uint64_t second_memory = kNoLimit)
      : spec(what),
        hosts{std::make_unique<Host>(2, memory), std::make_unique<Host>(2, second_memory)},
        peers{greeted(0), greeted(1)} {
    map.object = 1;
    map.runs = {{0, 0, 1}};
    for (Peer& peer : peers) CHECK_OK(peer.attach(spec, map));
  }
  Peer greeted(uint32_t i) { return Peer::greeted(*hosts[i], "key", kSession, hello_as(0, "app", {"x:1", "y:2"}, i)); }
  Status move(uint32_t shard, uint32_t from, uint32_t term) {
    return move_shard(*hosts[from], *hosts[1 - from], 1, shard, 1 - from, term);
  }
  // The request as a client with that term makes it.
  FramePart ask(uint32_t at, Frame frame, uint32_t term) {
    frame.parts[0].part.term = term;
    return peers[at].call_one(frame);
  }
  FramePart fingerprint(uint32_t at, uint32_t shard, uint32_t term) {
    return ask(at, test::about(Op::kFingerprint, map, shard, 0), term);
  }
  Shard& shard(uint32_t at, uint32_t i) { return *hosts[at]->find(1)->find(i); }

  const ObjectSpec spec;
  std::unique_ptr<Host> hosts[2];
  Peer peers[2];
  Map map;
};

Frame with_hyper(Frame frame) {
  frame.hyper = {0.1, 0.9, 0.999, 1e-8, 0.01, 0.5, 0.5, 0.5};
  return frame;
}

template <class T>
std::string some(size_t n, uint64_t seed) {
  test::Random random(seed);
  std::vector<T> all(n);
  for (T& x : all) x = static_cast<T>(static_cast<int64_t>(random.below(2000)) - 1000) / static_cast<T>(8);
  return bytes_of(all);
}
std::string some(Dtype dtype, size_t n, uint64_t seed) {
  if (dtype == Dtype::kFloat64) return some<double>(n, seed);
  return dtype == Dtype::kInt64 ? some<int64_t>(n, seed) : some<float>(n, seed);
}

// What is pushed to a table's shard, under the next sequence.
struct RowPusher {
  Pair& pair;
  uint32_t shard;
  uint64_t sequence = 0;

  Status push(uint32_t at, uint32_t term, const std::vector<uint64_t>& keys) {
    const std::string numbers = some<float>(keys.size() * pair.spec.table.dim, ++sequence);
    return pair.ask(at, with_hyper(on_keys(Op::kPush, pair.map, shard, sequence, keys, numbers)), term).status();
  }
  FramePart erase(uint32_t at, uint32_t term, const std::vector<uint64_t>& keys) {
    return pair.ask(at, on_keys(Op::kErase, pair.map, shard, ++sequence, keys), term);
  }
  FramePart rows(uint32_t at, uint32_t term) { return pair.ask(at, test::about(Op::kRows, pair.map, shard, 0), term); }
};

std::vector<uint64_t> keys_of(uint32_t shard, uint64_t first, size_t n) {
  std::vector<uint64_t> keys;
  for (size_t i = 0; i < n; ++i) keys.push_back(key_of(shard, mix(first + i) << 8));
  return keys;
}

}  // namespace

TEST(a_tensors_shard_is_the_same_at_its_new_server_whatever_its_dtype_and_rule) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kInt64}) {
    for (const RuleKind kind : our_rules()) {
      if (dtype != Dtype::kFloat32 && !layout_of(kind).any_dtype) continue;
      ObjectSpec spec = a_tensor("w", {4000, 10}, dtype, kind);
      if (dtype == Dtype::kFloat32) spec.tensor.init = {InitKind::kNormal, 0.0, 1.0};
      Pair pair(spec);
      const Cut cut = Cut::of(40'000, 10, size_of(dtype));
      for (uint32_t shard = 0; shard < cut.shards; ++shard) {
        const size_t n = cut.end_of(shard) - cut.first_of(shard);
        for (uint64_t i = 1; i <= 3; ++i)
          CHECK_OK(
              pair.ask(0, with_hyper(on_whole(Op::kPush, pair.map, shard, i, some(dtype, n, i), dtype)), 1).status());
      }
      for (const uint32_t shard : {1u, cut.shards - 1}) {
        const size_t n = cut.end_of(shard) - cut.first_of(shard);
        const uint64_t before = pair.fingerprint(0, shard, 1).part.value;
        CHECK_OK(pair.move(shard, 0, 2));
        CHECK_EQ(pair.fingerprint(1, shard, 2).part.value, before);
        CHECK_EQ(pair.shard(1, shard).count, 3u);
        // A repeat is acknowledged and not applied; the next one is.
        FramePart p = pair.ask(1, with_hyper(on_whole(Op::kPush, pair.map, shard, 3, some(dtype, n, 3), dtype)), 2);
        CHECK_OK(p.status());
        CHECK_EQ(p.part.sequence, 3u);
        CHECK_EQ(p.part.value, 4u);  // the version, plus one
        CHECK_EQ(pair.fingerprint(1, shard, 2).part.value, before);
        p = pair.ask(1, with_hyper(on_whole(Op::kPush, pair.map, shard, 4, some(dtype, n, 4), dtype)), 2);
        CHECK_OK(p.status());
        const uint64_t after = pair.fingerprint(1, shard, 2).part.value;
        CHECK(after != before);
        CHECK_OK(pair.move(shard, 1, 3));  // and home again
        CHECK_EQ(pair.fingerprint(0, shard, 3).part.value, after);
        CHECK_EQ(pair.shard(0, shard).version, 4u);
      }
    }
  }
}

TEST(a_tables_shard_is_the_same_at_its_new_server_whatever_its_rule) {
  for (const RuleKind kind : our_rules()) {
    for (const uint32_t dim : {1u, 5u, 33u}) {
      ObjectSpec spec = a_table("t", dim, kind);
      spec.table.init = {InitKind::kUniform, -1.0, 1.0};
      Pair pair(spec);
      RowPusher rows{pair, 7};
      for (int i = 0; i < 3; ++i) CHECK_OK(rows.push(0, 1, keys_of(7, 0, 700)));
      CHECK_EQ(rows.erase(0, 1, keys_of(7, 100, 50)).part.value, 50u);
      CHECK_OK(rows.push(0, 1, keys_of(7, 120, 10)));
      const uint64_t before = pair.fingerprint(0, 7, 1).part.value;
      CHECK_OK(pair.move(7, 0, 2));
      CHECK_EQ(pair.fingerprint(1, 7, 2).part.value, before);
      CHECK_EQ(rows.rows(1, 2).part.value, 660u);
      CHECK_EQ(pair.hosts[0]->find(1)->table()->rows(7), 0u);
      CHECK_EQ(pair.shard(1, 7).version, pair.shard(0, 7).version);
      CHECK_EQ(pair.shard(1, 7).count, 4u);  // what a schedule goes by
      CHECK_OK(rows.push(1, 2, keys_of(7, 90, 50)));
      CHECK_EQ(rows.rows(1, 2).part.value, 690u);
      const uint64_t after = pair.fingerprint(1, 7, 2).part.value;
      CHECK_OK(pair.move(7, 1, 3));
      CHECK_EQ(pair.fingerprint(0, 7, 3).part.value, after);
    }
  }
}

TEST(rows_that_are_made_changed_and_taken_out_during_the_copy_are_right) {
  test::Random random(test::seed());
  for (int round = 0; round < (test::accurate() ? 50 : 5); ++round) {
    Pair pair(a_table("t", 16, RuleKind::kAdam));
    RowPusher rows{pair, 3};
    CHECK_OK(rows.push(0, 1, keys_of(3, 0, 20'000)));
    std::unique_ptr<Departure> departure;
    CHECK_OK(pair.hosts[0]->depart(1, 3, 1, 2, &departure));
    std::vector<Sent> chunks;
    int changes = 40;
    CHECK_OK(all_chunks(*departure, &chunks, [&] {
      if (departure->frozen() || changes-- <= 0) return;
      // Some thousand at once, so that there are several rounds and the index grows.
      CHECK_OK(rows.push(0, 1, keys_of(3, random.below(40'000), 1 + random.below(2000))));
      CHECK_OK(rows.erase(0, 1, keys_of(3, random.below(40'000), 1 + random.below(500))).status());
      CHECK_OK(
          pair.ask(0,
                   on_keys(Op::kPull, pair.map, 3, 0, keys_of(3, 100'000 + random.below(1000), 5), "", wire::kCreates),
                   1)
              .status());
    }));
    CHECK(chunks.size() > 20);
    const Table& table = *pair.hosts[0]->find(1)->table();
    const uint64_t print = table.fingerprint(3), n = table.rows(3);
    Arrival arrival(*pair.hosts[1]);
    for (const Sent& sent : chunks) CHECK_OK(deliver(arrival, sent));
    CHECK(arrival.complete());
    CHECK_OK(departure->commit());
    CHECK_EQ(pair.fingerprint(1, 3, 2).part.value, print);
    CHECK_EQ(rows.rows(1, 2).part.value, n);
    CHECK_OK(rows.push(1, 2, keys_of(3, 0, 10)));
  }
}

TEST(answers_that_cannot_be_made_again_travel_with_their_shard) {
  ObjectSpec spec = a_table("t", 2);
  spec.table.reject_nonfinite = true;
  Pair pair(spec);
  RowPusher rows{pair, 9};
  CHECK_OK(rows.push(0, 1, keys_of(9, 0, 10)));
  CHECK_EQ(rows.erase(0, 1, keys_of(9, 0, 4)).part.value, 4u);
  const Frame bad =
      on_keys(Op::kPush, pair.map, 9, ++rows.sequence, keys_of(9, 0, 1), bytes_of(std::vector<float>{NAN, 1.0f}));
  const FramePart refused = pair.ask(0, bad, 1);
  CHECK_CODE(refused.status(), Code::kNonFinite);
  CHECK_OK(pair.move(9, 0, 2));
  const FramePart again = pair.ask(1, bad, 2);
  CHECK_CODE(again.status(), Code::kNonFinite);
  CHECK(again.items == refused.items);
  CHECK_EQ(pair.ask(1, on_keys(Op::kErase, pair.map, 9, 2, keys_of(9, 0, 4)), 2).part.value, 4u);
  CHECK_EQ(rows.rows(1, 2).part.value, 6u);
}

TEST(a_frozen_shard_parks_what_comes_and_refuses_it_once_it_has_left) {
  for (const bool leaves : {true, false}) {
    Pair pair(a_tensor("w", {10}));
    const std::string ones = bytes_of(std::vector<float>(10, 1.0f));
    CHECK_OK(pair.ask(0, on_whole(Op::kPush, pair.map, 0, 1, ones), 1).status());
    std::unique_ptr<Departure> departure;
    CHECK_OK(pair.hosts[0]->depart(1, 0, 1, 2, &departure));
    std::vector<Sent> chunks;
    CHECK_OK(all_chunks(*departure, &chunks));
    CHECK(departure->frozen());
    const uint64_t push = pair.peers[0].start(on_whole(Op::kPush, pair.map, 0, 2, ones));
    const uint64_t pull = pair.peers[0].start(on_whole(Op::kPull, pair.map, 0, 2));
    const uint64_t read = pair.peers[0].start(test::about(Op::kFingerprint, pair.map, 0, 0));
    CHECK(pair.peers[0].quiet(50));
    // The connection's thread is free: something else is answered.
    CHECK_CODE(pair.ask(0, on_whole(Op::kPull, pair.map, 7, 0), 1).status(), Code::kStaleMap);
    Arrival arrival(*pair.hosts[1]);
    for (const Sent& sent : chunks) CHECK_OK(deliver(arrival, sent));
    if (leaves) CHECK_OK(departure->commit());
    departure->abort();  // after a commit nothing happens
    for (const uint64_t request : {push, pull, read}) {
      const std::vector<FramePart> parts = pair.peers[0].finish(request, 1);
      CHECK_EQ(parts.size(), 1u);
      CHECK_CODE(parts[0].status(), leaves ? Code::kStaleMap : Code::kOk);
      if (leaves) CHECK_EQ(parts[0].part.term, 2u);
      if (leaves) CHECK_EQ(parts[0].part.value, 1u);
    }
    const FramePart there =
        pair.ask(leaves ? 1 : 0, on_whole(Op::kPush, pair.map, 0, leaves ? 2 : 3, ones), leaves ? 2 : 1);
    CHECK_OK(there.status());
    CHECK_EQ(there.part.value, leaves ? 3u : 4u);
  }
}

TEST(an_update_that_a_view_completes_while_its_shard_is_copied_is_made_once_at_either_place) {
  for (const bool leaves : {true, false}) {
    ObjectSpec spec = a_tensor("w", {10});
    spec.tensor.sync = {Sync::kBsp, 0, 0};
    Pair pair(spec);
    for (const auto& host : pair.hosts) host->set_view("app", 1, {{0, kSession, true}, {1, 999, true}}, {});
    Frame frame = on_whole(Op::kPush, pair.map, 0, 1, bytes_of(std::vector<float>(10, 1.0f)));
    frame.parts[0].part.flags |= wire::kCloses;
    const uint64_t push = pair.peers[0].start(frame);
    CHECK(pair.peers[0].quiet(50));  // it waits for the other worker
    std::unique_ptr<Departure> departure;
    CHECK_OK(pair.hosts[0]->depart(1, 0, 1, 2, &departure));
    bool lost = false;
    std::vector<Sent> chunks;
    CHECK_OK(all_chunks(*departure, &chunks, [&] {
      if (!departure->frozen() || std::exchange(lost, true)) return;
      for (const auto& host : pair.hosts) host->set_view("app", 2, {{0, kSession, true}}, {});
    }));
    CHECK(lost);
    Arrival arrival(*pair.hosts[1]);
    for (const Sent& sent : chunks) CHECK_OK(deliver(arrival, sent));
    if (leaves) CHECK_OK(departure->commit());
    departure->abort();
    CHECK_CODE(pair.peers[0].finish(push, 1)[0].status(), leaves ? Code::kStaleMap : Code::kOk);
    const FramePart there = pair.ask(leaves ? 1 : 0, on_whole(Op::kPull, pair.map, 0, 1), leaves ? 2 : 1);
    CHECK_OK(there.status());
    CHECK(there.numbers == bytes_of(std::vector<float>(10, 1.0f)));
  }
}

TEST(a_copy_counts_only_once_somebody_comes_under_its_term) {
  Pair pair(a_tensor("w", {10}));
  const std::string ones = bytes_of(std::vector<float>(10, 1.0f));
  CHECK_OK(pair.ask(0, on_whole(Op::kPush, pair.map, 0, 1, ones), 1).status());
  CHECK_OK(pair.move(0, 0, 2));
  CHECK_OK(pair.ask(1, on_whole(Op::kPull, pair.map, 0, 1), 2).status());
  {
    // It would go home, but the answer is lost.
    std::unique_ptr<Departure> departure;
    CHECK_OK(pair.hosts[1]->depart(1, 0, 0, 3, &departure));
    std::vector<Sent> chunks;
    CHECK_OK(all_chunks(*departure, &chunks));
    Arrival arrival(*pair.hosts[0]);
    for (const Sent& sent : chunks) CHECK_OK(deliver(arrival, sent));
    CHECK(arrival.complete());
  }
  // Who asks there under an old term hears what was known before, and everything goes on where it was.
  FramePart p = pair.ask(0, on_whole(Op::kPull, pair.map, 0, 0), 1);
  CHECK_CODE(p.status(), Code::kStaleMap);
  CHECK_EQ(p.part.term, 2u);
  CHECK_EQ(p.part.value, 1u);
  CHECK_OK(pair.ask(1, on_whole(Op::kPush, pair.map, 0, 2, ones), 2).status());
  // The same again, under the same term, takes its place.
  CHECK_OK(pair.move(0, 1, 3));
  p = pair.ask(0, on_whole(Op::kPull, pair.map, 0, 2), 3);
  CHECK_OK(p.status());
  CHECK_EQ(p.part.value, 3u);
  // Now that it counts, an old term is told the right one.
  p = pair.ask(0, on_whole(Op::kPull, pair.map, 0, 0), 1);
  CHECK_CODE(p.status(), Code::kStaleMap);
  CHECK_EQ(p.part.term, 3u);
  CHECK_EQ(p.part.value, 0u);
  // A move that has been made is not made again, and one that makes no sense is refused.
  std::unique_ptr<Departure> departure;
  CHECK_OK(pair.hosts[1]->depart(1, 0, 0, 3, &departure));
  CHECK(departure == nullptr);
  CHECK_CODE(pair.hosts[1]->depart(1, 0, 0, 4, &departure), Code::kStaleMap);
  CHECK_CODE(pair.hosts[0]->depart(1, 0, 0, 4, &departure), Code::kInvalidArgument);
  CHECK_CODE(pair.hosts[0]->depart(1, 0, 1, 3, &departure), Code::kInvalidArgument);
  CHECK_CODE(pair.hosts[0]->depart(1, 1, 1, 4, &departure), Code::kStaleMap);
  CHECK_CODE(pair.hosts[0]->depart(2, 0, 1, 4, &departure), Code::kNotFound);
}

TEST(a_shard_that_does_not_fit_stays_where_it_was_and_leaves_nothing) {
  for (const bool table : {false, true}) {
    const ObjectSpec spec = table ? a_table("t", 256) : a_tensor("w", {uint64_t{1} << 20});  // shards of 64 KiB
    Pair pair(spec, kNoLimit, table ? uint64_t{4} << 20 : 100'000);
    RowPusher rows{pair, 0};
    if (table) CHECK_OK(rows.push(0, 1, keys_of(0, 0, 8000)));
    CHECK_OK(pair.move(5, 0, 2));  // the first fits
    const uint64_t before = pair.fingerprint(0, 0, 1).part.value;
    CHECK_CODE(pair.move(0, 0, 2), Code::kResourceExhausted);
    CHECK_EQ(pair.fingerprint(0, 0, 1).part.value, before);
    CHECK_CODE(pair.fingerprint(1, 0, 2).status(), Code::kStaleMap);
    if (table) CHECK_EQ(pair.hosts[1]->find(1)->table()->rows(0), 0u);
    CHECK_OK(pair.move(5, 1, 3));  // memory that it has left
    if (!table) CHECK_OK(pair.move(0, 0, 2));
    if (!table) CHECK_EQ(pair.fingerprint(1, 0, 2).part.value, before);
  }
}

TEST(an_object_that_the_new_server_does_not_know_comes_along) {
  Pair pair(a_tensor("w", {10}));
  Host third(1, kNoLimit);
  const std::string ones = bytes_of(std::vector<float>(10, 1.0f));
  CHECK_OK(pair.ask(0, on_whole(Op::kPush, pair.map, 0, 1, ones), 1).status());
  CHECK_OK(move_shard(*pair.hosts[0], third, 1, 0, 2, 2));
  CHECK(third.find(1) != nullptr && third.find(1)->spec() == pair.spec);
  Peer peer = Peer::greeted(third, "key", kSession, hello_as(0, "app", {"x:1", "y:2", "z:3"}, 2));
  Frame pull = on_whole(Op::kPull, pair.map, 0, 1);
  pull.parts[0].part.term = 2;
  CHECK(peer.call_one(pull).numbers == ones);
  // One that knows better which number it is refuses.
  CHECK_CODE(move_shard(third, *pair.hosts[1], 1, 0, 0, 3), Code::kInvalidArgument);
}

TEST(a_shard_may_come_to_a_server_of_a_cluster_before_any_client_has_told_it_of_the_object) {
  for (const uint64_t cluster : {uint64_t{7}, uint64_t{0}}) {
    for (const uint32_t term : {1u, 3u}) {  // of what else should be there
      Host source(1, kNoLimit), target(1, kNoLimit);
      source.set_cluster(cluster, 0);
      target.set_cluster(cluster, 1);
      Hello hello = hello_as(0, "app", {"x:1", "y:2"}, 0);
      hello.cluster = cluster;
      if (cluster != 0) source.set_view("app", 1, {{0, kSession, true}}, {});
      Peer peer = Peer::greeted(source, "key", kSession, hello);
      Map map;
      map.object = 1;
      map.runs = {{0, 0, 1}, {1, 1, term}};
      for (Host* const host : {&source, &target}) {
        if (cluster != 0) host->know_object(a_tensor("w", {40'000}), map);
      }
      CHECK_OK(peer.attach(a_tensor("w", {40'000}), map));
      const Status status = move_shard(source, target, 1, 0, 1, 4);
      // Without a scheduler nobody knows whether the target is what it was; and what came there cannot be made anew.
      if (cluster == 0 || term != Map::kFirstTerm) {
        CHECK(status.code() == Code::kNotFound);
        continue;
      }
      CHECK_OK(status);
      CHECK(target.find(1)->find(0)->home.state == Residence::kArrived);
      CHECK(target.find(1)->find(1)->home.state == Residence::kHere);
    }
  }
}

TEST(a_server_may_hold_any_shards_of_a_tensor_from_the_beginning) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "key", kSession, hello_as(0, "app", {"x:1", "y:2"}, 1));
  const ObjectSpec spec = a_tensor("w", {100'000}, Dtype::kFloat32, RuleKind::kSum);  // 7 shards
  Map map;
  map.object = 1;
  map.runs = {{0, 1, 1}, {1, 0, 2}, {2, 1, 1}, {5, 0, 1}, {6, 1, 1}};
  CHECK_OK(peer.attach(spec, map));
  for (uint32_t shard = 0; shard < 7; ++shard) {
    const Map::Owned& owned = map.run_of(shard);
    const FramePart p = peer.call_one(on_whole(Op::kPull, map, shard, 0));
    CHECK_CODE(p.status(), owned.server == 1 ? Code::kOk : Code::kStaleMap);
    if (owned.server == 1) continue;
    CHECK_EQ(p.part.term, owned.term);
    CHECK_EQ(p.part.value, owned.server);
  }
}

// Whatever bytes arrive, they are refused with a typed error or make a shard that can be used, and nothing is left
// behind of those that are refused.
TEST(mutated_shards_are_refused_and_leave_nothing_behind) {
  test::Random random(test::seed());
  for (const bool table : {false, true}) {
    const ObjectSpec spec =
        table ? a_table("t", 3, RuleKind::kAdam) : a_tensor("w", {300, 3}, Dtype::kFloat32, RuleKind::kAdam);
    Pair pair(spec);
    RowPusher rows{pair, 0};
    if (table) {
      CHECK_OK(rows.push(0, 1, keys_of(0, 0, 300)));
      CHECK_OK(rows.erase(0, 1, keys_of(0, 0, 30)).status());
    } else {
      CHECK_OK(pair.ask(0, with_hyper(on_whole(Op::kPush, pair.map, 0, 1, some<float>(900, 1))), 1).status());
    }
    std::unique_ptr<Departure> departure;
    CHECK_OK(pair.hosts[0]->depart(1, 0, 1, 2, &departure));
    std::vector<Sent> chunks;
    bool changed = false;
    CHECK_OK(all_chunks(*departure, &chunks, [&] {
      if (chunks.size() == 2 && table && !std::exchange(changed, true)) {
        CHECK_OK(rows.erase(0, 1, keys_of(0, 40, 30)).status());
        CHECK_OK(rows.push(0, 1, keys_of(0, 500, 10)));
      }
    }));
    departure.reset();
    const uint64_t print = pair.fingerprint(0, 0, 1).part.value;
    uint64_t refused = 0, taken = 0;
    uint32_t term = 2;
    const int rounds = test::accurate() ? 100'000 : 3000;
    for (int i = 0; i < rounds; ++i) {
      std::vector<Sent> mutant = chunks;
      // Mostly one thing is wrong, and the checksums are put right again, or nothing else would ever be looked at.
      const int harms = 1 + static_cast<int>(random.below(3));
      for (int h = 0; h < harms; ++h) {
        const size_t which = random.below(mutant.size());
        Sent& sent = mutant[which];
        switch (random.below(8)) {
          case 0: mutant.erase(mutant.begin() + static_cast<ptrdiff_t>(which)); break;
          case 1: mutant.insert(mutant.begin() + static_cast<ptrdiff_t>(which), sent); break;
          case 2: std::swap(sent, mutant[random.below(mutant.size())]); break;
          case 3: sent.body.resize(random.below(2 * sent.body.size() + 2)); break;
          case 4: sent.head[random.below(64)] = static_cast<char>(random.next()); break;
          default:
            for (size_t n = 1 + random.below(8); n != 0 && !sent.body.empty(); --n) {
              const size_t at = random.below(sent.body.size());
              sent.body[at] = static_cast<char>(random.below(3) == 0 ? 0xFF : random.next());
            }
        }
        if (mutant.empty()) break;
      }
      const bool repairs = random.below(10) != 0;
      uint32_t number = 0;
      for (Sent& sent : mutant) {
        Chunk chunk;
        std::memcpy(&chunk, sent.head.data(), sizeof chunk);
        chunk.term = random.below(50) == 0 ? chunk.term : term;
        if (repairs) {
          if (random.below(4) != 0) chunk.number = number;
          if (random.below(8) != 0) chunk.bytes = sent.body.size();
          chunk.body_crc = crc32c(sent.body.data(), sent.body.size());
          encode(chunk, reinterpret_cast<std::byte*>(sent.head.data()));
        }
        ++number;
      }
      Arrival arrival(*pair.hosts[1]);
      Status status;
      for (const Sent& sent : mutant) {
        status = deliver(arrival, sent);
        if (!status.ok()) break;
      }
      if (arrival.complete()) {
        ++taken;
        ++term;                                         // the next takes its place
        ServedObject& there = *pair.hosts[1]->find(1);  // numbers may be any: they can be read
        (void)(table ? there.table()->fingerprint(0) : there.tensor_of(0).fingerprint(0));
        continue;
      }
      ++refused;
      arrival.close();
      CHECK(status.ok() || !status.message().empty());
      const Residence& home = pair.shard(1, 0).home;
      CHECK(home.state == Residence::kElsewhere || home.state == Residence::kArrived);
      if (table && home.state == Residence::kElsewhere) CHECK_EQ(pair.hosts[1]->find(1)->table()->rows(0), 0u);
    }
    CHECK(taken > 0);
    CHECK(refused > 0);
    CHECK_EQ(pair.fingerprint(0, 0, 1).part.value, print);
    // What it should be comes all the same.
    CHECK_OK(pair.move(0, 0, term + 1));
    CHECK_EQ(pair.fingerprint(1, 0, term + 1).part.value, print);
  }
}

}  // namespace windlass::move_test
