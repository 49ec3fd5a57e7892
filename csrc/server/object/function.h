// A user's function that reads a shard. It gets a copy that is made at the shard's turn, and runs without the turn.
#pragma once

#include <string>

#include "base/limits.h"
#include "server/object/bsp_updates.h"
#include "server/object/user_code.h"
#include "wire/frame.h"

namespace windlass {

// The memory of a result: as it is returned, gathered and sent.
inline constexpr uint64_t kResultMemoryBytes = 3 * limits::kResultBytesMax;

// With the turn: makes a call that is ready to run. On a table it gets rows from *from on; *from then says where the
// next call continues, and *more whether there is one.
UserCode::Ref read_part(const std::string& what, const wire::CallItem& item, const Target& target, uint64_t* from,
                        bool* more);
// Without the turn: runs it.
Status run_part(UserCode* code, const UserCode::Ref& call);

}  // namespace windlass
