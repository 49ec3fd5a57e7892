// Record: what a shard remembers of one session, stored with the shard's data so that both are copied, replicated and
// saved as one. Pure: no thread, socket or time inside.
//
// Pushes of a session to a shard are numbered 1, 2, 3, ... without gaps. `sequence` is the highest that was applied:
// a push at or below it is a repeat and is acknowledged again, the next one is applied, one beyond leaves a gap.
// `clock` is how many iterations the worker has closed here.
//
// Most answers can be made again from the shard. Those that cannot (a refusal, a count of deleted rows) are kept for as
// long as a client may still ask: its window of requests without an answer is limited.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/limits.h"
#include "base/status.h"

namespace windlass {

enum class Admission : uint8_t { kApply, kRepeat, kGap };

struct Record {
  // An answer that cannot be made again.
  struct Kept {
    uint64_t sequence;
    Status status;
    uint64_t value;
  };

  uint64_t sequence = 0;
  uint64_t clock = 0;
  uint64_t seen = 0;         // the shard's version when the session last looked at it
  uint64_t incarnation = 0;  // whose record it is: numbers of ended sessions are reused
  uint32_t rank = ~0u;       // of its worker when it last pushed or closed here; ~0: it never did
  std::unique_ptr<std::vector<Kept>> kept;

  Admission admit(uint64_t pushed) const {
    if (pushed <= sequence) return Admission::kRepeat;
    return pushed == sequence + 1 ? Admission::kApply : Admission::kGap;
  }
  // A close is idempotent: a repeat of an older one changes nothing.
  void close(uint64_t closed) { clock = std::max(clock, closed); }

  void keep(uint64_t pushed, Status status, uint64_t value) {
    if (kept == nullptr) kept = std::make_unique<std::vector<Kept>>();
    if (kept->size() == limits::kKeptAnswersMax) kept->erase(kept->begin());
    kept->push_back({pushed, std::move(status), value});
  }
  const Kept* find(uint64_t pushed) const {
    if (kept == nullptr) return nullptr;
    const auto it = std::find_if(kept->begin(), kept->end(), [&](const Kept& k) { return k.sequence == pushed; });
    return it == kept->end() ? nullptr : &*it;
  }
};

// The records of a shard, by the number the server gave the session. Thread safety: the holder of the shard's turn.
class Records {
 public:
  Record& of(uint32_t session, uint64_t incarnation = 0) {
    if (session < records_.size() && records_[session].incarnation == incarnation) [[likely]]
      return records_[session];
    return add(session, incarnation);
  }
  const Record* find(uint32_t session) const { return session < records_.size() ? &records_[session] : nullptr; }

  // Adds a record that arrived with its shard. Session numbers are a server's own, so the record waits here until its
  // session comes.
  void add(Record record) {
    if (arrived_ == nullptr) arrived_ = std::make_unique<std::map<uint64_t, Record>>();
    const uint64_t incarnation = record.incarnation;
    arrived_->insert_or_assign(incarnation, std::move(record));
  }
  // Visits every record that is not blank.
  template <class Visit>
  void each(Visit visit) const {
    const auto unless_blank = [&](const Record& r) {
      if (r.sequence != 0 || r.clock != 0) visit(r);
    };
    for (const Record& r : records_) unless_blank(r);
    if (arrived_ == nullptr) return;
    for (const auto& [incarnation, r] : *arrived_) unless_blank(r);
  }
  void clear() {
    records_.clear();
    arrived_.reset();
  }

 private:
  Record& add(uint32_t session, uint64_t incarnation) {
    if (session >= records_.size()) records_.resize(session + 1);
    Record& record = records_[session];
    if (record.incarnation == incarnation) return record;
    record = {};
    if (arrived_ != nullptr) claim(&record, incarnation);
    record.incarnation = incarnation;
    return record;
  }
  void claim(Record* record, uint64_t incarnation) {
    const auto it = arrived_->find(incarnation);
    if (it == arrived_->end()) return;
    *record = std::move(it->second);
    arrived_->erase(it);
  }

  std::vector<Record> records_;
  std::unique_ptr<std::map<uint64_t, Record>> arrived_;  // by incarnation: there may be very many that have ended
};

}  // namespace windlass
