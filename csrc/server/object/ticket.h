// Ticket: an entry that waits in its shard, for earlier pushes of its session or for other workers. Whoever changes the
// shard runs the tickets that have become ready, at the same turn (session/parked.h), and then delivers them.
//
//     run() -> kGated -> Ticket in the shard ... close of another worker -> ready() -> run() -> Freed -> deliver()
//
// A ticket whose sink reads later leaves the shard as *due*: it may be answered, but what it reads has not been read.
//
// There are two kinds, which differ in what they keep and in who gets the outcome: LocalTicket, of a client inside the
// process (client/op/local_route.h), and RemoteTicket, of a connection (server/net/waiting_block.h).
//
// Thread safety: the holder of the shard's turn. A sink takes no turn; one that may block is called without the turn.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/object/served_object.h"
#include "session/parked.h"

namespace windlass {

class Ticket;

// Receives outcomes.
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
  // Ends it with `status` instead of running it; deliver it then.
  void end(const Status& status);

  virtual Sink& sink() = 0;
  // Sort key within a sink: priority and request.
  virtual std::pair<int, uint64_t> order() const { return {0, 0}; }

  ServedObject& object() const { return object_; }
  const Batch& batch() const { return batch_; }
  const Entry& entry() const { return entry_; }
  Outcome& outcome() { return outcome_; }
  bool gated() const { return stage_ >= Stage::kTaken; }
  bool taken() const { return stage_ >= Stage::kTaken; }  // its push was taken
  bool due() const { return due_; }                       // all that is left to do is to read
  uint64_t asked() const { return asked_; }
  int64_t since_ns() const { return since_ns_; }
  uint32_t blocker() const { return blocker_; }
  // It has waited at the gate until now: notes for how long, and returns that.
  int64_t end_wait(int64_t now_ns) {
    outcome_.waited_for = blocker_;
    return outcome_.waited_ns = now_ns - since_ns_;
  }

 protected:
  // why: kEarly or kGated.
  Ticket(ServedObject& object, const Batch& batch, const Entry& entry, const Status& checked, Verdict why,
         const Shard& shard, int64_t now_ns);

  // Called before each run: the arrays may have moved, the caller may have given up, or memory may have run out.
  virtual Status prepare(Entry*) { return {}; }
  // Whether whoever gets the outcome does the reading.
  virtual bool reads_later() const { return false; }
  Entry& own_entry() { return entry_; }

 private:
  void stop_at_gate(const Shard& shard, int64_t now_ns);

  ServedObject& object_;
  const Batch& batch_;
  Entry entry_;
  Status checked_;
  Stage stage_;
  bool due_ = false;
  uint64_t asked_ = 0;  // at the gate: the clock, since when, and for whom
  int64_t since_ns_ = 0;
  uint32_t blocker_ = Gate::kOutsider;
  Outcome outcome_;
};

using Freed = std::vector<std::unique_ptr<Waiting>>;
// Delivers tickets that have run, those of one sink together.
void deliver(Freed* freed);

}  // namespace windlass
