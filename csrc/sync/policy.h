// Sync: the consistency policy of an object, fixed when it is made.
//
//     ASP        a push is applied when it comes, a pull never waits
//     SSP        likewise, but a pull at clock c waits until every worker has clock >= c - number
//     MaxDelay   likewise, but a pull waits while a worker with a lower clock has been at it for longer than `seconds`
//     BSP        update c is made once, from what every worker (but the `number` slowest) contributed when it closed c;
//                a pull at clock c waits for update c-1
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace windlass {

struct Sync {
  enum Kind : uint8_t { kAsp, kBsp, kSsp, kMaxDelay };
  static constexpr uint8_t kKinds = 4;
  static constexpr double kSecondsMax = 1e9;

  Kind kind = kAsp;
  uint32_t number = 0;  // BSP: how many an update goes without; SSP: the staleness
  double seconds = 0;   // MaxDelay

  bool gated() const { return kind != kAsp; }
  bool rounds() const { return kind == kBsp; }  // pushes wait for their update
  // Updates are made without the slowest workers, whose pushes are dropped until they catch up.
  bool may_drop() const { return kind == kBsp && number != 0; }
  friend bool operator==(const Sync&, const Sync&) = default;
};

std::string describe(const Sync& sync);
// Ok when there can be such a policy.
Status check_sync(const std::string& what, const Sync& sync);

}  // namespace windlass
