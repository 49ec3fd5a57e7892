// Ticket: an entry that waits in its shard: for earlier pushes of its session, for other workers, or for room. Whoever
// changes the shard runs the tickets that have become ready, at the same turn (session/parked.h), and delivers them
// afterwards, without the turn.
//
//     run() -> kGated -> Ticket in the shard ... close of another worker -> ready() -> run() -> Freed -> deliver()
//
// What a ticket keeps, and who gets its outcome, is the business of the two kinds there are: of a client inside the
// process (client/near.h) and of a connection (server/remote_ticket.h).
//
// Thread safety: the holder of the shard's turn. A sink takes no turn; one that may wait for anything is called
// without.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/object/served_object.h"
#include "session/parked.h"

namespace windlass {

class Ticket;

// Who gets outcomes.
class Sink {
 public:
  // Tickets of this sink that have run, in the order of Ticket::order().
  virtual void deliver(Ticket* const* tickets, size_t n) = 0;

 protected:
  ~Sink() = default;
};

class Ticket : public Waiting {
 public:
  bool ready(Shard& shard) final;
  bool run(Shard& shard) final;
  Wants wants(uint64_t clock) final;
  void served() final { stage_ = Stage::kServed; }
  // Instead: it ends with this, and is then delivered.
  void end(const Status& status);

  virtual Sink& sink() = 0;
  // What a sink may want together: a priority and a request.
  virtual std::pair<int, uint64_t> order() const { return {0, 0}; }

  ServedObject& object() const { return object_; }
  const Batch& batch() const { return batch_; }
  const Entry& entry() const { return entry_; }
  Outcome& outcome() { return outcome_; }
  bool gated() const { return stage_ >= Stage::kTaken; }
  bool taken() const { return stage_ >= Stage::kTaken; }  // its push was
  uint64_t asked() const { return asked_; }
  int64_t since_ns() const { return since_ns_; }

 protected:
  // why: kEarly, kGated or kFull.
  Ticket(ServedObject& object, const Batch& batch, const Entry& entry, const Status& checked, Verdict why,
         const Shard& shard);

  // The arrays may have moved, or nobody may want the answer any more; there may be no memory for it.
  virtual Status prepare(Entry*) { return {}; }
  Entry& own_entry() { return entry_; }

 private:
  void stop_at_gate(const Shard& shard);

  ServedObject& object_;
  const Batch& batch_;
  Entry entry_;
  Status checked_;
  Stage stage_;
  bool full_;
  uint64_t asked_ = 0;  // at the gate: the clock, since when, and for whom
  int64_t since_ns_ = 0;
  uint32_t blocker_ = Gate::kOutsider;
  Outcome outcome_;
};

using Freed = std::vector<std::unique_ptr<Waiting>>;
// Delivers tickets that have run, those of one sink together.
void deliver(Freed* freed);

}  // namespace windlass
