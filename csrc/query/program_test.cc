#include "query/program.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "base/limits.h"
#include "base/test.h"
#include "wire/frame.h"

namespace windlass::program_test {
namespace {

using Op = Program::Op;
using Type = Program::Type;

constexpr RowType kRows{Dtype::kFloat32, 5, true, true};

// Postfix, written down.
class Written {
 public:
  Written& op(Op op) {
    writer_.put(static_cast<uint8_t>(op));
    return *this;
  }
  Written& number(double x) {
    op(Op::kNumber);
    writer_.put(x);
    return *this;
  }
  Written& constant(uint64_t key) {
    op(Op::kConstant);
    writer_.put(key);
    return *this;
  }
  Written& column(uint32_t c) {
    op(Op::kColumn);
    writer_.put(c);
    return *this;
  }
  std::string take() { return writer_.take(); }

 private:
  wire::Writer writer_;
};

Status parse(const std::string& bytes, Type wanted, Program* out, const RowType& rows = kRows) {
  return Program::parse(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), rows, wanted, "where", out);
}

struct Rows {
  explicit Rows(test::Random& random) {
    for (size_t i = 0; i < Block::kRowsMax; ++i) {
      keys[i] = random.next() >> random.below(64);
      for (float& x : numbers[i]) x = random.below(30) == 0 ? NAN : static_cast<float>(random.below(7)) - 3;
      heads[i].count = static_cast<uint32_t>(random.below(5));
      rows[i] = numbers[i];
      head[i] = &heads[i];
    }
  }
  Block block(size_t n) const { return {keys, rows, head, n}; }
  uint64_t keys[Block::kRowsMax];
  float numbers[Block::kRowsMax][5];
  RowHead heads[Block::kRowsMax];
  const void* rows[Block::kRowsMax];
  const RowHead* head[Block::kRowsMax];
};

// The same for one row, with a stack that knows nothing of blocks.
struct Value {
  Type type;
  double number;
  uint64_t key;
  bool flag;
};

struct Random {
  test::Random& r;
  std::string bytes;
  size_t ops = 0;

  // Writes an expression of that type and returns how to compute it for row i.
  std::function<Value(const Rows&, size_t)> any(Type type, int depth) {
    ++ops;
    const auto put = [this](Op op) { bytes += static_cast<char>(op); };
    const auto raw = [this](auto x) { bytes.append(reinterpret_cast<const char*>(&x), sizeof x); };
    const auto number = [](double x) { return Value{Type::kNumber, x, 0, false}; };
    const auto holds = [](bool x) { return Value{Type::kBool, 0, 0, x}; };
    const auto keyed = [](uint64_t x) { return Value{Type::kKey, 0, x, false}; };
    if (type == Type::kKey) {
      if (depth > 0 && r.below(3) == 0) {
        const auto a = any(Type::kKey, depth - 1), b = any(Type::kKey, 0);
        put(Op::kModulo);
        return [=](const Rows& rows, size_t i) {
          const uint64_t by = b(rows, i).key;
          return keyed(by != 0 ? a(rows, i).key % by : 0);
        };
      }
      if (r.below(2) == 0) {
        put(Op::kKey);
        return [=](const Rows& rows, size_t i) { return keyed(rows.keys[i]); };
      }
      const uint64_t x = r.next() >> r.below(64);
      put(Op::kConstant), raw(x);
      return [=](const Rows&, size_t) { return keyed(x); };
    }
    if (type == Type::kBool) {
      if (depth == 0) {
        const bool x = r.below(2) == 0;
        put(x ? Op::kTrue : Op::kFalse);
        return [=](const Rows&, size_t) { return holds(x); };
      }
      switch (r.below(4)) {
        case 0: {
          const auto a = any(Type::kBool, depth - 1), b = any(Type::kBool, depth - 1);
          const bool both = r.below(2) == 0;
          put(both ? Op::kAnd : Op::kOr);
          return [=](const Rows& rows, size_t i) {
            const bool x = a(rows, i).flag, y = b(rows, i).flag;
            return holds(both ? x && y : x || y);
          };
        }
        case 1: {
          const auto a = any(Type::kBool, depth - 1);
          put(Op::kNot);
          return [=](const Rows& rows, size_t i) { return holds(!a(rows, i).flag); };
        }
        default: {
          const Type of = r.below(2) == 0 ? Type::kKey : Type::kNumber;
          const auto a = any(of, depth - 1), b = any(of, depth - 1);
          const auto op = static_cast<Op>(static_cast<uint64_t>(Op::kLess) + r.below(6));
          put(op);
          return [=](const Rows& rows, size_t i) {
            const Value x = a(rows, i), y = b(rows, i);
            const bool less = of == Type::kKey ? x.key < y.key : x.number < y.number;
            const bool same = of == Type::kKey ? x.key == y.key : x.number == y.number;
            const bool more = of == Type::kKey ? x.key > y.key : x.number > y.number;
            return holds(op == Op::kLess           ? less
                         : op == Op::kLessEqual    ? less || same
                         : op == Op::kGreater      ? more
                         : op == Op::kGreaterEqual ? more || same
                         : op == Op::kEqual        ? same
                                                   : !same);
          };
        }
      }
    }
    if (depth == 0 || r.below(3) == 0) {
      switch (r.below(5)) {
        case 0: {
          const auto c = static_cast<uint32_t>(r.below(5));
          put(Op::kColumn), raw(c);
          return [=](const Rows& rows, size_t i) { return number(rows.numbers[i][c]); };
        }
        case 1: put(Op::kUpdates); return [=](const Rows& rows, size_t i) { return number(rows.heads[i].count); };
        case 2: {
          const double x = r.unit();
          put(Op::kNumber), raw(x);
          return [=](const Rows&, size_t) { return number(x); };
        }
        default: {
          const auto op = static_cast<Op>(static_cast<uint64_t>(Op::kNorm) + r.below(6));
          put(op);
          return [=](const Rows& rows, size_t i) {
            double sum = 0, squares = 0, least = INFINITY, most = -INFINITY, wide = 0;
            bool nan = false;
            for (const float f : rows.numbers[i]) {
              const double x = f;
              sum += x, squares += x * x;
              least = std::min(least, x), most = std::max(most, x), wide = std::max(wide, std::fabs(x));
              nan = nan || std::isnan(x);
            }
            return number(nan               ? NAN
                          : op == Op::kNorm ? std::sqrt(squares)
                          : op == Op::kSum  ? sum
                          : op == Op::kMean ? sum / 5
                          : op == Op::kMin  ? least
                          : op == Op::kMax  ? most
                                            : wide);
          };
        }
      }
    }
    switch (r.below(7)) {
      case 0: {
        const auto a = any(Type::kNumber, depth - 1);
        put(Op::kNegate);
        return [=](const Rows& rows, size_t i) { return number(-a(rows, i).number); };
      }
      case 1: {
        const auto a = any(Type::kNumber, depth - 1);
        put(Op::kAbs);
        return [=](const Rows& rows, size_t i) { return number(std::fabs(a(rows, i).number)); };
      }
      case 2: {
        const auto a = any(Type::kKey, depth - 1);
        put(Op::kAsNumber);
        return [=](const Rows& rows, size_t i) { return number(static_cast<double>(a(rows, i).key)); };
      }
      default: {
        const auto a = any(Type::kNumber, depth - 1), b = any(Type::kNumber, depth - 1);
        const auto op = static_cast<Op>(static_cast<uint64_t>(Op::kAdd) + r.below(4));
        put(op);
        return [=](const Rows& rows, size_t i) {
          const double x = a(rows, i).number, y = b(rows, i).number;
          return number(op == Op::kAdd ? x + y : op == Op::kSubtract ? x - y : op == Op::kMultiply ? x * y : x / y);
        };
      }
    }
  }
};

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

TEST(a_program_computes_what_its_expression_says) {
  test::Random random(test::seed());
  for (int round = 0; round < 500; ++round) {
    const Rows rows(random);
    const Type type = round % 2 == 0 ? Type::kBool : Type::kNumber;
    Random written{random, ""};
    const auto oracle = written.any(type, 1 + static_cast<int>(random.below(6)));
    if (written.ops > limits::kProgramOpsMax) continue;
    Program program;
    CHECK_OK(parse(written.bytes, type, &program));
    const size_t n = 1 + random.below(Block::kRowsMax);
    bool flags[Block::kRowsMax];
    double numbers[Block::kRowsMax];
    type == Type::kBool ? program.run(rows.block(n), flags) : program.run(rows.block(n), numbers);
    for (size_t i = 0; i < n; ++i) {
      const Value want = oracle(rows, i);
      CHECK(type == Type::kBool ? flags[i] == want.flag : same(numbers[i], want.number));
    }
    if (type != Type::kBool) continue;
    Program::Kept kept;
    const Block some = program.keep(rows.block(n), &kept);
    size_t at = 0;
    for (size_t i = 0; i < n; ++i) {
      if (!flags[i]) continue;
      CHECK(some.keys[at] == rows.keys[i] && some.rows[at] == rows.rows[i]);
      ++at;
    }
    CHECK_EQ(some.n, at);
  }
}

TEST(keys_are_compared_exactly) {
  test::Random random(test::seed());
  Rows rows(random);
  const uint64_t near = (uint64_t{1} << 53) + 1;  // of which a float64 knows nothing
  rows.keys[0] = near, rows.keys[1] = near - 1, rows.keys[2] = ~uint64_t{0};
  Program program;
  bool holds[Block::kRowsMax];
  CHECK_OK(parse(Written().op(Op::kKey).constant(near).op(Op::kGreaterEqual).take(), Type::kBool, &program));
  program.run(rows.block(3), holds);
  CHECK(holds[0] && !holds[1] && holds[2]);
}

TEST(a_program_that_makes_no_sense_is_refused) {
  Program program;
  const auto refused = [&](const std::string& bytes, const char* why, Type wanted = Type::kBool,
                           const RowType& rows = kRows) {
    const Status status = parse(bytes, wanted, &program, rows);
    CHECK_CODE(status, Code::kInvalidArgument);
    if (status.message().find(why) == std::string::npos)
      test::fail(__FILE__, __LINE__, "'" + status.message() + "' does not say '" + why + "'");
  };
  refused("", "one value at the end, saw 0");
  refused(Written().op(Op::kTrue).op(Op::kTrue).take(), "one value at the end, saw 2");
  refused(Written().op(Op::kKey).take(), "expected true or false, saw a key");
  refused(Written().op(Op::kTrue).take(), "expected a number, saw true or false", Type::kNumber);
  refused(Written().op(Op::kAnd).take(), "expected 2 values before it, saw 0");
  refused(Written().op(Op::kTrue).op(Op::kAnd).take(), "expected 2 values before it, saw 1");
  refused(Written().op(Op::kTrue).number(1).op(Op::kAnd).take(), "expected true or false, saw a number");
  refused(Written().op(Op::kKey).number(1).op(Op::kLess).take(), "expected a number, saw a key");
  refused(Written().op(Op::kTrue).op(Op::kTrue).op(Op::kEqual).take(), "expected a number, saw true or false");
  refused(Written().column(5).number(1).op(Op::kLess).take(), "column 5 of rows with 5");
  refused(Written().op(Op::kUpdates).number(1).op(Op::kLess).take(), "in tables alone", Type::kBool,
          {Dtype::kFloat32, 5, false, true});
  refused(std::string(1, '\0'), "there is no 0");
  refused(std::string(1, '\xFF'), "there is no 255");
  refused(Written().number(1).take().substr(0, 5), "cut off");
  refused(Written().column(1).take().substr(0, 3), "cut off");
  Written deep, most;
  for (size_t i = 0; i <= limits::kProgramDepthMax; ++i) deep.op(Op::kTrue);
  refused(deep.take(), "at most 16 values");
  most.op(Op::kTrue);
  for (size_t i = 0; i < limits::kProgramOpsMax; ++i) most.op(Op::kNot);
  refused(most.take(), "at most 256");
}

TEST(random_bytes_are_refused_or_run) {
  test::Random random(test::seed());
  const Rows rows(random);
  const uint8_t ops[] = {1,  2,  3,  4,  8,  9,  10, 11, 12, 13, 14, 15, 16, 24,
                         25, 26, 27, 28, 29, 30, 31, 40, 41, 45, 48, 49, 50};
  size_t ran = 0;
  for (int round = 0; round < (test::accurate() ? 2'000'000 : 200'000); ++round) {
    std::string bytes;
    for (uint64_t n = random.below(12); n != 0; --n)
      bytes += static_cast<char>(random.below(10) == 0 ? random.below(256) : ops[random.below(sizeof ops)]);
    Program program;
    bool holds[Block::kRowsMax];
    double numbers[Block::kRowsMax];
    if (parse(bytes, Type::kBool, &program).ok()) program.run(rows.block(Block::kRowsMax), holds), ++ran;
    if (parse(bytes, Type::kNumber, &program).ok()) program.run(rows.block(Block::kRowsMax), numbers), ++ran;
  }
  CHECK(ran > 100);
}

}  // namespace windlass::program_test
