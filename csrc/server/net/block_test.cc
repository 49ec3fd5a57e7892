// Blocks of several entries: each entry may be applied, refused, come too early, wait for other workers or be
// elsewhere, and the connection may break before, during or after. What happens to one entry is none of the others'
// business.
#include <array>
#include <bit>
#include <map>

#include "base/test.h"
#include "server/host.h"
#include "server/net/peer_test.h"

namespace windlass::block_test {
namespace {

using test::a_table;
using test::a_tensor;
using test::about;
using test::bytes_of;
using test::Frame;
using test::frame_of;
using test::FramePart;
using test::hello_as;
using test::keys_in;
using test::on_keys;
using test::Peer;
using test::values_of;
using wire::Op;

constexpr uint32_t kDim = 2, kEntries = 3;

enum Fate { kApplied, kRefused, kEarly, kGated, kMoved, kFates };
enum Broken { kNever, kBefore, kDuring, kAfter, kCuts };

Hello as_rank(uint32_t rank, uint64_t known = 0) {
  Hello hello = hello_as(0, "app", {"here:1", "there:1"});
  hello.rank = rank;
  hello.world_size = 2;
  hello.known = known;
  return hello;
}

// Half of its shards are on another server.
Map a_table_under_bsp(Peer& peer) {
  ObjectSpec spec = a_table("t", kDim, RuleKind::kSgd);
  spec.table.sync = {Sync::kBsp, 0, 0};
  Map map;
  CHECK_OK(peer.open(spec, &map));
  CHECK_OK(peer.attach(spec, map));
  return map;
}

uint32_t shard_of(Fate fate, uint32_t entry) { return (fate == kMoved ? 200 : 10) + entry; }

// A push_pull that closes its iteration, of one key in each shard.
Frame block_of(const Map& map, const std::array<Fate, kEntries>& fates) {
  Frame f = frame_of(Op::kPushPull, map.object);
  f.hyper = {1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0};
  FramePart& p = f.parts.emplace_back();
  p.part.term = 1;
  p.part.flags = wire::kCloses | wire::kCreates;
  for (uint32_t i = 0; i < kEntries; ++i) {
    const uint32_t shard = shard_of(fates[i], i);
    const uint64_t sequence = fates[i] == kEarly ? 2 : 1;
    if (i == 0) {
      p.part.shard = shard;
      p.part.sequence = sequence;
      p.part.items = 1;
    } else {
      p.more.push_back({shard, 1, sequence});
    }
    p.items += bytes_of(keys_in(fates[i] == kRefused ? shard + 1 : shard, 1));
    p.numbers += bytes_of(std::vector<float>(kDim, -3.0f));
  }
  return f;
}

// The other worker closes, and has pushed nothing.
void close_other(Peer& other, const Map& map, const std::vector<uint32_t>& shards) {
  std::vector<Frame> closes;
  for (const uint32_t shard : shards) {
    Frame f = about(Op::kClose, map, shard, 0, bytes_of<uint64_t>({0}));
    f.parts[0].part.clock = 1;
    f.parts[0].part.flags = wire::kCloses;
    f.parts[0].part.value = std::bit_cast<uint64_t>(0.0);
    closes.push_back(f);
  }
  if (closes.empty()) return;
  for (const FramePart& p : other.call(test::in_step(closes))) CHECK_OK(p.status());
}

// What the caller did before, and now brings: the push whose number is missing.
void bring_missing(Peer& peer, const Map& map, const std::array<Fate, kEntries>& fates) {
  for (uint32_t i = 0; i < kEntries; ++i) {
    if (fates[i] != kEarly) continue;
    Frame f = on_keys(Op::kPush, map, shard_of(kEarly, i), 1, {}, "", wire::kEmpty);
    f.hyper = {1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0};
    CHECK_OK(peer.call_one(f).status());
  }
}

std::string said(const std::array<Fate, kEntries>& fates, Broken cut) {
  std::string text;
  for (const Fate f : fates) text += "areg m"[f == kMoved ? 5 : f];
  return text + " cut " + std::to_string(cut);
}

void check_answer(const FramePart& p, const std::array<Fate, kEntries>& fates, const std::string& what) {
  std::map<uint32_t, std::pair<Code, uint64_t>> exceptions;
  for (const auto& [e, message] : p.exceptions) exceptions[e.entry] = {static_cast<Code>(e.status), e.value};
  size_t rows = 0;
  bool right = true;
  for (uint32_t i = 0; i < kEntries; ++i) {
    if (fates[i] == kRefused) {
      right = right && exceptions[i].first == Code::kInvalidArgument;
    } else if (fates[i] == kMoved) {
      right = right && exceptions[i].first == Code::kStaleMap && exceptions[i].second == 1;
    } else {
      right = right && exceptions.count(i) == 0;
      ++rows;
    }
  }
  if (!right || values_of<float>(p.numbers) != std::vector<float>(rows * kDim, 3.0f))
    test::fail(__FILE__, __LINE__,
               what + ": a wrong answer, " + std::to_string(p.exceptions.size()) + " exceptions, " +
                   (p.exceptions.empty() ? "" : p.exceptions[0].second) + ", first number " +
                   (p.numbers.empty() ? "none" : std::to_string(values_of<float>(p.numbers)[0])));
}

}  // namespace

TEST(every_fate_of_an_entry_leaves_the_others_theirs_however_the_connection_breaks) {
  for (uint32_t n = 0; n < kFates * kFates * kFates * kCuts; ++n) {
    const auto cut = static_cast<Broken>(n % kCuts);
    const std::array<Fate, kEntries> fates = {static_cast<Fate>(n / kCuts % kFates),
                                              static_cast<Fate>(n / kCuts / kFates % kFates),
                                              static_cast<Fate>(n / kCuts / kFates / kFates)};
    Host host(1, ~uint64_t{0});
    Peer other = Peer::greeted(host, "other", 2, as_rank(1));
    Peer peer = Peer::greeted(host, "own", 1, as_rank(0));
    const Map map = a_table_under_bsp(peer);
    std::vector<uint32_t> at_once, later;
    for (uint32_t i = 0; i < kEntries; ++i) {
      if (fates[i] == kMoved) continue;
      (fates[i] == kGated ? later : at_once).push_back(shard_of(fates[i], i));
    }
    close_other(other, map, at_once);
    const bool waits = std::any_of(fates.begin(), fates.end(), [](Fate f) { return f == kEarly || f == kGated; });
    Frame block = block_of(map, fates);
    peer.stamp(&block);
    const std::string bytes = block.bytes();
    if (cut != kNever) {
      const uint64_t known = peer.incarnation;
      CHECK(peer.send(cut == kBefore ? bytes.substr(0, bytes.size() - 64) : bytes));
      if (cut == kDuring && waits) CHECK(peer.quiet(1));  // it waits in its shards
      if (cut == kAfter && !waits) CHECK_EQ(peer.finish(block.header.request, 1).size(), 1u);
      peer.close();
      peer = Peer::greeted(host, "own", 1, as_rank(0, known));
    }
    CHECK(peer.send(bytes));
    bring_missing(peer, map, fates);
    if (std::find(fates.begin(), fates.end(), kGated) != fates.end()) CHECK(peer.quiet(1));
    close_other(other, map, later);
    const std::vector<FramePart> answer = peer.finish(block.header.request, 1);
    if (answer.size() != 1 || answer[0].more.size() > 2) {
      test::fail(__FILE__, __LINE__, said(fates, cut) + ": " + std::to_string(answer.size()) + " answers");
      continue;
    }
    check_answer(answer[0], fates, said(fates, cut));
    // Once, whatever was sent again.
    for (uint32_t i = 0; i < kEntries; ++i) {
      if (fates[i] == kMoved || fates[i] == kRefused) continue;
      Frame pull = on_keys(Op::kPull, map, shard_of(fates[i], i), 0, keys_in(shard_of(fates[i], i), 1));
      pull.parts[0].part.clock = 1;
      CHECK(values_of<float>(peer.call_one(pull).numbers) == std::vector<float>(kDim, 3.0f));
    }
  }
}

TEST(a_block_says_the_values_of_all_its_entries_and_only_what_differs_besides) {
  Host host(1, ~uint64_t{0});
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_table("t", kDim));
  Frame push = on_keys(Op::kPush, map, 3, 1, keys_in(3, 5), bytes_of(std::vector<float>(7 * kDim, 1)));
  push.hyper.assign(8, 0);
  push.parts[0].items += bytes_of(keys_in(9, 2));
  push.parts[0].more = {{9, 2, 1}};
  CHECK_OK(peer.call_one(push).status());
  Frame rows = about(Op::kRows, map, 3, 1);
  rows.parts[0].more = {{9, 0, 1}, {10, 0, 0}};
  const FramePart counted = peer.call_one(rows);
  CHECK(counted.values == (std::vector<uint64_t>{5, 2, 0}));
  CHECK(counted.exceptions.empty());
  // The same with shards that follow each other: an entry is its sequence.
  Frame run = about(Op::kRows, map, 8, 0);
  run.parts[0].part.flags = wire::kRun;
  run.parts[0].more = {{}};  // 16 bytes: two sequences
  peer.stamp(&run);
  std::string bytes = run.bytes();
  test::change_block(&bytes, [](wire::Block* b) { b->entries = 3; });
  CHECK(peer.send(bytes));
  const std::vector<FramePart> answer = peer.finish(run.header.request, 1);
  CHECK(answer.size() == 1 && answer[0].values == (std::vector<uint64_t>{0, 2, 0}));
}

TEST(a_repeat_that_is_something_else_is_refused_for_what_it_is) {
  Host host(1, ~uint64_t{0});
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_table("t", kDim));
  CHECK_OK(peer.call_one(on_keys(Op::kErase, map, 3, 1, keys_in(3, 1))).status());  // whose answer is kept
  Frame other = on_keys(Op::kPushPull, map, 3, 1, keys_in(4, 1), bytes_of(std::vector<float>(kDim, 1)));
  other.hyper.assign(8, 0);
  CHECK_CODE(peer.call_one(other).status(), Code::kInvalidArgument);
  CHECK_OK(peer.call_one(on_keys(Op::kErase, map, 3, 1, keys_in(3, 1))).status());
}

TEST(an_unchanged_shard_has_no_numbers_among_those_that_have) {
  Host host(1, ~uint64_t{0});
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_tensor("w", {40'000}));  // three shards
  Frame push = test::on_spans(Op::kPush, map, 0, 1, {0, 1}, bytes_of<float>({5}));
  push.hyper.assign(8, 0);
  CHECK_OK(peer.call_one(push).status());
  // Versions count from 1: shard 0 has had an update, the others have not.
  Frame pull = test::on_spans(Op::kPull, map, 0, 1, {0, 2});
  pull.parts[0].part.value = 1;
  pull.parts[0].items += bytes_of<uint64_t>({16'384, 3, 32'768, 1});
  pull.parts[0].more = {{1, 1, 0}, {2, 1, 0}};
  const FramePart p = peer.call_one(pull);
  CHECK_EQ(p.exceptions.size(), 2u);
  for (const auto& [e, message] : p.exceptions) CHECK(e.status == 0 && e.flags == wire::kUnchanged && e.entry != 0);
  CHECK(values_of<float>(p.numbers) == (std::vector<float>{5, 0}));
  CHECK(p.values == (std::vector<uint64_t>{2, 1, 1}));
}

TEST(a_block_that_leans_on_one_that_is_not_there_or_was_damaged_is_refused) {
  Host host(1, ~uint64_t{0});
  Peer peer = Peer::greeted(host, "key");
  const Map map = peer.made(a_table("t", kDim));
  Frame alone = on_keys(Op::kPull, map, 3, 0, keys_in(3, 1));
  alone.parts[0].part.flags = wire::kAsBefore;
  CHECK_CODE(peer.call_one(alone).status(), Code::kInvalidArgument);
  Frame two = on_keys(Op::kPull, map, 3, 0, keys_in(3, 1), "", wire::kCreates);
  two.parts.push_back(two.parts[0]);
  two.parts[1].part.shard = 4;
  two.parts[1].items = bytes_of(keys_in(4, 1));
  for (const FramePart& p : peer.call(two)) CHECK_OK(p.status());
  two.header.request = 0;
  peer.stamp(&two);
  std::string bytes = two.bytes();
  bytes[130] = static_cast<char>(bytes[130] ^ 1);  // of the first one's body
  CHECK(peer.send(bytes));
  for (const FramePart& p : peer.finish(two.header.request, 2)) CHECK_CODE(p.status(), Code::kCorrupt);
  // Operations whose answers have a body are about one shard each, and a block is about some shard.
  Frame scan = about(Op::kScan, map, 3, 0, bytes_of<uint64_t>({10}));
  CHECK_OK(peer.call_one(scan).status());
  scan.parts[0].more = {{4, 0, 0}};
  CHECK_CODE(peer.call_one(scan).status(), Code::kInvalidArgument);
}

}  // namespace windlass::block_test
