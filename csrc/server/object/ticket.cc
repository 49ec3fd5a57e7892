#include "server/object/ticket.h"

#include <algorithm>
#include <tuple>

#include "base/os.h"

namespace windlass {

Ticket::Ticket(ServedObject& object, const Batch& batch, const Entry& entry, const Status& checked, Verdict why,
               const Shard& shard, int64_t now_ns)
    : object_(object),
      batch_(batch),
      entry_(entry),
      checked_(checked),
      stage_(why == Verdict::kGated ? Stage::kTaken : Stage::kParked) {
  if (why == Verdict::kGated) stop_at_gate(shard, now_ns);
}

void Ticket::stop_at_gate(const Shard& shard, int64_t now_ns) {
  stage_ = Stage::kTaken;
  asked_ = object_.clock_asked(batch_, entry_);
  since_ns_ = now_ns;
  blocker_ = shard.gate->blocker(batch_.caller.rank, asked_, since_ns_).rank;
}

bool Ticket::ready(Shard& shard) {
  if (shard.home.deleted()) return true;  // it is refused
  if (gated()) return shard.gate == nullptr || shard.gate->opens(batch_.caller.rank, asked_, time_for(*shard.gate));
  return entry_.sequence == Entry::kNextSequence || !object_.is_early(batch_, entry_, shard);
}

bool Ticket::run(Shard& shard) {
  // One that came early reads at once: what its session pushes next must not be in it.
  if (checked_.ok() && gated() && reads_later() && object_.lets_in(entry_, shard)) return due_ = true;
  if (Status status = prepare(&entry_); !status.ok() && checked_.ok()) checked_ = std::move(status);
  outcome_.term = entry_.term;
  const Verdict verdict = object_.run(batch_, entry_, shard, checked_, &outcome_, stage_);
  if (verdict == Verdict::kGated && !gated()) stop_at_gate(shard, os::now_ns());
  return verdict == Verdict::kDone;
}

Waiting::Wants Ticket::wants(uint64_t clock) {
  if (stage_ != Stage::kTaken || clock != asked_ || !checked_.ok()) return {};
  (void)prepare(&entry_);
  return object_.wants(batch_, entry_);
}

void Ticket::end(const Status& status) { outcome_.refuse(status); }

// Says how long tickets waited at gates and for whom, to their workers and to the statistics of their apps.
static void count_waits(const std::vector<Ticket*>& tickets) {
  int64_t now = 0;
  Workers* workers = nullptr;
  uint32_t blocker = Gate::kOutsider;
  uint64_t waits = 0;
  int64_t ns = 0;
  const auto flush = [&] {
    if (waits != 0) workers->count_waits(blocker, std::exchange(waits, 0), std::exchange(ns, 0));
  };
  for (Ticket* const ticket : tickets) {
    if (!ticket->gated()) continue;
    if (now == 0) now = os::now_ns();
    if (Workers* const own = ticket->object().workers().get(); own != workers || ticket->blocker() != blocker) {
      flush();
      workers = own;
      blocker = ticket->blocker();
    }
    ++waits;
    ns += ticket->end_wait(now);
  }
  flush();
}

void deliver(Freed* freed) {
  if (freed->empty()) return;
  std::vector<Ticket*> tickets;
  tickets.reserve(freed->size());
  for (const std::unique_ptr<Waiting>& w : *freed) tickets.push_back(static_cast<Ticket*>(w.get()));
  count_waits(tickets);
  const auto before = [](Ticket* a, Ticket* b) {
    return std::tuple(&a->sink(), a->order()) < std::tuple(&b->sink(), b->order());
  };
  if (!std::is_sorted(tickets.begin(), tickets.end(), before))  // usually it is: one worker waited for another
    std::stable_sort(tickets.begin(), tickets.end(), before);
  for (size_t i = 0; i < tickets.size();) {
    size_t end = i + 1;
    while (end < tickets.size() && &tickets[end]->sink() == &tickets[i]->sink()) ++end;
    tickets[i]->sink().deliver(&tickets[i], end - i);
    i = end;
  }
  freed->clear();
}

}  // namespace windlass
