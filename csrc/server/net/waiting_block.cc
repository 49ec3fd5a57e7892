#include "server/net/waiting_block.h"

#include "server/host.h"

namespace windlass {

std::shared_ptr<WaitingBlock> WaitingBlock::make(const std::shared_ptr<Connection>& from, const wire::Header& frame,
                                                 uint32_t label, const std::shared_ptr<ServedObject>& object,
                                                 const Batch& batch, const std::vector<Entry>& entries,
                                                 const std::vector<uint64_t>& out_at, bool force) {
  std::shared_ptr<WaitingBlock> made(new WaitingBlock(from, frame, label, object, batch, entries, out_at));
  const uint64_t items = made->items_bytes();
  const uint64_t each = sizeof(RemoteTicket) + sizeof(Entry) + sizeof(Outcome) + 2 * sizeof(uint64_t);
  if (!made->charge(sizeof(WaitingBlock) + entries.size() * each + items, force)) return nullptr;
  if (!made->copy_items(items)) return nullptr;
  from->waits(made);
  return made;
}

WaitingBlock::~WaitingBlock() {
  if (charged_ != 0) from_->host().waiting().refund(charged_);
  from_->waits_no_more(*this);
}

bool WaitingBlock::charge(uint64_t bytes, bool force) {
  StagingQuota& quota = from_->host().waiting();
  if (force) {
    quota.force(bytes);
  } else if (!quota.charge(bytes)) {
    return false;
  }
  charged_ += bytes;
  return true;
}

static uint64_t items_bytes_of(const Entry& e) {
  return e.items * (e.spans != nullptr ? sizeof(Span) : e.keyed != nullptr ? sizeof(Keyed) : 0);
}

uint64_t WaitingBlock::items_bytes() const {
  uint64_t bytes = (entries_[0].body_bytes + 7) & ~uint64_t{7};
  for (const Entry& e : entries_) bytes += items_bytes_of(e);
  return bytes;
}

// Copies items and argument: they lie in memory that the thread's next block will use.
bool WaitingBlock::copy_items(uint64_t bytes) {
  std::byte* at = items_.room(bytes + 1);
  if (at == nullptr) return false;
  const auto keep = [&](const void* from, uint64_t n, uint64_t room) {
    std::byte* const to = at;
    if (n != 0) std::memcpy(to, from, n);
    at += room;
    return to;
  };
  const Entry& first = entries_[0];
  const std::byte* const argument = keep(first.body, first.body_bytes, (first.body_bytes + 7) & ~uint64_t{7});
  for (Entry& e : entries_) {
    const uint64_t n = items_bytes_of(e);
    if (e.spans != nullptr) e.spans = reinterpret_cast<const Span*>(keep(e.spans, n, n));
    if (e.keyed != nullptr) e.keyed = reinterpret_cast<const Keyed*>(keep(e.keyed, n, n));
    e.body = argument;
  }
  if (first.vector != nullptr) {
    vector_ = *first.vector;
    entries_[0].vector = &vector_;
  }
  return true;
}

// Copies the numbers of early entries. Those of gated ones were taken already and are not needed any more. What an
// early entry reads it reads when it runs: that needs room, too.
bool WaitingBlock::keep_numbers(uint64_t kept_bytes) {
  if (has_numbers_) return true;
  uint64_t numbers = 0;
  for (const Entry& e : entries_) numbers += e.numbers_bytes;
  if (!charge((batch_.in_place ? 0 : numbers) + (broken(Break::kAnswers) ? 0 : kept_bytes), false)) return false;
  if (!batch_.in_place && numbers != 0) {
    std::byte* to = numbers_.room(numbers);
    if (to == nullptr) return false;
    for (Entry& e : entries_) {
      if (e.numbers_bytes == 0) continue;
      std::memcpy(to, e.in, e.numbers_bytes);
      e.in = to;
      to += e.numbers_bytes;
    }
  }
  has_numbers_ = true;
  return true;
}

std::unique_ptr<Waiting> WaitingBlock::ticket(const std::shared_ptr<WaitingBlock>& block, uint32_t i,
                                              const Status& checked, Verdict why, const Shard& shard) {
  const auto kept = [&] {
    return block->object().kept_bytes(block->batch_, block->entries_[0], block->out_at_.back());
  };
  if (why == Verdict::kEarly && !block->keep_numbers(kept())) return nullptr;
  return std::make_unique<RemoteTicket>(block, i, checked, why, shard);
}

std::byte* WaitingBlock::out(uint32_t i) {
  std::lock_guard lock(out_mutex_);
  std::byte* const all = out_.data() != nullptr ? out_.data() : out_.room(out_at_.back() + 1);
  return all != nullptr ? all + out_at_[i] : nullptr;
}

bool WaitingBlock::ended(uint32_t i, Outcome&& outcome, bool due) {
  outcomes_[i] = std::move(outcome);
  due_[i] = due ? 1 : 0;
  if (due) has_due_.store(true, std::memory_order_relaxed);
  waits_[i].store(false, std::memory_order_release);
  return left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

bool WaitingBlock::answer(Answers* answers, Freed* freed) {
  std::byte* const to = answers->open(out_at_.back());
  if (to == nullptr) return true;  // the client will ask again
  for (uint32_t i = 0; i < outcomes_.size(); ++i) {
    if (due_[i] == 0) {
      outcomes_[i].finish(object_->user_code());
      if (outcomes_[i].numbers_bytes != 0)
        std::memcpy(to + out_at_[i], out_.data() + out_at_[i], outcomes_[i].numbers_bytes);
      continue;
    }
    const Verdict verdict = read(i, to + out_at_[i]);
    if (verdict != Verdict::kDone) {
      wait_again(i, verdict, to, freed);
      return false;
    }
    due_[i] = 0;
  }
  answers->add({label_, static_cast<uint8_t>(batch_.op->op)}, outcomes_.data(), static_cast<uint32_t>(outcomes_.size()),
               out_at_.data(), has_values(*object_, *batch_.op));
  return true;
}

// An entry that is due reads its shard.
Verdict WaitingBlock::read(uint32_t i, std::byte* to) {
  Outcome& outcome = outcomes_[i];
  Entry entry = entries_[i];
  entry.out = to;
  if (overdue()) {
    outcome.refuse(Status(Code::kTimeout, "came too late for its caller"));
    return Verdict::kDone;
  }
  Shard* const shard = object_->find(entry.shard);
  Verdict verdict = Verdict::kDone;
  with_turn(shard->turn, [&] {
    outcome.term = entry.term;
    verdict = object_->run(batch_, entry, *shard, Status(), &outcome, Stage::kTaken);
  });
  return verdict;
}

// Entry i was due, but its shard is about to move or its gate has closed again: it waits once more. `made`: where the
// numbers of the others lie.
void WaitingBlock::wait_again(uint32_t i, Verdict why, const std::byte* made, Freed* freed) {
  std::byte* const kept = out(0);
  for (uint32_t k = 0; k < i; ++k) {
    Outcome& outcome = outcomes_[k];
    if (outcome.numbers_bytes == 0) continue;
    if (kept == nullptr) {
      outcome.refuse(Status(Code::kResourceExhausted, "no memory for its answer"));
    } else {
      std::memcpy(kept + out_at_[k], made + out_at_[k], outcome.numbers_bytes);
    }
  }
  left_.store(1, std::memory_order_release);
  Shard* const shard = object_->find(entries_[i].shard);
  with_turn(shard->turn, [&] {
    std::unique_ptr<Waiting> ticket = std::make_unique<RemoteTicket>(shared_from_this(), i, Status(), why, *shard);
    (void)shard->parked.park(&ticket, true);
    shard->parked.free(*shard, freed);
  });
}

bool WaitingBlock::waits_for(View::Worker* blocker) {
  for (uint32_t i = 0; i < entries_.size(); ++i) {
    if (!waits_[i].load(std::memory_order_acquire)) continue;
    Shard* const shard = object_->find(entries_[i].shard);
    with_turn(shard->turn, [&] {
      shard->parked.each([&](Waiting& w) {
        auto& ticket = static_cast<Ticket&>(w);
        if (&ticket.sink() != from_.get() || &static_cast<RemoteTicket&>(ticket).block() != this) return;
        if (ticket.gated() && shard->gate != nullptr)
          *blocker = shard->gate->blocker(batch_.caller.rank, ticket.asked(), os::now_ns());
      });
    });
    return true;
  }
  return !answered_.load(std::memory_order_acquire);
}

void WaitingBlock::forget() {
  for (uint32_t i = 0; i < entries_.size(); ++i) {
    if (!waits_[i].load(std::memory_order_acquire)) continue;
    Shard* const shard = object_->find(entries_[i].shard);
    with_turn(shard->turn, [&] {
      shard->parked.drop_if([&](const Waiting& w) {
        auto& ticket = const_cast<Ticket&>(static_cast<const Ticket&>(w));
        return &ticket.sink() == from_.get() && &static_cast<RemoteTicket&>(ticket).block() == this;
      });
    });
  }
}

}  // namespace windlass
