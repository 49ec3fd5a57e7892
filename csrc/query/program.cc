#include "query/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "base/limits.h"
#include "rule/kernels.h"
#include "wire/frame.h"

namespace windlass {
namespace {

using Op = Program::Op;
using Type = Program::Type;

const char* name_of(Type type) {
  return type == Type::kNumber ? "a number" : type == Type::kKey ? "a key" : "true or false";
}

template <class T>
void compare(Op op, const T* a, const T* b, bool* out, size_t n) {
  const auto each = [&](auto holds) {
    for (size_t i = 0; i < n; ++i) out[i] = holds(a[i], b[i]);
  };
  switch (op) {
    case Op::kLess: return each(std::less<T>());
    case Op::kLessEqual: return each(std::less_equal<T>());
    case Op::kGreater: return each(std::greater<T>());
    case Op::kGreaterEqual: return each(std::greater_equal<T>());
    case Op::kEqual: return each(std::equal_to<T>());
    default: return each(std::not_equal_to<T>());
  }
}

void calculate(Op op, double* a, const double* b, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    a[i] = op == Op::kAdd        ? a[i] + b[i]
           : op == Op::kSubtract ? a[i] - b[i]
           : op == Op::kMultiply ? a[i] * b[i]
                                 : a[i] / b[i];
  }
}

void read_column(const Block& block, Dtype dtype, uint32_t column, double* out) {
  for (size_t i = 0; i < block.n; ++i) {
    const void* const row = block.rows[i];
    out[i] = dtype == Dtype::kFloat32   ? static_cast<double>(static_cast<const float*>(row)[column])
             : dtype == Dtype::kFloat64 ? static_cast<const double*>(row)[column]
                                        : static_cast<double>(static_cast<const int64_t*>(row)[column]);
  }
}

void reduce(const Block& block, const RowType& type, Op op, double* out) {
  const Reduce what = op == Op::kNorm                     ? Reduce::kSquares
                      : op == Op::kSum || op == Op::kMean ? Reduce::kSum
                      : op == Op::kMin                    ? Reduce::kMin
                      : op == Op::kMax                    ? Reduce::kMax
                                                          : Reduce::kAbsMax;
  kernels().reduce(what, type.dtype, block.rows, block.n, type.dim, out);
  for (size_t i = 0; op == Op::kNorm && i < block.n; ++i) out[i] = std::sqrt(out[i]);
  for (size_t i = 0; op == Op::kMean && i < block.n; ++i) out[i] /= static_cast<double>(type.dim);
}

}  // namespace

Status Program::parse(const std::byte* bytes, size_t n, const RowType& rows, Type wanted, const char* what,
                      Program* out) {
  Program made;
  made.rows_ = rows;
  wire::Reader reader(bytes, n);
  std::vector<Type> stack;
  const auto wrong = [&](const std::string& why) {
    return Status(Code::kInvalidArgument,
                  std::string(what) + ": operation " + std::to_string(made.steps_.size()) + ": " + why);
  };
  while (reader.left() != 0) {
    Step step{static_cast<Op>(reader.get<uint8_t>())};
    if (made.steps_.size() == limits::kProgramOpsMax)
      return wrong("at most " + std::to_string(limits::kProgramOpsMax) + " are allowed");
    // What it takes from the stack, all of one type, and what it leaves there.
    size_t takes = 0;
    Type from = Type::kNumber, leaves = Type::kNumber;
    switch (step.op) {
      case Op::kNumber: step.number = reader.get<double>(); break;
      case Op::kConstant:
        step.key = reader.get<uint64_t>();
        leaves = Type::kKey;
        break;
      case Op::kTrue:
      case Op::kFalse: leaves = Type::kBool; break;
      case Op::kKey: leaves = Type::kKey; break;
      case Op::kColumn:
        step.column = reader.get<uint32_t>();
        if (step.column >= rows.dim)
          return wrong("column " + std::to_string(step.column) + " of rows with " + std::to_string(rows.dim));
        break;
      case Op::kUpdates:
        if (!rows.counts) return wrong("updates of rows are counted in tables alone");
        break;
      case Op::kNorm:
      case Op::kSum:
      case Op::kMean:
      case Op::kMin:
      case Op::kMax:
      case Op::kAbsMax: break;
      case Op::kAdd:
      case Op::kSubtract:
      case Op::kMultiply:
      case Op::kDivide: takes = 2; break;
      case Op::kNegate:
      case Op::kAbs: takes = 1; break;
      case Op::kModulo:
        takes = 2;
        from = leaves = Type::kKey;
        break;
      case Op::kAsNumber:
        takes = 1;
        from = Type::kKey;
        break;
      case Op::kLess:
      case Op::kLessEqual:
      case Op::kGreater:
      case Op::kGreaterEqual:
      case Op::kEqual:
      case Op::kNotEqual:
        takes = 2;
        from = stack.empty() || stack.back() == Type::kBool ? Type::kNumber : stack.back();
        leaves = Type::kBool;
        break;
      case Op::kAnd:
      case Op::kOr:
      case Op::kNot:
        takes = step.op == Op::kNot ? 1 : 2;
        from = leaves = Type::kBool;
        break;
      default: return wrong("there is no " + std::to_string(static_cast<unsigned>(step.op)));
    }
    if (!reader.ok()) return wrong("cut off");
    if (stack.size() < takes)
      return wrong("expected " + std::to_string(takes) + " values before it, saw " + std::to_string(stack.size()));
    for (size_t i = stack.size() - takes; i < stack.size(); ++i) {
      if (stack[i] != from) return wrong(std::string("expected ") + name_of(from) + ", saw " + name_of(stack[i]));
    }
    made.types_.push_back(from);
    stack.resize(stack.size() - takes);
    stack.push_back(leaves);
    if (stack.size() > limits::kProgramDepthMax)
      return wrong("at most " + std::to_string(limits::kProgramDepthMax) + " values at once are allowed");
    made.steps_.push_back(step);
  }
  if (stack.size() != 1)
    return Status(Code::kInvalidArgument,
                  std::string(what) + ": expected one value at the end, saw " + std::to_string(stack.size()));
  if (stack[0] != wanted)
    return Status(Code::kInvalidArgument,
                  std::string(what) + ": expected " + name_of(wanted) + ", saw " + name_of(stack[0]));
  *out = std::move(made);
  return {};
}

const Program::Slot& Program::run(const Block& block, Slot* stack) const {
  const size_t n = block.n;
  size_t depth = 0;
  for (size_t s = 0; s < steps_.size(); ++s) {
    const Step& step = steps_[s];
    Slot& next = stack[depth];  // where a new value goes
    Slot* const top = depth >= 1 ? stack + depth - 1 : nullptr;
    Slot* const below = depth >= 2 ? stack + depth - 2 : nullptr;
    switch (step.op) {
      case Op::kNumber: std::fill_n(next.number, n, step.number), ++depth; break;
      case Op::kConstant: std::fill_n(next.key, n, step.key), ++depth; break;
      case Op::kTrue:
      case Op::kFalse: std::fill_n(next.flag, n, step.op == Op::kTrue), ++depth; break;
      case Op::kKey: std::memcpy(next.key, block.keys, n * sizeof(uint64_t)), ++depth; break;
      case Op::kColumn: read_column(block, rows_.dtype, step.column, next.number), ++depth; break;
      case Op::kUpdates:
        for (size_t i = 0; i < n; ++i) next.number[i] = block.heads[i]->count;
        ++depth;
        break;
      case Op::kNorm:
      case Op::kSum:
      case Op::kMean:
      case Op::kMin:
      case Op::kMax:
      case Op::kAbsMax: reduce(block, rows_, step.op, next.number), ++depth; break;
      case Op::kAdd:
      case Op::kSubtract:
      case Op::kMultiply:
      case Op::kDivide: calculate(step.op, below->number, top->number, n), --depth; break;
      case Op::kNegate:
        for (size_t i = 0; i < n; ++i) top->number[i] = -top->number[i];
        break;
      case Op::kAbs:
        for (size_t i = 0; i < n; ++i) top->number[i] = std::fabs(top->number[i]);
        break;
      case Op::kModulo:
        for (size_t i = 0; i < n; ++i) below->key[i] = top->key[i] != 0 ? below->key[i] % top->key[i] : 0;
        --depth;
        break;
      case Op::kAsNumber:
        for (size_t i = 0; i < n; ++i) top->number[i] = static_cast<double>(top->key[i]);
        break;
      case Op::kAnd:
        for (size_t i = 0; i < n; ++i) below->flag[i] = below->flag[i] & top->flag[i];
        --depth;
        break;
      case Op::kOr:
        for (size_t i = 0; i < n; ++i) below->flag[i] = below->flag[i] | top->flag[i];
        --depth;
        break;
      case Op::kNot:
        for (size_t i = 0; i < n; ++i) top->flag[i] = !top->flag[i];
        break;
      default: {  // a comparison; parse() let nothing else in
        bool holds[Block::kRowsMax];
        if (types_[s] == Type::kKey) {
          compare(step.op, below->key, top->key, holds, n);
        } else {
          compare(step.op, below->number, top->number, holds, n);
        }
        std::memcpy(below->flag, holds, n);
        --depth;
      }
    }
  }
  return stack[0];
}

void Program::run(const Block& block, bool* out) const {
  Slot stack[limits::kProgramDepthMax];
  std::memcpy(out, run(block, stack).flag, block.n);
}

void Program::run(const Block& block, double* out) const {
  Slot stack[limits::kProgramDepthMax];
  std::memcpy(out, run(block, stack).number, block.n * sizeof(double));
}

Block Program::keep(const Block& block, Kept* kept) const {
  if (empty()) return block;
  bool holds[Block::kRowsMax];
  run(block, holds);
  size_t n = 0;
  for (size_t i = 0; i < block.n; ++i) {
    kept->keys[n] = block.keys[i];
    kept->rows[n] = block.rows[i];
    kept->heads[n] = block.heads != nullptr ? block.heads[i] : nullptr;
    n += holds[i];
  }
  return {kept->keys, kept->rows, kept->heads, n};
}

}  // namespace windlass
