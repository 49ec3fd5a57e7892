// CloseCall: closes an iteration at some shards of an object on servers elsewhere. It is a member of the StepCall that
// ends the iteration.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "client/op/call.h"

namespace windlass {

class CloseCall final : public Call {
 public:
  CloseCall(std::shared_ptr<Session> session, ClosingShards closing, uint64_t clock);

  void describe(uint32_t part, bool, Parcel* to) override;
  void write_argument(uint32_t part, std::byte* to) override;
  bool joins(uint32_t part) const override;
  Status land(uint32_t part, bool, const PartAnswer& answer, const std::byte*) override;

 protected:
  uint64_t clock_of(uint32_t) const override { return clock_; }
  Status add_to_plan(Arena::Segments*, RemoteRoute::Plan* plan) override {
    plan->flags = wire::kCloses;
    return {};
  }

 private:
  const ClosingShards closing_;
  const uint64_t clock_;
};

}  // namespace windlass
