// Crowd: the workers of an app as a server knows them, and how its pulls went.
//
// Who is waited for is the scheduler's to say, in numbered views. Where there is no scheduler, it is everybody that the
// first client counted (its world_size), until they say goodbye. Either way a worker that comes late is waited for once
// it has said at which clock it begins: enter().
//
// A worker closes the shards of objects it has open one by one. All others it closes with a tick, which names the
// objects it has open; that is what a View's clocks are for.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sync/gate.h"

namespace windlass {

// How pulls went, for people.
struct SyncStats {
  static constexpr size_t kBuckets = 16;  // the last one is for so many and more
  uint64_t pulls = 0;
  uint64_t staleness[kBuckets] = {};
  uint64_t waits = 0;
  double waited_seconds = 0;
  std::map<uint32_t, double> waited_for;  // seconds, by rank
  uint64_t late = 0;                      // pushes that came after their update was made
};

class Crowd {
 public:
  explicit Crowd(std::string app) : app_(std::move(app)) {}
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;

  const std::string& app() const { return app_; }

  // Each returns whether the view has changed: then every gate must be told.
  struct Member {
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    bool starts = false;  // at clock 0; others enter
  };
  bool set_view(uint64_t number, const std::vector<Member>& workers, const std::vector<uint32_t>& waited);
  // Where nobody forms views: so many workers, from this clock on. A larger world replaces a smaller one.
  bool assume(uint32_t world_size, uint64_t clock = 0);
  // There, a session; a second one under the same rank takes the place of the first, whose goodbye then changes
  // nothing.
  void came(uint32_t rank, uint64_t incarnation);
  bool left(uint32_t rank, uint64_t incarnation);
  bool enter(uint32_t rank, uint64_t incarnation, uint64_t clock);
  // All iterations before `clock` are closed, except at shards of these objects (ascending).
  bool tick(uint32_t rank, uint64_t clock, std::vector<uint32_t> open);
  bool tick(uint32_t rank, uint64_t clock);            // with the same objects as the last time
  std::vector<uint32_t> open_of(uint32_t rank) const;  // which those are

  View view(uint32_t object) const;
  uint32_t world_size() const;
  // What a session of so large a world counts as here.
  uint32_t rank_of(uint32_t rank, uint32_t world_size) const {
    const uint32_t assumed = assumed_world_.load(std::memory_order_relaxed);
    return assumed != 0 && assumed != world_size ? Gate::kOutsider : rank;
  }
  bool waits_for(uint32_t rank) const;
  // Waits until a view has this session, for so long at most; true at once where nobody forms views.
  bool await_view(uint32_t rank, uint64_t incarnation, int64_t ns) const;
  bool starts(uint32_t rank) const;  // with the others
  // Whether a session was in a view and is not any more: it was given up. The latest limits::kGivenUpMax are known.
  bool given_up(uint64_t incarnation) const;
  // Whether there is nobody but one worker: nothing can be stale.
  bool alone() const { return alone_.load(std::memory_order_relaxed); }

  // For objects without gates: the clock of the slowest of the others, by their ticks. Gate::kNone: there are none.
  uint64_t slowest(uint32_t but) const;

  template <class Visit>
  void visit_pace(Visit visit) const {
    std::lock_guard lock(mutex_);
    visit(pace_);
  }

  void count_pull(uint64_t asked, uint64_t seen);
  void count_wait(uint32_t rank, int64_t ns);
  void count_late() { late_.fetch_add(1, std::memory_order_relaxed); }
  SyncStats stats() const;

 private:
  struct Known {
    bool in_view = false;
    bool starts = false;    // with the app, and need not enter
    bool replaced = false;  // somebody who takes its place is waited for
    bool came = false;      // where nobody forms views
    // Who is in the view (where nobody forms views: who came last; 0: nobody), and who has entered.
    uint64_t incarnation = 0, entered = 0;
    uint64_t entered_at = 0;
    uint64_t ticked = 0;
    std::vector<uint32_t> open;

    bool waited() const { return (in_view && (starts || entered == incarnation)) || replaced; }
  };
  bool changed_locked();
  void give_up_locked(uint64_t incarnation);

  const std::string app_;
  mutable std::mutex mutex_;
  mutable std::condition_variable viewed_;
  uint64_t number_ = 0;  // of the view
  bool known_ = false;
  bool assumed_ = false;
  uint32_t world_size_ = 0;
  std::map<uint32_t, Known> workers_;
  std::vector<uint64_t> given_up_;         // incarnations, ascending
  std::deque<uint64_t> given_up_in_turn_;  // the same, the oldest first
  Gate pace_{Sync()};                      // everybody's ticks
  std::atomic<bool> alone_{true};
  std::atomic<uint32_t> assumed_world_{0};  // 0: somebody forms views

  std::atomic<uint64_t> pulls_{0}, waits_{0}, waited_ns_{0}, late_{0};
  std::atomic<uint64_t> staleness_[SyncStats::kBuckets] = {};
  mutable std::mutex waited_mutex_;
  std::map<uint32_t, int64_t> waited_for_;  // ns, by rank
};

}  // namespace windlass
