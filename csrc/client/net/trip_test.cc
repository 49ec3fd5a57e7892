// Which parts of a trip travel as one block.
#include "client/net/trip.h"

#include <set>

#include "base/test.h"
#include "client/net/links.h"
#include "client/net/remote_route.h"

namespace windlass::trip_test {
namespace {

// Parts that are as the test says.
class Fixed final : public Future, public Payload {
 public:
  void describe(uint32_t part, bool, Parcel* to) override { *to = parcels[part]; }
  bool joins(uint32_t part) const override { return alone.count(part) == 0; }
  Owners* owners(uint32_t, uint32_t*) override { return nullptr; }

  std::vector<Parcel> parcels;
  std::set<uint32_t> alone;
};

struct Fixture {
  // n parts with nothing in common but everything.
  explicit Fixture(uint32_t n, uint64_t numbers_bytes = 64) : payload(new Fixed), trip(nullptr, payload.get()) {
    for (uint32_t i = 0; i < n; ++i) {
      payload->parcels.push_back({.items = 1, .items_bytes = 8, .numbers_bytes = numbers_bytes});
      trip.parts.push_back({.part = i, .shard = 2 * i, .term = 1, .sequence = i, .clock = 7, .common = &common});
    }
  }
  // The first part of each block.
  std::vector<uint32_t> begins() {
    trip.make_blocks();
    std::vector<uint32_t> first;
    uint32_t next = 0;
    for (const Trip::Block& block : trip.blocks) {
      CHECK_EQ(block.first, next);
      next += block.n;
      first.push_back(block.first);
    }
    CHECK_EQ(next, trip.parts.size());
    return first;
  }
  using Firsts = std::vector<uint32_t>;

  Trip::Common common, another;
  Ref<Fixed> payload;
  Trip trip;
};

using Firsts = Fixture::Firsts;

}  // namespace

TEST(parts_that_differ_in_shard_sequence_and_items_alone_share_a_block) {
  Fixture f(200);
  for (uint32_t i = 0; i < 200; ++i) f.payload->parcels[i].items = i;
  CHECK(f.begins() == Firsts{0});
}

TEST(a_part_that_differs_in_anything_else_begins_a_block) {
  const auto differs = [](auto change) {
    Fixture f(6);
    change(&f, 3);
    return f.begins();
  };
  // From the third part on, or the third alone.
  CHECK(differs([](Fixture* f, uint32_t i) { f->trip.parts[i].term = 2; }) == (Firsts{0, 3, 4}));
  CHECK(differs([](Fixture* f, uint32_t i) { f->trip.parts[i].clock = 8; }) == (Firsts{0, 3, 4}));
  CHECK(differs([](Fixture* f, uint32_t i) { f->trip.parts[i].flags = wire::kCloses; }) == (Firsts{0, 3, 4}));
  CHECK(differs([](Fixture* f, uint32_t i) { f->trip.parts[i].common = &f->another; }) == (Firsts{0, 3, 4}));
  CHECK(differs([](Fixture* f, uint32_t i) { f->payload->parcels[i].flags = wire::kWhole; }) == (Firsts{0, 3, 4}));
  CHECK(differs([](Fixture* f, uint32_t i) { f->payload->parcels[i].value = 9; }) == (Firsts{0, 3, 4}));
  CHECK(differs([](Fixture* f, uint32_t i) { f->payload->alone.insert(i); }) == (Firsts{0, 3}));
  // A neighbour in the trip that is none in the request: their lists of keys do not lie together.
  CHECK(differs([](Fixture* f, uint32_t i) {
          for (; i < 6; ++i) f->trip.parts[i].part = i - 3;
        }) == (Firsts{0, 3}));
}

TEST(a_block_has_so_many_bytes_of_numbers_in_either_direction_and_so_many_entries) {
  Fixture sent(20, limits::kBlockBytesMax / 8);
  CHECK(sent.begins() == (Firsts{0, 8, 16}));
  Fixture wanted(20, 0);
  for (Parcel& parcel : wanted.payload->parcels) parcel.answer_bytes = limits::kBlockBytesMax / 4;
  CHECK(wanted.begins() == (Firsts{0, 4, 8, 12, 16}));
  Fixture large(3, limits::kBlockBytesMax + 1);  // each is streamed by itself
  CHECK(large.begins() == (Firsts{0, 1, 2}));
  Fixture many(limits::kBlockEntriesMax + 5, 0);
  CHECK(many.begins() == (Firsts{0, limits::kBlockEntriesMax}));
}

TEST(a_block_has_as_many_parts_as_are_without_an_answer) {
  Fixture f(5);
  (void)f.begins();
  CHECK_EQ(f.trip.unanswered_in(f.trip.blocks[0]), 5u);
  f.trip.parts[1].answered = f.trip.parts[4].answered = true;
  CHECK_EQ(f.trip.unanswered_in(f.trip.blocks[0]), 3u);
}

}  // namespace windlass::trip_test
