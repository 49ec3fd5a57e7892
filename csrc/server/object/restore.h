// Restore: a shard as a checkpoint has it, written to its place before anybody trains on it.
//
// Thread safety: each takes the shard's turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server/object/served_object.h"

namespace windlass {

// Some bytes of one of Tensor::pieces_of() a tensor's shard.
Status restore_piece(ServedObject& object, uint32_t shard, size_t piece, uint64_t at, const std::byte* from,
                     uint64_t bytes);
// Rows of a table's shard: the arrays of Capture::arrays_of(), each by itself. in_all: how many it will have, where
// they come in the order in which a capture had them.
Status restore_rows(ServedObject& object, uint32_t shard, uint64_t rows,
                    const std::vector<std::span<const std::byte>>& arrays, uint64_t in_all);
// The rest: its numbers of pushes and of the rule's updates, and under BSP of updates made. Call it last; `fingerprint`
// becomes that of what is there now.
Status restore_counts(ServedObject& object, uint32_t shard, uint64_t version, uint64_t count, uint64_t made,
                      uint64_t* fingerprint);

}  // namespace windlass
