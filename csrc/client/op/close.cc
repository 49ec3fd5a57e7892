#include "client/op/close.h"

#include <bit>
#include <cstring>
#include <string>
#include <utility>

namespace windlass {

static const std::string kNoName;

CloseCall::CloseCall(std::shared_ptr<Session> session, ClosingShards closing, uint64_t clock)
    : Call(std::move(session), closing.progress, {"tick", "object", kNoName}),
      closing_(std::move(closing)),
      clock_(clock) {
  aim(wire::Op::kClose, nullptr, closing_.progress->owners, closing_.shards);
}

void CloseCall::describe(uint32_t, bool, Parcel* to) {
  to->value = std::bit_cast<uint64_t>(closing_.weight);
  to->argument_bytes = sizeof(uint64_t);
}

void CloseCall::write_argument(uint32_t part, std::byte* to) {
  std::memcpy(to, &closing_.follows[part], sizeof closing_.follows[part]);
}

bool CloseCall::joins(uint32_t part) const { return closing_.follows[part] == closing_.follows[part - 1]; }

Status CloseCall::land(uint32_t, bool, const PartAnswer& answer, const std::byte*) {
  if (closing_.progress->sync.may_drop()) session().catch_up(answer.clock);
  return {};
}

}  // namespace windlass
