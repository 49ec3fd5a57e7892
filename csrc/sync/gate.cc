#include "sync/gate.h"

#include <algorithm>

#include "base/breaks.h"

namespace windlass {

std::string waits_for(const View::Worker& worker) {
  if (worker.rank == Gate::kOutsider) return "for the first view of its app";
  return "for rank " + std::to_string(worker.rank) + ", whose clock is " + std::to_string(worker.clock);
}

Gate::Worker* Gate::find(uint32_t rank) {
  if (rank < workers_.size() && workers_[rank].rank == rank) return &workers_[rank];  // no rank is missing before it
  const auto it =
      std::lower_bound(workers_.begin(), workers_.end(), rank, [](const Worker& w, uint32_t r) { return w.rank < r; });
  return it != workers_.end() && it->rank == rank ? &*it : nullptr;
}

Gate::Worker& Gate::add(uint32_t rank, int64_t now_ns) {
  if (Worker* const there = find(rank); there != nullptr) return *there;
  const auto it =
      std::lower_bound(workers_.begin(), workers_.end(), rank, [](const Worker& w, uint32_t r) { return w.rank < r; });
  return *workers_.insert(it, Worker{.rank = rank, .opened_ns = now_ns});
}

void Gate::set_view(const View& view, int64_t now_ns) {
  known_ = view.known;
  std::vector<uint32_t> before;
  for (Worker& w : workers_) {
    if (w.waited) before.push_back(w.rank);
    w.waited = false;
  }
  for (const View::Worker& v : view.workers) {
    Worker& w = add(v.rank, now_ns);
    w.waited = true;
    if (v.clock > w.clock || !std::binary_search(before.begin(), before.end(), v.rank)) w.opened_ns = now_ns;
    if (v.clock <= w.clock) continue;
    if (sync_.rounds()) w.skip(v.clock);
    w.clock = v.clock;
  }
  recount();
}

void Gate::restore(uint64_t made, std::vector<Worker> workers) {
  made_ = made;
  workers_ = std::move(workers);
  for (Worker& w : workers_) w.waited = true;  // until the view comes: for those in it an iteration goes on
  known_ = false;
  recount();
}

void Gate::Worker::skip(uint64_t to) {
  if (skipped.empty() || skipped.back().end < clock) skipped.push_back({clock, to});
  skipped.back().end = to;
}

void Gate::advance(uint64_t made) {
  made_ = made;
  count_behind();
}

void Gate::count_behind() {
  behind_ = static_cast<size_t>(
      std::count_if(workers_.begin(), workers_.end(), [&](const Worker& w) { return w.waited && w.clock <= made_; }));
}

void Gate::recount() {
  count_behind();
  lowest_ = second_ = kNone;
  at_lowest_ = at_second_ = 0;
  lowest_rank_ = kOutsider;
  for (const Worker& w : workers_) {
    if (!w.waited) continue;
    if (w.clock < lowest_) {
      second_ = lowest_;
      at_second_ = at_lowest_;
      lowest_ = w.clock;
      at_lowest_ = 1;
      lowest_rank_ = w.rank;
    } else if (w.clock == lowest_) {
      ++at_lowest_;
    } else if (w.clock <= second_) {
      at_second_ = w.clock < second_ ? 1 : at_second_ + 1;
      second_ = w.clock;
    }
  }
}

bool Gate::close(uint32_t rank, uint64_t clock, double weight, int64_t now_ns) {
  if (rank == kOutsider) return false;
  Worker& w = add(rank, now_ns);
  if (clock <= w.clock) return false;
  if (sync_.rounds() && weight != 0 && clock > made_) w.closed.push_back({clock - 1, weight});
  const uint64_t before = w.clock;
  w.clock = clock;
  w.opened_ns = now_ns;
  if (!w.waited) return true;
  if (before <= made_ && clock > made_) --behind_;
  // Only the last worker at the lowest clock raises it, so all are counted again once per iteration of all.
  if (before == lowest_) {
    at_lowest_ > 2 ? static_cast<void>(--at_lowest_) : recount();
  } else if (at_lowest_ == 1 && before == second_) {
    at_second_ > 1 ? static_cast<void>(--at_second_) : recount();
  }
  return true;
}

bool Gate::opens(uint32_t rank, uint64_t clock, int64_t now_ns) const {
  if (rank == kOutsider || sync_.kind == Sync::kAsp) return true;
  if (!known_) return false;
  if (!waits_for(rank)) return true;  // it has left, or was given up
  switch (sync_.kind) {
    case Sync::kBsp: return made_ >= clock || (made_ + 1 == clock && broken(Break::kGate));
    case Sync::kSsp: {
      const uint64_t others = seen(rank);
      if (others >= clock || clock - others <= sync_.number) return true;
      return clock - others == sync_.number + 1 && broken(Break::kGate);
    }
    case Sync::kMaxDelay: {
      if (seen(rank) >= clock) return true;
      const auto limit = static_cast<int64_t>(sync_.seconds * 1e9);
      return std::none_of(workers_.begin(), workers_.end(), [&](const Worker& w) {
        return w.waited && w.rank != rank && w.clock < clock && now_ns - w.opened_ns > limit;
      });
    }
    case Sync::kAsp: return true;
  }
  return true;
}

View::Worker Gate::blocker(uint32_t rank, uint64_t clock, int64_t now_ns) const {
  View::Worker found{kOutsider, 0};
  const auto limit = static_cast<int64_t>(sync_.seconds * 1e9);
  for (const Worker& w : workers_) {
    if (!w.waited || w.clock >= clock) continue;
    if (w.rank == rank && sync_.kind != Sync::kBsp) continue;
    if (sync_.kind == Sync::kMaxDelay && now_ns - w.opened_ns <= limit) continue;
    if (found.rank == kOutsider || w.clock < found.clock) found = {w.rank, w.clock};
  }
  return found;
}

uint64_t Gate::seen(uint32_t rank) const {
  if (sync_.rounds()) return made_;
  return rank == lowest_rank_ && at_lowest_ == 1 ? second_ : lowest_;
}

bool Gate::waits_for(uint32_t rank) const {
  const Worker* const w = find(rank);
  return w != nullptr && w->waited;
}

uint64_t Gate::clock_of(uint32_t rank) const {
  const Worker* const w = find(rank);
  return w != nullptr ? w->clock : 0;
}

bool Gate::has_closed(uint32_t rank, uint64_t iteration) const {
  const Worker* const w = find(rank);
  if (w == nullptr || w->clock <= iteration) return false;
  return std::none_of(w->skipped.begin(), w->skipped.end(),
                      [&](const Skipped& s) { return s.first <= iteration && iteration < s.end; });
}

uint64_t Gate::highest() const {
  uint64_t most = made_;
  for (const Worker& w : workers_) most = std::max(most, w.clock);
  return most;
}

uint64_t Gate::complete() const {
  if (!known_) return made_;
  if (sync_.number == 0 || lowest_ == kNone) return lowest_ == kNone ? highest() : std::max(made_, lowest_);
  if (behind_ > sync_.number) return made_;
  std::vector<uint64_t> clocks;
  for (const Worker& w : workers_) {
    if (w.waited) clocks.push_back(w.clock);
  }
  const size_t spare = std::min<size_t>(sync_.number, clocks.size() - 1);
  std::nth_element(clocks.begin(), clocks.begin() + static_cast<ptrdiff_t>(spare), clocks.end());
  return std::max(made_, clocks[spare]);
}

double Gate::weight(uint64_t iteration) const {
  double sum = 0;
  for (const Worker& w : workers_) {  // in rank order: a floating-point sum depends on it
    for (const Closed& c : w.closed) {
      if (c.iteration == iteration) sum += c.weight;
    }
  }
  return sum;
}

void Gate::forget(uint64_t before) {
  for (Worker& w : workers_) {
    std::erase_if(w.closed, [&](const Closed& c) { return c.iteration < before; });
    std::erase_if(w.skipped, [&](const Skipped& s) { return s.end <= before; });
  }
}

}  // namespace windlass
