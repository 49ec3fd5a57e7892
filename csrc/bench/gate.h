// What a gate costs a pull, without a server around it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sync/policy.h"

namespace windlass {

struct GateTime {
  double pull_ns = 0;   // close() and opens(), once per pull; under BSP the updates are counted, too
  double asked_ns = 0;  // the same, and whoever waits is asked again after every close, as in a server
};

// Workers whose steps take 50 ms, one in eight four times as long, for about so many pulls. Who comes when is found out
// before anything is timed. The best of `repeats` runs.
GateTime time_gate(const Sync& sync, uint32_t workers, size_t pulls, int repeats);

}  // namespace windlass
