// What the tests of queries share: a question, written down.
#pragma once

#include <string>
#include <vector>

#include "query/query.h"
#include "wire/frame.h"

namespace windlass::test {

inline std::string a_query(Query::Function function, const std::string& where = "", uint64_t number = 0,
                           const std::string& score = "", bool largest = false, const std::vector<double>& edges = {}) {
  wire::Writer writer;
  writer.put(static_cast<uint8_t>(function));
  writer.put(uint8_t{largest});
  writer.put(uint16_t{0});
  writer.put(static_cast<uint32_t>(where.size()));
  writer.put(static_cast<uint32_t>(score.size()));
  writer.put(uint32_t{0});
  writer.put(function == Query::Function::kHistogram ? uint64_t{edges.size()} : number);
  writer.put_bytes(where);
  writer.put_bytes(score);
  for (const double edge : edges) writer.put(edge);
  return writer.take();
}

// column `c` > x
inline std::string above(uint32_t c, double x) {
  wire::Writer writer;
  writer.put(static_cast<uint8_t>(Program::Op::kColumn));
  writer.put(c);
  writer.put(static_cast<uint8_t>(Program::Op::kNumber));
  writer.put(x);
  writer.put(static_cast<uint8_t>(Program::Op::kGreater));
  return writer.take();
}

inline std::string the_norm() { return std::string(1, static_cast<char>(Program::Op::kNorm)); }

inline Status parse(const std::string& bytes, const RowType& rows, Query* out) {
  return Query::parse(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), rows, out);
}

}  // namespace windlass::test
