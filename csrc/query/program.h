// Program: an expression over the key and the numbers of a row, in postfix, byte for byte as in docs/formats/wire.md.
//
//     (wl.row.norm() < 0.5) & (wl.key >= 7)        norm  number 0.5  less  key  key-constant 7  at-least  and
//
// It comes from a client, so parse() trusts nothing: it checks lengths, depth, columns and types. After that run()
// cannot fail. It takes a block of rows through one operation at a time, so that each is a loop over numbers.
//
// Keys are unsigned 64-bit numbers and are compared as such; all other numbers are float64. Comparisons with NaN are
// false, except that NaN != x is true.
//
// Thread safety: a value; run() from several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "query/block.h"

namespace windlass {

class Program {
 public:
  enum class Type : uint8_t { kNumber, kKey, kBool };
  enum class Op : uint8_t {
    kNumber = 1,  // float64 follows
    kConstant,    // a key: uint64 follows
    kTrue,
    kFalse,
    kKey = 8,
    kColumn,  // uint32 follows
    kUpdates,
    kNorm,
    kSum,
    kMean,
    kMin,
    kMax,
    kAbsMax,
    kAdd = 24,  // two numbers
    kSubtract,
    kMultiply,
    kDivide,
    kNegate,  // one number
    kAbs,
    kModulo,     // two keys; modulo 0 is 0
    kAsNumber,   // a key
    kLess = 40,  // two numbers or two keys
    kLessEqual,
    kGreater,
    kGreaterEqual,
    kEqual,
    kNotEqual,
    kAnd = 48,
    kOr,
    kNot,
  };

  // kInvalidArgument when anything is wrong; the message begins with `what`.
  static Status parse(const std::byte* bytes, size_t n, const RowType& rows, Type wanted, const char* what,
                      Program* out);

  bool empty() const { return steps_.empty(); }
  void run(const Block& block, bool* out) const;    // of type kBool
  void run(const Block& block, double* out) const;  // of type kNumber

  // The rows of a block that satisfy a predicate.
  struct Kept {
    uint64_t keys[Block::kRowsMax];
    const void* rows[Block::kRowsMax];
    const RowHead* heads[Block::kRowsMax];
  };
  Block keep(const Block& block, Kept* kept) const;

 private:
  struct Step {
    Op op;
    uint32_t column = 0;
    double number = 0;
    uint64_t key = 0;
  };
  union Slot {
    double number[Block::kRowsMax];
    uint64_t key[Block::kRowsMax];
    bool flag[Block::kRowsMax];
  };
  const Slot& run(const Block& block, Slot* stack) const;

  RowType rows_;
  std::vector<Step> steps_;
  std::vector<Type> types_;  // of each step's operands
};

}  // namespace windlass
