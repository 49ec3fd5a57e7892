#include "query/query.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/limits.h"
#include "rule/kernels.h"
#include "wire/frame.h"

namespace windlass {
namespace {

using Function = Query::Function;

Status wrong(const std::string& why) { return Status(Code::kInvalidArgument, "query: " + why); }

bool is_extreme(Function f) { return f == Function::kMin || f == Function::kMax || f == Function::kAbsMax; }

Reduce reduce_of(Function f) {
  switch (f) {
    case Function::kSquares: return Reduce::kSquares;
    case Function::kAbsolutes: return Reduce::kAbsolutes;
    case Function::kMin: return Reduce::kMin;
    case Function::kMax: return Reduce::kMax;
    case Function::kAbsMax: return Reduce::kAbsMax;
    case Function::kNonzero: return Reduce::kNonzero;
    default: return Reduce::kSum;
  }
}

double number_at(const void* row, Dtype dtype, size_t i) {
  return dtype == Dtype::kFloat32   ? static_cast<double>(static_cast<const float*>(row)[i])
         : dtype == Dtype::kFloat64 ? static_cast<const double*>(row)[i]
                                    : static_cast<double>(static_cast<const int64_t*>(row)[i]);
}

}  // namespace

// function u8, flags u8, 2 zeros, bytes of the predicate u32, bytes of the score u32, 4 zeros, number u64 (k, or
// edges), predicate, score, edges
Status Query::parse(const std::byte* bytes, size_t n, const RowType& rows, Query* out) {
  if (n > limits::kQueryBytesMax)
    return wrong(std::to_string(n) + " bytes, at most " + std::to_string(limits::kQueryBytesMax));
  wire::Reader reader(bytes, n);
  Query q;
  q.rows = rows;
  q.function = static_cast<Function>(reader.get<uint8_t>());
  const auto flags = reader.get<uint8_t>();
  const auto zeros = reader.get<uint16_t>();
  const auto where_bytes = reader.get<uint32_t>(), score_bytes = reader.get<uint32_t>();
  const auto more_zeros = reader.get<uint32_t>();
  const auto number = reader.get<uint64_t>();
  if (!reader.ok()) return wrong("cut off");
  if (q.function < Function::kCount || q.function > Function::kTop)
    return wrong("there is no function " + std::to_string(static_cast<unsigned>(q.function)));
  if (flags > 1 || zeros != 0 || more_zeros != 0) return wrong("flags that are not known");
  if (where_bytes > reader.left() || score_bytes > reader.left() - where_bytes)
    return wrong("expressions longer than the query");
  const bool histogram = q.function == Function::kHistogram, top = q.function == Function::kTop;
  const size_t rest = reader.left() - where_bytes - score_bytes;
  if (histogram && (number < 2 || number > limits::kBinsMax + 1))
    return wrong("a histogram has 1 to " + std::to_string(limits::kBinsMax) + " bins, saw " + std::to_string(number) +
                 " edges");
  if (top && (number == 0 || number > limits::kTopMax))
    return wrong("top_k gives 1 to " + std::to_string(limits::kTopMax) + " rows, not " + std::to_string(number));
  if (!histogram && !top && number != 0) return wrong("a number that is not needed");
  if (rest != (histogram ? number * sizeof(double) : 0)) return wrong("its length does not fit");
  if (top == (score_bytes == 0)) return wrong("a score belongs to top_k alone");
  const std::byte* const where = bytes + (n - reader.left());
  if (where_bytes != 0)
    WL_RETURN_IF_ERROR(Program::parse(where, where_bytes, rows, Program::Type::kBool, "where", &q.where));
  if (top) {
    q.k = number;
    q.largest = flags != 0;
    const std::byte* const score = where + where_bytes;
    WL_RETURN_IF_ERROR(Program::parse(score, score_bytes, rows, Program::Type::kNumber, "by", &q.score));
  }
  if (histogram) {
    q.edges.resize(number);
    std::memcpy(q.edges.data(), where + where_bytes, number * sizeof(double));
    for (size_t i = 0; i < number; ++i) {
      if (!std::isfinite(q.edges[i]) || (i != 0 && q.edges[i] < q.edges[i - 1]))
        return wrong("edges of a histogram are finite and ascend; number " + std::to_string(i) + " does not");
    }
  }
  if (q.by_row() && !rows.whole)
    return wrong("a row has " + std::to_string(rows.dim) +
                 " numbers, which lie in more than one shard; only functions of all numbers are possible");
  *out = std::move(q);
  return {};
}

Tally::Tally(const Query& query) : query_(query), top_(query.k, query.largest) {
  if (query.function == Function::kHistogram) bins_.resize(query.edges.size() - 1);
}

void Tally::take_extreme(double x) {
  x += 0.0;  // -0 becomes 0: which of the two came first must not show
  const bool better = query_.function == Function::kMin ? x < extreme_ : x > extreme_;
  if (seen_ == 0 || better || std::isnan(x)) extreme_ = x;
}

void Tally::take_extreme(int64_t x) {
  const bool better = query_.function == Function::kMin ? x < extreme_whole_ : x > extreme_whole_;
  if (seen_ == 0 || better) extreme_whole_ = x;
}

// Adds what kernels made of the numbers of each row, or of another shard.
void Tally::add_values(const double* values, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (is_extreme(query_.function)) {
      take_extreme(values[i]);
      ++seen_;
    } else {
      sum_.add(values[i]);
    }
  }
}

void Tally::add_whole(const void* const* rows, size_t n, size_t dim) {
  for (size_t r = 0; r < n; ++r) {
    const auto* const row = static_cast<const int64_t*>(rows[r]);
    if (query_.function == Function::kSum) {
      for (size_t i = 0; i < dim; ++i) whole_ += static_cast<uint64_t>(row[i]);
    } else if (dim != 0) {
      const bool least = query_.function == Function::kMin;
      take_extreme(least ? *std::min_element(row, row + dim) : *std::max_element(row, row + dim));
    }
    seen_ += dim;
  }
}

void Tally::count_in_bins(double x) {
  const std::vector<double>& edges = query_.edges;
  const size_t n = bins_.size();
  const double first = edges.front(), last = edges.back();
  if (!(x >= first && x <= last)) return;
  // Bins mostly have the same width: guess one, and let the edges confirm it.
  const double guess = (x - first) / (last - first) * static_cast<double>(n);
  size_t at = guess < static_cast<double>(n) ? static_cast<size_t>(guess) : n - 1;  // also when the guess is NaN
  if (!(edges[at] <= x && (x < edges[at + 1] || at + 1 == n))) {
    const auto above = std::upper_bound(edges.begin(), edges.end(), x);
    at = std::min(static_cast<size_t>(above - edges.begin()), n) - 1;
  }
  ++bins_[at];
}

void Tally::add_to_bins(const void* row, size_t n) {
  for (size_t i = 0; i < n; ++i) count_in_bins(number_at(row, query_.rows.dtype, i));
}

void Tally::add(const Block& all) {
  Program::Kept kept;
  const Block block = query_.where.keep(all, &kept);
  const RowType& type = query_.rows;
  double values[Block::kRowsMax];
  switch (query_.function) {
    case Function::kCount: seen_ += block.n; return;
    case Function::kTop:
      query_.score.run(block, values);
      top_.add(block.keys, values, block.n);
      return;
    case Function::kHistogram:
      for (size_t i = 0; i < block.n; ++i) add_to_bins(block.rows[i], type.dim);
      return;
    default: break;
  }
  if (query_.exact()) return add_whole(block.rows, block.n, type.dim);
  kernels().reduce(reduce_of(query_.function), type.dtype, block.rows, block.n, type.dim, values);
  const uint64_t before = seen_;
  add_values(values, block.n);
  seen_ = before + block.n * type.dim;
}

void Tally::add_run(const void* numbers, size_t n) {
  if (n == 0) return;
  if (query_.function == Function::kHistogram) return add_to_bins(numbers, n);
  if (query_.exact()) return add_whole(&numbers, 1, n);
  double value = 0;
  kernels().reduce(reduce_of(query_.function), query_.rows.dtype, &numbers, 1, n, &value);
  const uint64_t before = seen_;
  add_values(&value, 1);
  seen_ = before + n;
}

// count: rows u64. histogram: numbers of each bin, u64. top_k: key u64 and score f64 of each, best first. Else how many
// numbers u64, and the value, f64 or i64.
std::string Tally::take() {
  wire::Writer writer;
  switch (query_.function) {
    case Function::kCount: writer.put(seen_); break;
    case Function::kHistogram:
      for (const uint64_t n : bins_) writer.put(n);
      break;
    case Function::kTop: {
      const std::vector<Top::Scored> best = top_.take();
      static_assert(sizeof(Top::Scored) == 16);
      writer.put_bytes({reinterpret_cast<const char*>(best.data()), best.size() * sizeof(Top::Scored)});
      break;
    }
    default:
      writer.put(seen_);
      if (query_.exact()) {
        writer.put(query_.function == Function::kSum ? static_cast<int64_t>(whole_) : extreme_whole_);
      } else {
        writer.put(is_extreme(query_.function) ? extreme_ : sum_.value());
      }
  }
  return writer.take();
}

Status Tally::merge(const std::string& answer) {
  wire::Reader reader(answer);
  switch (query_.function) {
    case Function::kCount: seen_ += reader.get<uint64_t>(); break;
    case Function::kHistogram:
      for (uint64_t& n : bins_) n += reader.get<uint64_t>();
      break;
    case Function::kTop:
      for (size_t i = 0; i < query_.k && reader.left() >= sizeof(Top::Scored); ++i) {
        const auto key = reader.get<uint64_t>();
        top_.add(key, reader.get<double>());
      }
      break;
    default: {
      const auto seen = reader.get<uint64_t>();
      if (query_.exact()) {
        const auto value = reader.get<int64_t>();
        if (query_.function == Function::kSum) {
          whole_ += static_cast<uint64_t>(value);
        } else if (seen != 0) {
          take_extreme(value);
        }
      } else {
        const auto value = reader.get<double>();
        const uint64_t before = seen_;
        if (seen != 0) add_values(&value, 1);
        seen_ = before;
      }
      seen_ += seen;
    }
  }
  if (reader.at_end()) return {};
  return Status(Code::kProtocolError, "query: an answer of " + std::to_string(answer.size()) + " bytes does not fit");
}

}  // namespace windlass
