// Put and snapshot, frame by frame: numbered like pushes, checked like everything else.
#include <cmath>
#include <map>

#include "server/host.h"
#include "server/net/peer_test.h"
#include "tensor/planes.h"

namespace windlass::put_test {
namespace {

using test::a_table;
using test::a_tensor;
using test::about;
using test::bytes_of;
using test::Frame;
using test::FramePart;
using test::keys_in;
using test::on_keys;
using test::on_whole;
using test::Peer;
using test::values_of;
using wire::Op;

constexpr uint64_t kN = 1000;
constexpr uint32_t kWeights = 1, kFirst = 2, kSecond = 4;  // bits of PutItem::planes

std::string floats(size_t n, float value) { return bytes_of(std::vector<float>(n, value)); }

Frame a_put(const Map& map, uint64_t sequence, const wire::PutItem& item, const std::string& numbers,
            Dtype dtype = Dtype::kFloat32) {
  const std::string body(reinterpret_cast<const char*>(&item), sizeof item);
  return about(Op::kPut, map, 0, sequence, body, numbers, 0, dtype);
}
Frame a_push(const Map& map, uint64_t sequence, float value) {
  Frame f = on_whole(Op::kPush, map, 0, sequence, floats(kN, value));
  f.hyper = {0.1, 0.9, 0.999, 1e-8, 0};
  return f;
}

// Adam on one shard of 1000 weights that refuses NaN.
struct Fixture {
  Fixture() : host(2, ~uint64_t{0}), peer(Peer::greeted(host, "key")) {
    ObjectSpec spec = a_tensor("w", {kN}, Dtype::kFloat32, RuleKind::kAdam);
    spec.tensor.reject_nonfinite = true;
    map = peer.made(spec);
  }
  FramePart snapshot(uint64_t sequence) {
    const FramePart p = peer.call_one(about(Op::kSnapshot, map, 0, sequence));
    CHECK_OK(p.status());
    CHECK_EQ(p.numbers.size(), 3 * kN * sizeof(float));
    CHECK_EQ(p.items.size(), sizeof(uint64_t));
    return p;
  }
  Host host;
  Peer peer;
  Map map;
};

uint64_t count_of(const FramePart& snapshot) { return values_of<uint64_t>(snapshot.items)[0]; }

}  // namespace

TEST(planes_are_the_pieces_of_a_tensor) {
  Budget budget(~uint64_t{0});
  for (const RuleKind kind : our_rules()) {
    TensorSpec spec;
    spec.shape = {2500, 16};
    spec.rule.kind = kind;
    std::unique_ptr<Tensor> tensor;
    CHECK_OK(Tensor::create("w", spec, &budget, &tensor));
    CHECK_EQ(tensor->cut().shards, 3u);
    std::vector<uint64_t> sums;
    for (uint32_t shard = 0; shard < 3; ++shard) {
      const std::vector<Plane> planes = planes_of(spec, tensor->cut(), shard);
      const std::vector<Tensor::Piece> pieces = tensor->pieces_of(shard);
      CHECK_EQ(planes.size(), pieces.size());
      sums.resize(planes.size());
      for (size_t i = 0; i < planes.size(); ++i) {
        CHECK_EQ(planes[i].bytes, pieces[i].bytes);
        CHECK_EQ(planes[i].at, sums[i]);
        sums[i] += planes[i].bytes;
      }
    }
    CHECK(sums == plane_bytes(spec, tensor->cut()));
  }
}

TEST(a_put_sets_what_it_brings_and_a_snapshot_has_all_of_it) {
  Fixture f;
  CHECK_OK(f.peer.call_one(a_push(f.map, 1, 1)).status());
  const FramePart before = f.snapshot(1);
  CHECK_EQ(count_of(before), 1u);
  CHECK_EQ(before.part.value, 2u);  // the version, plus one
  FramePart p = f.peer.call_one(a_put(f.map, 2, {kWeights | kSecond, 0, 0}, floats(kN, 5) + floats(kN, 7)));
  CHECK_OK(p.status());
  CHECK_EQ(p.part.value, 3u);
  FramePart after = f.snapshot(2);
  CHECK(after.numbers.substr(0, kN * 4) == floats(kN, 5));
  CHECK(after.numbers.substr(kN * 4, kN * 4) == before.numbers.substr(kN * 4, kN * 4));
  CHECK(after.numbers.substr(2 * kN * 4) == floats(kN, 7));
  CHECK_EQ(count_of(after), 1u);
  CHECK_OK(f.peer.call_one(a_put(f.map, 3, {kFirst, 1, 42}, floats(kN, 9))).status());
  after = f.snapshot(3);
  CHECK(after.numbers.substr(kN * 4, kN * 4) == floats(kN, 9));
  CHECK_EQ(count_of(after), 42u);
}

TEST(a_put_has_its_place_among_the_pushes_and_is_applied_once) {
  Host host(2, ~uint64_t{0});
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_tensor("w", {kN}));
  const Frame put = a_put(map, 2, {kWeights, 0, 0}, floats(kN, 100));
  const uint64_t early = peer.start(put);  // before its time
  CHECK(peer.quiet(50));
  CHECK_OK(peer.call_one(on_whole(Op::kPush, map, 0, 1, floats(kN, 1))).status());
  CHECK_OK(peer.finish(early, 1).at(0).status());
  CHECK_OK(peer.call_one(on_whole(Op::kPush, map, 0, 3, floats(kN, 1))).status());
  const FramePart again = peer.call_one(put);  // as after a lost connection
  CHECK_OK(again.status());
  CHECK_EQ(again.part.sequence, 3u);
  const FramePart pulled = peer.call_one(on_whole(Op::kPull, map, 0, 3));
  CHECK(pulled.numbers == floats(kN, 101));
  // A pull and a snapshot wait for the put that they must see.
  const uint64_t pull = peer.start(on_whole(Op::kPull, map, 0, 4)), look = peer.start(about(Op::kSnapshot, map, 0, 4));
  CHECK(peer.quiet(50));
  CHECK_OK(peer.call_one(a_put(map, 4, {kWeights, 0, 0}, floats(kN, 3))).status());
  CHECK(peer.finish(pull, 1).at(0).numbers == floats(kN, 3));
  CHECK(peer.finish(look, 1).at(0).numbers == floats(kN, 3));
}

TEST(a_put_that_does_not_fit_is_refused_and_uses_its_sequence_up) {
  Fixture f;
  CHECK_OK(f.peer.call_one(a_push(f.map, 1, 1)).status());
  const FramePart before = f.snapshot(1);
  const std::string ones = floats(kN, 1);
  Frame cut_short = a_put(f.map, 0, {kWeights, 0, 0}, ones), longer = cut_short, lying = cut_short;
  cut_short.parts[0].items.resize(15);
  longer.parts[0].items.resize(24);
  lying.header.flags = wire::kInArenas;
  lying.places.emplace();
  const std::pair<Frame, Code> wrong[] = {
      {a_put(f.map, 0, {kWeights, 0, 0}, floats(kN - 1, 1)), Code::kShapeMismatch},
      {a_put(f.map, 0, {kWeights, 0, 0}, ones + ones), Code::kShapeMismatch},
      {a_put(f.map, 0, {0, 0, 0}, ones), Code::kShapeMismatch},
      {a_put(f.map, 0, {kWeights, 0, 0}, "", Dtype::kFloat32), Code::kShapeMismatch},
      {a_put(f.map, 0, {kWeights, 0, 0}, ones, Dtype::kBfloat16), Code::kShapeMismatch},
      {a_put(f.map, 0, {8, 0, 0}, ones), Code::kInvalidArgument},
      {a_put(f.map, 0, {~0u, 0, 0}, ones), Code::kInvalidArgument},
      {a_put(f.map, 0, {0, 2, 1}, ""), Code::kInvalidArgument},
      {a_put(f.map, 0, {0, 0, 1}, ""), Code::kInvalidArgument},
      {a_put(f.map, 0, {0, 1, limits::kUpdatesMax + 1}, ""), Code::kInvalidArgument},
      {a_put(f.map, 0, {kWeights, 0, 0}, floats(kN, NAN)), Code::kNonFinite},
      {a_put(f.map, 0, {kWeights | kSecond, 0, 0}, ones + floats(kN, INFINITY)), Code::kNonFinite},
      {cut_short, Code::kInvalidArgument},
      {longer, Code::kInvalidArgument},
      {lying, Code::kInvalidArgument},
  };
  uint64_t sequence = 1;
  for (const auto& [frame, code] : wrong) {
    Frame put = frame;
    put.parts[0].part.sequence = ++sequence;
    CHECK_EQ(static_cast<int>(f.peer.call_one(put).status().code()), static_cast<int>(code));
    CHECK_EQ(static_cast<int>(f.peer.call_one(put).status().code()), static_cast<int>(code));  // the same refusal
  }
  const FramePart after = f.snapshot(sequence);
  CHECK(after.numbers == before.numbers);
  CHECK(after.items == before.items);
  const Map table = f.peer.made(a_table("t", 4));
  CHECK(f.peer.call_one(about(Op::kSnapshot, table, 3, 0)).status().code() == Code::kInvalidArgument);
  Frame rows = a_put(table, 1, {kWeights, 0, 0}, ones);
  CHECK(f.peer.call_one(rows).status().code() == Code::kShapeMismatch);  // it names no keys
}

// ---- rows of tables -----------------------------------------------------------------------------------------------

namespace {

constexpr uint32_t kShard = 5;

Frame put_rows(const Map& map, uint64_t sequence, const std::vector<uint64_t>& keys, const wire::PutItem& item,
               const std::string& numbers) {
  const std::string argument(reinterpret_cast<const char*>(&item), sizeof item);
  Frame f = about(Op::kPut, map, kShard, sequence, bytes_of(keys) + argument, numbers);
  f.parts[0].part.items = static_cast<uint32_t>(keys.size());
  return f;
}

// Adam on rows of two numbers.
struct RowsFixture {
  RowsFixture() : host(2, ~uint64_t{0}), peer(Peer::greeted(host, "key")) {
    ObjectSpec spec = a_table("t", 2, RuleKind::kAdam);
    spec.table.reject_nonfinite = true;
    map = peer.made(spec);
  }
  // All rows with their state.
  FramePart exported() {
    const FramePart p = peer.call_one(
        about(Op::kScan, map, kShard, 0, bytes_of<uint64_t>({100}) + bytes_of<uint32_t>({Scan::kRowsWithState, 0})));
    CHECK_OK(p.status());
    return p;
  }
  Host host;
  Peer peer;
  Map map;
};

std::string row(float weight, float first, float second, uint32_t updates) {
  return bytes_of<float>({weight, weight, first, first, second, second}) + bytes_of<uint32_t>({updates});
}

}  // namespace

TEST(rows_are_put_whole_and_exported_as_they_were_put) {
  RowsFixture f;
  const std::vector<uint64_t> keys = keys_in(kShard, 3);
  const uint32_t all = kWeights | kFirst | kSecond;
  const std::string rows = row(1, 2, 3, 4) + row(5, 6, 7, 8) + row(9, 10, 11, 0);
  const FramePart answer = f.peer.call_one(put_rows(f.map, 1, keys, {all, 1, 0}, rows));
  CHECK_OK(answer.status());
  FramePart seen = f.exported();
  CHECK_EQ(seen.items.size(), 3 * sizeof(uint64_t));
  std::map<uint64_t, std::string> found, expected;
  for (size_t i = 0; i < 3; ++i) {
    found[values_of<uint64_t>(seen.items)[i]] = seen.numbers.substr(i * 28, 28);
    expected[keys[i]] = rows.substr(i * 28, 28);
  }
  CHECK(found == expected);
  // What is left out starts anew.
  CHECK_OK(f.peer.call_one(put_rows(f.map, 2, {keys[0]}, {kWeights, 0, 0}, bytes_of<float>({3, 3}))).status());
  CHECK_OK(f.peer.call_one(put_rows(f.map, 3, {keys[1]}, {kWeights | kSecond, 0, 0}, bytes_of<float>({4, 4, 5, 5})))
               .status());
  expected[keys[0]] = row(3, 0, 0, 0);
  expected[keys[1]] = row(4, 0, 5, 0);
  seen = f.exported();
  for (size_t i = 0; i < 3; ++i) found[values_of<uint64_t>(seen.items)[i]] = seen.numbers.substr(i * 28, 28);
  CHECK(found == expected);
}

TEST(rows_that_are_put_again_are_put_once_and_in_order) {
  RowsFixture f;
  const std::vector<uint64_t> keys = keys_in(kShard, 2);
  const Frame first = put_rows(f.map, 1, keys, {kWeights, 0, 0}, bytes_of<float>({1, 1, 1, 1}));
  const Frame second = put_rows(f.map, 2, keys, {kWeights, 0, 0}, bytes_of<float>({2, 2, 2, 2}));
  const uint64_t early = f.peer.start(second);
  CHECK(f.peer.quiet(50));
  CHECK_OK(f.peer.call_one(first).status());
  CHECK_OK(f.peer.finish(early, 1).at(0).status());
  CHECK_OK(f.peer.call_one(first).status());  // as after a lost connection
  const FramePart pulled = f.peer.call_one(on_keys(Op::kPull, f.map, kShard, 2, keys));
  CHECK(pulled.numbers == bytes_of<float>({2, 2, 2, 2}));
}

TEST(rows_that_do_not_fit_are_refused_and_use_their_sequence_up) {
  RowsFixture f;
  const std::vector<uint64_t> keys = keys_in(kShard, 2), others = keys_in(kShard + 1, 2);
  const std::string two = bytes_of<float>({1, 1, 1, 1});
  Frame cut_short = put_rows(f.map, 0, keys, {kWeights, 0, 0}, two);
  cut_short.parts[0].items.resize(cut_short.parts[0].items.size() - 1);
  const std::pair<Frame, Code> wrong[] = {
      {put_rows(f.map, 0, keys, {kWeights, 0, 0}, bytes_of<float>({1, 1, 1})), Code::kShapeMismatch},
      {put_rows(f.map, 0, keys, {kWeights, 1, 0}, two), Code::kShapeMismatch},
      {put_rows(f.map, 0, keys, {kWeights | kFirst, 0, 0}, two), Code::kShapeMismatch},
      {put_rows(f.map, 0, keys, {kFirst, 0, 0}, two), Code::kInvalidArgument},
      {put_rows(f.map, 0, keys, {8 | kWeights, 0, 0}, two), Code::kInvalidArgument},
      {put_rows(f.map, 0, keys, {kWeights, 1, 7}, two), Code::kInvalidArgument},
      {put_rows(f.map, 0, others, {kWeights, 0, 0}, two), Code::kInvalidArgument},
      {put_rows(f.map, 0, keys, {kWeights, 0, 0}, bytes_of<float>({1, 1, 1, NAN})), Code::kNonFinite},
      {cut_short, Code::kInvalidArgument},
  };
  uint64_t sequence = 0;
  for (const auto& [frame, code] : wrong) {
    Frame put = frame;
    put.parts[0].part.sequence = ++sequence;
    CHECK_EQ(static_cast<int>(f.peer.call_one(put).status().code()), static_cast<int>(code));
    CHECK_EQ(static_cast<int>(f.peer.call_one(put).status().code()), static_cast<int>(code));  // the same refusal
  }
  CHECK(f.exported().items.empty());
  CHECK_OK(f.peer.call_one(put_rows(f.map, ++sequence, keys, {kWeights, 0, 0}, two)).status());
}

}  // namespace windlass::put_test
