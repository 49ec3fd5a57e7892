// Requests whose arrays lie in arenas, from a client that is made by hand and may lie about them.
#include <algorithm>
#include <functional>

#include "base/crc32c.h"
#include "server/host.h"
#include "server/net/peer_test.h"

namespace windlass::in_place_test {
namespace {

using test::a_table;
using test::a_tensor;
using test::about;
using test::bytes_of;
using test::Frame;
using test::FramePart;
using test::in_step;
using test::keys_in;
using test::on_whole;
using test::Peer;
using wire::Op;

constexpr uint64_t kBytes = 1 << 20, kElements = 40'000, kPerShard = 16'384;
constexpr uint32_t kArena = 5, kDim = 4;

// A host, and a client that has shared a megabyte with it: input at 0, output at 512 KiB, lists at 256 KiB.
struct Fixture {
  Fixture() : host(2, ~uint64_t{0}), peer(Peer::greeted(host, "key")) {
    std::string why;
    const int file = os::make_shared_file(kBytes, &why);
    memory = os::map_shared(file, kBytes);
    Frame frame = test::with_body(Op::kArena, bytes_of<uint64_t>({kArena, kBytes}));
    peer.stamp(&frame);
    const std::string bytes = frame.bytes();
    const os::Piece piece{const_cast<char*>(bytes.data()), bytes.size()};
    CHECK_EQ(os::send_pieces(peer.fd(), &piece, 1, true, file), static_cast<long>(bytes.size()));
    CHECK_OK(peer.finish(frame.header.request, 1)[0].status());
    os::close_file(file);
    tensor = peer.made(a_tensor("w", {kElements}));
    table = peer.made(a_table("t", kDim));
    for (uint64_t i = 0; i < kElements; ++i) input()[i] = 1;
  }
  ~Fixture() { os::unmap_shared(memory, kBytes); }

  float* input() { return reinterpret_cast<float*>(memory); }
  float* output() { return reinterpret_cast<float*>(memory + kBytes / 2); }
  std::byte* lists() { return memory + kBytes / 4; }

  static wire::Places places() {
    return {.in_arena = kArena,
            .out_arena = kArena,
            .in_offset = 0,
            .in_bytes = kElements * 4,
            .out_offset = kBytes / 2,
            .out_bytes = kElements * 4,
            .base = 0};
  }
  static Frame lying(Frame f, const wire::Places& places) {
    if (f.header.operation() != Op::kStep) f.places = places;
    f.header.flags |= wire::kInArenas;
    return f;
  }
  uint64_t fingerprint() { return peer.fingerprint(tensor, 3) + peer.fingerprint(table, limits::kTableShards); }

  Host host;
  Peer peer;
  std::byte* memory = nullptr;
  Map tensor, table;
};

wire::ListedItems list_of(Fixture& f, const std::vector<uint64_t>& pairs) {
  std::memcpy(f.lists(), pairs.data(), pairs.size() * 8);
  return {.arena = kArena, .crc = crc32c(f.lists(), pairs.size() * 8), .offset = kBytes / 4, .bytes = pairs.size() * 8};
}

Frame listed(Fixture& f, const wire::ListedItems& list, uint32_t items, uint64_t sequence) {
  Frame frame =
      about(Op::kPushPull, f.table, 7, sequence, std::string(reinterpret_cast<const char*>(&list), sizeof list), "",
            wire::kPlaced | wire::kListed | wire::kCreates);
  frame.parts[0].part.items = items;
  return Fixture::lying(frame, Fixture::places());
}

}  // namespace

TEST(arrays_are_read_and_written_where_they_lie) {
  Fixture f;
  for (uint32_t s = 0; s < 3; ++s) {
    const FramePart p = f.peer.call_one(Fixture::lying(on_whole(Op::kPushPull, f.tensor, s, 1), Fixture::places()));
    CHECK_OK(p.status());
    CHECK(p.numbers.empty());
  }
  for (uint64_t i = 0; i < kElements; ++i) CHECK_EQ(f.output()[i], 1.0f);
  CHECK_EQ(f.output()[kElements], 0.0f);
  // The same in a step, whose parts have places of their own.
  Frame step = in_step({on_whole(Op::kPushPull, f.tensor, 0, 2), on_whole(Op::kPull, f.tensor, 2, 1)});
  for (FramePart& p : step.parts) p.about->places = Fixture::places();
  for (const FramePart& p : f.peer.call(Fixture::lying(step, {}))) CHECK_OK(p.status());
  CHECK_EQ(f.output()[0], 2.0f);
  CHECK_EQ(f.output()[2 * kPerShard], 1.0f);
}

TEST(places_that_are_not_there_are_refused_and_nothing_happens) {
  Fixture f;
  const uint64_t before = f.fingerprint();
  uint64_t sequence = 0;
  const auto spoiled = [&](const std::function<void(wire::Places*)>& spoil) {
    wire::Places places = Fixture::places();
    spoil(&places);
    const Status alone = f.peer.call_one(Fixture::lying(on_whole(Op::kPull, f.tensor, 2, 0), places)).status();
    Frame step = in_step({on_whole(Op::kPushPull, f.tensor, 2, ++sequence)});
    step.parts[0].about->places = places;
    CHECK(!f.peer.call_one(Fixture::lying(step, {})).status().ok());  // a push, and it needs both arrays
    return alone;
  };
  constexpr uint64_t kHuge = ~uint64_t{0};
  for (const uint64_t offset : {kBytes, kBytes - 8, kHuge - 7, uint64_t{1} << 63, kBytes / 2 + 4})
    CHECK_CODE(spoiled([&](wire::Places* p) { p->out_offset = offset; }), Code::kInvalidArgument);
  for (const uint64_t bytes : {kBytes, kHuge, uint64_t{1} << 63})
    CHECK_CODE(spoiled([&](wire::Places* p) { p->out_bytes = bytes; }), Code::kInvalidArgument);
  CHECK_CODE(spoiled([&](wire::Places* p) { p->out_bytes = 8; }), Code::kShapeMismatch);
  CHECK_CODE(spoiled([&](wire::Places* p) { p->out_arena = 6; }), Code::kInvalidArgument);
  CHECK_CODE(spoiled([&](wire::Places* p) { p->out_arena = 0; }), Code::kInvalidArgument);
  for (const uint64_t base : {uint64_t{1}, uint64_t{40'000}, kHuge, kHuge / 4, uint64_t{1} << 62}) {
    if (base == 1) continue;  // within the array, as it happens
    CHECK_CODE(spoiled([&](wire::Places* p) { p->base = base; }), Code::kShapeMismatch);
  }
  CHECK_EQ(f.fingerprint(), before);
  for (uint64_t i = 0; i < kElements; ++i) CHECK_EQ(f.output()[i], 0.0f);
}

TEST(lists_in_arenas_are_copied_checked_and_used) {
  Fixture f;
  const std::vector<uint64_t> keys = keys_in(7, 3);
  const wire::ListedItems list = list_of(f, {keys[0], 2, keys[1], 0, keys[2], 5});
  CHECK_OK(f.peer.call_one(listed(f, list, 3, 1)).status());
  for (const uint64_t row : {0, 2, 5}) CHECK_EQ(f.output()[row * kDim], 1.0f);
  CHECK_EQ(f.output()[1 * kDim], 0.0f);

  const uint64_t before = f.fingerprint();
  uint64_t sequence = 1;
  const auto spoiled = [&](const std::function<void(wire::ListedItems*)>& spoil, uint32_t items = 3) {
    wire::ListedItems bad = list;
    spoil(&bad);
    const FramePart p = f.peer.call_one(listed(f, bad, items, sequence + 1));
    const uint64_t seen = f.peer.call_one(about(Op::kFingerprint, f.table, 7, 0)).part.sequence;
    sequence = seen;  // some refusals use up their number
    return p.status();
  };
  constexpr uint64_t kHuge = ~uint64_t{0};
  CHECK_CODE(spoiled([](wire::ListedItems* l) { l->crc ^= 1; }), Code::kCorrupt);
  CHECK_CODE(spoiled([](wire::ListedItems* l) { l->arena = 77; }), Code::kInvalidArgument);
  for (const uint64_t at : {kBytes, kHuge, kHuge - 47, uint64_t{4}})
    CHECK_CODE(spoiled([&](wire::ListedItems* l) { l->offset = at; }), Code::kInvalidArgument);
  for (const uint64_t bytes : {kBytes, kHuge, uint64_t{limits::kItemsBytesMax} + 1})
    CHECK_CODE(spoiled([&](wire::ListedItems* l) { l->bytes = bytes; }), Code::kInvalidArgument);
  CHECK_CODE(spoiled([](wire::ListedItems*) {}, 4), Code::kShapeMismatch);  // as many keys as were said
  CHECK_CODE(spoiled([](wire::ListedItems*) {}, 0xFFFFFFFF), Code::kShapeMismatch);
  // A list where none belongs.
  Frame alone = listed(f, list, 3, sequence + 1);
  alone.header.flags = 0;
  alone.places.reset();
  CHECK(!f.peer.call_one(alone).status().ok());
  sequence = f.peer.call_one(about(Op::kFingerprint, f.table, 7, 0)).part.sequence;
  Frame step = in_step({listed(f, list, 3, sequence + 1)});
  step.parts[0].about->places.reset();
  CHECK_CODE(f.peer.call_one(Fixture::lying(step, {})).status(), Code::kInvalidArgument);
  Frame short_one = listed(f, list, 3, sequence + 1);
  short_one.parts[0].items.resize(16);
  CHECK_CODE(f.peer.call_one(short_one).status(), Code::kInvalidArgument);
  CHECK_EQ(f.fingerprint(), before);
}

TEST(after_a_damaged_arena_frame_no_file_is_taken_for_another) {
  Fixture f;
  std::string why;
  const int file = os::make_shared_file(kBytes, &why);
  Frame frame = test::with_body(Op::kArena, bytes_of<uint64_t>({9, kBytes}));
  f.peer.stamp(&frame);
  std::string bytes = frame.bytes();
  bytes[128] = static_cast<char>(bytes[128] ^ 1);  // the body
  const os::Piece piece{bytes.data(), bytes.size()};
  CHECK_EQ(os::send_pieces(f.peer.fd(), &piece, 1, true, file), static_cast<long>(bytes.size()));
  CHECK_CODE(f.peer.finish(frame.header.request, 1)[0].status(), Code::kCorrupt);
  frame.header.request = 0;
  f.peer.stamp(&frame);
  const std::string again = frame.bytes();
  const os::Piece right{const_cast<char*>(again.data()), again.size()};
  CHECK_EQ(os::send_pieces(f.peer.fd(), &right, 1, true, file), static_cast<long>(again.size()));
  CHECK_CODE(f.peer.finish(frame.header.request, 1)[0].status(), Code::kProtocolError);
  os::close_file(file);
}

}  // namespace windlass::in_place_test
