// Vector operations, frame by frame: with which tensors, numbered like pushes, and what happens where one has moved.
#include <bit>
#include <cmath>
#include <thread>

#include "server/host.h"
#include "server/move/move_test.h"
#include "server/net/peer_test.h"

namespace windlass::vector_test {
namespace {

using test::a_table;
using test::a_tensor;
using test::about;
using test::bytes_of;
using test::Frame;
using test::FramePart;
using test::hello_as;
using test::on_whole;
using test::Peer;
using test::values_of;
using wire::Op;

constexpr uint64_t kN = 1000;
constexpr uint64_t kSession = 4711;

std::string floats(float value, size_t n = kN) { return bytes_of(std::vector<float>(n, value)); }

ObjectSpec like(const std::string& name, const ObjectSpec& anchor) {
  ObjectSpec spec = a_tensor(name, anchor.tensor.shape, anchor.tensor.dtype);
  spec.tensor.like = anchor.own_name();
  return spec;
}

struct With {
  uint32_t object = 0;
  uint64_t sequence = 0;
  uint32_t term = 1;
};
Frame a_vector(VectorOp op, const Map& map, uint64_t sequence, With x = {}, double a = 0, uint32_t shard = 0) {
  wire::VectorItem item;
  item.operation = static_cast<uint8_t>(op);
  item.object = x.object;
  item.term = x.object != 0 ? x.term : 0;
  item.sequence = x.sequence;
  item.a = std::bit_cast<uint64_t>(a);
  const Op operation = writes(op) ? Op::kVector : Op::kDot;
  return about(operation, map, shard, sequence, std::string(reinterpret_cast<const char*>(&item), sizeof item));
}

// Two tensors that are alike, on one server: y is 1 everywhere, x is 2.
struct Fixture {
  explicit Fixture(bool rejects = false) : host(2, ~uint64_t{0}), peer(Peer::greeted(host, "key")) {
    const ObjectSpec spec = a_tensor("y", {kN});
    y = peer.made(spec);
    ObjectSpec second = like("x", spec);
    second.tensor.reject_nonfinite = rejects;
    x = peer.made(second);
    CHECK_OK(peer.call_one(on_whole(Op::kPush, y, 0, 1, floats(1))).status());
    CHECK_OK(peer.call_one(on_whole(Op::kPush, x, 0, 1, floats(2))).status());
  }
  float weight(const Map& map) {
    const FramePart p = peer.call_one(on_whole(Op::kPull, map, 0, 0));
    const std::vector<float> all = values_of<float>(p.numbers);
    CHECK_EQ(all.size(), kN);
    CHECK(all == std::vector<float>(kN, all[0]));
    return all[0];
  }
  Host host;
  Peer peer;
  Map y, x;
};

bool is_apart(const FramePart& p) { return p.part.status == 0 && (p.part.flags & wire::kApart) != 0; }

}  // namespace

TEST(each_vector_operation_does_what_its_name_says) {
  Fixture f;
  const With x{f.x.object, 1};
  const FramePart dot = f.peer.call_one(a_vector(VectorOp::kDot, f.y, 1, x));
  CHECK_OK(dot.status());
  CHECK_EQ(std::bit_cast<double>(dot.part.value), 2.0 * kN);
  const std::tuple<VectorOp, With, double, float> all[] = {
      {VectorOp::kAxpy, x, 0.5, 2},    {VectorOp::kScale, {}, 3, 6}, {VectorOp::kAdd, x, 0, 8},
      {VectorOp::kMultiply, x, 0, 16}, {VectorOp::kCopy, x, 0, 2},   {VectorOp::kFill, {}, 7, 7},
  };
  uint64_t sequence = 1;
  for (const auto& [op, with, a, want] : all) {
    const FramePart p = f.peer.call_one(a_vector(op, f.y, ++sequence, with, a));
    CHECK_OK(p.status());
    CHECK_EQ(p.part.value, sequence + 1);  // the version, plus one
    CHECK_EQ(f.weight(f.y), want);
  }
  CHECK_EQ(f.weight(f.x), 2.0f);
  // With itself.
  CHECK_OK(f.peer.call_one(a_vector(VectorOp::kAxpy, f.y, ++sequence, {f.y.object}, 2)).status());
  CHECK_EQ(f.weight(f.y), 21.0f);
  const FramePart own = f.peer.call_one(a_vector(VectorOp::kDot, f.y, sequence, {f.y.object}));
  CHECK_EQ(std::bit_cast<double>(own.part.value), 441.0 * kN);
}

TEST(a_vector_operation_has_its_place_among_the_pushes_and_is_applied_once) {
  Fixture f;
  const Frame add = a_vector(VectorOp::kAdd, f.y, 3, {f.x.object, 1});
  const uint64_t early = f.peer.start(add);  // before its time: it waits with the copy that it has of x
  const uint64_t scale = f.peer.start(a_vector(VectorOp::kScale, f.y, 4, {}, 10));
  const uint64_t self = f.peer.start(a_vector(VectorOp::kAdd, f.y, 5, {f.y.object}));
  const uint64_t dot = f.peer.start(a_vector(VectorOp::kDot, f.y, 5, {f.x.object, 1}));
  CHECK(f.peer.quiet(50));
  CHECK_OK(f.peer.call_one(on_whole(Op::kPush, f.y, 0, 2, floats(5))).status());
  for (const uint64_t request : {early, scale, self}) CHECK_OK(f.peer.finish(request, 1).at(0).status());
  CHECK_EQ(f.weight(f.y), 160.0f);  // ((1 + 5 + 2) * 10) * 2
  CHECK_EQ(std::bit_cast<double>(f.peer.finish(dot, 1).at(0).part.value), 320.0 * kN);
  const FramePart again = f.peer.call_one(add);  // as after a lost connection
  CHECK_OK(again.status());
  CHECK(!is_apart(again));
  CHECK_EQ(again.part.sequence, 5u);
  CHECK_EQ(f.weight(f.y), 160.0f);
}

TEST(a_vector_operation_that_was_done_is_not_done_again_though_the_other_tensor_could_not_be_read_any_more) {
  Fixture f;
  const Frame add = a_vector(VectorOp::kAdd, f.y, 2, {f.x.object, 1});
  CHECK_OK(f.peer.call_one(add).status());
  const Frame later = a_vector(VectorOp::kAdd, f.y, 2, {f.x.object, 1, 9});  // the same with a term that is none
  const FramePart again = f.peer.call_one(later);
  CHECK_OK(again.status());
  CHECK(!is_apart(again));
  CHECK_EQ(f.weight(f.y), 3.0f);
}

TEST(nothing_is_done_before_this_sessions_pushes_to_the_other_tensor_have_come) {
  Fixture f;
  const Frame add = a_vector(VectorOp::kAdd, f.y, 2, {f.x.object, 2});
  for (int i = 0; i < 2; ++i) {  // and again, as after a lost connection
    const FramePart p = f.peer.call_one(add);
    CHECK(is_apart(p));
    CHECK(p.items.find("expected push 2 of this worker, saw 1") != std::string::npos);
    CHECK_EQ(p.part.sequence, 2u);  // it is used up
  }
  CHECK(is_apart(f.peer.call_one(a_vector(VectorOp::kDot, f.y, 2, {f.x.object, 2}))));
  CHECK_EQ(f.weight(f.y), 1.0f);
  CHECK_OK(f.peer.call_one(on_whole(Op::kPush, f.x, 0, 2, floats(4))).status());
  CHECK(is_apart(f.peer.call_one(add)));  // what was said once is said again
  CHECK_OK(f.peer.call_one(a_vector(VectorOp::kAdd, f.y, 3, {f.x.object, 2})).status());
  CHECK_EQ(f.weight(f.y), 7.0f);
  CHECK_EQ(std::bit_cast<double>(f.peer.call_one(a_vector(VectorOp::kDot, f.y, 3, {f.x.object, 2})).part.value),
           42.0 * kN);
}

TEST(tensors_that_are_not_alike_are_refused_by_name_and_the_sequence_is_used_up) {
  Fixture f;
  const Map stranger = f.peer.made(a_tensor("stranger", {kN})),
            wide = f.peer.made(a_tensor("wide", {kN}, Dtype::kInt64)), rows = f.peer.made(a_table("rows", 4));
  uint64_t sequence = 1;
  for (const uint32_t object : {stranger.object, wide.object, rows.object}) {
    for (const VectorOp op : {VectorOp::kAdd, VectorOp::kDot}) {
      sequence += writes(op);
      const Frame frame = a_vector(op, f.y, sequence, {object});
      for (int i = 0; i < 2; ++i) {
        const FramePart p = f.peer.call_one(frame);
        CHECK(p.code() == Code::kInvalidArgument);
        CHECK(p.items.find("'y'") != std::string::npos && p.items.find("expected") != std::string::npos);
        CHECK_EQ(p.part.sequence, sequence);
      }
    }
  }
  CHECK(f.peer.call_one(a_vector(VectorOp::kAdd, rows, 1, {f.y.object})).code() == Code::kInvalidArgument);
  CHECK(f.peer.call_one(a_vector(VectorOp::kScale, rows, 2, {}, 2)).code() == Code::kInvalidArgument);
  CHECK(is_apart(f.peer.call_one(a_vector(VectorOp::kAdd, f.y, ++sequence, {4000}))));  // not known here
  CHECK_EQ(f.weight(f.y), 1.0f);
}

// A spec that claims to be like another and is not of its form must not be read beyond its end.
TEST(a_tensor_that_only_says_it_is_like_another_is_refused) {
  Host host(2, ~uint64_t{0});
  Peer peer = Peer::greeted(host, "key");
  const ObjectSpec spec = a_tensor("y", {kN});
  const Map y = peer.made(spec);
  ObjectSpec forged = a_tensor("x", {10});
  forged.tensor.like = "y";
  Map map;
  CHECK(peer.open(forged, &map).code() == Code::kInvalidArgument);
  map.object = 50;
  map.runs = {{0, 0, 1}};
  CHECK_OK(peer.attach(forged, map));  // past the catalogue
  CHECK(peer.call_one(a_vector(VectorOp::kAdd, y, 1, {50})).code() == Code::kInvalidArgument);
  CHECK(peer.call_one(a_vector(VectorOp::kCopy, map, 1, {y.object})).code() == Code::kInvalidArgument);
}

TEST(items_that_break_the_rules_are_refused) {
  Fixture f;
  const auto with = [&](auto change) {
    wire::VectorItem item;
    item.operation = static_cast<uint8_t>(VectorOp::kAxpy);
    item.object = f.x.object;
    item.term = 1;
    change(&item);
    return about(Op::kVector, f.y, 0, 2, std::string(reinterpret_cast<const char*>(&item), sizeof item));
  };
  Frame cut_short = with([](auto*) {}), longer = cut_short;
  cut_short.parts[0].items.resize(31);
  longer.parts[0].items.resize(40);
  using Item = wire::VectorItem;
  const Frame wrong[] = {
      cut_short,
      longer,
      with([](Item* i) { i->operation = 0; }),
      with([](Item* i) { i->operation = 8; }),
      with([](Item* i) { i->operation = 255; }),
      with([](Item* i) { i->zero[2] = 1; }),
      with([](Item* i) { i->zero_too = 1; }),
      with([](Item* i) { i->object = 0; }),
      with([](Item* i) { i->operation = static_cast<uint8_t>(VectorOp::kFill); }),
      with([](Item* i) {
        i->operation = static_cast<uint8_t>(VectorOp::kAdd);
        i->a = 1;
      }),
  };
  for (const Frame& frame : wrong) CHECK(f.peer.call_one(frame).code() == Code::kInvalidArgument);
  // Numbers and arenas that nobody asked for are refused like a push that does not fit.
  Frame numbers = a_vector(VectorOp::kAdd, f.y, 2, {f.x.object, 1}), lying = a_vector(VectorOp::kScale, f.y, 3, {}, 2);
  numbers.parts[0].numbers = floats(9);
  lying.header.flags = wire::kInArenas;
  lying.places.emplace();
  CHECK(f.peer.call_one(numbers).code() == Code::kShapeMismatch);
  CHECK(f.peer.call_one(lying).code() == Code::kInvalidArgument);
  CHECK_EQ(f.weight(f.y), 1.0f);
  CHECK_OK(f.peer.call_one(a_vector(VectorOp::kScale, f.y, 4, {}, 2)).status());
  CHECK_EQ(f.weight(f.y), 2.0f);
}

TEST(a_tensor_that_refuses_nan_refuses_it_from_another) {
  Fixture f(true);
  CHECK_OK(f.peer.call_one(on_whole(Op::kPush, f.y, 0, 2, floats(NAN))).status());
  uint64_t sequence = 1;
  for (const VectorOp op : {VectorOp::kAdd, VectorOp::kCopy, VectorOp::kMultiply})
    CHECK(f.peer.call_one(a_vector(op, f.x, ++sequence, {f.y.object, 2})).code() == Code::kNonFinite);
  CHECK(f.peer.call_one(a_vector(VectorOp::kFill, f.x, ++sequence, {}, INFINITY)).code() == Code::kNonFinite);
  CHECK(f.peer.call_one(a_vector(VectorOp::kScale, f.x, ++sequence, {}, 1e300)).code() == Code::kNonFinite);
  CHECK(f.peer.call_one(a_vector(VectorOp::kAxpy, f.x, ++sequence, {f.x.object}, NAN)).code() == Code::kNonFinite);
  CHECK_OK(f.peer.call_one(a_vector(VectorOp::kDot, f.x, sequence, {f.y.object, 2})).status());  // it only reads
  CHECK_EQ(f.weight(f.x), 2.0f);
}

TEST(a_vector_operation_is_no_contribution_and_closes_nothing) {
  Host host(2, ~uint64_t{0});
  Peer peer = Peer::greeted(host, "key");
  ObjectSpec spec = a_tensor("y", {kN});
  spec.tensor.sync = {Sync::kBsp, 0, 0};
  const Map y = peer.made(spec);
  Frame push = on_whole(Op::kPush, y, 0, 1, floats(1));
  push.hyper = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0};
  const uint64_t waits = peer.start(push);  // for the end of its iteration
  CHECK_OK(peer.call_one(a_vector(VectorOp::kFill, y, 2, {}, 5)).status());
  CHECK(peer.quiet(50));
  const FramePart dot = peer.call_one(a_vector(VectorOp::kDot, y, 2, {y.object}));
  CHECK_EQ(std::bit_cast<double>(dot.part.value), 25.0 * kN);
  Frame close = on_whole(Op::kPushPull, y, 0, 3, floats(2));
  close.parts[0].part.flags |= wire::kCloses;
  close.hyper = {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 1};
  const FramePart done = peer.call_one(close);
  CHECK_OK(done.status());
  CHECK(done.numbers == floats(8));  // what waited for its update is applied to what was filled in
  CHECK_OK(peer.finish(waits, 1).at(0).status());
}

// Two servers, and x leaves before y.
TEST(while_one_of_two_has_moved_nothing_is_done_and_the_answer_says_where_it_is) {
  const ObjectSpec spec = a_tensor("y", {kN}), second = like("x", spec);
  Host hosts[2] = {Host(2, ~uint64_t{0}), Host(2, ~uint64_t{0})};
  const auto greeted = [&](uint32_t i) {
    return Peer::greeted(hosts[i], "key", kSession, hello_as(0, "app", {"a:1", "b:2"}, i));
  };
  Peer peers[2] = {greeted(0), greeted(1)};
  Map y{1, {{0, 0, 1}}}, x{2, {{0, 0, 1}}};
  CHECK_OK(peers[0].attach(spec, y));
  CHECK_OK(peers[0].attach(second, x));
  CHECK_OK(peers[0].call_one(on_whole(Op::kPush, y, 0, 1, floats(1))).status());
  CHECK_OK(peers[0].call_one(on_whole(Op::kPush, x, 0, 1, floats(2))).status());
  CHECK_OK(test::move_shard(hosts[0], hosts[1], 2, 0, 1, 5));
  const Frame stays = a_vector(VectorOp::kAdd, y, 2, {2, 1, 5});
  for (int i = 0; i < 2; ++i) {
    const FramePart p = peers[0].call_one(stays);
    CHECK(is_apart(p));
    CHECK_EQ(p.part.value, uint64_t{5} << 32 | 1);  // since term 5, on server 1
    CHECK(p.items.find("'x', whose shard is on server 1 since term 5") != std::string::npos);
  }
  CHECK_OK(test::move_shard(hosts[0], hosts[1], 1, 0, 1, 3));
  y.runs[0].term = 3;
  CHECK(is_apart(peers[1].call_one(stays)) == false);  // an old term is told the new one
  Frame follows = stays;
  follows.parts[0].part.term = 3;
  CHECK(is_apart(peers[1].call_one(follows)));  // refused at the old place, and here as well: the record came along
  const FramePart done = peers[1].call_one(a_vector(VectorOp::kAdd, y, 3, {2, 1, 5}));
  CHECK_OK(done.status());
  CHECK(!is_apart(done));
  const FramePart pulled = peers[1].call_one(on_whole(Op::kPull, y, 0, 3));
  CHECK(pulled.numbers == floats(3));
}

TEST(a_copy_of_the_other_tensor_that_has_arrived_counts_from_the_first_operation_under_its_term) {
  const ObjectSpec spec = a_tensor("y", {kN}), second = like("x", spec);
  Host hosts[2] = {Host(2, ~uint64_t{0}), Host(2, ~uint64_t{0})};
  Peer peer = Peer::greeted(hosts[1], "key", kSession, hello_as(0, "app", {"a:1", "b:2"}, 1));
  Peer old = Peer::greeted(hosts[0], "key", kSession, hello_as(0, "app", {"a:1", "b:2"}, 0));
  const Map y{1, {{0, 0, 1}}}, x{2, {{0, 0, 1}}};
  CHECK_OK(old.attach(spec, y));
  CHECK_OK(old.attach(second, x));
  CHECK_OK(old.call_one(on_whole(Op::kPush, x, 0, 1, floats(2))).status());
  for (const uint32_t object : {1u, 2u}) CHECK_OK(test::move_shard(hosts[0], hosts[1], object, 0, 1, 2));
  Map moved = y;
  moved.runs[0] = {0, 1, 2};
  CHECK_OK(peer.call_one(a_vector(VectorOp::kCopy, moved, 1, {2, 1, 2})).status());
  CHECK(peer.call_one(on_whole(Op::kPull, moved, 0, 1)).numbers == floats(2));
}

// y += x and x += y at once, again and again: nobody waits for ever, and every number is one that some order gives.
TEST(operations_in_both_directions_do_not_wait_for_each_other) {
  Fixture f;
  Peer other = Peer::greeted(f.host, "another");
  constexpr uint64_t kRounds = 300;
  std::thread thread([&] {
    for (uint64_t i = 1; i <= kRounds; ++i)
      CHECK_OK(other.call_one(a_vector(VectorOp::kCopy, f.x, i, {f.y.object})).status());
  });
  for (uint64_t i = 2; i <= kRounds; ++i)
    CHECK_OK(f.peer.call_one(a_vector(VectorOp::kCopy, f.y, i, {f.x.object, 1})).status());
  thread.join();
  CHECK(f.weight(f.y) == 1.0f || f.weight(f.y) == 2.0f);
}

}  // namespace windlass::vector_test
