// A reader at a shard: what would change it is refused, whatever came with it, and leaves nothing but its number.
#include "server/object/scene_test.h"

namespace windlass::test {
namespace {

constexpr wire::Op kAll[] = {wire::Op::kPush,   wire::Op::kPull,   wire::Op::kPushPull,   wire::Op::kErase,
                             wire::Op::kPut,    wire::Op::kVector, wire::Op::kDot,        wire::Op::kClose,
                             wire::Op::kSettle, wire::Op::kRows,   wire::Op::kFingerprint};

constexpr uint64_t kReader = 99;

Batch by_reader(wire::Op op) {
  Batch b = Scene::batch(op, kReader);
  b.caller.rank = Gate::kOutsider;
  b.caller.reads = true;
  return b;
}

uint64_t rows_of(Scene& scene) {
  const Ran ran = scene.run(Scene::batch(wire::Op::kRows), scene.entry(0));
  CHECK(ran.ok());
  return ran.outcome.value;
}

}  // namespace

TEST(what_changes_a_shard_is_all_that_a_reader_is_refused) {
  for (const wire::Op op : kAll) {
    const bool reads = op == wire::Op::kPull || op == wire::Op::kDot || op == wire::Op::kSettle ||
                       op == wire::Op::kRows || op == wire::Op::kFingerprint;
    CHECK_EQ(traits_of(op)->changes(), !reads);
  }
}

TEST(a_reader_changes_nothing_under_any_policy) {
  for (const Sync& sync : {Sync{}, Sync{Sync::kBsp}, Sync{Sync::kSsp, 1}, Sync{Sync::kMaxDelay, 0, 1}}) {
    Scene scene(sync, RuleKind::kSum);
    uint64_t sequence = 0;
    for (const wire::Op op : {wire::Op::kPush, wire::Op::kPushPull, wire::Op::kPush}) {
      Entry e = scene.entry(++sequence, 0, 5);
      e.flags = wire::kCloses;
      const Ran ran = scene.run(by_reader(op), e);
      CHECK(ran.refused(Code::kAccessDenied));
      CHECK_EQ(ran.outcome.sequence, sequence);                         // used up: what waits for it goes on
      CHECK(scene.run(by_reader(op), e).refused(Code::kAccessDenied));  // a repeat
    }
    Entry e = scene.entry(sequence, 7);
    e.flags = wire::kCloses;
    CHECK(scene.run(by_reader(wire::Op::kClose), e).refused(Code::kAccessDenied));
    CHECK(!scene.object->used());  // as if nobody had come
    CHECK_EQ(scene.shard().version, 0u);
    if (scene.shard().gate != nullptr) CHECK_EQ(scene.shard().gate->highest(), 0u);
    CHECK_EQ(scene.weight(), 0.0f);
  }
}

TEST(a_pull_of_a_reader_makes_no_rows) {
  Scene scene(Sync{}, RuleKind::kSum, true);
  Entry e = scene.entry(0);
  e.flags = wire::kCreates;
  CHECK(scene.run(by_reader(wire::Op::kPull), e).ok());
  CHECK(scene.out == std::vector<float>(scene.out.size(), 0.0f));
  CHECK_EQ(rows_of(scene), 0u);
  CHECK(scene.run(Scene::batch(wire::Op::kPull), e).ok());
  const uint64_t rows = rows_of(scene);
  CHECK(rows > 0);
  CHECK(scene.run(by_reader(wire::Op::kErase), scene.entry(1)).refused(Code::kAccessDenied));
  CHECK_EQ(rows_of(scene), rows);
}

}  // namespace windlass::test
