#include "client/near.h"

#include "client/call.h"

namespace windlass {

class NearTicket final : public Ticket {
 public:
  NearTicket(Near& near, uint32_t part, const Entry& entry, Verdict why, const Shard& shard)
      : Ticket(near.object(), near.call_.batch(), entry, Status(), why, shard),
        call_(&near.call_),
        near_(near),
        part_(part) {}

  Sink& sink() override { return near_; }
  uint32_t part() const { return part_; }
  void keep_input() { kept_ = true; }

 private:
  Status prepare(Entry* entry) override {
    call_->set_arrays(part_, kept_, entry);
    return {};
  }

  const Ref<Call> call_;
  Near& near_;
  const uint32_t part_;
  bool kept_ = false;
};

Near::Near(Call& call) : ShardWork(call), call_(call) {}

void Near::set(ServedObject* object, const std::vector<uint32_t>* shards) {
  object_ = object;
  shards_ = shards;
  set_parts(static_cast<uint32_t>(shards->size()));
}

ShardWork::Ran Near::run(uint32_t part, bool kept, Status* status) {
  Shard& shard = this->shard(part);
  Entry entry;
  entry.shard = (*shards_)[part];
  entry.term = shard.home.term;
  call_.fill(part, kept, &entry);
  Outcome outcome;
  const Verdict verdict = object_->run(call_.batch(), entry, shard, call_.checked(part), &outcome);
  if (verdict == Verdict::kDone) {
    *status = call_.landed(part, &outcome);
  } else {
    auto ticket = std::make_unique<NearTicket>(*this, part, entry, verdict, shard);
    if (kept) ticket->keep_input();
    std::unique_ptr<Waiting> waiting = std::move(ticket);
    (void)shard.parked.park(&waiting, true);
    call_.stopped();
  }
  if (!shard.parked.empty()) {
    Freed freed;
    shard.parked.free(shard, &freed);
    windlass::deliver(&freed);
  }
  return verdict == Verdict::kDone ? Ran::kDone : Ran::kStopped;
}

// With the turn: what was taken back still uses up its sequence, and closes what its worker counts as closed.
void Near::skip(uint32_t part) {
  if (!call_.batch().op->numbered) return;
  Shard& shard = this->shard(part);
  Entry entry;
  entry.shard = (*shards_)[part];
  entry.term = shard.home.term;
  call_.fill(part, false, &entry);
  entry.flags |= wire::kEmpty;
  Outcome outcome;
  (void)object_->run(call_.batch(), entry, shard, Status(), &outcome);
  Freed freed;
  shard.parked.free(shard, &freed);
  windlass::deliver(&freed);
}

void Near::keep(uint32_t part) { call_.keep(part); }

void Near::keep_all() {
  for (uint32_t part = 0; part < parts(); ++part) {
    keep(part);
    set_kept(part);
  }
}

bool Near::is_next(View::Worker* blocker) {
  bool next = true;
  if (parts() == 0) return next;
  with_turn(turn(0), [&] {
    const Gate& gate = *shard(0).gate;
    const uint32_t rank = call_.batch().caller.rank;
    next = BspUpdates::is_next(rank, gate.clock_of(rank), gate);
    *blocker = gate.blocker(rank, gate.made() + 1, os::now_ns());
  });
  return next;
}

Ticket* Near::find_ticket(uint32_t part) const {
  Ticket* found = nullptr;
  shard(part).parked.each([&](Waiting& w) {
    auto& ticket = static_cast<Ticket&>(w);
    if (&ticket.sink() == this && static_cast<NearTicket&>(ticket).part() == part) found = &ticket;
  });
  return found;
}

bool Near::leave_gate(uint32_t part) {
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

void Near::detach(uint32_t part) {
  with_turn(shard(part).turn, [&] {
    Ticket* const ticket = find_ticket(part);
    if (ticket == nullptr || ticket->taken()) return;  // its output is gone: the call answers nobody any more
    keep(part);
    static_cast<NearTicket*>(ticket)->keep_input();
  });
}

void Near::deliver(Ticket* const* tickets, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t part = static_cast<NearTicket*>(tickets[i])->part();
    Outcome& outcome = tickets[i]->outcome();
    call_.note_wait(outcome.waited_ns, outcome.waited_for);
    end_stopped(part, call_.landed(part, &outcome));
  }
}

std::string Near::stuck() {
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!is_stopped(part)) continue;
    std::string text;
    with_turn(shard(part).turn, [&] {
      const Ticket* const ticket = find_ticket(part);
      if (ticket == nullptr) return;
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
