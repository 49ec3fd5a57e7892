// Parked: requests of a shard that came too early. A push waits for the ones before it, a pull for the last push of its
// worker; what they wait for is on the other lane, or will be sent again. And a pull waits at the gate for other
// workers, as does a push under BSP. Pure: no thread, socket or time inside.
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

// A request that waits. With the shard's turn:
class Waiting {
 public:
  // Where it wants a whole shard's weights, if that is all it waits for; past the cache, where they are many.
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
  // Whoever makes the update it waits for, the one before this clock, may write the weights there while it has them at
  // hand, and calls served().
  virtual Wants wants(uint64_t) { return {}; }
  virtual void served() {}
};

class Parked {
 public:
  // False, and nothing changes, when there is no room. `always`: there is, for who was let in already.
  bool park(std::unique_ptr<Waiting>* waiting, bool always = false) {
    if (all_ == nullptr) all_ = std::make_unique<All>();
    if (all_->size() >= limits::kParkedMax && !always) return false;
    all_->push_back(std::move(*waiting));
    return true;
  }
  // The next one for which ready(waiting) is true, in order of arrival.
  template <class Ready>
  std::unique_ptr<Waiting> take_if(Ready ready) {
    if (empty()) return nullptr;
    const auto which = std::find_if(all_->begin(), all_->end(), [&](const auto& w) { return ready(*w); });
    if (which == all_->end()) return nullptr;
    std::unique_ptr<Waiting> taken = std::move(*which);
    all_->erase(which);
    return taken;
  }
  // Runs whoever is ready, and whoever that makes ready; *freed gets those that have run.
  void free(Shard& shard, std::vector<std::unique_ptr<Waiting>>* freed) {
    for (bool again = !empty(); again;) {
      again = false;
      for (size_t i = 0; i < all_->size();) {
        if (!(*all_)[i]->ready(shard)) {
          ++i;
          continue;
        }
        if (!(*all_)[i]->run(shard)) {  // others may profit, unless nothing has happened at all
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
