// Query: a question about the rows or the numbers of an object, byte for byte as in docs/formats/wire.md; Tally: what
// has been seen of them, and the answer.
//
// Every shard is asked the same and answers with a few bytes; a Tally in the client makes one answer of those, whatever
// order they come in. Neither depends on how rows lie in memory, so the answer is the same for any number of servers.
//
//     shard 0:  blocks of rows -> Tally -> bytes  |
//     shard 1:  blocks of rows -> Tally -> bytes  |->  Tally of the client -> bytes
//
// A Query comes from a client and is believed only after parse(). The memory of a Tally is limited by what was asked.
//
// Thread safety: values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "query/block.h"
#include "query/exact.h"
#include "query/program.h"
#include "query/top.h"

namespace windlass {

struct Query {
  enum class Function : uint8_t {
    kCount = 1,  // rows
    kSum,        // numbers, as are those that follow; of int64 it wraps around
    kMean,       // their sum in float64
    kSquares,
    kAbsolutes,
    kMin,
    kMax,
    kAbsMax,
    kNonzero,
    kHistogram,
    kTop,
  };
  Function function = Function::kCount;
  bool largest = true;        // kTop
  uint64_t k = 0;             // kTop
  std::vector<double> edges;  // kHistogram
  Program where;              // empty: all rows
  Program score;              // kTop
  RowType rows;

  // Whatever is wrong is kInvalidArgument.
  static Status parse(const std::byte* bytes, size_t n, const RowType& rows, Query* out);
  // Whether it has to be asked row by row.
  bool by_row() const { return function == Function::kCount || function == Function::kTop || !where.empty(); }
  bool counts_all() const { return function == Function::kCount && where.empty(); }
  // Whether the value is an int64.
  bool exact() const {
    return rows.dtype == Dtype::kInt64 &&
           (function == Function::kSum || function == Function::kMin || function == Function::kMax);
  }
};

class Tally {
 public:
  explicit Tally(const Query& query);

  void add(const Block& block);
  void add_rows(uint64_t n) { seen_ += n; }  // of a count of all rows, which need not be looked at
  // Numbers that lie one behind the other, of a query that is not by row.
  void add_run(const void* numbers, size_t n);
  std::string take();
  // An answer of another Tally of the same query; kProtocolError when it is none.
  Status merge(const std::string& answer);

 private:
  void add_values(const double* values, size_t n);
  void add_whole(const void* const* rows, size_t n, size_t dim);
  void add_to_bins(const void* row, size_t n);
  void count_in_bins(double x);
  void take_extreme(double x);
  void take_extreme(int64_t x);

  const Query& query_;
  uint64_t seen_ = 0;  // rows or numbers
  ExactSum sum_;
  uint64_t whole_ = 0;  // an int64 as it wraps around
  double extreme_ = 0;  // of what was seen, if anything
  int64_t extreme_whole_ = 0;
  std::vector<uint64_t> bins_;
  Top top_;
};

}  // namespace windlass
