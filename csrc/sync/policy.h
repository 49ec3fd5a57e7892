// Sync: the consistency policy of an object, fixed when it is made.
//
//     ASP        a push is applied on arrival, a pull never waits
//     SSP        likewise, but a pull at clock c waits until every worker has clock >= c - number
//     MaxDelay   likewise, but a pull waits while a worker with a lower clock has spent over `seconds` in its iteration
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
  uint32_t number = 0;  // BSP: how many workers an update may lack; SSP: the staleness
  double seconds = 0;   // MaxDelay

  bool gated() const { return kind != kAsp; }
  bool rounds() const { return kind == kBsp; }      // pushes wait for their update
  bool timed() const { return kind == kMaxDelay; }  // its gates ask what time it is
  // Updates are made without the slowest workers, whose pushes are dropped until they catch up.
  bool may_drop() const { return kind == kBsp && number != 0; }
  friend bool operator==(const Sync&, const Sync&) = default;
};

std::string describe(const Sync& sync);
// Ok when the policy is valid.
Status check_sync(const std::string& what, const Sync& sync);

}  // namespace windlass
