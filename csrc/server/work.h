// Work: one request on its way through the shards it touches, and the future that its caller waits on.
//
// A request is cut into parts, one per shard. A part runs while its shard's turn is held, by whichever thread gets
// there: the caller, a thread of the crew, or a thread that was busy with the same shard. The last part to finish
// completes the work.
//
//     begin()       the caller runs the parts itself, with help where the request is large
//     begin_kept()  the same, but no part outlives the call with the caller's arrays: where a shard is busy, its part
//                   first copies what it needs (keep()) and is then left in the queue
//     begin_later() the parts are left in the shards' queues, in order, and the crew runs them, or who waits for them;
//                   `shared`: several threads at once may
//     begin_away()  somebody else does it, on a server elsewhere, and reports each part's end with end_away()
//
// In each case parts of one caller reach a shard in the order the requests were begun.
//
// Thread safety: every public method from any thread. Memory: alive while a Ref or an unfinished part exists.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/shares.h"
#include "base/status.h"
#include "base/turn.h"
#include "server/helped.h"

namespace windlass {

class Crew;

class Work : public Helped {
 public:
  void begin(Crew* helpers);
  void begin_kept(Crew* helpers);
  void begin_later(Crew* crew, bool shared = true);

  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  // Helps, then waits until done or until the monotonic time; true when done.
  virtual bool wait_until(int64_t deadline_ns);
  bool sleep_until(int64_t deadline_ns);  // the same without helping
  Status status() const;                  // of finished work

  // Makes sure that no part touches the caller's arrays any more: parts not yet begun never will be, those under way
  // are waited for. For a caller who gives up and owns the memory.
  virtual void cancel();

  // The same for work that must be done all the same: parts not yet begun copy their input first (keep()).
  virtual void let_go();

  // Runs or drains parts until none is left to start.
  void help() override;

  void resume(uint32_t part);
  void abandon(uint32_t part, const Status& status);  // instead: it ends with this

  // It is not done before one more end_away(), whatever ends meanwhile; false when it is done.
  bool stay_open();

 protected:
  Work() = default;
  ~Work() override = default;

  void set_parts(uint32_t n);
  // Takes back parts that nobody has begun; true when those were all, *any when there were some.
  bool cancel_queued(bool* any);
  void fail(const Status& status);

  void begin_away(uint32_t parts);
  void end_away(const Status& status);
  virtual Turn& turn(uint32_t part) = 0;
  // With the turn held. `kept`: keep() has copied the part's input.
  virtual Status run(uint32_t part, bool kept) = 0;
  virtual void skip(uint32_t) {}  // instead, of a part that was taken back
  // For run(): the part is not done when it returns; it waits at its shard's gate, and holds on to no input of the
  // caller's. Whoever finds the gate open calls resume() at the shard's turn, which calls pass().
  void wait_at_gate(uint32_t part) { part_[part].state.store(kWaiting, std::memory_order_relaxed); }
  virtual Status pass(uint32_t) { return {}; }
  bool is_waiting(uint32_t part) const { return part_[part].state.load(std::memory_order_acquire) == kWaiting; }
  // Takes a part that waits away from the gate.
  virtual void leave_gate(uint32_t) {}
  virtual bool may_leave_gate() const { return false; }  // only who has pushed nothing
  virtual void keep(uint32_t) {}                         // copies the part's input, for begin_kept()
  virtual void finished() {}                             // once, after the last part and before anyone sees done()
  virtual void over() {}                                 // once, after done()

 private:
  enum : uint32_t { kPending, kAwaited, kDone };
  enum PartState : uint8_t { kQueued, kKeeping, kRunning, kWaiting, kOver, kCancelled };

  struct Part final : Job {
    void run() override { work->run_part(*this); }
    Work* work = nullptr;
    uint32_t index = 0;
    bool kept = false;
    std::atomic<uint8_t> state{kQueued};
  };

  void run_part(Part& part);
  void end_part();
  bool cancel_waiting(uint32_t i);
  void wait_while_running(const Part& part);
  void run_or_keep(uint32_t i);
  void complete();
  void share(bool shared, const Crew* crew);

  std::unique_ptr<Part[]> many_;
  Part one_;  // most requests are small and touch one shard
  Part* part_ = &one_;
  uint32_t n_ = 0;
  enum Mode : uint8_t { kRun, kRunOrKeep, kDrain } mode_ = kRun;
  bool shared_ = false;                 // several threads may help at once
  std::atomic<bool> helped_{false};     // one has begun to
  std::atomic<uint32_t> borrowing_{0};  // parts that still want the caller's arrays, for begin_kept()
  Shares shares_;                       // of parts that nobody has started
  std::atomic<uint32_t> unfinished_{0};
  std::atomic<uint32_t> state_{kPending};
  mutable std::mutex mutex_;  // of error_
  Status error_;
  std::atomic<bool> failed_{false};  // error_ is set
};

}  // namespace windlass
