// Gate: whom a pull at a shard waits for, and when an update there is complete. Pure: no thread or socket inside, and
// the caller says what time it is.
//
// Every worker of the app has a clock here: how many iterations it has closed at this shard. Clocks are kept by rank,
// not by process: a process that replaces a lost worker continues from its clock.
//
//     close(), set_view()  ->  clocks move, or a worker is no longer waited for  ->  opens() is true for more pulls
//
// A gate never closes again for a clock it has opened for, but a worker that joins may hold up later clocks. So a
// waiting request asks again after every close and every view, and not in between.
//
// Under BSP a gate counts updates: update c is complete when every worker that is waited for has closed c, all but the
// `spare` slowest. `made` is the number of the next update.
//
// Thread safety: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sync/policy.h"

namespace windlass {

// The workers that are waited for, ascending by rank, each with its lowest possible clock, for a shard that knows
// nothing of it.
struct View {
  struct Worker {
    uint32_t rank = 0;
    uint64_t clock = 0;
  };
  bool known = false;  // until then everybody waits
  std::vector<Worker> workers;
};

// "for rank 2, whose clock is 3", or that no view is known yet.
std::string waits_for(const View::Worker& worker);

class Gate {
 public:
  static constexpr uint32_t kOutsider = ~0u;  // rank of clients without a clock here: readers, workers of another app
  static constexpr uint64_t kNone = ~uint64_t{0};
  static constexpr uint64_t kOver = kNone - 1;  // the clock of a worker that is done: nobody waits for it any more

  explicit Gate(const Sync& sync) : sync_(sync) {}

  const Sync& sync() const { return sync_; }

  void set_view(const View& view, int64_t now_ns);
  // The worker has closed everything before `clock` here. `weight`: the total weight of its pushes to the object in
  // iteration clock-1, 0 when there were none. A repeat of an older close changes nothing; true when something changed.
  bool close(uint32_t rank, uint64_t clock, double weight, int64_t now_ns);

  // Whether a pull at this clock may go ahead.
  bool opens(uint32_t rank, uint64_t clock, int64_t now_ns) const;
  // A worker that holds up such a pull: the lowest clock, and of those the lowest rank. kOutsider: no view is known
  // yet.
  View::Worker blocker(uint32_t rank, uint64_t clock, int64_t now_ns) const;
  // The clock up to which a pull of this worker sees everybody's pushes: the lowest clock of the others, or under BSP
  // the number of updates made. kNone: there are no others.
  uint64_t seen(uint32_t rank) const;

  bool waits_for(uint32_t rank) const;
  uint64_t clock_of(uint32_t rank) const;
  uint64_t lowest() const { return lowest_; }  // among workers that are waited for; kNone when there are none
  uint64_t highest() const;                    // of all

  // BSP.
  uint64_t made() const { return made_; }
  // How many updates are complete, whether made or not.
  uint64_t complete() const;
  // Counts all updates before `made` as made.
  void advance(uint64_t made);
  // For a new shard: iterations that workers closed before it existed need no update.
  void begin() { advance(complete()); }
  // The total weight of an iteration's pushes to the object, over the workers that have closed it here.
  double weight(uint64_t iteration) const;
  // False also for iterations that a view made the worker skip: nobody closed those.
  bool has_closed(uint32_t rank, uint64_t iteration) const;
  // Forgets the weights of iterations before this one.
  void forget(uint64_t before);

  struct Closed {
    uint64_t iteration = 0;
    double weight = 0;
  };
  struct Skipped {
    uint64_t first = 0, end = 0;
  };
  struct Worker {
    uint32_t rank = 0;
    bool waited = false;
    uint64_t clock = 0;
    int64_t opened_ns = 0;              // when its present iteration began
    std::vector<Closed> closed = {};    // under BSP: iterations with a weight whose update is not made yet
    std::vector<Skipped> skipped = {};  // likewise, iterations that a view made it skip

    void skip(uint64_t to);
  };
  const std::vector<Worker>& workers() const { return workers_; }
  // Restores the state from another server; set_view() must say again who is waited for.
  void restore(uint64_t made, std::vector<Worker> workers);

 private:
  Worker* find(uint32_t rank);
  const Worker* find(uint32_t rank) const { return const_cast<Gate*>(this)->find(rank); }
  Worker& add(uint32_t rank, int64_t now_ns);
  void recount();
  void count_behind();

  const Sync sync_;
  bool known_ = false;
  std::vector<Worker> workers_;  // ascending by rank
  uint64_t made_ = 0;
  size_t behind_ = 0;  // workers that are waited for and have not closed the next update
  // Among workers that are waited for: the lowest clock and how many have it. If only one has: its rank, and the same
  // for the others.
  uint64_t lowest_ = kNone, second_ = kNone;
  size_t at_lowest_ = 0, at_second_ = 0;
  uint32_t lowest_rank_ = kOutsider;
};

}  // namespace windlass
