#include "server/host.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>

#include "server/net/peer_test.h"

namespace windlass::host_test {
namespace {

using test::a_table;
using test::a_tensor;
using test::about;
using test::after_ms;
using test::bytes_of;
using test::eventually;
using test::Frame;
using test::frame_of;
using test::FramePart;
using test::hello_as;
using test::in_step;
using test::keys_in;
using test::on_keys;
using test::on_spans;
using test::on_whole;
using test::Peer;
using test::values_of;
using test::with_body;
using wire::Op;

constexpr uint64_t kNoLimit = ~uint64_t{0};

std::string floats(size_t n, float value) { return bytes_of(std::vector<float>(n, value)); }

bool nothing_is_parked(Host& host) { return host.waiting().used() == 0; }

// A host with one of each: a tensor of three shards that refuses NaN, a table that does, and one session's view of it.
struct Fixture {
  static constexpr uint64_t kElements = 40'000;  // float32: 16384 + 16384 + 7232
  static constexpr uint64_t kPerShard = 16'384;
  static constexpr uint32_t kShards = 3, kDim = 4;

  explicit Fixture(int threads = 2, uint64_t memory_bytes_max = kNoLimit)
      : host(threads, memory_bytes_max), peer(Peer::greeted(host, "key")) {
    tensor_spec.tensor.reject_nonfinite = true;
    table_spec.table.reject_nonfinite = true;
    tensor = peer.made(tensor_spec);
    table = peer.made(table_spec);
    CHECK_EQ(Cut::of(kElements, 1, 4).shards, kShards);
    for (uint32_t s = 0; s < kShards; ++s) {
      const uint64_t n = std::min(kPerShard, kElements - s * kPerShard);
      CHECK_OK(peer.call_one(on_whole(Op::kPush, tensor, s, 1, floats(n, 1.0f + static_cast<float>(s)))).status());
    }
    const std::vector<uint64_t> keys = keys_in(7, 10);
    CHECK_OK(peer.call_one(on_keys(Op::kPush, table, 7, 1, keys, floats(10 * kDim, 3.0f))).status());
  }
  uint64_t fingerprint() { return peer.fingerprint(tensor, kShards) + peer.fingerprint(table, limits::kTableShards); }
  uint64_t rows() {
    Frame f = frame_of(Op::kRows, table.object);
    for (uint32_t s = 0; s < limits::kTableShards; ++s) f.parts.push_back({{.shard = s, .term = 1}, "", ""});
    uint64_t sum = 0;
    for (const FramePart& p : peer.call(f)) sum += p.part.value;
    return sum;
  }
  // The number of the next push to the shard.
  uint64_t next(const Map& map, uint32_t shard) {
    return peer.call_one(frame_of_one(Op::kFingerprint, map, shard)).part.sequence + 1;
  }
  static Frame frame_of_one(Op op, const Map& map, uint32_t shard) { return about(op, map, shard, 0); }

  Host host;
  Peer peer;
  ObjectSpec tensor_spec = a_tensor("w", {kElements}), table_spec = a_table("t", kDim);
  Map tensor, table;
};

// The frame, with another count of items than it has.
Frame claiming(Frame frame, uint32_t items) {
  frame.parts[0].part.items = items;
  return frame;
}

}  // namespace

TEST(a_client_made_by_hand_pushes_and_pulls_a_tensor) {
  Fixture f;
  // Some elements of one shard, the numbers one behind the other.
  FramePart p = f.peer.call_one(on_spans(Op::kPull, f.tensor, 1, 0, {16'384, 2, 20'000, 3}));
  CHECK_OK(p.status());
  CHECK(values_of<float>(p.numbers) == std::vector<float>(5, 2.0f));
  CHECK_EQ(p.part.shard, 1u);
  CHECK_EQ(p.part.sequence, 1u);
  CHECK_EQ(p.part.value, 2u);  // the version, plus one
  p = f.peer.call_one(on_spans(Op::kPush, f.tensor, 1, 2, {16'385, 1, 20'002, 2}, bytes_of<float>({10, 20, 30})));
  CHECK_OK(p.status());
  CHECK(p.numbers.empty());
  CHECK_EQ(p.part.value, 3u);
  p = f.peer.call_one(
      on_spans(Op::kPushPull, f.tensor, 1, 3, {16'384, 2, 20'001, 3}, bytes_of<float>({100, 200, 300, 400, 500})));
  CHECK_OK(p.status());
  CHECK(values_of<float>(p.numbers) == std::vector<float>({102, 212, 302, 422, 532}));
  CHECK_EQ(p.part.sequence, 3u);
  // Nothing newer than what the client has: no numbers.
  Frame newer = on_whole(Op::kPull, f.tensor, 1, 3);
  newer.parts[0].part.value = p.part.value;
  p = f.peer.call_one(newer);
  CHECK_OK(p.status());
  CHECK(p.numbers.empty() && (p.part.flags & wire::kUnchanged) != 0);
  newer.parts[0].part.value -= 1;
  p = f.peer.call_one(newer);
  CHECK_EQ(p.numbers.size(), Fixture::kPerShard * 4);
  CHECK((p.part.flags & wire::kUnchanged) == 0);
}

TEST(numbers_travel_in_other_types_and_with_checksums) {
  Fixture f;
  for (const bool summed : {false, true}) {
    for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16, Dtype::kFloat32}) {
      Frame pull = on_spans(Op::kPull, f.tensor, 0, 0, {0, 3});
      pull.header.dtype_out = static_cast<uint8_t>(dtype);
      pull.header.flags = summed ? wire::kChecksummed : 0;
      const FramePart p = f.peer.call_one(pull);  // which checks the sums
      CHECK_OK(p.status());
      CHECK_EQ(p.numbers.size(), 3 * size_of(dtype));
      const uint16_t one = values_of<uint16_t>(p.numbers)[dtype == Dtype::kFloat32 ? 1 : 0];
      CHECK_EQ(one, dtype == Dtype::kFloat16 ? 0x3C00 : 0x3F80);
      CHECK((p.part.numbers_crc != 0) == summed);
    }
  }
  const Map sums = f.peer.made(a_tensor("i", {10}, Dtype::kInt64));
  const std::vector<int64_t> g(10, -(int64_t{1} << 62));
  const FramePart p = f.peer.call_one(on_whole(Op::kPushPull, sums, 0, 1, bytes_of(g), Dtype::kInt64));
  CHECK_OK(p.status());
  CHECK(values_of<int64_t>(p.numbers) == g);
}

TEST(a_client_made_by_hand_uses_a_table) {
  Fixture f;
  const std::vector<uint64_t> keys = keys_in(7, 12);
  FramePart p = f.peer.call_one(on_keys(Op::kPull, f.table, 7, 1, keys));
  CHECK_OK(p.status());
  std::vector<float> want(12 * Fixture::kDim, 0.0f);
  std::fill_n(want.begin(), 10 * Fixture::kDim, 3.0f);
  CHECK(values_of<float>(p.numbers) == want);
  CHECK_EQ(f.rows(), 10u);  // looking makes no rows
  p = f.peer.call_one(on_keys(Op::kPull, f.table, 7, 1, keys, "", wire::kCreates));
  CHECK_OK(p.status());
  CHECK_EQ(f.rows(), 12u);
  p = f.peer.call_one(on_keys(Op::kPushPull, f.table, 7, 2, {keys[0], keys[11]}, floats(2 * Fixture::kDim, 1.0f)));
  CHECK_OK(p.status());
  CHECK(values_of<float>(p.numbers) == std::vector<float>({4, 4, 4, 4, 1, 1, 1, 1}));
  p = f.peer.call_one(on_keys(Op::kErase, f.table, 7, 3, {keys[1], keys[2], keys_in(7, 100)[99]}));
  CHECK_OK(p.status());
  CHECK_EQ(p.part.value, 2u);
  CHECK_EQ(f.rows(), 10u);

  // An export in pieces of 4 has every row once.
  std::map<uint64_t, std::vector<float>> all;
  uint64_t cursor = 0;
  for (bool more = true; more;) {
    Frame scan = about(Op::kScan, f.table, 7, 3, bytes_of<uint64_t>({4}));
    scan.parts[0].part.value = cursor;
    p = f.peer.call_one(scan);
    CHECK_OK(p.status());
    const std::vector<uint64_t> got = values_of<uint64_t>(p.items);
    const std::vector<float> rows = values_of<float>(p.numbers);
    CHECK_EQ(p.part.items, got.size());
    CHECK_EQ(rows.size(), got.size() * Fixture::kDim);
    for (size_t i = 0; i < got.size(); ++i) {
      CHECK(all.emplace(got[i], std::vector<float>(&rows[i * Fixture::kDim], &rows[(i + 1) * Fixture::kDim])).second);
    }
    CHECK(!got.empty() || (p.part.flags & wire::kMore) == 0);
    cursor = p.part.value;
    more = (p.part.flags & wire::kMore) != 0;
  }
  CHECK_EQ(all.size(), 10u);
  CHECK(all[keys[0]] == std::vector<float>(4, 4.0f));
  CHECK(all[keys[5]] == std::vector<float>(4, 3.0f));
}

TEST(a_request_of_many_parts_is_answered_part_by_part) {
  Host host(3, kNoLimit);
  Peer peer = Peer::greeted(host, "key");
  constexpr uint64_t kElements = 1 << 20;  // int64: 8 MiB, and the crew helps
  const Map map = peer.made(a_tensor("w", {kElements}, Dtype::kInt64));
  const Cut cut = Cut::of(kElements, 1, 8);
  CHECK_EQ(cut.shards, 64u);
  for (uint64_t n = 1; n <= 5; ++n) {
    Frame push = frame_of(n % 2 == 0 ? Op::kPush : Op::kPushPull, map.object);
    push.header.dtype_in = push.header.dtype_out = static_cast<uint8_t>(Dtype::kInt64);
    push.header.flags = n % 3 == 0 ? wire::kChecksummed : 0;
    for (uint32_t s = 0; s < cut.shards; ++s) {
      std::vector<int64_t> g(cut.end_of(s) - cut.first_of(s), static_cast<int64_t>(n * 1000 + s));
      Frame one = on_whole(Op::kPush, map, s, n, bytes_of(g), Dtype::kInt64);
      push.parts.push_back(one.parts[0]);
    }
    std::atomic<bool> sent{false};
    push.header.request = 100 + n;
    peer.stamp(&push);
    std::thread sender([&] { sent = peer.send(push.bytes()); });  // answers come while it is still being sent
    std::vector<FramePart> answer = peer.finish(100 + n, cut.shards);
    sender.join();
    CHECK(sent.load());
    CHECK_EQ(answer.size(), cut.shards);
    std::vector<bool> seen(cut.shards);
    for (const FramePart& p : answer) {
      CHECK_OK(p.status());
      CHECK(!seen[p.part.shard]);
      seen[p.part.shard] = true;
      const int64_t want = static_cast<int64_t>(n * (n + 1) / 2 * 1000 + n * p.part.shard);
      const std::vector<int64_t> got = values_of<int64_t>(p.numbers);
      CHECK_EQ(got.size(), n % 2 == 0 ? 0 : cut.end_of(p.part.shard) - cut.first_of(p.part.shard));
      CHECK(std::all_of(got.begin(), got.end(), [&](int64_t x) { return x == want; }));
    }
  }
}

TEST(a_step_has_parts_about_any_object_and_is_answered_part_by_part) {
  Fixture f;
  const std::vector<uint64_t> keys = keys_in(7, 2);
  Frame step = in_step({on_whole(Op::kPush, f.tensor, 0, 2, floats(Fixture::kPerShard, 1)),
                        on_spans(Op::kPull, f.tensor, 0, 2, {5, 2}),  // which sees that push
                        on_keys(Op::kPushPull, f.table, 7, 2, keys, floats(2 * Fixture::kDim, 1)),
                        on_whole(Op::kPush, f.tensor, 0, 3, floats(Fixture::kPerShard, 1)),
                        on_spans(Op::kPull, f.tensor, 2, 1, {32'768, 1})});
  for (const uint8_t bulk : {0, 1}) {
    step.header.lane = bulk;
    std::vector<FramePart> parts = f.peer.call(step);
    CHECK_EQ(parts.size(), 5u);
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.part.shard < b.part.shard; });
    for (uint32_t i = 0; i < 5; ++i) {
      CHECK_OK(parts[i].status());
      CHECK_EQ(parts[i].part.shard, i);
    }
    CHECK(values_of<float>(parts[1].numbers) == std::vector<float>(2, bulk == 0 ? 2.0f : 3.0f));
    CHECK(values_of<float>(parts[2].numbers) == std::vector<float>(2 * Fixture::kDim, 4.0f));
    CHECK(values_of<float>(parts[4].numbers) == std::vector<float>(1, 3.0f));
    CHECK_EQ(parts[3].part.sequence, 3u);
  }  // the second time it was a repeat, and changed nothing
  CHECK(values_of<float>(f.peer.call_one(on_spans(Op::kPull, f.tensor, 0, 3, {0, 1})).numbers) ==
        std::vector<float>(1, 3.0f));
}

TEST(parts_of_a_step_that_make_no_sense_are_refused_one_by_one) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  const Frame good = on_spans(Op::kPull, f.tensor, 0, 1, {5, 2});
  const auto spoiled = [&](auto spoil) {
    Frame step = in_step({good, good});
    spoil(&step.parts[1]);
    std::vector<FramePart> parts = f.peer.call(step);
    CHECK_EQ(parts.size(), 2u);
    if (parts[0].part.shard != 0) std::swap(parts[0], parts[1]);
    CHECK_OK(parts[0].status());
    return parts[1].status();
  };
  for (const Op op : {Op::kErase, Op::kStep, Op::kHello, static_cast<Op>(0), static_cast<Op>(200)})
    CHECK_CODE(spoiled([op](FramePart* p) { p->about->op = static_cast<uint8_t>(op); }), Code::kInvalidArgument);
  CHECK_CODE(spoiled([](FramePart* p) { p->about->dtype_in = 5; }), Code::kInvalidArgument);
  CHECK_CODE(spoiled([](FramePart* p) { p->about->dtype_out = 255; }), Code::kInvalidArgument);
  CHECK_CODE(spoiled([](FramePart* p) { p->about->hypers_claimed = 12; }), Code::kInvalidArgument);
  CHECK_CODE(spoiled([](FramePart* p) { p->about->hypers_claimed = 8; }), Code::kInvalidArgument);  // there is no room
  CHECK_CODE(spoiled([](FramePart* p) { p->about->object = 60'000; }), Code::kNotFound);
  CHECK_CODE(spoiled([](FramePart* p) { p->part.shard = 3; }), Code::kStaleMap);
  Frame none = in_step({good});
  none.parts[0].items.resize(63);
  CHECK_CODE(f.peer.call_one(none).status(), Code::kShapeMismatch);
  none.parts[0].items.clear();
  CHECK_CODE(f.peer.call_one(none).status(), Code::kShapeMismatch);
  CHECK_EQ(f.fingerprint(), before);
}

TEST(requests_that_arrive_together_are_all_answered_also_when_the_order_is_wrong) {
  for (const bool backwards : {false, true}) {
    Fixture f;
    std::string all;
    constexpr uint64_t kRequests = 60;
    for (uint64_t i = 0; i < kRequests; ++i) {
      const uint64_t n = backwards ? kRequests - i : i + 1;
      Frame push = on_spans(Op::kPushPull, f.tensor, 2, n + 1, {32'768, 1}, bytes_of<float>({1}));
      push.header.request = 1000 + n;
      f.peer.stamp(&push);
      all += push.bytes();
    }
    CHECK(f.peer.send(all));
    for (uint64_t n = 1; n <= kRequests; ++n) {
      const std::vector<FramePart> parts = f.peer.finish(1000 + n, 1);
      CHECK_EQ(parts.size(), 1u);
      CHECK_OK(parts[0].status());
      CHECK(values_of<float>(parts[0].numbers) == std::vector<float>(1, 3.0f + static_cast<float>(n)));
    }
  }
}

TEST(nothing_is_served_before_hello) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  for (uint8_t op = 2; op <= wire::kOpMax; ++op) {
    Peer stranger(f.host, "other");
    stranger.session = f.peer.session;  // even who guesses these
    stranger.app = f.peer.app;
    stranger.start(on_whole(static_cast<Op>(op), f.tensor, 0, 2, floats(Fixture::kPerShard, 9)));
    const Status status = stranger.thrown_out();
    CHECK_CODE(status, Code::kProtocolError);
    CHECK(status.message().find("before hello") != std::string::npos);
  }
  CHECK_EQ(f.fingerprint(), before);
  CHECK_EQ(f.host.clients(), 1u);
}

TEST(frames_of_another_session_or_app_end_the_connection) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  for (const bool session : {false, true}) {
    Peer peer = Peer::greeted(f.host, session ? "a" : "b");
    Frame push = on_whole(Op::kPush, f.tensor, 0, 1, floats(Fixture::kPerShard, 9));
    if (session) {
      push.header.session = f.peer.session;
    } else {
      push.header.app = peer.app + 1;
    }
    peer.start(push);
    CHECK_CODE(peer.thrown_out(), Code::kProtocolError);
  }
  CHECK_EQ(f.fingerprint(), before);
}

TEST(a_session_key_belongs_to_one_session) {
  Fixture f;
  Peer thief(f.host, "key", f.peer.session + 1);
  CHECK_CODE(thief.hello(hello_as()), Code::kAccessDenied);
  Peer other_app(f.host, "key", f.peer.session);
  CHECK_CODE(other_app.hello(hello_as(1, "other")), Code::kAccessDenied);
  thief.start(on_whole(Op::kPull, f.tensor, 0, 0));
  CHECK_CODE(thief.thrown_out(), Code::kProtocolError);  // it is still a stranger
  Peer second = Peer::greeted(f.host, "key", f.peer.session, hello_as(1));
  CHECK_EQ(second.app, f.peer.app);
  CHECK_EQ(f.host.clients(), 1u);
  CHECK_OK(second.call_one(on_whole(Op::kPull, f.tensor, 0, 1)).status());
}

// The scheduler says who has which rank. It tells a worker and a server at the same time, so a hello may be first.
TEST(in_a_cluster_a_worker_is_let_in_once_the_view_has_it_and_nobody_else_is) {
  Host host(1, kNoLimit);
  host.set_cluster(7, 0);
  Hello hello = hello_as();
  hello.cluster = 7;
  std::thread scheduler([&] {
    usleep(100'000);
    host.set_view("app", 1, {{0, 100, true}}, {});
  });
  Peer worker(host, "a", 100);
  CHECK_OK(worker.hello(hello));
  scheduler.join();
  Peer other(host, "b", 200);
  CHECK_CODE(other.hello(hello), Code::kTimeout);
  Peer twin(host, "c", 100);
  CHECK_CODE(twin.hello(hello), Code::kAccessDenied);
  hello.rank = 1;
  hello.world_size = 2;
  Peer elsewhere(host, "d", 100);
  CHECK_CODE(elsewhere.hello(hello), Code::kTimeout);
  hello.rank = hello.world_size = 0;  // a reader
  CHECK_OK(Peer(host, "e", 300).hello(hello));
  host.set_view("app", 2, {{0, 400, false}}, {});
  hello = hello_as(1);
  hello.cluster = 7;
  CHECK_CODE(Peer(host, "a", 100).hello(hello), Code::kClosed);  // it was given up
  CHECK_OK(Peer(host, "f", 400).hello(hello));
  hello.cluster = 0;
  CHECK_CODE(Peer(host, "g", 400).hello(hello), Code::kAccessDenied);
}

TEST(in_a_cluster_objects_are_those_that_the_scheduler_has_told_of) {
  Host host(1, kNoLimit);
  host.set_cluster(7, 0);
  host.set_view("app", 1, {{0, 100, true}}, {});
  Hello hello = hello_as();
  hello.cluster = 7;
  Peer peer = Peer::greeted(host, "a", 100, hello);
  const ObjectSpec spec = a_tensor("w", {100}), other = a_tensor("v", {100});
  Map map, unused;
  map.object = 1;
  map.runs = {{0, 0, 1}};
  CHECK_CODE(peer.attach(spec, map), Code::kTimeout);
  CHECK(host.find(1) == nullptr);
  std::thread scheduler([&] {
    usleep(100'000);
    host.know_object(spec, map);
  });
  CHECK_OK(peer.attach(spec, map));
  scheduler.join();
  CHECK_CODE(peer.attach(other, map), Code::kSpecMismatch);
  CHECK_CODE(peer.open(other, &unused), Code::kInvalidArgument);
  Map gone = map;
  gone.object = 2;
  host.know_object(other, gone);
  CHECK_OK(peer.attach(other, gone));
  host.forget_object(2);
  CHECK(host.find(2) == nullptr);
  CHECK_CODE(peer.attach(other, gone), Code::kDeleted);
}

TEST(a_deleted_object_is_gone_for_those_who_wait_and_those_who_come) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "a");
  const ObjectSpec spec = a_tensor("w", {100});
  const Map map = peer.made(spec);
  const std::string ones = bytes_of(std::vector<float>(100, 1));
  CHECK_OK(peer.call_one(on_whole(Op::kPush, map, 0, 1, ones)).status());
  const uint64_t early = peer.start(on_whole(Op::kPull, map, 0, 3));
  CHECK(peer.quiet(50));
  Peer other = Peer::greeted(host, "b", 7, hello_as(0, "other"));
  CHECK_CODE(other.remove(spec, map), Code::kAccessDenied);
  CHECK(peer.quiet(50));
  CHECK_OK(peer.remove(spec, map));
  CHECK_CODE(peer.finish(early, 1).at(0).status(), Code::kDeleted);
  CHECK_CODE(peer.call_one(on_whole(Op::kPush, map, 0, 2, ones)).status(), Code::kDeleted);
  CHECK_CODE(peer.attach(spec, map), Code::kDeleted);
  CHECK_OK(peer.remove(spec, map));  // as after a lost connection
  CHECK_EQ(host.server().memory_bytes(), 0u);
  const Map again = peer.made(spec);
  CHECK(again.object != map.object);
  CHECK_OK(peer.remove(spec, map));  // and late: it is about the first one
  CHECK_OK(peer.call_one(on_whole(Op::kPush, again, 0, 1, ones)).status());
}

TEST(lists_of_servers_must_agree) {
  Fixture f;
  Peer peer(f.host, "x");
  CHECK_CODE(peer.hello(hello_as(0, "app", {"elsewhere:1"})), Code::kSpecMismatch);
  CHECK_CODE(peer.hello(hello_as(0, "app", {"here:1", "there:2"})), Code::kSpecMismatch);
  CHECK_OK(peer.hello(hello_as()));  // the connection is still good
  CHECK_OK(peer.hello(hello_as()));  // and a second hello changes nothing
  CHECK_EQ(f.host.clients(), 2u);
  Host other(1, kNoLimit);
  {
    const Peer mistyped = Peer::greeted(other, "mistyped", 0, hello_as(0, "app", {"x:1", "z:2"}, 0));
  }
  CHECK(eventually([&] { return other.connections() == 0; }));
  Peer first = Peer::greeted(other, "a", 0, hello_as(0, "app", {"x:1", "y:2"}, 1));
  Peer second(other, "b");
  CHECK_CODE(second.hello(hello_as(0, "app", {"x:1", "y:2"}, 0)), Code::kSpecMismatch);
}

// Its goodbye may still be on the way when somebody else says hello.
TEST(a_client_that_is_about_to_be_gone_binds_nobody_to_its_list) {
  Host host(1, kNoLimit);
  auto leaving = std::make_unique<Peer>(Peer::greeted(host, "leaving", 0, hello_as(0, "app", {"x:1", "y:2"}, 0)));
  std::thread goes([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    leaving.reset();
  });
  Peer next(host, "next");
  CHECK_OK(next.hello(hello_as(0, "app", {"y:2", "x:1"}, 1)));
  goes.join();
}

// One that was forgotten has records that nobody keeps any more: what it sends again could be applied twice.
TEST(a_session_that_comes_back_must_be_known) {
  Fixture f;
  Hello hello = hello_as();
  hello.known = f.host.incarnation();
  Peer forgotten(f.host, "forgotten");
  CHECK_CODE(forgotten.hello(hello), Code::kServerLost);
  Peer back(f.host, "key", f.peer.session);
  CHECK_OK(back.hello(hello));
  CHECK_EQ(f.host.clients(), 1u);
}

TEST(apps_have_numbers_and_sessions_share_them) {
  Host host(1, kNoLimit);
  Peer a = Peer::greeted(host, "a"), b = Peer::greeted(host, "b", 0, hello_as(0, "other"));
  Peer c = Peer::greeted(host, "c");
  CHECK(a.app != 0 && b.app != 0 && a.app != b.app);
  CHECK_EQ(a.app, c.app);
  CHECK_EQ(a.incarnation, host.incarnation());
}

TEST(app_names_that_nobody_uses_are_freed_and_those_in_use_stay) {
  Host host(1, kNoLimit);
  Peer stays = Peer::greeted(host, "stays", 0, hello_as(0, "stays"));
  host.set_view("viewed", 3, {{0, 77, true}}, {});
  for (int i = 0; i < 1000; ++i) {
    Peer peer = Peer::greeted(host, "key" + std::to_string(i), 0, hello_as(0, "app" + std::to_string(i)));
    CHECK(peer.app < 200);
    peer.start(frame_of(Op::kGoodbye));
    CHECK(eventually([&] { return host.clients() == 1; }));
  }
  CHECK(host.sync_stats().size() < 200);
  const auto has = [&](const std::string& app) {
    const auto all = host.sync_stats();
    return std::any_of(all.begin(), all.end(), [&](const auto& one) { return one.first == app; });
  };
  CHECK(has("stays") && has("viewed"));
  host.set_view("never heard of", 1, {}, {});
  CHECK(!has("never heard of"));
  Peer again = Peer::greeted(host, "again", 0, hello_as(0, "stays"));
  CHECK_EQ(again.app, stays.app);
}

TEST(each_wrong_request_is_refused_by_name_and_changes_nothing) {
  Fixture f;
  const uint64_t before = f.fingerprint(), rows = f.rows();
  const float nan = std::nanf(""), inf = INFINITY;
  const std::vector<uint64_t> keys = keys_in(7, 3), others = keys_in(8, 1);
  const std::string three = floats(3 * Fixture::kDim, 1);
  const auto whole = [&](Op op, size_t n, Dtype dtype = Dtype::kFloat32) {
    return on_whole(op, f.tensor, 0, 0, std::string(n * size_of(dtype), '\1'), dtype);
  };
  const auto spans = [&](std::vector<uint64_t> s, size_t n) {
    return on_spans(Op::kPush, f.tensor, 0, 0, s, floats(n, 1));
  };
  const auto changed = [](Frame frame, auto change) {
    change(&frame);
    return frame;
  };
  struct Wrong {
    const char* what;
    Frame frame;
    Code code;
  };
  const uint64_t top = uint64_t{1} << 63, end = Fixture::kPerShard;
  std::vector<Wrong> all = {
      // An object, a shard or a term that is not here.
      {"object 0", changed(whole(Op::kPush, end), [](Frame* x) { x->header.object = 0; }), Code::kNotFound},
      {"object 99", changed(whole(Op::kPush, end), [](Frame* x) { x->header.object = 99; }), Code::kNotFound},
      {"object 2^32-1", changed(whole(Op::kPush, end), [](Frame* x) { x->header.object = ~0u; }), Code::kNotFound},
      {"shard 3", changed(whole(Op::kPush, end), [](Frame* x) { x->parts[0].part.shard = 3; }), Code::kStaleMap},
      {"shard max", changed(whole(Op::kPush, end), [](Frame* x) { x->parts[0].part.shard = ~0u; }), Code::kStaleMap},
      {"term 0", changed(whole(Op::kPush, end), [](Frame* x) { x->parts[0].part.term = 0; }), Code::kStaleMap},
      {"term 2", changed(whole(Op::kPull, 0), [](Frame* x) { x->parts[0].part.term = 2; }), Code::kStaleMap},
      {"shard 256", changed(on_keys(Op::kPull, f.table, 7, 0, keys), [](Frame* x) { x->parts[0].part.shard = 256; }),
       Code::kStaleMap},
      // Shapes.
      {"one short", whole(Op::kPush, end - 1), Code::kShapeMismatch},
      {"one more", whole(Op::kPush, end + 1), Code::kShapeMismatch},
      {"no numbers", whole(Op::kPush, 0), Code::kShapeMismatch},
      {"no numbers to push_pull", whole(Op::kPushPull, 0), Code::kShapeMismatch},
      {"float64", whole(Op::kPush, end, Dtype::kFloat64), Code::kShapeMismatch},
      {"int64", whole(Op::kPush, end, Dtype::kInt64), Code::kShapeMismatch},
      {"numbers to a pull", whole(Op::kPull, end), Code::kShapeMismatch},
      {"float64 out", changed(whole(Op::kPull, 0), [](Frame* x) { x->header.dtype_out = 1; }), Code::kShapeMismatch},
      {"numbers with an empty push",
       changed(whole(Op::kPush, end), [](Frame* x) { x->parts[0].part.flags |= wire::kEmpty; }), Code::kShapeMismatch},
      // Spans.
      {"behind the shard", spans({end, 1}, 1), Code::kShapeMismatch},
      {"across its end", spans({end - 1, 2}, 2), Code::kShapeMismatch},
      {"of another shard", spans({2 * end, 1}, 1), Code::kShapeMismatch},
      {"first 2^63", spans({top, 1}, 1), Code::kShapeMismatch},
      {"count 2^63", spans({0, top}, 1), Code::kShapeMismatch},
      {"count 2^64-1", spans({1, ~uint64_t{0}}, 1), Code::kShapeMismatch},
      {"first 2^64-1", spans({~uint64_t{0}, 2}, 1), Code::kShapeMismatch},
      {"a sum that overflows", spans({0, top, 0, top}, 0), Code::kShapeMismatch},
      {"a sum that is too much", spans({0, end, 0, 1}, end + 1), Code::kShapeMismatch},
      {"fewer numbers than spans", spans({0, 2, 5, 2}, 3), Code::kShapeMismatch},
      {"more items than bytes", changed(spans({0, 1}, 1), [](Frame* x) { x->parts[0].part.items = 2; }),
       Code::kShapeMismatch},
      {"2^32-1 items", changed(spans({0, 1}, 1), [](Frame* x) { x->parts[0].part.items = ~0u; }), Code::kShapeMismatch},
      {"half a span", changed(spans({0, 1}, 1), [](Frame* x) { x->parts[0].items.resize(8); }), Code::kShapeMismatch},
      // Numbers.
      {"NaN", on_spans(Op::kPush, f.tensor, 0, 0, {0, 2}, bytes_of<float>({1, nan})), Code::kNonFinite},
      {"infinity", on_spans(Op::kPushPull, f.tensor, 0, 0, {0, 2}, bytes_of<float>({-inf, 1})), Code::kNonFinite},
      {"NaN for a row", on_keys(Op::kPush, f.table, 7, 0, {keys[0]}, bytes_of<float>({1, 1, nan, 1})),
       Code::kNonFinite},
      // Keys.
      {"a key of another shard", on_keys(Op::kPush, f.table, 7, 0, {keys[0], others[0], keys[1]}, three),
       Code::kInvalidArgument},
      {"a key of another shard to erase", on_keys(Op::kErase, f.table, 7, 0, others), Code::kInvalidArgument},
      {"a key of another shard to pull", on_keys(Op::kPull, f.table, 7, 0, others), Code::kInvalidArgument},
      {"fewer rows than keys", on_keys(Op::kPush, f.table, 7, 0, keys, floats(2 * Fixture::kDim, 1)),
       Code::kShapeMismatch},
      {"half a row", on_keys(Op::kPush, f.table, 7, 0, keys, floats(2, 1)), Code::kShapeMismatch},
      {"rows without keys", on_keys(Op::kPush, f.table, 7, 0, {}, three), Code::kShapeMismatch},
      {"more keys than bytes",
       changed(on_keys(Op::kPush, f.table, 7, 0, keys, three), [](Frame* x) { x->parts[0].part.items = 0x80000003u; }),
       Code::kShapeMismatch},
      {"half a key", changed(on_keys(Op::kPull, f.table, 7, 0, keys), [](Frame* x) { x->parts[0].items.resize(20); }),
       Code::kShapeMismatch},
      {"float64 rows out", changed(on_keys(Op::kPull, f.table, 7, 0, keys), [](Frame* x) { x->header.dtype_out = 1; }),
       Code::kShapeMismatch},
      // An export.
      {"how many?", about(Op::kScan, f.table, 7, 0), Code::kShapeMismatch},
      {"none", about(Op::kScan, f.table, 7, 0, bytes_of<uint64_t>({0})), Code::kInvalidArgument},
      {"2^63", about(Op::kScan, f.table, 7, 0, bytes_of<uint64_t>({top})), Code::kInvalidArgument},
      {"2^64-1", about(Op::kScan, f.table, 7, 0, bytes_of<uint64_t>({~uint64_t{0}})), Code::kInvalidArgument},
      {"2^32", about(Op::kScan, f.table, 7, 0, bytes_of<uint64_t>({uint64_t{1} << 32})), Code::kInvalidArgument},
      // What a tensor has not.
      {"len of a tensor", about(Op::kRows, f.tensor, 0, 0), Code::kInvalidArgument},
      {"export of a tensor", about(Op::kScan, f.tensor, 0, 0, bytes_of<uint64_t>({1})), Code::kInvalidArgument},
      {"delete of a tensor", on_keys(Op::kErase, f.tensor, 0, 0, {1}), Code::kInvalidArgument},
      {"delete of a tensor, of many rows that are not there", claiming(on_keys(Op::kErase, f.tensor, 0, 0, {1}), ~0u),
       Code::kInvalidArgument},
  };
  for (Wrong& wrong : all) {
    const bool tensor = wrong.frame.header.object == f.tensor.object;
    const Map& map = tensor ? f.tensor : f.table;
    const uint32_t shard = tensor ? 0 : 7;
    const Op op = wrong.frame.header.operation();
    const bool pushes = op == Op::kPush || op == Op::kPushPull || op == Op::kErase;
    if (pushes) wrong.frame.parts[0].part.sequence = f.next(map, shard);
    for (int again = 0; again < 2; ++again) {  // a repeat is refused in the same words
      const FramePart p = f.peer.call_one(wrong.frame);
      if (p.code() != wrong.code) test::fail(__FILE__, __LINE__, std::string(wrong.what) + ": " + p.items);
      CHECK(!p.items.empty() && p.numbers.empty());
      CHECK_EQ(p.part.shard, wrong.frame.parts[0].part.shard);
    }
    if (f.fingerprint() != before || f.rows() != rows) test::fail(__FILE__, __LINE__, wrong.what);
  }
  // The connection is as good as new, and so are all shards.
  for (uint32_t s = 0; s < Fixture::kShards; ++s) {
    const uint64_t n = std::min(Fixture::kPerShard, Fixture::kElements - s * Fixture::kPerShard);
    CHECK_OK(f.peer.call_one(on_whole(Op::kPush, f.tensor, s, f.next(f.tensor, s), floats(n, 1))).status());
  }
  CHECK_OK(f.peer.call_one(on_keys(Op::kPush, f.table, 7, f.next(f.table, 7), keys, three)).status());
  CHECK(f.fingerprint() != before);
}

TEST(hyperparameters_that_a_rule_needs_must_come) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_tensor("w", {4}, Dtype::kFloat32, RuleKind::kAdam));
  const uint64_t before = peer.fingerprint(map, 1);
  Frame push = on_whole(Op::kPush, map, 0, 1, floats(4, 1));
  CHECK_CODE(peer.call_one(push).status(), Code::kInvalidArgument);
  push.hyper = {0.1, 0.9};
  push.parts[0].part.sequence = 2;
  CHECK_CODE(peer.call_one(push).status(), Code::kInvalidArgument);
  CHECK_EQ(peer.fingerprint(map, 1), before);
  push.hyper = {0.1, 0.9, 0.999, 1e-8, 0, 0, 0, 0};
  push.parts[0].part.sequence = 3;
  CHECK_OK(peer.call_one(push).status());
  CHECK(peer.fingerprint(map, 1) != before);
}

TEST(rows_that_would_not_fit_an_answer_are_refused_before_memory_is_taken) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_table("t", limits::kTableDimMax));  // 4 MiB a row
  const std::vector<uint64_t> keys = keys_in(3, 257);             // a little over 1 GiB
  const int64_t before = test::resident_bytes();
  CHECK_CODE(peer.call_one(on_keys(Op::kPull, map, 3, 0, keys)).status(), Code::kInvalidArgument);
  CHECK_CODE(peer.call_one(about(Op::kScan, map, 3, 0, bytes_of<uint64_t>({257}))).status(), Code::kInvalidArgument);
  CHECK(test::kSanitized || test::resident_bytes() - before <= 1 << 20);
}

TEST(a_part_that_was_damaged_is_refused_as_corrupt_and_can_be_sent_again) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  Frame push = on_spans(Op::kPush, f.tensor, 0, 2, {5, 3}, floats(3, 1));
  push.header.flags = wire::kChecksummed;
  push.header.request = 1000;
  f.peer.stamp(&push);
  const std::string right = push.bytes();
  for (const size_t at : {size_t{128}, size_t{130}, size_t{192}, size_t{203}}) {  // of the items, of the numbers
    std::string wrong = right;
    wrong[at] = static_cast<char>(wrong[at] ^ 4);
    CHECK(f.peer.send(wrong));
    CHECK_CODE(f.peer.finish(1000, 1)[0].status(), Code::kCorrupt);
    CHECK_EQ(f.fingerprint(), before);
  }
  CHECK(f.peer.send(right));
  CHECK_OK(f.peer.finish(1000, 1)[0].status());  // its sequence was not used up
  CHECK(f.fingerprint() != before);
}

TEST(a_damaged_header_ends_the_connection_with_a_reason) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  Frame push = on_spans(Op::kPush, f.tensor, 0, 2, {5, 3}, floats(3, 1));
  push.header.request = 1000;
  for (size_t at = 0; at < 128; at += 3) {  // of the frame, of the part
    Peer peer = Peer::greeted(f.host, "other", 77);
    Frame mine = push;
    peer.stamp(&mine);
    std::string wrong = mine.bytes();
    wrong[at] = static_cast<char>(wrong[at] ^ 0x10);
    CHECK(peer.send(wrong));
    const Status status = peer.thrown_out();
    CHECK_CODE(status, Code::kProtocolError);
    CHECK(!status.message().empty());
  }
  CHECK_EQ(f.fingerprint(), before);
}

TEST(frames_that_do_not_add_up_end_the_connection) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  const auto thrown_out = [&](const std::function<void(std::string*)>& change, const Frame& frame) {
    Peer peer = Peer::greeted(f.host, "other", 77);
    Frame mine = frame;
    peer.stamp(&mine);
    std::string bytes = mine.bytes();
    change(&bytes);
    CHECK(peer.send(bytes));
    peer.end_sending();
    CHECK_CODE(peer.thrown_out(), Code::kProtocolError);
  };
  using test::change_block;
  using test::change_header;
  const Frame push = on_spans(Op::kPush, f.tensor, 0, 2, {5, 3}, floats(3, 1));
  const Frame hello = with_body(Op::kHello, encode(hello_as()));
  const Frame open = with_body(Op::kOpen, "x");
  for (const Frame& frame : {push, hello, open}) {
    thrown_out([&](std::string* b) { change_header(b, [](wire::Header* h) { h->length += 64; }), b->append(64, 'x'); },
               frame);
    thrown_out([&](std::string* b) { change_header(b, [](wire::Header* h) { h->length -= 64; }); }, frame);
    thrown_out([&](std::string* b) { change_header(b, [](wire::Header* h) { h->op |= wire::kAnswer; }); }, frame);
    thrown_out([&](std::string* b) { change_header(b, [](wire::Header* h) { h->request = 0; }); }, frame);
    for (const uint32_t bytes : {limits::kItemsBytesMax, limits::kItemsBytesMax + 1, 0xFFFFFFFFu})
      thrown_out([&](std::string* b) { change_block(b, [=](wire::Block* p) { p->body_bytes = bytes; }); }, frame);
    for (const uint64_t bytes : {limits::kNumbersBytesMax, limits::kNumbersBytesMax + 1})
      thrown_out(
          [&](std::string* b) {
            change_block(b, [=](wire::Block* p) { p->numbers_bytes = static_cast<uint32_t>(bytes); });
          },
          frame);
  }
  thrown_out([&](std::string* b) { change_header(b, [](wire::Header* h) { h->blocks = 0; }); }, push);
  thrown_out([&](std::string* b) { change_header(b, [](wire::Header* h) { h->blocks = 2; }); }, open);
  Frame two = open;
  two.parts.push_back(two.parts[0]);
  thrown_out([](std::string*) {}, two);
  CHECK_EQ(f.fingerprint(), before);
  CHECK(eventually([&] { return f.host.connections() == 1; }));
}

TEST(a_push_that_comes_again_is_applied_once) {
  Fixture f;
  Frame push = on_spans(Op::kPush, f.tensor, 0, 2, {0, 1}, floats(1, 10));
  const FramePart first = f.peer.call_one(push);
  CHECK_OK(first.status());
  const uint64_t once = f.fingerprint();
  for (int i = 0; i < 5; ++i) {
    CHECK_OK(f.peer.call_one(push).status());
    CHECK_EQ(f.fingerprint(), once);
  }
  // On another lane, and after the connection was re-made.
  Peer second = Peer::greeted(f.host, "key", f.peer.session, hello_as(1));
  CHECK_OK(second.call_one(push).status());
  f.peer = Peer::greeted(f.host, "key", f.peer.session);
  CHECK_OK(f.peer.call_one(push).status());
  CHECK_EQ(f.fingerprint(), once);
  // A push_pull that comes again is answered with numbers again.
  Frame both = on_spans(Op::kPushPull, f.tensor, 0, 3, {0, 2}, floats(2, 1));
  for (int i = 0; i < 3; ++i) {
    CHECK(values_of<float>(f.peer.call_one(both).numbers) == std::vector<float>({12, 2}));
  }
  // So is a deletion with its count, and a refusal with the same words.
  const Frame erase = on_keys(Op::kErase, f.table, 7, 2, keys_in(7, 4));
  for (int i = 0; i < 3; ++i) CHECK_EQ(f.peer.call_one(erase).part.value, 4u);
  CHECK_EQ(f.rows(), 6u);
  const Frame wrong = on_spans(Op::kPush, f.tensor, 0, 4, {0, 1}, floats(2, 1));
  const FramePart refused = f.peer.call_one(wrong);
  CHECK_CODE(refused.status(), Code::kShapeMismatch);
  // Even when the repeat would make sense.
  const FramePart again = f.peer.call_one(on_spans(Op::kPush, f.tensor, 0, 4, {0, 1}, floats(1, 1)));
  CHECK(again.items == refused.items && again.code() == refused.code());
  CHECK_OK(f.peer.call_one(on_spans(Op::kPush, f.tensor, 0, 5, {0, 1}, floats(1, 1))).status());
}

TEST(sessions_number_their_pushes_apart) {
  Fixture f;
  Peer other = Peer::greeted(f.host, "other");
  const Frame push = on_spans(Op::kPushPull, f.tensor, 0, 1, {0, 1}, floats(1, 5));
  CHECK(values_of<float>(other.call_one(push).numbers) == std::vector<float>({6}));
  CHECK(values_of<float>(f.peer.call_one(push).numbers) == std::vector<float>({6}));  // a repeat of its first
}

TEST(an_empty_push_uses_up_its_sequence_and_nothing_else) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  const uint64_t version = f.peer.call_one(on_whole(Op::kPull, f.tensor, 0, 1)).part.value;
  const FramePart empty = f.peer.call_one(about(Op::kPush, f.tensor, 0, 2, "", "", wire::kEmpty));
  CHECK_OK(empty.status());
  CHECK_EQ(empty.part.value, version);  // equal versions mean equal bits
  CHECK_OK(f.peer.call_one(about(Op::kPush, f.table, 9, 1, "", "", wire::kEmpty)).status());
  CHECK_EQ(f.fingerprint(), before);
  CHECK_EQ(f.next(f.tensor, 0), 3u);
  CHECK_EQ(f.next(f.table, 9), 2u);
}

TEST(what_comes_too_early_waits_and_is_then_done_in_order) {
  Fixture f;
  Peer bulk = Peer::greeted(f.host, "key", f.peer.session, hello_as(1));
  // 5, 4, 3 on one lane, and a pull that must see 4; then 2 on the other.
  std::vector<uint64_t> waiting;
  for (const uint64_t n : {5u, 4u, 3u}) {
    waiting.push_back(
        bulk.start(on_spans(Op::kPushPull, f.tensor, 0, n, {0, 1}, floats(1, static_cast<float>(10 * n)))));
  }
  const uint64_t pull = bulk.start(on_spans(Op::kPull, f.tensor, 0, 4, {0, 1}));
  CHECK(bulk.quiet(30));
  // The server holds them, and says so.
  std::vector<uint64_t> asked = waiting;
  asked.push_back(pull);
  asked.push_back(99'999);
  FramePart held = bulk.call_one(with_body(Op::kAsk, bytes_of(asked)));
  const std::vector<uint64_t> numbers = values_of<uint64_t>(held.items);  // three per request; nobody is waited for
  std::vector<uint64_t> ids;
  for (size_t i = 0; i < numbers.size(); i += 3) ids.push_back(numbers[i]);
  std::sort(ids.begin(), ids.end());
  asked.pop_back();
  CHECK(ids == asked);
  CHECK(f.peer.call_one(with_body(Op::kAsk, bytes_of(asked))).items.empty());  // the other lane has none of them
  CHECK(!nothing_is_parked(f.host));

  const FramePart first = f.peer.call_one(on_spans(Op::kPushPull, f.tensor, 0, 2, {0, 1}, floats(1, 20)));
  CHECK(values_of<float>(first.numbers) == std::vector<float>({21}));
  CHECK(values_of<float>(bulk.finish(waiting[2], 1)[0].numbers) == std::vector<float>({51}));
  CHECK(values_of<float>(bulk.finish(waiting[1], 1)[0].numbers) == std::vector<float>({91}));
  CHECK(values_of<float>(bulk.finish(waiting[0], 1)[0].numbers) == std::vector<float>({141}));
  const FramePart seen = bulk.finish(pull, 1)[0];
  CHECK(seen.part.sequence >= 4 && values_of<float>(seen.numbers)[0] >= 91);
  CHECK(eventually([&] { return bulk.call_one(with_body(Op::kAsk, bytes_of(asked))).items.empty(); }));
  CHECK(eventually([&] { return nothing_is_parked(f.host); }));
}

TEST(a_refusal_that_waited_is_a_refusal) {
  Fixture f;
  const uint64_t wrong = f.peer.start(on_spans(Op::kPush, f.tensor, 0, 3, {0, 1}, floats(7, 1)));
  const uint64_t right = f.peer.start(on_spans(Op::kPush, f.tensor, 0, 2, {0, 1}, floats(1, 1)));
  CHECK_OK(f.peer.finish(right, 1)[0].status());
  CHECK_CODE(f.peer.finish(wrong, 1)[0].status(), Code::kShapeMismatch);
  CHECK_EQ(f.next(f.tensor, 0), 4u);
}

TEST(what_waits_goes_with_its_connection) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  for (int round = 0; round < 5; ++round) {
    Peer bulk = Peer::greeted(f.host, "key", f.peer.session, hello_as(1));
    for (uint64_t n = 3; n < 40; ++n) bulk.start(on_spans(Op::kPush, f.tensor, 0, n, {0, 1}, floats(1, 1)));
    for (uint32_t s = 0; s < 100; ++s) bulk.start(on_keys(Op::kPull, f.table, s, 50, keys_in(s, 2)));
    CHECK_EQ(values_of<uint64_t>(bulk.call_one(with_body(Op::kAsk, bytes_of<uint64_t>({3, 50, 100}))).items).size(),
             9u);
    if (round % 2 == 0) bulk.close();
    CHECK(round % 2 != 0 || eventually([&] { return f.host.connections() == 1; }));
    if (round % 2 != 0) Peer::greeted(f.host, "key", f.peer.session, hello_as(1));  // replaces it
    CHECK(eventually([&] { return nothing_is_parked(f.host); }));
  }
  CHECK_EQ(f.fingerprint(), before);
  CHECK_OK(f.peer.call_one(on_spans(Op::kPush, f.tensor, 0, 2, {0, 1}, floats(1, 1))).status());
  CHECK_EQ(f.next(f.tensor, 0), 3u);  // none of them was left behind
}

TEST(parking_is_limited_in_number_and_the_refusal_names_the_number_expected) {
  Fixture f;
  std::vector<uint64_t> requests;
  for (uint64_t n = 0; n < limits::kParkedMax + 10; ++n) {
    requests.push_back(f.peer.start(on_spans(Op::kPush, f.tensor, 0, 3 + n, {0, 1}, floats(1, 1))));
  }
  for (size_t i = limits::kParkedMax; i < requests.size(); ++i) {
    const FramePart p = f.peer.finish(requests[i], 1)[0];
    CHECK_CODE(p.status(), Code::kOutOfSequence);
    CHECK(p.items.find("expected sequence 2") != std::string::npos);
  }
  // Another session's push to the shard is not held up.
  Peer other = Peer::greeted(f.host, "other");
  CHECK_OK(other.call_one(on_spans(Op::kPush, f.tensor, 0, 1, {0, 1}, floats(1, 1))).status());
  CHECK_CODE(other.call_one(on_spans(Op::kPush, f.tensor, 0, 3, {0, 1}, floats(1, 1))).status(), Code::kOutOfSequence);
  CHECK_OK(f.peer.call_one(on_spans(Op::kPush, f.tensor, 0, 2, {0, 1}, floats(1, 1))).status());
  for (size_t i = 0; i < limits::kParkedMax; ++i) CHECK_OK(f.peer.finish(requests[i], 1)[0].status());
  CHECK_EQ(f.next(f.tensor, 0), 3 + limits::kParkedMax);
  CHECK(eventually([&] { return nothing_is_parked(f.host); }));
}

TEST(parking_is_limited_in_bytes) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "key");
  constexpr uint64_t kMany = 1 << 20;  // 4 MiB in one shard: a row is not divided
  const Map map = peer.made(a_tensor("w", {1, kMany}));
  std::vector<uint64_t> requests;
  const std::string g = floats(kMany, 1);
  for (uint64_t n = 0; n < 18; ++n) requests.push_back(peer.start(on_whole(Op::kPush, map, 0, 2 + n, g)));
  size_t refused = 0;
  for (uint64_t n = 15; n < 18; ++n) {
    refused += peer.finish(requests[n], 1)[0].code() == Code::kOutOfSequence;
  }
  CHECK_EQ(refused, 3u);
  CHECK_OK(peer.call_one(on_whole(Op::kPush, map, 0, 1, g)).status());
  for (uint64_t n = 0; n < 15; ++n) CHECK_OK(peer.finish(requests[n], 1)[0].status());
  CHECK(eventually([&] { return nothing_is_parked(host); }));
}

TEST(a_lane_that_is_made_again_replaces_the_old_one) {
  Fixture f;
  Peer again = Peer::greeted(f.host, "key", f.peer.session);
  CHECK(f.peer.ended());
  CHECK_EQ(f.host.clients(), 1u);
  CHECK_OK(again.call_one(on_whole(Op::kPull, f.tensor, 0, 1)).status());
  CHECK(eventually([&] { return f.host.connections() == 1; }));
}

TEST(a_session_ends_with_goodbye_and_its_number_is_free_for_the_next) {
  Fixture f;
  for (int round = 0; round < 20; ++round) {
    Peer client = Peer::greeted(f.host, "client" + std::to_string(round));
    Peer bulk = Peer::greeted(f.host, "client" + std::to_string(round), client.session, hello_as(1));
    // A new session counts from 1, whoever had its number before.
    const FramePart p = client.call_one(on_spans(Op::kPushPull, f.tensor, 0, 1, {9, 1}, floats(1, 1)));
    CHECK_OK(p.status());
    CHECK(values_of<float>(p.numbers) == std::vector<float>({2.0f + static_cast<float>(round)}));
    bulk.start(on_spans(Op::kPush, f.tensor, 0, 5, {9, 1}, floats(1, 1)));  // parked
    client.start(frame_of(Op::kGoodbye));
    CHECK(client.ended() && bulk.ended());
    CHECK(eventually([&] { return f.host.clients() == 1; }));
    Peer late(f.host, "client" + std::to_string(round), client.session);
    CHECK_OK(late.hello(hello_as()));  // a new session by the same name
    late.start(frame_of(Op::kGoodbye));
    CHECK(late.ended());
    CHECK(eventually([&] { return f.host.clients() == 1 && nothing_is_parked(f.host); }));
  }
}

TEST(the_first_server_lists_what_there_is) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "key");
  FramePart none = peer.call_one(with_body(Op::kList, ""));
  CHECK_OK(none.status());
  CHECK_EQ(none.part.value, 0u);
  std::vector<ObjectSpec> specs;
  for (int i = 0; i < 50; ++i) {
    specs.push_back(i % 2 == 0 ? a_tensor(std::to_string(i), {static_cast<uint64_t>(i)})
                               : a_table(std::to_string(i), static_cast<uint32_t>(i)));
    Map map;
    CHECK_OK(peer.open(specs.back(), &map));
    CHECK_EQ(map.object, static_cast<uint32_t>(i + 1));
  }
  const uint64_t request = peer.start(frame_of(Op::kList));
  const std::vector<FramePart> parts = peer.finish(request, specs.size());
  CHECK_EQ(parts.size(), specs.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    CHECK_EQ(parts[i].part.value, specs.size());
    wire::Reader r(parts[i].items);
    Map map;
    ObjectSpec spec;
    CHECK_OK(decode(&r, &map));
    CHECK_OK(decode(&r, &spec));
    CHECK(r.at_end() && spec == specs[parts[i].part.shard] && map.object == parts[i].part.shard + 1);
  }
}

TEST(an_object_that_does_not_fit_is_refused_and_the_connection_stays) {
  Fixture f(2, uint64_t{8} << 20);
  const uint64_t before = f.fingerprint(), used = f.host.server().memory_bytes();
  Map map;
  CHECK_OK(f.peer.open(a_tensor("large", {uint64_t{1} << 30}), &map));
  CHECK_CODE(f.peer.attach(a_tensor("large", {uint64_t{1} << 30}), map), Code::kResourceExhausted);
  CHECK_CODE(f.peer.open(a_tensor("w", {7}), &map), Code::kSpecMismatch);
  CHECK_CODE(f.peer.open(a_tensor("huge", {uint64_t{1} << 41}), &map), Code::kInvalidArgument);
  CHECK_CODE(f.peer.open(a_tensor("wide", {uint64_t{1} << 32, uint64_t{1} << 32}), &map), Code::kInvalidArgument);
  CHECK_CODE(f.peer.open(a_table("wide", 0), &map), Code::kInvalidArgument);
  CHECK_CODE(f.peer.call_one(with_body(Op::kOpen, "nonsense")).status(), Code::kProtocolError);
  CHECK_CODE(f.peer.call_one(with_body(Op::kAttach, "")).status(), Code::kProtocolError);
  // Maps that are wrong for the object.
  Map wrong = f.tensor;
  for (const uint32_t object : {0u, static_cast<uint32_t>(limits::kObjectsMax + 1), 0xFFFFFFFFu}) {
    wrong.object = object;
    CHECK_CODE(f.peer.attach(f.tensor_spec, wrong), Code::kInvalidArgument);
  }
  wrong = f.tensor;
  wrong.object = 50;
  wrong.runs[0].server = 1;
  CHECK_CODE(f.peer.attach(f.tensor_spec, wrong), Code::kProtocolError);
  wrong.runs[0] = {1, 0, 1};
  CHECK_CODE(f.peer.attach(f.tensor_spec, wrong), Code::kProtocolError);
  wrong.runs.clear();
  CHECK_CODE(f.peer.attach(f.tensor_spec, wrong), Code::kProtocolError);
  // An object that is here already, under another name.
  CHECK_CODE(f.peer.attach(f.table_spec, f.tensor), Code::kSpecMismatch);
  CHECK_OK(f.peer.attach(f.tensor_spec, f.tensor));  // and as it is
  CHECK_EQ(f.fingerprint(), before);
  CHECK_EQ(f.host.server().memory_bytes(), used);
}

TEST(a_table_that_has_used_up_the_memory_refuses_rows_and_goes_on) {
  Fixture f(2, uint64_t{8} << 20);
  const uint64_t before = f.fingerprint();
  uint64_t n = 2;
  Status status;
  for (uint32_t round = 0; status.ok() && round < 2000; ++round) {
    std::vector<uint64_t> keys;
    for (uint64_t i = 0; i < 1000; ++i) keys.push_back(key_of(7, mix((round + 1) * 100'000 + i)));
    status = f.peer.call_one(on_keys(Op::kPull, f.table, 7, 1, keys, "", wire::kCreates)).status();
  }
  CHECK_CODE(status, Code::kResourceExhausted);
  CHECK_EQ(f.fingerprint(), before);
  CHECK_OK(f.peer.call_one(on_keys(Op::kPush, f.table, 7, n, keys_in(7, 1), floats(4, 1))).status());
}

TEST(only_the_first_server_keeps_the_catalogue) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "key", 0, hello_as(0, "app", {"x:1", "y:2"}, 1));
  Map map;
  CHECK_CODE(peer.open(a_tensor("w", {4}), &map), Code::kInvalidArgument);
  CHECK_CODE(peer.call_one(with_body(Op::kList, "")).status(), Code::kInvalidArgument);
  // It holds its run of the shards and no other.
  const ObjectSpec spec = a_tensor("w", {40'000});
  map.object = 1;
  map.runs = {{0, 0, 1}, {2, 1, 5}};  // shards that moved here, of an object that is not here: what they held is lost
  CHECK_CODE(peer.attach(spec, map), Code::kServerLost);
  map.runs = {{0, 0, 1}, {2, 1, 1}};
  CHECK_OK(peer.attach(spec, map));
  CHECK_CODE(peer.call_one(on_whole(Op::kPull, map, 0, 0)).status(), Code::kStaleMap);
  CHECK_CODE(peer.call_one(on_whole(Op::kPull, map, 1, 0)).status(), Code::kStaleMap);
  const FramePart p = peer.call_one(on_whole(Op::kPull, map, 2, 0));
  CHECK_OK(p.status());
  CHECK_EQ(p.numbers.size(), (40'000 - 2 * 16'384) * 4u);
  // Who comes later brings a map in which shards have moved; who was slow, an earlier one. A term has one owner.
  Map later = map;
  later.runs = {{0, 1, 2}, {1, 0, 1}, {2, 0, 3}};
  CHECK_OK(peer.attach(spec, later));
  later.runs = {{0, 1, 1}, {2, 1, 1}};
  CHECK_CODE(peer.attach(spec, later), Code::kSpecMismatch);
}

TEST(an_export_writes_no_more_than_was_made_room_for) {
  Host host(1, kNoLimit);
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_table("t", 32));
  std::vector<uint64_t> keys(4092);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = key_of(3, mix(i + 1));
  CHECK_OK(peer.call_one(on_keys(Op::kPush, map, 3, 1, keys, floats(keys.size() * 32, 1))).status());
  for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBfloat16, Dtype::kFloat64, Dtype::kFloat32}) {
    Frame scan = about(Op::kScan, map, 3, 2, bytes_of<uint64_t>({keys.size()}));  // which waits, in memory of its own
    scan.header.dtype_out = static_cast<uint8_t>(dtype);
    const uint64_t waiting = peer.start(scan);
    scan.parts[0].part.sequence = 1;
    const FramePart p = peer.call_one(scan);
    CHECK(p.status().ok() ? p.numbers.size() == keys.size() * 32 * 4 : dtype != Dtype::kFloat32);
    CHECK_OK(peer.call_one(about(Op::kPush, map, 3, 2, "", "", wire::kEmpty)).status());
    CHECK_EQ(peer.finish(waiting, 1).size(), 1u);
    peer.call_one(about(Op::kPush, map, 3, 3, "", "", wire::kEmpty));
  }
}

// S7: a reader that never reads.
TEST(a_peer_that_never_reads_does_not_stop_others) {
  Fixture f(3);
  constexpr uint64_t kElements = 1 << 20;  // 4 MiB in 64 shards
  const Map large = f.peer.made(a_tensor("large", {kElements}));
  const Cut cut = Cut::of(kElements, 1, 4);
  Frame both = frame_of(Op::kPushPull, large.object), all = frame_of(Op::kPull, large.object);
  for (uint32_t s = 0; s < cut.shards; ++s) {
    both.parts.push_back(on_whole(Op::kPushPull, large, s, 1, floats(cut.per_shard, 1)).parts[0]);
    all.parts.push_back(on_whole(Op::kPull, large, s, 0).parts[0]);
  }
  std::vector<std::unique_ptr<Peer>> deaf;
  for (int i = 0; i < 4; ++i) {
    deaf.push_back(std::make_unique<Peer>(Peer::greeted(f.host, "deaf" + std::to_string(i))));
    for (int n = 0; n < 3; ++n) deaf.back()->start(all);
    Frame mine = both;
    deaf.back()->stamp(&mine);
    deaf.back()->send(mine.bytes(), 200);  // for the crew to help with; it may not even be taken
  }
  const int64_t begin = os::now_ns();
  const Frame small = on_spans(Op::kPushPull, f.tensor, 0, 0, {0, 1}, floats(1, 1));
  for (uint64_t n = 2; n < 300; ++n) {
    Frame push = small;
    push.parts[0].part.sequence = n;
    CHECK_OK(f.peer.call_one(push).status());
  }
  const std::vector<FramePart> got = f.peer.call(all);  // what they do not take is there for others
  CHECK_EQ(got.size(), cut.shards);
  for (const FramePart& p : got) CHECK_OK(p.status());
  CHECK(os::now_ns() - begin < 10'000 * test::kMsNs);
  deaf.clear();
  CHECK(eventually([&] { return f.host.connections() == 1; }));
}

// S5: what is only claimed costs nothing.
TEST(claimed_lengths_take_no_memory) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  const auto claim = [&](uint64_t length, uint32_t blocks, uint32_t body, uint64_t numbers, Op op, bool refused) {
    Peer peer = Peer::greeted(f.host, "claims", 99);
    Frame frame = on_whole(op, f.tensor, 0, 2);
    peer.stamp(&frame);
    std::string bytes = frame.bytes().substr(0, 128);
    test::change_header(&bytes, [&](wire::Header* h) {
      h->length = length;
      h->blocks = blocks;
    });
    test::change_block(&bytes, [&](wire::Block* b) {
      b->items = body / 16;
      b->body_bytes = body;
      b->numbers_bytes = static_cast<uint32_t>(std::min<uint64_t>(numbers, 0xFFFFFFC0));
    });
    const int64_t resident = test::resident_bytes();
    CHECK(peer.send(bytes));
    if (refused) {
      CHECK_CODE(peer.thrown_out(), Code::kProtocolError);
    } else {
      CHECK(peer.quiet(20));  // it waits for the rest
    }
    CHECK(test::kSanitized || test::resident_bytes() - resident <= 1 << 20);
  };
  constexpr uint64_t kHuge[] = {uint64_t{1} << 31, 0xFFFFFFC0u, uint64_t{1} << 63, ~uint64_t{63}};
  for (const uint64_t n : kHuge) {
    claim(n, 1, 0, n, Op::kPush, true);
    claim(n, 1, static_cast<uint32_t>(n), 0, Op::kPush, true);
    claim(uint64_t{1} << 41, 1, 0, n, Op::kPush, true);
  }
  claim(uint64_t{1} << 43, 1, 0, 64, Op::kPush, true);
  claim(uint64_t{1} << 41, limits::kBlocksMax + 1, 0, 64, Op::kPush, true);
  // Within the limits, and it never comes.
  claim(uint64_t{1} << 41, 1, 0, limits::kNumbersBytesMax, Op::kPush, false);
  claim(uint64_t{1} << 41, 1, limits::kItemsBytesMax, limits::kNumbersBytesMax, Op::kPushPull, false);
  claim(uint64_t{1} << 41, limits::kBlocksMax, limits::kItemsBytesMax, 0, Op::kPull, false);
  claim(uint64_t{1} << 41, 1, 0xFFFFFFFFu, 0, Op::kOpen, true);
  claim((uint64_t{1} << 21) + 64, 1, 1u << 21, 0, Op::kOpen, true);
  CHECK_EQ(f.fingerprint(), before);
  CHECK(eventually([&] { return f.host.connections() == 1; }));
}

// Nor does it take the room of those who really send.
TEST(a_large_part_that_never_comes_does_not_hold_up_others) {
  Fixture f;
  constexpr uint64_t kMany = 1 << 20;  // 4 MiB in one shard: a row is not divided
  const Map map = f.peer.made(a_tensor("large", {1, kMany}));
  std::vector<std::unique_ptr<Peer>> liars;
  for (const uint64_t claimed : {limits::kNumbersBytesMax, limits::kHugePartBytes, limits::kHugePartBytes,
                                 limits::kHugePartBytes, limits::kHugePartBytes}) {
    liars.push_back(std::make_unique<Peer>(Peer::greeted(f.host, "liar" + std::to_string(liars.size()))));
    Frame push = on_whole(Op::kPush, map, 0, 1);
    liars.back()->stamp(&push);
    std::string bytes = push.bytes();
    test::change_header(&bytes, [&](wire::Header* h) { h->length = limits::kSectionBytes + wire::padded(claimed); });
    test::change_block(&bytes, [&](wire::Block* b) { b->numbers_bytes = static_cast<uint32_t>(claimed); });
    CHECK(liars.back()->send(bytes + std::string(100, 'x')));
    CHECK(liars.back()->quiet(20));
  }
  const uint64_t request = f.peer.start(on_whole(Op::kPush, map, 0, 1, floats(kMany, 1)));
  const std::vector<FramePart> answer = f.peer.finish(request, 1, 10'000);
  CHECK(answer.size() == 1 && answer[0].status().ok());
}

TEST(what_waits_is_answered_without_memory_for_what_it_claimed) {
  if (test::kSanitized) return;
  Fixture f;
  const int64_t before = test::resident_bytes();
  std::vector<uint64_t> waiting;
  for (int i = 0; i < 4; ++i) {  // each could have 1 GiB of rows; there are ten
    const uint64_t most = limits::kNumbersBytesMax / (Fixture::kDim * 4);
    waiting.push_back(f.peer.start(about(Op::kScan, f.table, 7, 2, bytes_of<uint64_t>({most}))));
  }
  std::atomic<bool> done{false};
  std::atomic<int64_t> most{0};
  std::thread watcher([&] {
    while (!done) most = std::max(most.load(), test::resident_bytes());
  });
  CHECK_OK(f.peer.call_one(about(Op::kPush, f.table, 7, 2, "", "", wire::kEmpty)).status());
  for (const uint64_t request : waiting) {
    const std::vector<FramePart> p = f.peer.finish(request, 1);
    CHECK(p.size() == 1 && p[0].part.items == 10);
  }
  done = true;
  watcher.join();
  CHECK(most - before <= 16 << 20);
}

TEST(memory_is_back_where_it_was_when_clients_have_gone) {
  Fixture f;
  const auto busy = [&] {
    std::vector<std::unique_ptr<Peer>> peers;
    for (uint64_t i = 0; i < 16; ++i) {
      const std::string key = "client" + std::to_string(i);
      peers.push_back(std::make_unique<Peer>(Peer::greeted(f.host, key, 100 + i)));
      Peer& peer = *peers.back();
      CHECK_EQ(peer.call_one(on_whole(Op::kPull, f.tensor, 0, 0)).numbers.size(), Fixture::kPerShard * 4);
      for (uint64_t n = 2; n < 20; ++n) peer.start(on_whole(Op::kPush, f.tensor, 0, n, floats(Fixture::kPerShard, 0)));
    }
    for (const auto& peer : peers) {
      peer->start(frame_of(Op::kGoodbye));
      CHECK(peer->ended());
    }
    peers.clear();
    CHECK(eventually([&] { return f.host.connections() == 1 && f.host.clients() == 1 && nothing_is_parked(f.host); }));
  };
  busy();
  const int64_t before = test::resident_bytes();
  const uint64_t used = f.host.server().memory_bytes();
  for (uint64_t i = 0; i < 20 / test::kSlowness; ++i) busy();
  CHECK_EQ(f.host.server().memory_bytes(), used);
  CHECK(test::kSanitized || test::resident_bytes() - before <= 8 << 20);
}

TEST(close_ends_connections_whatever_they_are_doing) {
  Host host(2, kNoLimit);
  Peer first = Peer::greeted(host, "first");
  const Map map = first.made(a_tensor("w", {1 << 20}));
  std::vector<std::unique_ptr<Peer>> peers;
  for (int i = 0; i < 12; ++i) {
    peers.push_back(std::make_unique<Peer>(host, "k" + std::to_string(i)));
    Peer& peer = *peers.back();
    if (i % 6 == 0) continue;  // silent
    CHECK_OK(peer.hello(hello_as()));
    Frame push = on_whole(Op::kPush, map, 0, 2, floats(1 << 14, 1));
    peer.stamp(&push);
    const std::string bytes = push.bytes();
    if (i % 6 == 1) CHECK(peer.send(bytes.substr(0, 30)));    // within a header
    if (i % 6 == 2) CHECK(peer.send(bytes.substr(0, 5000)));  // within a part
    if (i % 6 == 3) peer.start(push);                         // parked
    for (int n = 0; i % 6 == 4 && n < 40; ++n) {              // does not read
      Frame all = frame_of(Op::kPull, map.object);
      for (uint32_t s = 0; s < 64; ++s) all.parts.push_back(on_whole(Op::kPull, map, s, 0).parts[0]);
      peer.stamp(&all);
      if (!peer.send(all.bytes(), 50)) break;
    }
  }
  CHECK_EQ(host.connections(), 13u);
  const int64_t begin = os::now_ns();
  CHECK_OK(host.close(after_ms(20'000)));
  CHECK(os::now_ns() - begin < 10'000 * test::kMsNs);
  CHECK_EQ(host.connections(), 0u);
  CHECK(nothing_is_parked(host));
  CHECK(first.ended());
  for (const auto& peer : peers) CHECK(peer->ended());
  CHECK_OK(host.close(after_ms(1000)));
  // A socket that comes too late is closed.
  const test::SocketPair pair;
  CHECK_CODE(host.adopt(pair.theirs, "late", "key"), Code::kClosed);
  test::Stream late(pair.ours);
  CHECK(late.ended());
}

TEST(a_host_can_go_while_clients_are_busy) {
  for (int round = 0; round < 10; ++round) {
    auto host = std::make_unique<Host>(2, kNoLimit);
    Peer first = Peer::greeted(*host, "first");
    const Map map = first.made(a_tensor("w", {1 << 16}));
    std::vector<std::thread> busy;
    std::atomic<int> served{0};
    for (int i = 0; i < 3; ++i) {
      busy.emplace_back([&, peer = std::make_shared<Peer>(Peer::greeted(*host, "k" + std::to_string(i)))] {
        for (uint64_t n = 1;; ++n) {
          Frame push = on_whole(Op::kPushPull, map, static_cast<uint32_t>(n % 4), (n + 3) / 4, floats(1 << 14, 1));
          peer->stamp(&push);
          if (!peer->send(push.bytes()) || peer->finish(push.header.request, 1).empty()) return;
          ++served;
        }
      });
    }
    CHECK(eventually([&] { return served > 30; }));
    host.reset();
    for (std::thread& t : busy) t.join();
  }
}

}  // namespace windlass::host_test
