// Workers: the workers of an app as a server knows them, and statistics of their pulls.
//
// The scheduler says who is waited for, in numbered views. Without a scheduler it is the world_size workers that the
// first client announced, until they say goodbye. Either way a late worker is waited for once it has said at which
// clock it begins: enter().
//
// A worker closes the shards of objects it has open one by one. It closes all others with a tick, which names the open
// objects; those shards learn of it through a View's clocks.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sync/gate.h"

namespace windlass {

// Statistics of what pulls do at shards, for people to read.
struct SyncStats {
  static constexpr size_t kBuckets = 16;  // the last one counts everything beyond
  uint64_t reads = 0;                     // of shards, by pulls
  uint64_t staleness[kBuckets] = {};
  uint64_t waits = 0;
  double waited_seconds = 0;
  std::map<uint32_t, double> waited_for;  // seconds, by rank
  uint64_t late = 0;                      // pushes that came after their update was made
};

class Workers {
 public:
  explicit Workers(std::string app) : app_(std::move(app)) {}
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  const std::string& app() const { return app_; }

  // Those that return true have changed the view: every gate must then be told.
  struct Member {
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    bool starts = false;  // with the app; others enter
    uint64_t clock = 0;   // at which it starts: 0, or where a checkpoint was cut
  };
  bool set_view(uint64_t number, const std::vector<Member>& workers, const std::vector<uint32_t>& waited);
  // Without a scheduler: assumes world_size workers, from this clock on. A larger world replaces a smaller one, and any
  // world replaces one that all have left.
  bool assume(uint32_t world_size, uint64_t clock = 0);
  // Likewise: a session has come. A second one under the same rank replaces the first, whose goodbye then changes
  // nothing.
  void came(uint32_t rank, uint64_t incarnation);
  bool left(uint32_t rank, uint64_t incarnation);
  bool enter(uint32_t rank, uint64_t incarnation, uint64_t clock);
  // The worker has closed all iterations before `clock`, except at shards of these objects (ascending).
  bool tick(uint32_t rank, uint64_t clock, std::vector<uint32_t> open);
  bool tick(uint32_t rank, uint64_t clock);            // with the same objects as the last time
  std::vector<uint32_t> open_of(uint32_t rank) const;  // the objects of its last tick

  // What a server knows of a worker that another may not know: it goes along with shards that move.
  struct Heard {
    uint32_t rank = 0;
    uint64_t entered = 0;  // which incarnation
    uint64_t entered_at = 0;
    uint64_t ticked = 0;
    std::vector<uint32_t> open;
  };
  std::vector<Heard> heard() const;
  bool hear(const std::vector<Heard>& all);  // what both know: the later counts

  View view(uint32_t object) const;
  uint32_t world_size() const;
  // The rank of such a session here: Gate::kOutsider when another world size is assumed.
  uint32_t rank_of(uint32_t rank, uint32_t world_size) const {
    const uint32_t assumed = assumed_world_.load(std::memory_order_relaxed);
    return assumed != 0 && assumed != world_size ? Gate::kOutsider : rank;
  }
  bool waits_for(uint32_t rank) const;
  // Whether the scheduler's last view has this session, also when it has left meanwhile. Without a scheduler: always.
  bool knows(uint32_t rank, uint64_t incarnation) const;
  bool starts(uint32_t rank) const;  // whether it starts with the others
  // Whether a session was dropped from a view, and so given up. Remembers the latest limits::kGivenUpMax.
  bool given_up(uint64_t incarnation) const;
  // Whether nobody is waited for: all have left, or nobody has come.
  bool over() const;
  // Whether there is at most one worker, so that nothing can be stale.
  bool alone() const { return alone_.load(std::memory_order_relaxed); }

  // For objects without gates: the clock of the slowest other worker, by its ticks. Gate::kNone: there is none.
  uint64_t slowest(uint32_t but) const;

  template <class Visit>
  void visit_pace(Visit visit) const {
    std::lock_guard lock(mutex_);
    visit(pace_);
  }

  void count_pull(uint64_t asked, uint64_t seen);
  // `waits` waits of `ns` in all, for one rank.
  void count_waits(uint32_t rank, uint64_t waits, int64_t ns);
  void count_late() { late_.fetch_add(1, std::memory_order_relaxed); }
  SyncStats stats() const;

 private:
  struct Known {
    bool in_view = false;
    bool starts = false;    // starts with the app, and need not enter
    bool replaced = false;  // its replacement is waited for
    bool came = false;      // without a scheduler: its session has come
    // The incarnation in the view (without a scheduler: the last that came; 0: none), and the one that has entered.
    uint64_t incarnation = 0, entered = 0;
    uint64_t viewed = 0;  // the incarnation in the scheduler's last view; 0: none
    uint64_t entered_at = 0;
    uint64_t ticked = 0;
    std::vector<uint32_t> open;

    bool waited() const { return (in_view && (starts || entered == incarnation)) || replaced; }
  };
  bool changed_locked();
  bool over_locked() const;
  void give_up_locked(uint64_t incarnation);

  const std::string app_;
  mutable std::mutex mutex_;
  uint64_t number_ = 0;  // of the view
  bool known_ = false;
  bool assumed_ = false;
  uint32_t world_size_ = 0;
  std::map<uint32_t, Known> workers_;
  std::atomic<bool> any_given_up_{false};
  std::vector<uint64_t> given_up_;         // incarnations, ascending
  std::deque<uint64_t> given_up_in_turn_;  // the same, the oldest first
  Gate pace_{Sync()};                      // everybody's ticks
  std::atomic<bool> alone_{true};
  std::atomic<uint32_t> assumed_world_{0};  // 0: none, as with a scheduler

  std::atomic<uint64_t> waits_{0}, waited_ns_{0}, late_{0};
  std::atomic<uint64_t> staleness_[SyncStats::kBuckets] = {};
  mutable std::mutex waited_mutex_;
  std::map<uint32_t, int64_t> waited_for_;  // ns, by rank
};

}  // namespace windlass
