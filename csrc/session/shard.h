// Shard: what every shard has, whatever it holds. Tensors and tables add their data.
#pragma once

#include <cstdint>

#include "base/turn.h"
#include "session/parked.h"
#include "session/record.h"

namespace windlass {

struct alignas(64) Shard {
  Turn turn;             // everything below belongs to its holder
  uint64_t version = 0;  // how many pushes were applied
  uint64_t count = 0;    // how many updates the rule has made: what Adam calls its step
  Records records;
  Parked parked;  // what came before its time
};

}  // namespace windlass
