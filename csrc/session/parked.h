// Parked: requests at a shard that came too early. A push waits for the pushes before it, a pull for its worker's last
// push; those are on the other lane, or will be sent again. A pull, and under BSP a push, also waits at the gate for
// other workers. Pure: no thread, socket or time inside.
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/limits.h"

namespace windlass {

struct Shard;

// A request that waits. Every method is called with the shard's turn.
class Waiting {
 public:
  // Where to write the whole shard's weights, if that is all the request waits for. stream: past the cache.
  struct Wants {
    float* out = nullptr;
    bool stream = false;
  };

  Waiting() = default;
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  virtual ~Waiting() = default;

  virtual bool ready(Shard& shard) = 0;  // whether what it waited for has come
  virtual bool run(Shard& shard) = 0;    // false: it waits for something else now
  // For the pass that makes the update before this clock: if the request waits for it, the pass may write the new
  // weights there and then calls served().
  virtual Wants wants(uint64_t) { return {}; }
  virtual void served() {}
};

class Parked {
 public:
  // Returns false and changes nothing when there is no room. `always`: ignores the limit, for a request that was
  // admitted before.
  bool park(std::unique_ptr<Waiting>* waiting, bool always = false) {
    if (all_ == nullptr) all_ = std::make_unique<All>();
    if (all_->size() >= limits::kParkedMax && !always) return false;
    all_->push_back(std::move(*waiting));
    return true;
  }
  // Takes the first request, in order of arrival, for which ready(waiting) is true.
  template <class Ready>
  std::unique_ptr<Waiting> take_if(Ready ready) {
    if (empty()) return nullptr;
    const auto which = std::find_if(all_->begin(), all_->end(), [&](const auto& w) { return ready(*w); });
    if (which == all_->end()) return nullptr;
    std::unique_ptr<Waiting> taken = std::move(*which);
    all_->erase(which);
    return taken;
  }
  // Runs the requests that are ready, and those that this makes ready. *freed gets the ones that have run.
  void free(Shard& shard, std::vector<std::unique_ptr<Waiting>>* freed) {
    for (bool again = !empty(); again;) {
      again = false;
      for (size_t i = 0; i < all_->size();) {
        if (!(*all_)[i]->ready(shard)) {
          ++i;
          continue;
        }
        if (!(*all_)[i]->run(shard)) {  // it may have made others ready, unless nothing has changed
          again = again || !(*all_)[i]->ready(shard);
          ++i;
          continue;
        }
        again = true;
        freed->push_back(std::move((*all_)[i]));
        all_->erase(all_->begin() + static_cast<ptrdiff_t>(i));
      }
    }
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
  template <class Visit>
  void each(Visit visit) {
    if (empty()) return;
    for (const auto& w : *all_) visit(*w);
  }
  bool empty() const { return all_ == nullptr || all_->empty(); }

 private:
  using All = std::vector<std::unique_ptr<Waiting>>;
  std::unique_ptr<All> all_;  // most shards never need one
};

}  // namespace windlass
