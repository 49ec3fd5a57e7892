#include "server/object/shard_query.h"

#include <algorithm>

#include "base/limits.h"
#include "wire/frame.h"

namespace windlass {
namespace {

// Visits rows [first, end) of a tensor, which lie in this shard, a block at a time, until `visit` returns false.
template <class F>
void visit_rows(const Tensor& tensor, uint32_t shard, uint64_t first, uint64_t end, F visit) {
  const Cut& cut = tensor.cut();
  const size_t bytes = cut.row * size_of(tensor.spec().dtype);
  const std::byte* const begin = tensor.weights_of(shard);
  const uint64_t before = cut.first_of(shard) / cut.row;
  uint64_t keys[Block::kRowsMax];
  const void* rows[Block::kRowsMax];
  for (uint64_t at = first; at < end;) {
    const size_t n = std::min<uint64_t>(Block::kRowsMax, end - at);
    for (size_t i = 0; i < n; ++i) {
      keys[i] = at + i;
      rows[i] = begin + (at + i - before) * bytes;
    }
    at += n;
    if (!visit(Block{keys, rows, nullptr, n})) return;
  }
}

}  // namespace

RowType row_type_of(const TensorSpec& spec, const Cut& cut) { return {spec.dtype, cut.row, false, cut.whole_rows}; }

RowType row_type_of(const Target& t) {
  return t.table != nullptr ? t.table->row_type() : row_type_of(t.tensor->spec(), t.tensor->cut());
}

std::string shard_query(const Query& query, const Target& t) {
  Tally tally(query);
  if (t.table != nullptr && query.counts_all()) {
    tally.add_rows(t.table->rows(t.shard));
    return tally.take();
  }
  if (t.table != nullptr) {
    t.table->walk(t.shard, [&](const Block& block) { tally.add(block); });
    return tally.take();
  }
  const Cut& cut = t.tensor->cut();
  const uint64_t first = cut.first_of(t.shard), end = cut.end_of(t.shard);
  if (query.by_row()) {
    visit_rows(*t.tensor, t.shard, first / cut.row, end / cut.row, [&](const Block& block) {
      tally.add(block);
      return true;
    });
  } else {
    tally.add_run(t.tensor->weights_of(t.shard), end - first);
  }
  return tally.take();
}

Status parse_where(const std::byte* bytes, size_t n, const RowType& rows, Program* where) {
  if (n > limits::kQueryBytesMax)
    return Status(Code::kInvalidArgument,
                  "where: " + std::to_string(n) + " bytes, at most " + std::to_string(limits::kQueryBytesMax));
  return Program::parse(bytes, n, rows, Program::Type::kBool, "where", where);
}

// Format: row limit u64; then, if there is more: what u32, 4 zero bytes, predicate.
Status Scan::parse(const std::byte* bytes, size_t n, const RowType& rows, Scan* out) {
  wire::Reader reader(bytes, n);
  Scan s;
  s.most = reader.get<uint64_t>();
  if (!reader.ok()) return Status(Code::kShapeMismatch, "export: how many at most?");
  if (reader.left() != 0) {
    const auto flags = reader.get<uint32_t>(), zeros = reader.get<uint32_t>();
    if (!reader.ok() || flags > kRowsWithState || zeros != 0)
      return Status(Code::kInvalidArgument, "export: flags that are not known");
    s.what = static_cast<What>(flags);
    s.filtered = reader.left() != 0;
    if (reader.left() > limits::kQueryBytesMax)
      return Status(Code::kInvalidArgument, "export: a predicate of " + std::to_string(reader.left()) +
                                                " bytes, at most " + std::to_string(limits::kQueryBytesMax));
    if (s.filtered)
      WL_RETURN_IF_ERROR(
          Program::parse(bytes + (n - reader.left()), reader.left(), rows, Program::Type::kBool, "where", &s.where));
  }
  if (s.what == kKeys && !rows.whole)
    return Status(Code::kInvalidArgument,
                  "keys: a row has " + std::to_string(rows.dim) + " numbers, which lie in more than one shard");
  *out = std::move(s);
  return {};
}

std::string Scan::encode(uint64_t most, What what, const std::string& where) {
  wire::Writer writer;
  writer.put(most);
  if (what == kRows && where.empty()) return writer.take();
  writer.put(uint32_t{what});
  writer.put(uint32_t{0});
  writer.put_bytes(where);
  return writer.take();
}

bool scan(const Scan& scan, const Target& t, uint64_t* from, std::vector<uint64_t>* keys, std::vector<float>* rows) {
  if (t.table != nullptr) {
    if (!scan.filtered && scan.what == Scan::kRows) return t.table->scan(t.shard, from, scan.most, keys, rows);
    return t.table->scan(t.shard, from, scan.most, scan.where, keys, scan.what == Scan::kKeys ? nullptr : rows,
                         scan.what == Scan::kRowsWithState);
  }
  const Cut& cut = t.tensor->cut();
  const uint64_t begin = std::max(*from, cut.first_of(t.shard) / cut.row), last = cut.end_of(t.shard) / cut.row;
  if (begin >= last) return false;
  const uint64_t end = begin + std::min<uint64_t>(limits::kScanRowsMax, last - begin);
  size_t got = 0;
  *from = begin;
  visit_rows(*t.tensor, t.shard, begin, end, [&](const Block& block) {
    bool holds[Block::kRowsMax];
    std::fill_n(holds, block.n, true);
    if (scan.filtered) scan.where.run(block, holds);
    for (size_t i = 0; i < block.n && got < scan.most; ++i) {
      *from = block.keys[i] + 1;
      if (!holds[i]) continue;
      keys->push_back(block.keys[i]);
      ++got;
    }
    return got < scan.most;
  });
  return *from < last;
}

}  // namespace windlass
