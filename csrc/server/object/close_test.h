// What the tests of updates share: a close without the request that would bring it.
#pragma once

#include <memory>
#include <vector>

#include "server/object/bsp_updates.h"

namespace windlass::test {

// With the turn: a worker has closed everything before `clock`. Runs the entries that waited for it.
inline void close_in_turn(const Target& target, Shard& shard, uint32_t rank, uint64_t clock, double weight) {
  Gate& gate = *shard.gate;
  if (!gate.close(rank, clock, weight, 0)) return;
  if (gate.sync().rounds()) {
    if (shard.staged != nullptr) static_cast<BspUpdates&>(*shard.staged).fold(gate, target);
    make_updates(shard, target);
  }
  std::vector<std::unique_ptr<Waiting>> freed;
  shard.parked.free(shard, &freed);
}

}  // namespace windlass::test
