// The close of an iteration at servers elsewhere: one request per server, with a part per shard that is still open and
// one that speaks for all objects that the worker does not know. Nobody waits for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "client/engine.h"

namespace windlass {

struct ClosingShards {
  std::shared_ptr<Progress> progress;
  std::vector<uint32_t> shards;
  std::vector<uint64_t> follows;  // of each shard: up to where it was closed before
  double weight;                  // of the iteration's pushes to the object
};

// open: the objects that the worker has open.
Status close_away(std::shared_ptr<Session> session, const std::vector<ClosingShards>& closing, uint64_t clock,
                  std::vector<uint32_t> open, int64_t deadline_ns);

// Only says it, to these servers.
Status tick_away(std::shared_ptr<Session> session, const std::vector<uint32_t>& servers, uint64_t clock,
                 std::vector<uint32_t> open, int64_t deadline_ns);

// Waits until everything that was pushed to these shards, and closed there, has arrived, wherever they are by now.
Status settle_away(std::shared_ptr<Session> session, const std::vector<ClosingShards>& shards, int64_t deadline_ns);

}  // namespace windlass
