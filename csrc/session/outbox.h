// Outbox: the requests of one lane that have no answer yet. Pure: no thread, socket or time inside.
//
// Requests are made in the order of their ids and sent in that order. A broken connection, or a server that does not
// have a request it should have, puts them back among those to be sent; the lowest goes first, so that a shard sees a
// session's pushes in order again.
//
//     add() -> queued -> next() -> sent -> answered() -> gone
//                 ^________________|  lost(), heard()
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace windlass {

template <class T>
class Outbox {
 public:
  void add(uint64_t id, T what) {
    all_.emplace(id, Entry{std::move(what), false});
    ++queued_;
    queued_from_ = std::min(queued_from_, id);
  }
  bool idle() const { return all_.empty(); }
  bool has_queued() const { return queued_ != 0; }
  bool has_sent() const { return all_.size() > queued_; }
  size_t size() const { return all_.size(); }

  // The next to be sent, which counts as sent from now on; nullptr when there is none.
  T* next() {
    if (queued_ == 0) return nullptr;
    const auto it = first_queued();
    it->second.sent = true;
    --queued_;
    return &it->second.what;
  }
  const T* peek() { return queued_ == 0 ? nullptr : &first_queued()->second.what; }  // the same, without sending it
  // The one that has been without an answer for longest; nullptr when nothing is.
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
    if (!it->second.sent) --queued_;
    all_.erase(it);
    return true;
  }

  // The connection broke: whatever was sent may not have arrived.
  void lost() {
    for (auto& [id, e] : all_) e.sent = false;
    queued_ = all_.size();
    queued_from_ = 0;
  }
  void again(uint64_t id) {
    const auto it = all_.find(id);
    if (it == all_.end() || !it->second.sent) return;
    it->second.sent = false;
    ++queued_;
    queued_from_ = std::min(queued_from_, id);
  }
  // What to ask the server about, and what follows from its answer: a request that it does not hold and has not
  // answered either is lost.
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
  };
  auto first_queued() {
    const auto it =
        std::find_if(all_.lower_bound(queued_from_), all_.end(), [](const auto& e) { return !e.second.sent; });
    queued_from_ = it->first;
    return it;
  }

  std::map<uint64_t, Entry> all_;
  size_t queued_ = 0;
  uint64_t queued_from_ = 0;  // nothing before it is queued
};

}  // namespace windlass
