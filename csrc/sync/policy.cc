#include "sync/policy.h"

#include <charconv>

namespace windlass {

std::string describe(const Sync& s) {
  char seconds[32];
  const auto end = std::to_chars(seconds, seconds + sizeof seconds, s.seconds).ptr;
  switch (s.kind) {
    case Sync::kAsp: return "ASP()";
    case Sync::kBsp: return s.number == 0 ? "BSP()" : "BSP(spare=" + std::to_string(s.number) + ")";
    case Sync::kSsp: return "SSP(" + std::to_string(s.number) + ")";
    case Sync::kMaxDelay: return "MaxDelay(" + std::string(seconds, end) + ")";
  }
  return "?";
}

Status check_sync(const std::string& what, const Sync& s) {
  if (s.kind >= Sync::kKinds) return Status(Code::kInvalidArgument, what + ": no such policy");
  const bool has_number = s.kind == Sync::kBsp || s.kind == Sync::kSsp;
  if (s.number != 0 && !has_number)
    return Status(Code::kInvalidArgument,
                  what + ": " + describe(s) + " has no number, saw " + std::to_string(s.number));
  if (s.kind != Sync::kMaxDelay ? s.seconds != 0 : !(s.seconds >= 0 && s.seconds <= Sync::kSecondsMax))
    return Status(Code::kInvalidArgument, what + ": " + describe(s) + ": expected 0 to 1e9 seconds");
  return {};
}

}  // namespace windlass
