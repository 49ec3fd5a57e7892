// LocalGate: a part of a request that waits at the gate of a shard inside this process.
#pragma once

#include "base/os.h"
#include "client/call.h"
#include "session/shard.h"
#include "sync/crowd.h"

namespace windlass {

class LocalGate final : public Waiting {
 public:
  LocalGate(Ref<Call> call, uint32_t part, Crowd& crowd, const Gate& gate, uint32_t rank, uint64_t asked)
      : call_(std::move(call)), part_(part), crowd_(crowd), rank_(rank), asked_(asked), since_ns_(os::now_ns()) {
    blocker_ = gate.blocker(rank, asked, since_ns_).rank;
  }

  bool ready(Shard& shard) override { return shard.gate->opens(rank_, asked_, os::now_ns()); }
  bool run(Shard&) override {
    const int64_t ns = os::now_ns() - since_ns_;
    crowd_.count_wait(blocker_, ns);
    call_->note_wait(ns, blocker_);
    call_->resume(part_);
    return true;
  }
  void end(const Status& status) { call_->abandon(part_, status); }
  bool is(const Call* call, uint32_t part) const { return call_.get() == call && part_ == part; }
  const Call& call() const { return *call_; }
  uint32_t rank() const { return rank_; }
  uint64_t asked() const { return asked_; }
  int64_t since_ns() const { return since_ns_; }

 private:
  const Ref<Call> call_;
  const uint32_t part_;
  Crowd& crowd_;
  const uint32_t rank_;
  const uint64_t asked_;
  const int64_t since_ns_;
  uint32_t blocker_ = Gate::kOutsider;
};

// With the turn: whoever waits at the gate ends with kClosed.
inline void end_local_waits(Shard& shard) {
  while (const std::unique_ptr<Waiting> waiting = shard.parked.take_if([](const Waiting&) { return true; }))
    static_cast<LocalGate&>(*waiting).end(Status(Code::kClosed, "the cluster has been closed"));
}

}  // namespace windlass
