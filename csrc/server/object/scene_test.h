// What the tests of served objects share: an object with its server and two workers, without sockets.
#pragma once

#include <bit>
#include <memory>
#include <vector>

#include "base/test.h"
#include "server/server.h"

namespace windlass::test {

inline constexpr uint64_t kN = 8;
inline constexpr uint64_t kBytes = kN * sizeof(float);
// Incarnations, and numbers of sessions. The successor takes rank 1.
inline constexpr uint64_t kRank0 = 11, kRank1 = 12, kSuccessor = 13;
inline constexpr Sync kAsp{Sync::kAsp, 0, 0}, kSsp{Sync::kSsp, 0, 0}, kBsp{Sync::kBsp, 0, 0}, kSpare{Sync::kBsp, 1, 0};

struct Ran {
  Verdict verdict;
  Outcome outcome;
  bool ok() const { return verdict == Verdict::kDone && outcome.status.ok(); }
  bool refused(Code code) const { return verdict == Verdict::kDone && outcome.status.code() == code; }
};

struct BytesMax {
  uint64_t memory = ~uint64_t{0}, staging = limits::kRoundsBytesMax;
};

// An object of one app with ranks 0 and 1, and one shard of it: a tensor whose shard has everything, or a table of one
// column.
struct Scene {
  explicit Scene(const Sync& sync, RuleKind rule = RuleKind::kSgd, bool is_table = false, const BytesMax& most = {})
      : server(1, most.memory, most.staging), index(is_table ? 7 : 0) {
    set_view({{0, kRank0, true}, {1, kRank1, true}});
    ObjectSpec spec;
    spec.name = server.workers()->app() + "/w";
    spec.is_table = is_table;
    spec.tensor.shape = {kN};
    spec.table.dim = 1;
    spec.tensor.rule.kind = spec.table.rule.kind = rule;
    spec.tensor.sync = spec.table.sync = sync;
    CHECK_OK(server.open(spec, &object));
    for (uint64_t i = 0; i < kN; ++i) keyed.push_back({mix(key_of(index, mix(i + 1))), static_cast<uint32_t>(i)});
  }
  Shard& shard() { return *object->find(index); }
  void set_view(const std::vector<Workers::Member>& workers, const std::vector<uint32_t>& waited = {}) {
    CHECK(server.workers()->set_view(++views, workers, waited));
    server.tell_gates(server.workers());
  }
  static Batch batch(wire::Op op, uint64_t by = kRank0) {
    Batch b;
    b.op = traits_of(op);
    b.caller = {static_cast<uint32_t>(by), by, by == kRank0 ? 0u : 1u};
    b.hyper.v[0] = 1;
    b.hypers = limits::kRuleHyperMax;
    b.in_place = true;
    return b;
  }
  // About the whole shard, or of a table every key. What it brings is `g` everywhere; what it wants goes to `out`.
  Entry entry(uint64_t sequence, uint64_t clock = 0, float g = 0) {
    Entry e;
    e.shard = index;
    e.term = shard().home.term;
    e.sequence = sequence;
    e.clock = clock;
    e.items = object->spec().is_table ? kN : 1;
    e.spans = &whole;
    e.keyed = keyed.data();
    in.assign(kN, g);
    e.in = reinterpret_cast<const std::byte*>(in.data());
    e.out = reinterpret_cast<std::byte*>(out.data());
    return e;
  }
  Ran run(const Batch& b, const Entry& e, const Status& checked = {}, Stage stage = Stage::kFresh) {
    Ran ran;
    ran.verdict = object->run(b, e, shard(), checked, &ran.outcome, stage);
    return ran;
  }
  Ran push(uint64_t sequence, float g, uint64_t clock = 0, uint16_t flags = 0, uint64_t by = kRank0) {
    Entry e = entry(sequence, clock, g);
    e.flags = flags;
    return run(batch(wire::Op::kPush, by), e);
  }
  Ran close(uint64_t by, uint64_t clock, double weight) {
    Entry e = entry(0, clock);
    e.flags = wire::kCloses;
    e.value = std::bit_cast<uint64_t>(weight);
    return run(batch(wire::Op::kClose, by), e);
  }
  // What all weights are.
  float weight() {
    std::vector<float> all(kN);
    Batch b = batch(wire::Op::kPull);
    b.caller.rank = Gate::kOutsider;
    Entry e = entry(0);
    e.out = reinterpret_cast<std::byte*>(all.data());
    CHECK(run(b, e).ok());
    CHECK(all == std::vector<float>(kN, all[0]));
    return all[0];
  }
  uint64_t sequence(uint64_t by = kRank0) { return shard().records.of(static_cast<uint32_t>(by), by).sequence; }

  Server server;
  const uint32_t index;
  std::shared_ptr<ServedObject> object;
  uint64_t views = 0;
  const Span whole{0, kN, 0};
  std::vector<Keyed> keyed;
  std::vector<float> in, out = std::vector<float>(kN, 77.0f);
};

}  // namespace windlass::test
