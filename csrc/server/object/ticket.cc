#include "server/object/ticket.h"

#include <algorithm>
#include <tuple>

#include "base/os.h"

namespace windlass {

Ticket::Ticket(ServedObject& object, const Batch& batch, const Entry& entry, const Status& checked, Verdict why,
               const Shard& shard)
    : object_(object),
      batch_(batch),
      entry_(entry),
      checked_(checked),
      stage_(why == Verdict::kGated ? Stage::kTaken : Stage::kParked),
      full_(why == Verdict::kFull) {
  if (why == Verdict::kGated) stop_at_gate(shard);
}

void Ticket::stop_at_gate(const Shard& shard) {
  stage_ = Stage::kTaken;
  asked_ = object_.clock_asked(batch_, entry_);
  since_ns_ = os::now_ns();
  blocker_ = shard.gate->blocker(batch_.caller.rank, asked_, since_ns_).rank;
}

bool Ticket::ready(Shard& shard) {
  if (gated()) return shard.gate == nullptr || shard.gate->opens(batch_.caller.rank, asked_, os::now_ns());
  if (full_) return BspUpdates::is_next(batch_.caller.rank, entry_.clock, *shard.gate);
  return entry_.sequence == Entry::kNextSequence || !object_.is_early(batch_, entry_, shard);
}

bool Ticket::run(Shard& shard) {
  if (Status status = prepare(&entry_); !status.ok() && checked_.ok()) checked_ = std::move(status);
  outcome_.term = entry_.term;
  const Verdict verdict = object_.run(batch_, entry_, shard, checked_, &outcome_, stage_);
  if (verdict == Verdict::kGated && !gated()) stop_at_gate(shard);
  if (verdict != Verdict::kDone) return false;
  if (!gated()) return true;
  // How long it waited and for whom, for its worker and for everybody.
  outcome_.waited_ns = os::now_ns() - since_ns_;
  outcome_.waited_for = blocker_;
  object_.crowd()->count_wait(blocker_, outcome_.waited_ns);
  return true;
}

Waiting::Wants Ticket::wants(uint64_t clock) {
  if (stage_ != Stage::kTaken || clock != asked_ || !checked_.ok()) return {};
  (void)prepare(&entry_);
  return object_.wants(batch_, entry_);
}

void Ticket::end(const Status& status) { outcome_.refuse(status); }

void deliver(Freed* freed) {
  if (freed->empty()) return;
  std::vector<Ticket*> tickets;
  for (const std::unique_ptr<Waiting>& w : *freed) tickets.push_back(static_cast<Ticket*>(w.get()));
  const auto key = [](Ticket* t) { return std::tuple(&t->sink(), t->order()); };
  if (tickets.size() > 1)
    std::stable_sort(tickets.begin(), tickets.end(), [&](Ticket* a, Ticket* b) { return key(a) < key(b); });
  for (size_t i = 0; i < tickets.size();) {
    size_t end = i + 1;
    while (end < tickets.size() && &tickets[end]->sink() == &tickets[i]->sink()) ++end;
    tickets[i]->sink().deliver(&tickets[i], end - i);
    i = end;
  }
  freed->clear();
}

}  // namespace windlass
