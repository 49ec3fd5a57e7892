// Queries on a whole object (query/query.h): every shard answers at its turn, and the answers are merged.
//
// A query sees what its session has pushed before and waits at gates as a pull of the same clock does. It is atomic for
// a shard, not for the object.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/op/handle.h"
#include "query/query.h"
#include "server/object/shard_query.h"

namespace windlass {

// The object that is asked.
struct Asked {
  std::shared_ptr<Handle> handle;
  What what;
  uint32_t shards = 0;
  RowType rows;
};

const char* verb_of(const std::string& query);  // its name in errors
// *answer becomes the bytes of docs/formats/wire.md.
Status ask(const Asked& asked, const std::string& query, int64_t deadline_ns, std::string* answer);

// Where a scan has got to. A row that exists from start to end is returned exactly once, whatever else is added or
// deleted.
struct ScanCursor {
  uint32_t shard = 0;
  uint64_t from = 0;
};
// What is scanned, and how many numbers of each row are returned with its key.
struct Scanned {
  Scan::What what = Scan::kRows;
  size_t numbers = 0;
};
// Returns up to `most` rows from the cursor on for which the predicate, if any, holds; `rows` may be null where only
// keys are scanned. Returns nothing after the last. Waits at no gate.
Status scan(const Asked& asked, ScanCursor* cursor, size_t most, const Scanned& scanned, const std::string& where,
            int64_t deadline_ns, std::vector<uint64_t>* keys, std::vector<float>* rows);

}  // namespace windlass
