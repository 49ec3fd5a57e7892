#include "client/op/local_route.h"

#include "client/op/call.h"

namespace windlass {

class LocalTicket final : public Ticket {
 public:
  LocalTicket(LocalRoute& route, uint32_t part, const Entry& entry, const Status& checked, Verdict why,
              const Shard& shard)
      : Ticket(route.object(), route.call_.batch(), entry, checked, why, shard, os::now_ns()),
        call_(&route.call_),
        route_(route),
        part_(part) {}

  Sink& sink() override { return route_; }
  uint32_t part() const { return part_; }
  void keep_input() { kept_ = true; }

 private:
  Status prepare(Entry* entry) override {
    call_->set_arrays(part_, kept_, entry);
    return {};
  }

  const Ref<Call> call_;
  LocalRoute& route_;
  const uint32_t part_;
  bool kept_ = false;
};

LocalRoute::LocalRoute(Call& call) : ShardWork(call), call_(call) {}

void LocalRoute::set(ServedObject* object, const std::vector<uint32_t>* shards) {
  object_ = object;
  shards_ = shards;
  set_parts(static_cast<uint32_t>(shards->size()));
}

ShardWork::Ran LocalRoute::run(uint32_t part, bool kept, Status* status) {
  Shard& shard = this->shard(part);
  Entry entry;
  entry.shard = (*shards_)[part];
  entry.term = shard.home.term;
  const Status checked = call_.fill(part, kept, &entry);
  Outcome outcome;
  const Verdict verdict = object_->run(call_.batch(), entry, shard, checked, &outcome);
  if (verdict == Verdict::kDone) {
    *status = landed(part, &outcome);
  } else {
    stop(part);
    call_.stopped();
    auto ticket = std::make_unique<LocalTicket>(*this, part, entry, checked, verdict, shard);
    if (kept) ticket->keep_input();
    std::unique_ptr<Waiting> waiting = std::move(ticket);
    (void)shard.parked.park(&waiting, true);
  }
  if (!shard.parked.empty()) {
    Freed freed;
    shard.parked.free(shard, &freed);
    windlass::deliver(&freed);  // may deliver this part's own ticket: the call may be gone
  }
  return verdict == Verdict::kDone ? Ran::kDone : Ran::kStopped;
}

Status LocalRoute::landed(uint32_t part, Outcome* outcome) {
  if (!outcome->status.ok()) call_.refused(part, outcome->status.code());
  return call_.landed(part, outcome);
}

// With the turn: a part that was taken back still uses up its sequence, and closes what its worker counts as closed.
void LocalRoute::skip(uint32_t part) {
  if (!call_.batch().op->numbered) return;
  Shard& shard = this->shard(part);
  Entry entry;
  entry.shard = (*shards_)[part];
  entry.term = shard.home.term;
  (void)call_.fill(part, false, &entry);  // its payload does not matter any more
  entry.flags |= wire::kEmpty;
  Outcome outcome;
  (void)object_->run(call_.batch(), entry, shard, Status(), &outcome);
  Freed freed;
  shard.parked.free(shard, &freed);
  windlass::deliver(&freed);
}

void LocalRoute::keep(uint32_t part) { call_.keep(part); }

void LocalRoute::keep_all() {
  for (uint32_t part = 0; part < parts(); ++part) {
    keep(part);
    set_kept(part);
  }
}

bool LocalRoute::is_next(uint64_t iteration, View::Worker* blocker) {
  const uint32_t rank = call_.batch().caller.rank;
  bool next = true;
  for (uint32_t part = 0; part < parts() && next; ++part) {
    with_turn(turn(part), [&] {
      const Gate& gate = *shard(part).gate;
      // A late push is dropped and an outsider's is refused: neither waits.
      next = rank == Gate::kOutsider || iteration < gate.made() || BspUpdates::is_next(rank, iteration, gate);
      *blocker = gate.blocker(rank, gate.made() + 1, os::now_ns());
    });
  }
  return next;
}

Ticket* LocalRoute::find_ticket(uint32_t part) const {
  Ticket* found = nullptr;
  shard(part).parked.each([&](Waiting& w) {
    auto& ticket = static_cast<Ticket&>(w);
    if (&ticket.sink() == this && static_cast<LocalTicket&>(ticket).part() == part) found = &ticket;
  });
  return found;
}

bool LocalRoute::leave_gate(uint32_t part) {
  bool left = false;
  Shard& shard = this->shard(part);
  with_turn(shard.turn, [&] {
    const Ticket* const ticket = find_ticket(part);
    if (ticket == nullptr || (call_.batch().op->numbered && ticket->taken())) return;
    shard.parked.drop_if([&](const Waiting& w) { return &w == ticket; });
    skip(part);
    left = true;
  });
  return left;
}

bool LocalRoute::detach(uint32_t part) {
  bool waits = false;
  with_turn(shard(part).turn, [&] {
    Ticket* const ticket = find_ticket(part);
    waits = ticket != nullptr;
    if (!waits || ticket->taken()) return;  // only its output is left, which nobody wants
    keep(part);
    static_cast<LocalTicket*>(ticket)->keep_input();
  });
  return waits;
}

void LocalRoute::deliver(Ticket* const* tickets, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t part = static_cast<LocalTicket*>(tickets[i])->part();
    Outcome& outcome = tickets[i]->outcome();
    call_.note_wait(outcome.waited_ns, outcome.waited_for);
    end_stopped(part, landed(part, &outcome));
  }
}

std::string LocalRoute::stuck() {
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!is_stopped(part)) continue;
    std::string text;
    with_turn(shard(part).turn, [&] {
      const Ticket* const ticket = find_ticket(part);
      if (ticket == nullptr || shard(part).gate == nullptr) return;
      const uint32_t rank = call_.batch().caller.rank;
      const uint64_t asked = ticket->gated() ? ticket->asked() : ticket->entry().clock + 1;
      text = "rank " + std::to_string(rank) + " at clock " + std::to_string(asked) + " waits " +
             waits_for(shard(part).gate->blocker(rank, asked, os::now_ns()));
    });
    if (!text.empty()) return text;
  }
  return "";
}

}  // namespace windlass
