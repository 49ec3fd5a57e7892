// Shard: what every shard has, whatever it holds. Tensors and tables add their data.
#pragma once

#include <cstdint>
#include <memory>

#include "base/turn.h"
#include "session/parked.h"
#include "session/record.h"
#include "session/residence.h"
#include "sync/gate.h"

namespace windlass {

// What a shard keeps for a layer above.
struct Staged {
  virtual ~Staged() = default;
};

class ShardCapture;

// What every request looks at comes first, on one cache line.
struct alignas(64) Shard {
  Turn turn;  // everything below belongs to its holder
  Residence home;
  uint64_t version = 0;  // how many pushes and puts were applied
  uint64_t count = 0;    // how many updates the rule has made: what Adam calls its step
  Parked parked;         // requests that came too early
  Records records;
  std::unique_ptr<Gate> gate;       // none where nobody ever waits
  std::unique_ptr<Staged> staged;   // pushes that wait for their update
  ShardCapture* capture = nullptr;  // while a checkpoint takes it (server/object/capture.h)
};

}  // namespace windlass
