// Record: what a shard remembers of one session, stored with the shard's data so that both are copied, replicated and
// saved as one. Pure: no thread, socket or time inside.
//
// Pushes of a session to a shard are numbered 1, 2, 3, ... without gaps. `sequence` is the highest that was applied:
// a push at or below it is a repeat and is acknowledged again, the next one is applied, one beyond leaves a gap.
// `clock` is how many iterations the worker has closed here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace windlass {

enum class Admission : uint8_t { kApply, kRepeat, kGap };

struct Record {
  uint64_t sequence = 0;
  uint64_t clock = 0;

  Admission admit(uint64_t pushed) const {
    if (pushed <= sequence) return Admission::kRepeat;
    return pushed == sequence + 1 ? Admission::kApply : Admission::kGap;
  }
  // A close is idempotent: a repeat of an older one changes nothing.
  void close(uint64_t closed) { clock = std::max(clock, closed); }
};

// The records of a shard, by the number the server gave the session. Thread safety: the holder of the shard's turn.
class Records {
 public:
  Record& of(uint32_t session) {
    if (session >= records_.size()) records_.resize(session + 1);
    return records_[session];
  }
  const Record* find(uint32_t session) const { return session < records_.size() ? &records_[session] : nullptr; }

 private:
  std::vector<Record> records_;
};

}  // namespace windlass
