#include "sync/workers.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/limits.h"

namespace windlass {

// Sets everybody's pace, for objects without gates.
bool Workers::changed_locked() {
  View view;
  view.known = known_;
  for (const auto& [rank, w] : workers_) {
    if (w.waited()) view.workers.push_back({rank, std::max(w.entered_at, w.ticked)});
  }
  pace_.set_view(view, 0);
  alone_.store(view.workers.size() < 2, std::memory_order_relaxed);
  return true;
}

bool Workers::set_view(uint64_t number, const std::vector<Member>& workers, const std::vector<uint32_t>& waited) {
  std::lock_guard lock(mutex_);
  if (number <= number_) return false;
  number_ = number;
  known_ = true;
  const bool assumed = std::exchange(assumed_, false);
  assumed_world_.store(0, std::memory_order_relaxed);
  for (auto& [rank, w] : workers_) {
    const bool stays = std::any_of(workers.begin(), workers.end(), [&, r = rank, n = w.incarnation](const Member& m) {
      return m.rank == r && m.incarnation == n;
    });
    if (w.in_view && !stays && !assumed) give_up_locked(w.incarnation);
    w.in_view = w.replaced = false;
    w.viewed = 0;
  }
  for (const Member& m : workers) {
    Known& w = workers_[m.rank];
    w.in_view = true;
    w.starts = m.starts;
    if (m.starts) w.entered_at = std::max(w.entered_at, m.clock);
    w.incarnation = w.viewed = m.incarnation;
  }
  for (const uint32_t rank : waited) workers_[rank].replaced = true;
  world_size_ = std::max(world_size_, static_cast<uint32_t>(workers.size() + waited.size()));
  return changed_locked();
}

// Sessions keep ending while the app goes on, so the oldest are forgotten.
void Workers::give_up_locked(uint64_t incarnation) {
  const auto place = [&](uint64_t n) { return std::lower_bound(given_up_.begin(), given_up_.end(), n); };
  if (const auto at = place(incarnation); at == given_up_.end() || *at != incarnation) {
    given_up_.insert(at, incarnation);
    any_given_up_.store(true, std::memory_order_release);
    given_up_in_turn_.push_back(incarnation);
  }
  if (given_up_in_turn_.size() <= limits::kGivenUpMax) return;
  given_up_.erase(place(given_up_in_turn_.front()));
  given_up_in_turn_.pop_front();
}

bool Workers::assume(uint32_t world_size, uint64_t clock) {
  std::lock_guard lock(mutex_);
  if (known_ && (!assumed_ || (world_size <= world_size_ && !over_locked()))) return false;
  known_ = assumed_ = true;
  world_size_ = world_size;
  assumed_world_.store(world_size, std::memory_order_relaxed);
  workers_.clear();
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    Known& w = workers_[rank];
    w.in_view = w.starts = true;
    w.entered_at = clock;
  }
  return changed_locked();
}

bool Workers::over_locked() const {
  return std::none_of(workers_.begin(), workers_.end(),
                      [](const auto& w) { return w.second.waited() || w.second.in_view; });
}

bool Workers::over() const {
  std::lock_guard lock(mutex_);
  return over_locked();
}

void Workers::came(uint32_t rank, uint64_t incarnation) {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(rank);
  if (!assumed_ || it == workers_.end()) return;
  const bool same = std::exchange(it->second.incarnation, incarnation) == incarnation;
  if (it->second.in_view && std::exchange(it->second.came, true) && !same) it->second.replaced = true;
}

bool Workers::left(uint32_t rank, uint64_t incarnation) {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(rank);
  if (it == workers_.end() || !it->second.in_view || it->second.incarnation != incarnation) return false;
  it->second.in_view = it->second.replaced = it->second.came = false;
  if (assumed_) it->second.incarnation = 0;
  return changed_locked();
}

bool Workers::enter(uint32_t rank, uint64_t incarnation, uint64_t clock) {
  std::lock_guard lock(mutex_);
  Known& w = workers_[rank];
  if (w.entered != incarnation) {  // its predecessor's ticks say nothing of the objects that this one has open
    w.ticked = 0;
    w.open.clear();
  }
  w.entered = incarnation;
  if (assumed_) {
    w.in_view = w.starts = w.came = true;
    if (w.incarnation == 0) w.incarnation = incarnation;
  }
  w.entered_at = std::max(w.entered_at, clock);
  return changed_locked();
}

bool Workers::tick(uint32_t rank, uint64_t clock, std::vector<uint32_t> open) {
  std::lock_guard lock(mutex_);
  Known& w = workers_[rank];  // its view may still be on the way
  if (clock < w.ticked) return false;
  if (clock == w.ticked) {  // a repeat, or its replacement has fewer open
    std::vector<uint32_t> both;
    std::set_intersection(w.open.begin(), w.open.end(), open.begin(), open.end(), std::back_inserter(both));
    const bool fewer = both.size() < w.open.size();
    w.open = std::move(both);
    return fewer;
  }
  w.ticked = clock;
  w.open = std::move(open);
  pace_.close(rank, clock, 0, 0);
  return true;
}

bool Workers::tick(uint32_t rank, uint64_t clock) {
  std::lock_guard lock(mutex_);
  Known& w = workers_[rank];
  if (clock <= w.ticked) return false;
  w.ticked = clock;
  pace_.close(rank, clock, 0, 0);
  return true;
}

std::vector<uint32_t> Workers::open_of(uint32_t rank) const {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(rank);
  return it != workers_.end() ? it->second.open : std::vector<uint32_t>();
}

std::vector<Workers::Heard> Workers::heard() const {
  std::lock_guard lock(mutex_);
  std::vector<Heard> all;
  for (const auto& [rank, w] : workers_) {
    if (w.entered != 0 || w.entered_at != 0 || w.ticked != 0)
      all.push_back({rank, w.entered, w.entered_at, w.ticked, w.open});
  }
  return all;
}

bool Workers::hear(const std::vector<Heard>& all) {
  std::lock_guard lock(mutex_);
  bool changed = false;
  for (const Heard& h : all) {
    Known& w = workers_[h.rank];
    const bool newer = h.entered != w.entered && h.entered != 0 && (w.entered == 0 || h.entered == w.incarnation);
    if (h.entered != w.entered && !newer) continue;  // of another incarnation than the one that is here
    if (newer) {
      w.entered = h.entered;
      if (w.incarnation != h.entered) w.entered_at = w.ticked = 0;
      changed = true;
    }
    if (h.entered_at > w.entered_at) {
      w.entered_at = h.entered_at;
      changed = true;
    }
    if (h.ticked > w.ticked) {
      w.ticked = h.ticked;
      w.open = h.open;
      pace_.close(h.rank, h.ticked, 0, 0);
      changed = true;
    } else if (h.ticked == w.ticked && h.open != w.open) {
      std::vector<uint32_t> both;
      std::set_intersection(w.open.begin(), w.open.end(), h.open.begin(), h.open.end(), std::back_inserter(both));
      w.open = std::move(both);
      changed = true;
    }
  }
  return changed && changed_locked();
}

View Workers::view(uint32_t object) const {
  std::lock_guard lock(mutex_);
  View view;
  view.known = known_;
  for (const auto& [rank, w] : workers_) {
    if (!w.waited()) continue;
    const bool has = std::binary_search(w.open.begin(), w.open.end(), object);
    view.workers.push_back({rank, has ? w.entered_at : std::max(w.entered_at, w.ticked)});
  }
  return view;
}

uint32_t Workers::world_size() const {
  std::lock_guard lock(mutex_);
  return world_size_;
}

bool Workers::waits_for(uint32_t rank) const {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(rank);
  return it != workers_.end() && it->second.waited();
}

bool Workers::knows(uint32_t rank, uint64_t incarnation) const {
  std::lock_guard lock(mutex_);
  if (assumed_) return true;
  const auto it = workers_.find(rank);
  return it != workers_.end() && it->second.viewed == incarnation;
}

bool Workers::starts(uint32_t rank) const {
  std::lock_guard lock(mutex_);
  const auto it = workers_.find(rank);
  return it != workers_.end() && it->second.in_view && it->second.starts && !it->second.replaced;
}

bool Workers::given_up(uint64_t incarnation) const {
  if (!any_given_up_.load(std::memory_order_acquire)) return false;
  std::lock_guard lock(mutex_);
  return std::binary_search(given_up_.begin(), given_up_.end(), incarnation);
}

uint64_t Workers::slowest(uint32_t but) const {
  if (alone()) return Gate::kNone;
  std::lock_guard lock(mutex_);
  return pace_.seen(but);
}

void Workers::count_pull(uint64_t asked, uint64_t seen) {
  const uint64_t staleness = asked > seen ? asked - seen : 0;
  staleness_[std::min<uint64_t>(staleness, SyncStats::kBuckets - 1)].fetch_add(1, std::memory_order_relaxed);
}

void Workers::count_waits(uint32_t rank, uint64_t waits, int64_t ns) {
  waits_.fetch_add(waits, std::memory_order_relaxed);
  waited_ns_.fetch_add(static_cast<uint64_t>(ns), std::memory_order_relaxed);
  if (rank == Gate::kOutsider) return;
  std::lock_guard lock(waited_mutex_);
  waited_for_[rank] += ns;
}

SyncStats Workers::stats() const {
  SyncStats s;
  for (size_t i = 0; i < SyncStats::kBuckets; ++i) {
    s.staleness[i] = staleness_[i];
    s.reads += s.staleness[i];
  }
  s.waits = waits_;
  s.waited_seconds = static_cast<double>(waited_ns_) * 1e-9;
  s.late = late_;
  std::lock_guard lock(waited_mutex_);
  for (const auto& [rank, ns] : waited_for_) s.waited_for[rank] = static_cast<double>(ns) * 1e-9;
  return s;
}

}  // namespace windlass
