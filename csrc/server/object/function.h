// A function of the user's that reads a shard: what it gets is copied at the shard's turn, and it runs without it.
#pragma once

#include <string>

#include "server/object/bsp_updates.h"
#include "server/object/user_code.h"
#include "wire/frame.h"

namespace windlass {

// With the turn: a call that is ready to run. Of a table it gets rows from *from on, which becomes where the next call
// goes on; *more says whether there is one.
UserCode::Ref read_part(const std::string& what, const wire::CallItem& item, const Target& target, uint64_t* from,
                        bool* more);
// Without the turn: runs it.
Status run_part(UserCode* code, const UserCode::Ref& call);

}  // namespace windlass
