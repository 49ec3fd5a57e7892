// What queries and scans do to one shard.
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <string>
#include <vector>

#include "query/query.h"
#include "server/object/bsp_updates.h"

namespace windlass {

RowType row_type_of(const TensorSpec& spec, const Cut& cut);
RowType row_type_of(const Target& target);

// The shard's answer to a query that was parsed for its object.
std::string shard_query(const Query& query, const Target& target);

// The predicate of a delete: only rows for which it holds are deleted.
Status parse_where(const std::byte* bytes, size_t n, const RowType& rows, Program* where);

// What a scan asks for: at most how many rows, what of them, and which rows.
struct Scan {
  enum What : uint32_t { kRows = 0, kKeys = 1, kRowsWithState = 2 };  // the last in the form RowForm::all()
  uint64_t most = 0;
  What what = kRows;
  bool filtered = false;
  Program where;

  // Errors are kInvalidArgument or kShapeMismatch.
  static Status parse(const std::byte* bytes, size_t n, const RowType& rows, Scan* out);
  static std::string encode(uint64_t most, What what, const std::string& where);
};

// Keys from *from on, and their rows unless only keys are wanted; false if those were the last. A tensor returns only
// keys.
bool scan(const Scan& scan, const Target& target, uint64_t* from, std::vector<uint64_t>* keys,
          std::vector<float>* rows);

}  // namespace windlass
