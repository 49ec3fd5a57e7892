// ShardWork: a request on its way through the shards it touches, inside this process.
//
// A request is cut into parts, one per shard. A part runs while its shard's turn is held, by whichever thread gets
// there: the caller, a thread of the crew, or a thread that was busy with the same shard. Every part ends once, and is
// then reported to the future that the work belongs to.
//
//     begin()       the caller runs the parts itself, with help where the request is large
//     begin_kept()  the same, but no part outlives the call with the caller's arrays: where a shard is busy, its part
//                   first copies what it needs (keep()) and stays in the queue
//     begin_later() the parts stay in the shards' queues, in order, until the crew or a waiting thread runs them;
//                   `shared`: several threads at once may
//
// In each case parts of one caller reach a shard in the order the requests were begun.
//
// A part may stop at a gate: run() calls stop() before other threads can find the waiting part, and returns kStopped.
// Whoever opens the gate ends the part with end_stopped(), perhaps before run() has returned.
//
// Thread safety: one thread begins it; then every public method from any thread. Memory: a member of its future, which
// lives until the last part has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "base/turn.h"
#include "exec/crew_task.h"
#include "exec/future.h"
#include "exec/shares.h"

namespace windlass {

class Crew;

class ShardWork : public CrewTask {
 public:
  ShardWork(const ShardWork&) = delete;
  ShardWork& operator=(const ShardWork&) = delete;

  void begin(Crew* helpers);
  void begin_kept(Crew* helpers);
  void begin_later(Crew* crew, bool shared = true);

  // Runs or drains parts until none is left to start.
  void help() override;

  // Ensures that no part touches the caller's arrays any more: cancels parts not yet begun and waits for those under
  // way. For a caller that gives up and owns the memory.
  void cancel();
  // The same for work that must still be done: parts not yet begun copy their input first (keep()).
  void let_go();
  // Cancels parts that nobody has begun or that can leave their gate. True when those were all; *any when there were
  // some.
  bool cancel_queued(bool* any);

  bool is_stopped(uint32_t part) const { return part_[part].state.load(std::memory_order_acquire) == kStoppedAtGate; }
  // Ends a part that had stopped; called with the shard's turn or soon after it.
  void end_stopped(uint32_t part, const Status& status);

 protected:
  enum class Ran : uint8_t { kDone, kStopped };

  explicit ShardWork(Future& future) : future_(future) {}
  ~ShardWork() = default;

  void set_parts(uint32_t n);
  uint32_t parts() const { return n_; }
  // Called first within run(): from now on other threads can end the part.
  void stop(uint32_t part) { part_[part].state.store(kStoppedAtGate, std::memory_order_release); }
  void set_kept(uint32_t part) { part_[part].kept = true; }  // before it begins: its input has been copied

  virtual Turn& turn(uint32_t part) = 0;
  // With the turn held. `kept`: keep() has copied the part's input. After kStopped the work may be gone.
  virtual Ran run(uint32_t part, bool kept, Status* status) = 0;
  virtual void skip(uint32_t) {}  // called instead for a part that was cancelled before its turn
  virtual void keep(uint32_t) {}  // copies the part's input, for begin_kept() and let_go()
  // For a part that has stopped: takes the shard's turn and withdraws the part. False when the part has ended by now,
  // or has already taken effect.
  virtual bool leave_gate(uint32_t) { return false; }
  // Likewise takes the turn: the part copies what it needs of the caller's arrays and goes on without them. False: it
  // no longer waits, and whoever ran it is about to end it.
  virtual bool detach(uint32_t) { return true; }

 private:
  enum State : uint8_t { kQueued, kKeeping, kRunning, kStoppedAtGate, kOver, kCancelled };

  struct Part final : Job {
    void run() override { work->run_part(*this); }
    ShardWork* work = nullptr;
    uint32_t index = 0;
    bool kept = false;
    std::atomic<uint8_t> state{kQueued};
  };

  void run_part(Part& part);
  bool run_in_turn(Part& part);
  void start_all();
  bool cancel_stopped(uint32_t i);
  void detach_stopped(uint32_t i);
  void wait_while(State state, const Part& part);
  void run_or_keep(uint32_t i);
  void leave(uint32_t i, Turn& turn);
  void share(bool shared, const Crew* crew);

  Future& future_;
  std::unique_ptr<Part[]> many_;
  Part one_;  // most requests are small and touch one shard
  Part* part_ = &one_;
  uint32_t n_ = 0;
  enum Mode : uint8_t { kRun, kRunOrKeep, kDrain } mode_ = kRun;
  bool shared_ = false;                 // several threads may help at once
  std::atomic<bool> helped_{false};     // a thread has begun to help
  std::atomic<uint32_t> borrowing_{0};  // parts that still use the caller's arrays, where begin_kept() has helpers
  Shares shares_;                       // of parts that nobody has started
};

}  // namespace windlass
