// Questions about a whole object (query/query.h): every shard answers at its turn, and the answers become one.
//
// A query sees what its session has pushed before and waits at gates as a pull of the same clock does. It is atomic for
// a shard, not for the object.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/handle.h"
#include "query/query.h"

namespace windlass {

// Of whom it is asked.
struct Asked {
  std::shared_ptr<Handle> handle;
  What what;
  uint32_t shards = 0;
  RowType rows;
};

const char* verb_of(const std::string& query);  // what errors call it
// *answer becomes the bytes of docs/formats/wire.md.
Status ask(const Asked& asked, const std::string& query, int64_t deadline_ns, std::string* answer);

// Where a scan has got to. A row that is there from start to end comes once, whatever else grows or goes.
struct ScanCursor {
  uint32_t shard = 0;
  uint64_t from = 0;
};
// Up to `most` rows from the cursor on, of those for which the predicate holds, if there is one; without `weights`,
// keys alone. Nothing comes when all have come. Waits at no gate.
Status scan(const Asked& asked, ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
            std::vector<uint64_t>* keys, std::vector<float>* weights);

}  // namespace windlass
