// What a gate costs a pull, without a server around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sync/policy.h"

namespace windlass {

// Seconds per pull, one for each repeat.
struct GateTimes {
  std::vector<double> pull_seconds;   // close() and opens(), once per pull; under BSP the updates are counted, too
  std::vector<double> asked_seconds;  // the same, and waiting pulls ask again after every close, as in a server
};

// Simulates workers whose steps take 50 ms, one in eight four times as long, for about `pulls` pulls. The order of
// events is computed before anything is timed.
GateTimes time_gate(const Sync& sync, uint32_t workers, size_t pulls, int repeats);

}  // namespace windlass
