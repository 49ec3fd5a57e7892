// Query: a question about the rows or the numbers of an object, byte for byte as in docs/formats/wire.md; Tally: the
// answer so far.
//
// Every shard gets the same question and answers with a few bytes; a Tally in the client merges these into one answer,
// in whatever order they come. Nothing depends on how rows lie in memory, so the answer is the same for any number of
// servers.
//
//     shard 0:  blocks of rows -> Tally -> bytes  |
//     shard 1:  blocks of rows -> Tally -> bytes  |->  Tally of the client -> bytes
//
// A Query comes from a client and is trusted only after parse(). The query limits the memory of its Tally.
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
    kSum,        // of numbers, as all that follow; int64 wraps around
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

  // kInvalidArgument when anything is wrong.
  static Status parse(const std::byte* bytes, size_t n, const RowType& rows, Query* out);
  // Whether it must go row by row.
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
  void add_rows(uint64_t n) { seen_ += n; }  // for a count of all rows, which need not be visited
  // Adds contiguous numbers, for a query that is not by row.
  void add_run(const void* numbers, size_t n);
  std::string take();
  // Adds the answer of another Tally of the same query; kProtocolError when it is malformed.
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
  uint64_t whole_ = 0;  // an int64 sum, which wraps around
  double extreme_ = 0;  // valid once seen_ is not 0
  int64_t extreme_whole_ = 0;
  std::vector<uint64_t> bins_;
  Top top_;
};

}  // namespace windlass
