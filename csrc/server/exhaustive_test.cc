// Gates and rounds under every order of events in a small world: 2 workers, 2 shards, 2 or 3 iterations, at most one
// crash and one message that comes twice. Messages of a worker to a shard stay in order, as its sequences make them;
// all others come in any order, views included. A crash is followed by
//
//     kView     a view without the worker
//     kReplace  its place being kept: another process does its iteration again
//     kJoin     a view without it, and then another process under its rank, beyond all clocks
//
// Every state that can be reached is visited once. In each, what the code did is compared with a ledger that knows the
// promise and nothing of the code: who closed what, and so which updates are made, and from what.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/test.h"
#include "server/object/close_test.h"
#include "session/record.h"
#include "sync/gate.h"

namespace windlass::exhaustive_test {
namespace {

using test::close_in_turn;

constexpr size_t kShards = 2, kRanks = 2, kActors = 3;  // the third takes the place of one that crashed

enum Crash { kView, kReplace, kJoin };
enum Flaw { kNoFlaw, kLoose, kForgetsIncarnations, kHearsTheLost };

struct Options {
  Sync sync;
  Crash crash = kView;
  uint64_t clocks = 3;
  bool fused = false;  // push, close and pull in one request; else push, close, pull
  Flaw flaw = kNoFlaw;
};

// What an actor pushes in an iteration; sums say how often each is in them.
int64_t value_of(size_t actor, uint64_t iteration) { return int64_t{1} << (4 * (actor * 4 + iteration)); }
int64_t times(int64_t total, size_t actor, uint64_t iteration) { return (total >> (4 * (actor * 4 + iteration))) & 15; }

// What must be so at a shard.
struct Ledger {
  std::array<bool, kRanks> in_view = {true, true};
  std::array<uint8_t, kRanks> clock = {};
  std::array<std::array<uint8_t, 8>, kRanks> closed_by = {};  // the actor, plus one
  std::array<std::array<uint8_t, 8>, kActors> pushed = {};
  std::array<uint8_t, kActors> sequence = {};
  std::array<bool, kActors> lost = {};
  uint8_t made = 0;
  int64_t total = 0;

  void close(size_t actor, size_t rank, uint64_t clock_now) {
    if (clock[rank] >= clock_now) return;
    clock[rank] = static_cast<uint8_t>(clock_now);
    closed_by[rank][clock_now - 1] = static_cast<uint8_t>(actor + 1);
  }
  void make(const Sync& sync) {
    if (!sync.rounds()) return;
    std::vector<uint64_t> clocks;
    for (size_t r = 0; r < kRanks; ++r) {
      if (in_view[r]) clocks.push_back(clock[r]);
    }
    std::sort(clocks.begin(), clocks.end());
    for (const uint64_t due = clocks[std::min<size_t>(sync.number, clocks.size() - 1)]; made < due; ++made) {
      for (size_t r = 0; r < kRanks; ++r) {
        const size_t by = closed_by[r][made];
        if (by != 0 && pushed[by - 1][made] != 0) total += value_of(by - 1, made);
      }
    }
  }
};

struct Place {
  std::shared_ptr<const Gate> gate;
  std::shared_ptr<const BspUpdates> rounds;
  int64_t total = 0;
  Ledger ledger;
};

struct Actor {
  uint8_t rank = 0;
  bool started = false, alive = false;
  uint8_t iteration = 0;
  std::array<uint8_t, kShards> step = {};
};

struct World {
  std::array<Place, kShards> places;
  std::array<Actor, kActors> actors;
  std::array<bool, kShards> view = {}, entered = {};
  bool crashed = false, doubled = false, joining = false;
  uint8_t join_at = 0, margin = 1;
};

class Checker {
 public:
  explicit Checker(const Options& options) : options_(options) {
    const TensorSpec spec{.shape = {1}, .dtype = Dtype::kInt64, .rule = {RuleKind::kSum}, .sync = options.sync};
    CHECK_OK(Tensor::create("w", spec, &budget_, &tensor_));
    World first;
    Gate gate(options.sync);
    gate.set_view({.known = true, .workers = {{0, 0}, {1, 0}}}, 0);
    for (Place& place : first.places) {
      place.gate = std::make_shared<const Gate>(gate);
      place.rounds = std::make_shared<const BspUpdates>();
    }
    for (uint8_t a = 0; a < kRanks; ++a) first.actors[a] = {.rank = a, .started = true, .alive = true};
    visit(std::move(first));
  }

  size_t run() {
    while (!open_.empty() && wrong_.empty()) {
      const World world = std::move(open_.back());
      open_.pop_back();
      expand(world);
    }
    return seen_.size();
  }
  const std::string& wrong() const { return wrong_; }
  uint64_t waits = 0, repeats = 0, late = 0, ends = 0;

 private:
  uint8_t steps() const { return options_.fused ? 2 : 3; }
  void complain(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }

  void visit(World world) {
    std::string key;
    const auto put = [&](const auto& fields) { key.append(reinterpret_cast<const char*>(&fields), sizeof fields); };
    for (const Place& p : world.places) {
      const Ledger& l = p.ledger;
      put(l.in_view), put(l.clock), put(l.closed_by), put(l.pushed), put(l.sequence), put(l.lost), put(l.made);
      put(l.total);
      key += p.rounds->first(*p.gate) == l.made ? '1' : '0';  // whether there is a sum
      for (const BspUpdates::Push& w : p.rounds->waiting()) put(w.iteration), put(w.incarnation), put(w.rank);
    }
    for (const Actor& a : world.actors) put(a.rank), put(a.started), put(a.alive), put(a.iteration), put(a.step);
    put(world.view), put(world.entered), put(world.crashed), put(world.doubled), put(world.joining);
    put(world.join_at), put(world.margin);
    if (seen_.insert(std::move(key)).second) open_.push_back(std::move(world));
  }

  // What the shard does, by the code that ships; then both have to agree.
  void act(Place* place, const std::function<void(Shard&, const Target&)>& what, const std::string& name) {
    Shard& shard = tensor_->shard(0);
    const Target target{tensor_.get(), nullptr, 0};
    shard.gate = std::make_unique<Gate>(*place->gate);
    shard.staged = std::make_unique<BspUpdates>(*place->rounds);
    const int64_t before = weight();
    what(shard, target);
    place->total += weight() - before;
    place->gate = std::shared_ptr<const Gate>(std::move(shard.gate));
    place->rounds = std::make_shared<const BspUpdates>(static_cast<const BspUpdates&>(*shard.staged));
    place->ledger.make(options_.sync);
    const Gate& gate = *place->gate;
    if (options_.sync.rounds() && gate.made() != place->ledger.made) complain(name + ": another number of updates");
    if (place->total != place->ledger.total) complain(name + ": an update is not what was closed");
    for (uint32_t r = 0; r < kRanks; ++r) {
      if (gate.clock_of(r) != place->ledger.clock[r]) complain(name + ": another clock");
      if (gate.waits_for(r) != place->ledger.in_view[r]) complain(name + ": another view");
    }
  }
  int64_t weight() const {
    int64_t w = 0;
    std::memcpy(&w, tensor_->weights_of(0), sizeof w);
    return w;
  }

  void push(Place* place, size_t actor, const Actor& a, uint64_t iteration, uint64_t sequence, bool closes) {
    Ledger& ledger = place->ledger;
    Record record;
    record.sequence = ledger.sequence[actor];
    const bool fresh = record.admit(sequence) == Admission::kApply;
    const uint64_t clock = iteration + 1;
    if (fresh) {
      ledger.sequence[actor] = static_cast<uint8_t>(sequence);
      // What was closed in this worker's place stays as it is.
      if (ledger.clock[a.rank] > iteration) ++repeats;
      if (iteration < ledger.made) ++late;
      ++ledger.pushed[actor][iteration];
      if (!options_.sync.rounds()) ledger.total += value_of(actor, iteration);
    }
    if (fresh && closes) ledger.close(actor, a.rank, clock);
    int64_t passing = value_of(actor, iteration);
    act(
        place,
        [&](Shard& shard, const Target& target) {
          if (!fresh) return;
          if (options_.sync.rounds()) {
            BspUpdates::Push p{.rank = a.rank, .iteration = iteration, .dtype = Dtype::kInt64, .spans = {{0, 1, 0}}};
            if (options_.flaw != kForgetsIncarnations) p.incarnation = actor + 1;
            p.numbers = reinterpret_cast<const std::byte*>(&passing);
            if (!closes ||
                !BspUpdates::is_next(a.rank, iteration, *shard.gate)) {  // as it comes over a socket, or lies
              const auto kept = std::make_shared<int64_t>(passing);
              p.numbers = reinterpret_cast<const std::byte*>(kept.get());
              p.memory = kept;
              p.charged = a.rank == 0;
            }
            static_cast<BspUpdates&>(*shard.staged).add(std::move(p), *shard.gate);
          } else {
            const Span all{0, 1, 0};
            tensor_->apply(0, {}, &all, 1, {&passing, nullptr, Dtype::kInt64, Dtype::kInt64, false});
          }
          if (closes) close_in_turn(target, shard, a.rank, clock, 1);
          passing = 15;  // its memory is somebody else's by the end of the turn
        },
        "p" + std::to_string(actor) + std::to_string(iteration) + (closes ? "c" : ""));
  }
  void close(Place* place, size_t actor, const Actor& a, uint64_t clock) {
    place->ledger.close(actor, a.rank, clock);
    act(
        place, [&](Shard& shard, const Target& target) { close_in_turn(target, shard, a.rank, clock, 1); },
        "c" + std::to_string(actor) + std::to_string(clock));
  }
  void set_view(Place* place, std::vector<View::Worker> workers) {
    place->ledger.in_view = {};
    std::string name = "v";
    for (const View::Worker& w : workers) {
      name += std::to_string(w.rank) + std::to_string(w.clock);
      place->ledger.in_view[w.rank] = true;
      place->ledger.clock[w.rank] = std::max(place->ledger.clock[w.rank], static_cast<uint8_t>(w.clock));
    }
    act(
        place,
        [&](Shard& shard, const Target& target) {
          shard.gate->set_view({.known = true, .workers = std::move(workers)}, 0);
          if (options_.sync.rounds()) make_updates(shard, target);
        },
        name);
  }

  // A pull that was let through has to see what was promised.
  void check_pull(const Place& place, size_t actor, const Actor& a, uint64_t clock, uint64_t first) {
    const Ledger& ledger = place.ledger;
    const Sync& sync = options_.sync;
    if (sync.rounds()) {
      if (ledger.made < clock) complain("a pull before its update");
      if (sync.number == 0 && ledger.made > clock) complain("a pull after an update too many");
      return;
    }
    for (uint64_t i = first; i < clock; ++i) {
      if (times(place.total, actor, i) == 0) complain("a pull does not see its own push");
    }
    const size_t other = 1 - a.rank;
    if (sync.kind != Sync::kSsp || !ledger.in_view[other]) return;
    if (ledger.clock[other] + sync.number < clock) complain("a pull is too far ahead");
    for (uint64_t i = 0; i + sync.number < clock; ++i) {
      const size_t by = ledger.closed_by[other][i];
      if (by != 0 && times(place.total, by - 1, i) == 0) complain("a pull does not see what was closed");
    }
  }

  void expand(const World& world) {
    bool progress = false;
    for (size_t a = 0; a < kActors; ++a) {
      for (size_t s = 0; s < kShards; ++s) {
        progress = deliver(world, a, s) || progress;
        repeat(world, a, s);
      }
      if (a < kRanks) crash(world, a);
    }
    progress = (world.crashed && hear(world)) || progress;
    if (progress) return;
    ++ends;
    for (const Actor& a : world.actors) {
      if (a.alive && a.iteration < options_.clocks)
        complain("rank " + std::to_string(a.rank) + " waits for ever in iteration " + std::to_string(a.iteration));
    }
    if (world.crashed && options_.crash != kView && !world.actors[2].started) complain("nobody takes the place");
  }

  bool deliver(const World& world, size_t actor, size_t s) {
    const Actor& a = world.actors[actor];
    const Place& at = world.places[s];
    if (!a.started || a.iteration >= options_.clocks || a.step[s] >= steps() || at.ledger.lost[actor]) return false;
    const bool pulls = a.step[s] + 1 == steps();
    if (pulls && !a.alive) return false;
    const uint64_t clock = a.iteration + 1u;
    if (pulls && !at.gate->opens(a.rank, options_.flaw == kLoose ? clock - 1 : clock, 0)) {
      ++waits;
      return false;
    }
    World next = world;
    Place* const place = &next.places[s];
    if (pulls) {
      check_pull(*place, actor, a, clock, firsts_of(world, actor));
    } else if (a.step[s] == 0) {
      push(place, actor, a, a.iteration, place->ledger.sequence[actor] + 1u, options_.fused);
    } else {
      close(place, actor, a, clock);
    }
    Actor& moved = next.actors[actor];
    ++moved.step[s];
    if (std::all_of(moved.step.begin(), moved.step.end(), [&](uint8_t n) { return n == steps(); })) {
      ++moved.iteration;
      moved.step = {};
    }
    visit(std::move(next));
    return true;
  }
  static uint64_t firsts_of(const World& world, size_t actor) { return actor == 2 ? world.join_at : 0; }

  // The last push and the last close come once more.
  void repeat(const World& world, size_t actor, size_t s) {
    const Ledger& ledger = world.places[s].ledger;
    if (world.doubled || ledger.sequence[actor] == 0 || ledger.lost[actor]) return;
    const uint64_t last = firsts_of(world, actor) + ledger.sequence[actor] - 1;
    World next = world;
    next.doubled = true;
    push(&next.places[s], actor, world.actors[actor], last, ledger.sequence[actor], options_.fused);
    visit(std::move(next));
    const uint64_t closed = ledger.clock[world.actors[actor].rank];
    if (options_.fused || closed == 0) return;
    next = world;
    next.doubled = true;
    close(&next.places[s], actor, world.actors[actor], closed);
    visit(std::move(next));
  }

  void crash(const World& world, size_t actor) {
    if (world.crashed || world.actors[actor].iteration >= options_.clocks) return;
    World next = world;
    next.crashed = true;
    next.actors[actor].alive = false;
    next.actors[2].rank = static_cast<uint8_t>(actor);
    visit(std::move(next));
  }

  // What follows a crash.
  bool hear(const World& world) {
    const uint8_t rank = world.actors[2].rank;
    const uint32_t other = 1u - rank;
    bool progress = false;
    for (size_t s = 0; s < kShards; ++s) {
      if (world.view[s]) continue;
      World next = world;
      next.view[s] = true;
      next.places[s].ledger.lost[rank] = options_.flaw != kHearsTheLost;
      if (options_.crash == kReplace) {
        set_view(&next.places[s], {{0, 0}, {1, 0}});
      } else {
        set_view(&next.places[s], {{other, 0}});
      }
      visit(std::move(next));
      progress = true;
    }
    if (!world.view[0] || !world.view[1] || world.actors[2].started || options_.crash == kView) return progress;
    World next = world;
    if (options_.crash == kReplace) {
      uint64_t own = Gate::kNone;
      for (const Place& p : world.places) own = std::min(own, std::max(p.gate->clock_of(rank), p.gate->made()));
      start(&next, own);
      visit(std::move(next));
      return true;
    }
    if (!world.joining) {
      uint64_t highest = 0, lowest = Gate::kNone;
      for (const Place& p : world.places) {
        highest = std::max(highest, p.gate->highest());
        lowest = std::min(lowest, p.gate->lowest());
      }
      next.joining = true;
      next.join_at = static_cast<uint8_t>(options_.sync.rounds() ? highest + world.margin : lowest);
      visit(std::move(next));
      return true;
    }
    for (size_t s = 0; s < kShards; ++s) {
      if (world.entered[s]) continue;
      next = world;
      next.entered[s] = true;
      const uint64_t at = world.join_at;
      set_view(&next.places[s], {{0, rank == 0 ? at : 0}, {1, rank == 1 ? at : 0}});
      if (next.entered[0] && next.entered[1]) {
        uint64_t highest = 0;
        for (const Place& p : next.places) highest = std::max(highest, p.gate->highest());
        if (options_.sync.rounds() && highest > at) {  // the other has passed: again, further ahead
          next.joining = false;
          next.entered = {};
          next.margin = static_cast<uint8_t>(2 * next.margin);
        } else {
          start(&next, at);
        }
      }
      visit(std::move(next));
    }
    return true;
  }
  static void start(World* world, uint64_t clock) {
    Actor& a = world->actors[2];
    a.started = a.alive = true;
    a.iteration = world->join_at = static_cast<uint8_t>(clock);
  }

  const Options options_;
  Budget budget_;
  std::unique_ptr<Tensor> tensor_;
  std::unordered_set<std::string> seen_;
  std::vector<World> open_;
  std::string wrong_;
};

struct Policy {
  const char* name;
  Sync sync;
};
const Policy kPolicies[] = {{"BSP", {.kind = Sync::kBsp}},
                            {"SSP(0)", {.kind = Sync::kSsp, .number = 0}},
                            {"SSP(1)", {.kind = Sync::kSsp, .number = 1}},
                            {"ASP", {}},
                            {"BSP(spare=1)", {.kind = Sync::kBsp, .number = 1}}};

}  // namespace

TEST(every_order_of_events_in_a_small_world_keeps_the_promise_of_its_policy) {
  for (const Policy& policy : kPolicies) {
    if (test::kSanitized && !test::accurate() && &policy != kPolicies) break;
    size_t states = 0;
    const uint32_t spare = policy.sync.rounds() ? policy.sync.number : 0;
    uint64_t waits = 0, repeats = 0, late = 0;
    for (const Crash crash : {kView, kReplace, kJoin}) {
      for (const bool fused : {true, false}) {
        if (test::kSanitized && spare != 0 && !fused) continue;
        const bool few = spare == 0 && !test::kSanitized && (crash == kView || (fused && crash == kReplace));
        const uint64_t clocks = few || test::accurate() ? 3 : 2;
        Checker checker({.sync = policy.sync, .crash = crash, .clocks = clocks, .fused = fused});
        states += checker.run();
        waits += checker.waits, repeats += checker.repeats, late += checker.late;
        CHECK(checker.wrong().empty());
        if (!checker.wrong().empty())
          std::fprintf(stderr, "%s, crash %d, fused %d: %s\n", policy.name, crash, fused, checker.wrong().c_str());
        CHECK(checker.ends > 0);
      }
    }
    std::printf("%s: %zu states\n", policy.name, states);
    CHECK(states > 10'000 && repeats > 0);
    // Of two workers, of whom one is spare, none waits.
    CHECK((waits > 0) == (policy.sync.kind != Sync::kAsp && spare == 0));
    CHECK((late > 0) == policy.sync.rounds());
  }
}

TEST(the_search_notices_a_gate_that_is_loose_by_one) {
  int noticed = 0;
  for (const Policy& policy : kPolicies) {
    if (policy.sync.kind == Sync::kAsp || (policy.sync.rounds() && policy.sync.number != 0)) continue;
    Checker checker({.sync = policy.sync, .fused = true, .flaw = kLoose});
    checker.run();
    const bool early =
        checker.wrong() == (policy.sync.rounds() ? "a pull before its update" : "a pull is too far ahead");
    CHECK(early);
    noticed += early;
  }
  CHECK_EQ(noticed, 3);
}

TEST(the_search_notices_pushes_of_a_lost_worker_beside_those_of_its_replacement) {
  for (const Flaw flaw : {kForgetsIncarnations, kHearsTheLost}) {
    Checker checker({.sync = {.kind = Sync::kBsp}, .crash = kReplace, .flaw = flaw});
    checker.run();
    CHECK(checker.wrong().find("an update is not what was closed") != std::string::npos);
  }
}

}  // namespace windlass::exhaustive_test
