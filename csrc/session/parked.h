// Parked: requests of a shard that came too early. A push waits for the ones before it, a pull for the last push of its
// worker; what they wait for is on the other lane, or will be sent again. Pure: no thread, socket or time inside.
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/limits.h"

namespace windlass {

// A request that waits until its session's `sequence` at the shard is at least `after`.
class Waiting {
 public:
  Waiting(uint32_t session, uint64_t after) : session_(session), after_(after) {}
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  virtual ~Waiting() = default;

  uint32_t session() const { return session_; }
  uint64_t after() const { return after_; }

 private:
  const uint32_t session_;
  const uint64_t after_;
};

class Parked {
 public:
  // False, and nothing changes, when there is no room.
  bool park(std::unique_ptr<Waiting>* waiting) {
    if (all_ == nullptr) all_ = std::make_unique<All>();
    if (all_->size() >= limits::kParkedMax) return false;
    all_->push_back(std::move(*waiting));
    return true;
  }
  // The next one of the session that has nothing to wait for any more, lowest first and then in order of arrival.
  std::unique_ptr<Waiting> take(uint32_t session, uint64_t sequence) {
    if (empty()) return nullptr;
    auto best = all_->end();
    for (auto it = all_->begin(); it != all_->end(); ++it) {
      if ((*it)->session() != session || (*it)->after() > sequence) continue;
      if (best == all_->end() || (*it)->after() < (*best)->after()) best = it;
    }
    return take(best);
  }
  // The next one of any session for which ready(waiting) is true, in order of arrival.
  template <class Ready>
  std::unique_ptr<Waiting> take_if(Ready ready) {
    if (empty()) return nullptr;
    return take(std::find_if(all_->begin(), all_->end(), [&](const auto& w) { return ready(*w); }));
  }
  template <class Pred>
  void drop_if(Pred pred) {
    if (!empty()) std::erase_if(*all_, [&](const std::unique_ptr<Waiting>& w) { return pred(*w); });
  }
  template <class Visit>
  void each(Visit visit) const {
    if (empty()) return;
    for (const auto& w : *all_) visit(*w);
  }
  bool empty() const { return all_ == nullptr || all_->empty(); }

 private:
  using All = std::vector<std::unique_ptr<Waiting>>;
  std::unique_ptr<Waiting> take(All::iterator which) {
    if (which == all_->end()) return nullptr;
    std::unique_ptr<Waiting> taken = std::move(*which);
    all_->erase(which);
    return taken;
  }

  std::unique_ptr<All> all_;  // most shards never need one
};

}  // namespace windlass
