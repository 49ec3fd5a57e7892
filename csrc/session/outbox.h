// Outbox: the requests of one lane that have no answer yet. Pure: no thread, socket or time inside.
//
// Requests are added in the order of their ids and sent in that order, except that one of higher priority overtakes
// those of lower priority that it need not follow. The ones it must follow are sent just before it, as early as if they
// had its priority. When the connection breaks, or the server does not hold a request that it should, requests are
// queued again; the lowest id goes first, so that a shard sees a session's pushes in order again.
//
//     add() -> queued -> next() -> sent -> answered() -> gone
//                 ^________________|  lost(), heard(), again()
//
// Thread safety: none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace windlass {

template <class T>
class Outbox {
 public:
  void add(uint64_t id, T what, uint8_t priority = 0) {
    all_.emplace(id, Entry{std::move(what), false, priority});
    ++queued_;
    urgent_ += priority != 0 ? 1 : 0;
    queued_from_ = std::min(queued_from_, id);
  }
  bool idle() const { return all_.empty(); }
  bool has_queued() const { return queued_ != 0; }
  bool has_sent() const { return all_.size() > queued_; }
  size_t size() const { return all_.size(); }

  // Takes the next request to send, which counts as sent from now on; nullptr when there is none. follows(later,
  // earlier): whether the later one must not overtake the earlier one.
  template <class Follows>
  T* next(Follows follows) {
    if (queued_ == 0) return nullptr;
    const auto it = most_urgent(follows);
    it->second.sent = true;
    --queued_;
    urgent_ -= it->second.priority != 0 ? 1 : 0;
    return &it->second.what;
  }
  T* next() { return next(never); }
  // The same, without sending it.
  template <class Follows>
  const T* peek(Follows follows) {
    return queued_ == 0 ? nullptr : &most_urgent(follows)->second.what;
  }
  const T* peek() { return peek(never); }
  // The request with the lowest id that was sent and has no answer; nullptr when there is none.
  const T* oldest_sent() const {
    const auto it = std::find_if(all_.begin(), all_.end(), [](const auto& e) { return e.second.sent; });
    return it == all_.end() ? nullptr : &it->second.what;
  }
  T* find(uint64_t id) {
    const auto it = all_.find(id);
    return it == all_.end() ? nullptr : &it->second.what;
  }
  bool answered(uint64_t id) {  // false: it is gone already
    const auto it = all_.find(id);
    if (it == all_.end()) return false;
    if (!it->second.sent) {
      --queued_;
      urgent_ -= it->second.priority != 0 ? 1 : 0;
    }
    all_.erase(it);
    return true;
  }

  // The connection broke: whatever was sent may not have arrived.
  void lost() {
    urgent_ = 0;
    for (auto& [id, e] : all_) {
      e.sent = false;
      urgent_ += e.priority != 0 ? 1 : 0;
    }
    queued_ = all_.size();
    queued_from_ = 0;
  }
  void again(uint64_t id) {
    const auto it = all_.find(id);
    if (it == all_.end() || !it->second.sent) return;
    it->second.sent = false;
    ++queued_;
    urgent_ += it->second.priority != 0 ? 1 : 0;
    queued_from_ = std::min(queued_from_, id);
  }
  // The requests to ask the server about, and what follows from its answer: a request that it neither holds nor has
  // answered is lost and is queued again.
  std::vector<uint64_t> to_ask(size_t most) const {
    std::vector<uint64_t> ids;
    for (const auto& [id, e] : all_) {
      if (e.sent && ids.size() < most) ids.push_back(id);
    }
    return ids;
  }
  size_t heard(const std::vector<uint64_t>& asked, const std::vector<uint64_t>& held) {
    size_t lost = 0;
    for (const uint64_t id : asked) {
      if (std::find(held.begin(), held.end(), id) != held.end() || find(id) == nullptr) continue;
      again(id);
      ++lost;
    }
    return lost;
  }

  template <class Visit>
  void each(Visit visit) {
    for (auto& [id, e] : all_) visit(id, e.what);
  }

 private:
  struct Entry {
    T what;
    bool sent;
    uint8_t priority;
  };
  static bool never(const T&, const T&) { return false; }
  // With more queued than this, which no window allows, requests go in order of their ids: a search would take too
  // long.
  static constexpr size_t kChosenFromMax = 1024;
  auto first_queued() {
    const auto it =
        std::find_if(all_.lower_bound(queued_from_), all_.end(), [](const auto& e) { return !e.second.sent; });
    queued_from_ = it->first;
    return it;
  }
  // The first request of the highest priority, or the first that must be sent before it.
  template <class Follows>
  auto most_urgent(Follows follows) {
    const auto first = first_queued();
    auto best = first;
    if (urgent_ == 0 || queued_ > kChosenFromMax) return best;
    for (auto it = first; it != all_.end(); ++it) {
      if (!it->second.sent && it->second.priority > best->second.priority) best = it;
    }
    for (auto it = first; it != best;) {
      const bool goes_first = !it->second.sent && follows(best->second.what, it->second.what);
      if (goes_first) best = it;
      it = goes_first ? first : std::next(it);
    }
    return best;
  }

  std::map<uint64_t, Entry> all_;
  size_t queued_ = 0;
  size_t urgent_ = 0;         // of those, with a priority
  uint64_t queued_from_ = 0;  // nothing before it is queued
};

}  // namespace windlass
