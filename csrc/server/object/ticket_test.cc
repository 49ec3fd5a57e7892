#include "server/object/ticket.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/test.h"
#include "server/server.h"

namespace windlass::ticket_test {
namespace {

constexpr uint64_t kN = 8;
constexpr uint64_t kFirst = 11, kSecond = 12;  // incarnations of ranks 0 and 1

// Notes what it gets, in order.
class Notes final : public Sink {
 public:
  void deliver(Ticket* const* tickets, size_t n) override;
  std::vector<std::vector<int>> got;
  std::vector<std::pair<uint32_t, int64_t>> waits;  // for whom, and how long
};

class Noted final : public Ticket {
 public:
  Noted(ServedObject& object, const Batch& batch, const Entry& entry, Verdict why, const Shard& shard, Notes& sink,
        int name = 0, std::pair<int, uint64_t> order = {})
      : Ticket(object, batch, entry, Status(), why, shard, os::now_ns()), name(name), sink_(sink), order_(order) {}
  Sink& sink() override { return sink_; }
  std::pair<int, uint64_t> order() const override { return order_; }

  const int name;
  float* out_now = nullptr;  // where its output is by now
  Status wrong;
  int prepared = 0;

 private:
  Status prepare(Entry* entry) override {
    ++prepared;
    entry->out = reinterpret_cast<std::byte*>(out_now);
    return wrong;
  }
  Notes& sink_;
  const std::pair<int, uint64_t> order_;
};

void Notes::deliver(Ticket* const* tickets, size_t n) {
  got.emplace_back();
  for (size_t i = 0; i < n; ++i) {
    got.back().push_back(static_cast<Noted*>(tickets[i])->name);
    waits.emplace_back(tickets[i]->outcome().waited_for, tickets[i]->outcome().waited_ns);
  }
}

// A tensor of one shard on a server that ranks 0 and 1 have joined.
struct Scene {
  explicit Scene(Sync sync) : server(1, ~uint64_t{0}) {
    uint64_t clock = 0;
    server.join(0, 2, kFirst, &clock);
    server.join(1, 2, kSecond, &clock);
    ObjectSpec spec;
    spec.name = server.workers()->app() + "/w";
    spec.tensor.shape = {kN};
    spec.tensor.rule.kind = RuleKind::kSgd;
    spec.tensor.sync = sync;
    CHECK_OK(server.open(spec, &object));
  }
  Shard& shard() { return *object->find(0); }
  // `rank` is a session, too.
  Batch batch(wire::Op op, uint32_t rank, uint64_t incarnation) {
    Batch b;
    b.op = traits_of(op);
    b.caller = {rank, incarnation, rank};
    b.hyper.v[0] = 1;
    b.in_place = true;
    return b;
  }
  Entry entry(uint64_t clock, const float* in, float* out) {
    Entry e;
    e.term = shard().home.term;
    e.clock = clock;
    e.spans = &whole;
    e.items = 1;
    e.in = reinterpret_cast<const std::byte*>(in);
    e.out = reinterpret_cast<std::byte*>(out);
    return e;
  }
  void close(uint32_t rank, uint64_t incarnation, uint64_t clock, double weight) {
    const Batch b = batch(wire::Op::kClose, rank, incarnation);
    Entry e = entry(clock, nullptr, nullptr);
    e.flags = wire::kCloses;
    e.value = std::bit_cast<uint64_t>(weight);
    Outcome outcome;
    CHECK(object->run(b, e, shard(), Status(), &outcome) == Verdict::kDone);
  }
  template <class... Args>
  Noted& park(Args&&... args) {
    auto ticket = std::make_unique<Noted>(*object, std::forward<Args>(args)...);
    Noted& parked = *ticket;
    std::unique_ptr<Waiting> waiting = std::move(ticket);
    CHECK(shard().parked.park(&waiting));
    return parked;
  }
  // Runs whoever is ready, and keeps them alive.
  size_t free() {
    const size_t before = freed.size();
    shard().parked.free(shard(), &freed);
    return freed.size() - before;
  }

  Server server;
  std::shared_ptr<ServedObject> object;
  const Span whole{0, kN, 0};
  Notes notes;
  Freed freed;
};

constexpr Sync kBsp{Sync::kBsp, 0, 0}, kAsp{Sync::kAsp, 0, 0};

}  // namespace

TEST(a_ticket_at_the_gate_runs_when_the_others_have_closed) {
  Scene s(kBsp);
  const Batch pull = s.batch(wire::Op::kPull, 0, kFirst);
  std::vector<float> out(kN, 7.0f);
  const Entry entry = s.entry(1, nullptr, out.data());
  Outcome outcome;
  CHECK(s.object->run(pull, entry, s.shard(), Status(), &outcome) == Verdict::kGated);
  Noted& ticket = s.park(pull, entry, Verdict::kGated, s.shard(), s.notes);
  ticket.out_now = out.data();
  CHECK(ticket.gated());
  CHECK_EQ(ticket.asked(), 1u);
  s.close(0, kFirst, 1, 0);
  CHECK_EQ(s.free(), 0u);
  CHECK_EQ(ticket.prepared, 0);
  s.close(1, kSecond, 1, 0);
  CHECK_EQ(out[0], 7.0f);
  CHECK_EQ(s.free(), 1u);
  CHECK(s.shard().parked.empty());
  CHECK(out == std::vector<float>(kN, 0.0f));
  CHECK_OK(ticket.outcome().status);
  CHECK_EQ(ticket.outcome().clock, 1u);
  deliver(&s.freed);
  CHECK_EQ(s.notes.waits.size(), 1u);
  CHECK_EQ(s.notes.waits[0].first, 0u);  // the first that had not closed when it came
  CHECK(s.notes.waits[0].second > 0);
  const SyncStats stats = s.server.workers()->stats();
  CHECK_EQ(stats.waits, 1u);
  CHECK(stats.waited_for.at(0) > 0);
}

TEST(an_early_ticket_runs_when_its_predecessor_has) {
  Scene s(kAsp);
  const Batch push = s.batch(wire::Op::kPush, 0, kFirst);
  const std::vector<float> g(kN, 1.0f);
  Entry second = s.entry(0, g.data(), nullptr), first = second;
  second.sequence = 2;
  first.sequence = 1;
  Outcome outcome;
  CHECK(s.object->run(push, second, s.shard(), Status(), &outcome) == Verdict::kEarly);
  Noted& ticket = s.park(push, second, Verdict::kEarly, s.shard(), s.notes);
  CHECK(!ticket.taken());
  CHECK_EQ(s.free(), 0u);
  CHECK(s.object->run(push, first, s.shard(), Status(), &outcome) == Verdict::kDone);
  CHECK_EQ(s.free(), 1u);
  CHECK_EQ(s.shard().version, 2u);
  CHECK_EQ(ticket.outcome().sequence, 2u);
}

TEST(a_ticket_asks_where_its_arrays_are_each_time_it_runs) {
  Scene s(kBsp);
  const Batch pull = s.batch(wire::Op::kPull, 0, kFirst);
  std::vector<float> before(kN, 7.0f), after(kN, 7.0f);
  const Entry entry = s.entry(1, nullptr, before.data());
  Noted& moved = s.park(pull, entry, Verdict::kGated, s.shard(), s.notes);
  moved.out_now = after.data();
  Noted& gone = s.park(pull, entry, Verdict::kGated, s.shard(), s.notes);  // its caller has given up
  Noted& wrong = s.park(pull, entry, Verdict::kGated, s.shard(), s.notes);
  wrong.wrong = Status(Code::kResourceExhausted, "no memory for its answer");
  s.close(0, kFirst, 1, 0);
  s.close(1, kSecond, 1, 0);
  CHECK_EQ(s.free(), 3u);
  CHECK(before == std::vector<float>(kN, 7.0f));
  CHECK(after == std::vector<float>(kN, 0.0f));
  CHECK_OK(moved.outcome().status);
  CHECK_OK(gone.outcome().status);
  CHECK_CODE(wrong.outcome().status, Code::kResourceExhausted);
}

// Whoever makes the update has the weights at hand.
TEST(the_update_writes_the_weights_where_its_tickets_want_them_then) {
  Scene s(kBsp);
  std::vector<float> g(kN, 2.0f), before(kN, 7.0f), after(kN, 7.0f);
  Batch push_pull = s.batch(wire::Op::kPushPull, 0, kFirst);
  push_pull.arrays.memory = std::make_shared<int>();  // registered: the update may use them where they are
  Entry entry = s.entry(0, g.data(), before.data());
  entry.flags = wire::kCloses;
  Outcome outcome;
  CHECK(s.object->run(push_pull, entry, s.shard(), Status(), &outcome) == Verdict::kGated);
  Noted& ticket = s.park(push_pull, entry, Verdict::kGated, s.shard(), s.notes);
  CHECK(ticket.taken());
  ticket.out_now = after.data();
  CHECK(ticket.wants(1).out == after.data());
  CHECK(ticket.wants(2).out == nullptr);  // another update than the one it waits for
  s.close(1, kSecond, 1, 0);
  CHECK(before == std::vector<float>(kN, 7.0f));
  CHECK(after == std::vector<float>(kN, -2.0f));  // at the close, before the ticket has run
  after[0] = 5.0f;
  CHECK_EQ(s.free(), 1u);
  CHECK_EQ(after[0], 5.0f);  // written once
  CHECK_OK(ticket.outcome().status);
  CHECK_EQ(ticket.outcome().value, 2u);
}

TEST(an_update_writes_nothing_for_a_ticket_that_nobody_waits_for) {
  Scene s(kBsp);
  std::vector<float> g(kN, 2.0f), out(kN, 7.0f);
  Batch push_pull = s.batch(wire::Op::kPushPull, 0, kFirst);
  push_pull.arrays.memory = std::make_shared<int>();
  Entry entry = s.entry(0, g.data(), out.data());
  entry.flags = wire::kCloses;
  Outcome outcome;
  CHECK(s.object->run(push_pull, entry, s.shard(), Status(), &outcome) == Verdict::kGated);
  Noted& ticket = s.park(push_pull, entry, Verdict::kGated, s.shard(), s.notes);
  s.close(1, kSecond, 1, 0);
  CHECK_EQ(s.free(), 1u);
  CHECK(out == std::vector<float>(kN, 7.0f));
  CHECK_OK(ticket.outcome().status);
  CHECK_EQ(s.shard().version, 1u);  // the push counted
}

TEST(tickets_of_one_sink_are_delivered_together_and_in_their_order) {
  Scene s(kAsp);
  const Batch push = s.batch(wire::Op::kPush, 0, kFirst);
  const Entry entry = s.entry(0, nullptr, nullptr);
  Notes other;
  Freed freed;
  const auto add = [&](Notes& sink, int name, std::pair<int, uint64_t> order) {
    freed.push_back(std::make_unique<Noted>(*s.object, push, entry, Verdict::kEarly, s.shard(), sink, name, order));
  };
  add(s.notes, 1, {0, 5});
  add(other, 2, {0, 1});
  add(s.notes, 3, {0, 4});
  add(s.notes, 4, {-1, 9});
  add(other, 5, {0, 1});
  add(s.notes, 6, {0, 5});
  deliver(&freed);
  CHECK(freed.empty());
  CHECK(s.notes.got == (std::vector<std::vector<int>>{{4, 3, 1, 6}}));
  CHECK(other.got == (std::vector<std::vector<int>>{{2, 5}}));
}

TEST(a_ticket_that_is_ended_says_why) {
  Scene s(kBsp);
  const Batch pull = s.batch(wire::Op::kPull, 0, kFirst);
  Noted& ticket = s.park(pull, s.entry(1, nullptr, nullptr), Verdict::kGated, s.shard(), s.notes);
  ticket.end(Status(Code::kClosed, "the cluster has been closed"));
  CHECK_CODE(ticket.outcome().status, Code::kClosed);
}

}  // namespace windlass::ticket_test
