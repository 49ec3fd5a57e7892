// Gate: whom a pull at a shard waits for, and when an update there is complete. Pure: no thread or socket inside, and
// time is what the caller says it is.
//
// Every worker of the app has a clock here: how many iterations it has closed at this shard. Clocks are kept by rank,
// not by process: one that takes a lost worker's place goes on where that one had got to.
//
//     close(), set_view()  ->  clocks move, or somebody is waited for no more  ->  opens() is true for more pulls
//
// A gate never takes back what it has opened, except that a worker that joins may hold up later clocks. So whoever
// waits asks again after every close and every view, and nobody asks in between.
//
// Under BSP updates are counted: update c is complete when everybody who is waited for has closed c, all but the
// `spare` slowest. `made` is the number of the next.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sync/policy.h"

namespace windlass {

// Who is waited for, ascending by rank, and the least clock that each has at a shard that knows nothing of it.
struct View {
  struct Worker {
    uint32_t rank = 0;
    uint64_t clock = 0;
  };
  bool known = false;  // until then everybody waits
  std::vector<Worker> workers;
};

// "for rank 2, whose clock is 3", or that nobody is known yet.
std::string waits_for(const View::Worker& worker);

class Gate {
 public:
  static constexpr uint32_t kOutsider = ~0u;  // the rank of who has no clock here: a reader, a worker of another app
  static constexpr uint64_t kNone = ~uint64_t{0};
  static constexpr uint64_t kOver = kNone - 1;  // the clock of a worker that is done: nobody waits for it any more

  explicit Gate(const Sync& sync) : sync_(sync) {}

  const Sync& sync() const { return sync_; }

  void set_view(const View& view, int64_t now_ns);
  // The worker has closed everything before `clock` here. `weight`: what the object's pushes in iteration clock-1
  // weigh together, 0 when there were none. A repeat of an older close changes nothing; true when something changed.
  bool close(uint32_t rank, uint64_t clock, double weight, int64_t now_ns);

  // Whether a pull at this clock need not wait.
  bool opens(uint32_t rank, uint64_t clock, int64_t now_ns) const;
  // One that holds it up: the lowest clock, and of those the lowest rank. kOutsider: nobody is known yet.
  View::Worker blocker(uint32_t rank, uint64_t clock, int64_t now_ns) const;
  // The clock up to which everybody's pushes are seen by a pull of this worker: the lowest of the others, or under BSP
  // the number of updates that were made. kNone: there are no others.
  uint64_t seen(uint32_t rank) const;

  bool waits_for(uint32_t rank) const;
  uint64_t clock_of(uint32_t rank) const;
  uint64_t lowest() const { return lowest_; }  // of those who are waited for; kNone when there are none
  uint64_t highest() const;                    // of all

  // BSP.
  uint64_t made() const { return made_; }
  // How many updates could be made by now.
  uint64_t complete() const;
  // The next update counts as made.
  void advance(uint64_t made);
  // At a shard that is new: what workers had closed before it was there needs no update.
  void begin() { advance(complete()); }
  // What the object's pushes of all workers weigh in an iteration, of those who have closed it here.
  double weight(uint64_t iteration) const;
  // False also for what a view has put the worker past: nobody closed that.
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
    std::vector<Closed> closed = {};    // under BSP: iterations whose update is not made yet and that have a weight
    std::vector<Skipped> skipped = {};  // likewise, iterations that a view has put it past

    void skip(uint64_t to);
  };
  const std::vector<Worker>& workers() const { return workers_; }
  // As it was at another server; who is waited for is to be said anew.
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
  size_t behind_ = 0;  // of those who are waited for: how many have not closed the next update
  // Of those who are waited for: the lowest clock and how many have it. If it is one: who, and the same of the others.
  uint64_t lowest_ = kNone, second_ = kNone;
  size_t at_lowest_ = 0, at_second_ = 0;
  uint32_t lowest_rank_ = kOutsider;
};

}  // namespace windlass
