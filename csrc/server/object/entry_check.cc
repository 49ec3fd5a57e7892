// ServedObject::check and its kin: what a server checks of an entry from a frame before it runs. Nothing in the entry
// is trusted before; afterwards its items are decoded, in memory of this thread that the next begin_checks() reuses.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/breaks.h"
#include "server/object/function.h"
#include "server/object/served_object.h"
#include "tensor/planes.h"

namespace windlass {
namespace {

thread_local std::vector<Span> t_spans;
thread_local std::vector<Keyed> t_keyed;

constexpr uint64_t kRowsMax = uint64_t{1} << 32;  // of an array: Keyed counts them with 32 bits
constexpr uint64_t kCopies = 3;                   // of the body of an answer: as it is made, gathered and sent

bool placed(const Entry& e) { return (e.flags & wire::kPlaced) != 0; }
size_t span_bytes(const Entry& e) { return (placed(e) ? 3 : 2) * sizeof(uint64_t); }
size_t key_bytes(const Entry& e) { return (placed(e) ? 2 : 1) * sizeof(uint64_t); }

// Whether `n` elements at `at` lie within an array of `bytes` bytes.
bool fits(uint64_t at, uint64_t n, uint64_t bytes, Dtype dtype) {
  const uint64_t elements = bytes / size_of(dtype);
  return at <= elements && n <= elements - at;
}

// Rows are put whole: their weights are always there, and each row brings its own count.
Status decode_put_rows(const Entry& e, const TableSpec& spec, wire::PutItem* item) {
  WL_RETURN_IF_ERROR(wire::decode(e.body, e.body_bytes, RowForm::parts_of(spec).size(), item));
  if ((item->planes & 1) == 0) return Status(Code::kInvalidArgument, "put: expected the weights of the rows");
  if (item->count != 0) return Status(Code::kInvalidArgument, "put: each row of a table has a count of its own");
  return {};
}

bool is_finite(Dtype dtype, uint64_t a) {
  if (dtype == Dtype::kInt64) return true;
  const auto number = std::bit_cast<double>(a);
  return std::isfinite(dtype == Dtype::kFloat32 ? static_cast<float>(number) : number);
}

}  // namespace

void ServedObject::begin_checks(uint64_t items) {
  t_spans.clear();
  t_keyed.clear();
  // Entries point into these, so they must not move. Whole shards are spans that `items` does not count.
  t_spans.reserve(items + limits::kBlockEntriesMax);
  t_keyed.reserve(items + 1);  // never null, also for an entry without keys
}

uint64_t ServedObject::numbers_bytes(const Batch& b, const Entry& e) const {
  if (table_ != nullptr && b.op->op == wire::Op::kPut) {
    wire::PutItem item;
    return decode_put_rows(e, spec_.table, &item).ok() ? e.items * row_form(item).bytes(spec_.table) : 0;
  }
  if (!brings_gradient(b, e) || b.in_place) return 0;
  if (table_ != nullptr) return uint64_t{e.items} * spec_.table.dim * size_of(b.in_dtype);
  const Cut& cut = tensor_->cut();
  if (e.shard >= shards_) return 0;
  uint64_t elements = 0;
  if ((e.flags & wire::kWhole) != 0) elements = cut.end_of(e.shard) - cut.first_of(e.shard);
  for (uint32_t i = 0; (e.flags & wire::kWhole) == 0 && i < e.items; ++i) {
    uint64_t count = 0;
    std::memcpy(&count, e.encoded + i * span_bytes(e) + sizeof count, sizeof count);
    elements += std::min(count, limits::kNumbersBytesMax);
  }
  return elements * size_of(b.in_dtype);
}

Status ServedObject::check(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  *out_bytes = 0;
  const OpTraits& op = *b.op;
  if (!(spec_.is_table ? op.of_tables : op.of_tensors))
    return refused(Code::kInvalidArgument,
                   std::string(spec_.is_table ? "a table has no " : "a tensor has no ") + wire::name_of(op.op));
  if (brings_gradient(b, *e)) {
    const uint8_t least = layout_of(rule()).hypers;
    if (b.hypers < least) {
      return refused(Code::kInvalidArgument,
                     "expected " + std::to_string(least) + " hyperparameters, saw " + std::to_string(b.hypers));
    }
  } else if (e->numbers_bytes != 0 && op.op != wire::Op::kPut && op.op != wire::Op::kVector &&
             op.op != wire::Op::kDot) {
    return refused(Code::kShapeMismatch, "expected no numbers, saw " + std::to_string(e->numbers_bytes) + " bytes");
  }
  if (placed(*e) && !b.in_place) return refused(Code::kInvalidArgument, "places without arenas");
  if (b.in_place) {
    if (!op.contributes && !op.returns)
      return refused(Code::kInvalidArgument,
                     std::string(wire::name_of(op.op)) + " has no arrays that could lie in arenas");
    if ((brings_gradient(b, *e) && b.arrays.in == nullptr) || (op.returns && b.arrays.out == nullptr))
      return refused(Code::kInvalidArgument, std::string(wire::name_of(op.op)) + " in arenas, but an array is missing");
  }
  if (e->empty() && op.op == wire::Op::kPush) return {};
  return op.check != nullptr ? (this->*op.check)(b, e, out_bytes) : Status();
}

Status ServedObject::check_numbers(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  return spec_.is_table ? check_keys(b, e, out_bytes) : check_spans(b, e, out_bytes);
}

Status ServedObject::check_spans(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  const Cut& cut = tensor_->cut();
  const TensorSpec& spec = spec_.tensor;
  const uint64_t first = cut.first_of(e->shard), end = cut.end_of(e->shard);
  uint64_t elements = end - first;
  const size_t from = t_spans.size();
  if (e->body_bytes != 0)
    return refused(Code::kShapeMismatch, std::to_string(e->body_bytes) + " bytes more than its spans have");
  if ((e->flags & wire::kWhole) != 0) {
    t_spans.push_back({first, elements, b.in_place ? first - b.arrays.base : 0});
  } else {
    const Layout layout = layout_of(spec.rule);
    const bool whole_rows = (layout.row_scalars != 0 || layout.by_row) && b.op->numbered;
    // A pull may ask for an element several times; a push has each once.
    const uint64_t most = b.op->numbered ? end - first : limits::kNumbersBytesMax / size_of(b.out_dtype);
    elements = 0;
    for (uint32_t i = 0; i < e->items; ++i) {
      uint64_t s[3] = {};
      std::memcpy(s, e->encoded + i * span_bytes(*e), span_bytes(*e));
      if (s[0] < first || s[0] >= end || s[1] > end - s[0] || s[1] > most - elements ||
          (whole_rows && (s[0] % cut.row != 0 || s[1] % cut.row != 0))) {
        return refused(Code::kShapeMismatch, "elements " + std::to_string(s[0]) + " + " + std::to_string(s[1]) +
                                                 " do not fit shard " + std::to_string(e->shard) + ", which has " +
                                                 std::to_string(first) + " to " + std::to_string(end));
      }
      // In a frame the numbers lie back to back; in arenas a span may lie outside the arrays, which check_in_place()
      // sees.
      t_spans.push_back({s[0], s[1], placed(*e) ? s[2] : b.in_place ? s[0] - b.arrays.base : elements});
      elements += s[1];
    }
  }
  e->spans = t_spans.data() + from;
  e->items = static_cast<uint32_t>(t_spans.size() - from);
  if (b.in_place) WL_RETURN_IF_ERROR(check_in_place(b, *e));
  if (brings_gradient(b, *e)) {
    const uint64_t bytes = b.in_place ? 0 : elements * size_of(b.in_dtype);
    if (!may_travel(b.in_dtype, spec.dtype) || e->numbers_bytes != bytes) {
      return refused(Code::kShapeMismatch, "expected " + std::to_string(elements) + " numbers for " +
                                               name_of(spec.dtype) + ", saw " + std::to_string(e->numbers_bytes) +
                                               " bytes of " + name_of(b.in_dtype));
    }
    if (spec.reject_nonfinite && !finite(b, *e) && !broken(Break::kNonfinite)) {
      return refused(Code::kNonFinite,
                     "the gradient has NaN or infinity; nothing was applied to shard " + std::to_string(e->shard));
    }
  }
  if (b.op->returns) {
    if (!may_travel(b.out_dtype, spec.dtype)) {
      return refused(Code::kShapeMismatch,
                     std::string("holds ") + name_of(spec.dtype) + ", asked for " + name_of(b.out_dtype));
    }
    *out_bytes = b.in_place ? 0 : elements * size_of(b.out_dtype);
  }
  return {};
}

// Checks that the spans lie within the caller's arrays.
Status ServedObject::check_in_place(const Batch& b, const Entry& e) const {
  for (uint32_t i = 0; i < e.items; ++i) {
    const Span& s = e.spans[i];
    if (brings_gradient(b, e) && !fits(s.at, s.n, b.arrays.in_bytes, b.in_dtype))
      return refused(Code::kShapeMismatch, "the gradient has " + std::to_string(b.arrays.in_bytes) +
                                               " bytes, too few for shard " + std::to_string(e.shard));
    if (b.op->returns && !fits(s.at, s.n, b.arrays.out_bytes, b.out_dtype))
      return refused(Code::kShapeMismatch, "the output has " + std::to_string(b.arrays.out_bytes) +
                                               " bytes, too few for shard " + std::to_string(e.shard));
  }
  return {};
}

// Whether a gradient, whose items are decoded, is finite.
bool ServedObject::finite(const Batch& b, const Entry& e) const {
  const uint64_t size = size_of(b.in_dtype);
  if (table_ != nullptr) {
    const uint32_t dim = spec_.table.dim;
    if (!b.in_place) return kernels().finite(b.in_dtype, e.in, uint64_t{e.items} * dim);
    return std::all_of(e.keyed, e.keyed + e.items,
                       [&](const Keyed& k) { return kernels().finite(b.in_dtype, e.in + k.at * dim * size, dim); });
  }
  return std::all_of(e.spans, e.spans + e.items,
                     [&](const Span& s) { return kernels().finite(b.in_dtype, e.in + s.at * size, s.n); });
}

Status ServedObject::check_keys(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  const TableSpec& spec = spec_.table;
  const uint64_t rows = e->items;
  if (e->body_bytes != 0 && b.op->op != wire::Op::kErase && b.op->op != wire::Op::kPut)
    return refused(Code::kShapeMismatch, std::to_string(e->body_bytes) + " bytes more than its keys have");
  const bool moves = b.op->contributes || b.op->returns;
  if (moves && b.in_place != placed(*e) && rows != 0)
    return refused(Code::kInvalidArgument, "rows in arenas have places, others have none");
  const uint64_t row_in = uint64_t{spec.dim} * size_of(b.in_dtype), row_out = uint64_t{spec.dim} * size_of(b.out_dtype);
  if (b.op->returns && rows > limits::kNumbersBytesMax / row_out) {
    return refused(Code::kInvalidArgument, std::to_string(rows) + " rows of one shard at once, at most " +
                                               std::to_string(limits::kNumbersBytesMax / row_out));
  }
  const uint64_t rows_in = b.in_place && brings_gradient(b, *e) ? b.arrays.in_bytes / row_in : ~uint64_t{0};
  const uint64_t rows_out = b.in_place && b.op->returns ? b.arrays.out_bytes / row_out : ~uint64_t{0};
  const size_t from = t_keyed.size();
  t_keyed.resize(from + rows);
  for (uint32_t i = 0; i < rows; ++i) {
    uint64_t k[2] = {0, i};
    std::memcpy(k, e->encoded + i * key_bytes(*e), key_bytes(*e));
    const uint64_t hash = mix(k[0]);
    if (k[1] >= std::min({rows_in, rows_out, kRowsMax})) {
      return refused(Code::kShapeMismatch,
                     "row " + std::to_string(k[1]) + " of arrays of " + std::to_string(std::min(rows_in, rows_out)));
    }
    if (shard_of_hash(hash) != e->shard) {
      return refused(Code::kInvalidArgument, "key " + std::to_string(k[0]) + " belongs to shard " +
                                                 std::to_string(shard_of_hash(hash)) + ", not " +
                                                 std::to_string(e->shard));
    }
    t_keyed[from + i] = {hash, static_cast<uint32_t>(k[1])};
  }
  e->keyed = t_keyed.data() + from;
  if (brings_gradient(b, *e)) {
    const uint64_t bytes = b.in_place ? 0 : rows * row_in;
    if (!may_travel(b.in_dtype, Dtype::kFloat32) || e->numbers_bytes != bytes) {
      return refused(Code::kShapeMismatch, "expected " + std::to_string(rows) + " rows of " + std::to_string(spec.dim) +
                                               ", saw " + std::to_string(e->numbers_bytes) + " bytes of " +
                                               name_of(b.in_dtype));
    }
    if (spec.reject_nonfinite && !finite(b, *e) && !broken(Break::kNonfinite)) {
      return refused(Code::kNonFinite,
                     "the gradients have NaN or infinity; nothing was applied to shard " + std::to_string(e->shard));
    }
  }
  if (b.op->returns) {
    if (!may_travel(b.out_dtype, Dtype::kFloat32)) {
      return refused(Code::kShapeMismatch, std::string("holds float32, asked for ") + name_of(b.out_dtype));
    }
    *out_bytes = b.in_place ? 0 : rows * row_out;
  }
  return {};
}

Status ServedObject::check_erase(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  WL_RETURN_IF_ERROR(check_keys(b, e, out_bytes));
  if (e->body_bytes == 0) return {};
  Program where;
  const Status status = parse_where(e->body, e->body_bytes, row_type(), &where);
  return status.ok() ? status : refused(status.code(), status.message());
}

Status ServedObject::check_put_rows(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  const TableSpec& spec = spec_.table;
  wire::PutItem item;
  if (const Status status = decode_put_rows(*e, spec, &item); !status.ok())
    return refused(status.code(), status.message());
  WL_RETURN_IF_ERROR(check_keys(b, e, out_bytes));
  const RowForm form = row_form(item);
  const uint64_t row = form.bytes(spec);
  if (b.in_dtype != Dtype::kFloat32 || e->numbers_bytes != e->items * row)
    return refused(Code::kShapeMismatch, "put: expected " + std::to_string(e->items) + " rows of " +
                                             std::to_string(row) + " bytes, saw " + std::to_string(e->numbers_bytes) +
                                             " bytes of " + name_of(b.in_dtype));
  // The count is no float.
  const uint64_t numbers = form.numbers(spec) - (form.counted ? 1 : 0);
  for (uint32_t i = 0; i < e->items && spec.reject_nonfinite && !broken(Break::kNonfinite); ++i) {
    if (!kernels().finite(Dtype::kFloat32, e->in + i * row, numbers))
      return refused(Code::kNonFinite, "put: NaN or infinity; nothing was put into shard " + std::to_string(e->shard));
  }
  return {};
}

Status ServedObject::check_put(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  if (table_ != nullptr) return check_put_rows(b, e, out_bytes);
  const TensorSpec& spec = spec_.tensor;
  const std::vector<Plane> planes = planes_of(spec, tensor_->cut(), e->shard);
  wire::PutItem item;
  if (const Status status = wire::decode(e->body, e->body_bytes, planes.size(), &item); !status.ok())
    return refused(status.code(), status.message());
  uint64_t bytes = 0;
  for (size_t i = 0; i < planes.size(); ++i) bytes += (item.planes >> i & 1) != 0 ? planes[i].bytes : 0;
  if (b.in_dtype != spec.dtype || e->numbers_bytes != bytes) {
    return refused(Code::kShapeMismatch, "put: expected " + std::to_string(bytes) + " bytes for " +
                                             name_of(spec.dtype) + ", saw " + std::to_string(e->numbers_bytes) +
                                             " bytes of " + name_of(b.in_dtype));
  }
  const std::byte* from = e->in;
  for (size_t i = 0; i < planes.size() && spec.reject_nonfinite && !broken(Break::kNonfinite); ++i) {
    if ((item.planes >> i & 1) == 0) continue;
    const Dtype dtype = i == 0 ? spec.dtype : Dtype::kFloat32;
    if (!kernels().finite(dtype, from, planes[i].bytes / size_of(dtype)))
      return refused(Code::kNonFinite, "put: NaN or infinity; nothing was put into shard " + std::to_string(e->shard));
    from += planes[i].bytes;
  }
  return {};
}

// Does not check the other tensor, whose numbers have been read (server/object/vector.h).
Status ServedObject::check_vector(const Batch& b, Entry* e, uint64_t*) const {
  const TensorSpec& spec = spec_.tensor;
  const VectorOp op = e->vector->item.op();
  if (writes(op) != b.op->numbered)
    return refused(Code::kInvalidArgument, std::string(windlass::name_of(op)) + " is no " + wire::name_of(b.op->op));
  if (!spec.reject_nonfinite || !writes(op) || broken(Break::kNonfinite)) return {};
  const uint64_t elements = e->numbers_bytes / size_of(spec.dtype);
  if (is_finite(spec.dtype, e->vector->item.a) && (elements == 0 || kernels().finite(spec.dtype, e->in, elements)))
    return {};
  return refused(Code::kNonFinite, std::string(windlass::name_of(op)) +
                                       ": NaN or infinity; nothing was applied to shard " + std::to_string(e->shard));
}

Status ServedObject::check_scan(const Batch& b, Entry* e, uint64_t* out_bytes) const {
  const RowType rows = row_type();
  Scan scan;
  if (const Status status = Scan::parse(e->body, e->body_bytes, rows, &scan); !status.ok())
    return refused(status.code(), status.message());
  const bool keys_only = scan.what == Scan::kKeys;
  if (!spec_.is_table && !keys_only) return refused(Code::kInvalidArgument, "a tensor has no export");
  if (b.out_dtype != Dtype::kFloat32) return refused(Code::kShapeMismatch, "export: rows are float32");
  const uint64_t row_out = keys_only                           ? sizeof(uint64_t)
                           : scan.what == Scan::kRowsWithState ? RowForm::all(spec_.table).bytes(spec_.table)
                                                               : rows.dim * sizeof(float);
  const uint64_t most = (keys_only ? uint64_t{limits::kItemsBytesMax} : limits::kNumbersBytesMax) / row_out;
  if (scan.most == 0 || scan.most > most) {
    return refused(Code::kInvalidArgument,
                   "export: " + std::to_string(scan.most) + " rows at once, at most " + std::to_string(most));
  }
  if (!keys_only) *out_bytes = scan.most * row_out;
  const uint64_t keys = keys_only || scan.filtered ? std::min<uint64_t>(scan.most, limits::kScanRowsMax) : scan.most;
  e->length = kCopies * keys * sizeof(uint64_t) + (keys_only ? 0 : keys * row_out);
  return {};
}

Status ServedObject::check_snapshot(const Batch&, Entry* e, uint64_t* out_bytes) const {
  if (e->value == wire::kCountAlone) return {};
  for (const Plane& plane : planes_of(spec_.tensor, tensor_->cut(), e->shard)) *out_bytes += plane.bytes;
  return {};
}

Status ServedObject::check_query(const Batch&, Entry* e, uint64_t*) const {
  Query query;
  const Status status = Query::parse(e->body, e->body_bytes, row_type(), &query);
  if (!status.ok()) return refused(status.code(), status.message());
  const uint64_t top = query.function == Query::Function::kTop ? query.k : 0;
  e->length = kCopies * (2 * top + query.edges.size()) * sizeof(uint64_t);
  return {};
}

Status ServedObject::check_call(const Batch&, Entry* e, uint64_t*) const {
  wire::CallItem item;
  const Status status = wire::decode(e->body, e->body_bytes, &item);
  if (!status.ok()) return refused(status.code(), status.message());
  e->length = kResultMemoryBytes;
  return {};
}

// A page of an export may claim more than there is.
uint64_t ServedObject::kept_bytes(const Batch& b, const Entry& e, uint64_t out_bytes) {
  const uint64_t claimed = out_bytes + e.length, row = spec_.is_table ? spec_.table.dim * sizeof(float) : 0;
  switch (b.op->op) {
    case wire::Op::kCall:  // what its function gets; the result is made when it can be sent
      if (table_ == nullptr) return tensor_of(e.shard).pieces_of(e.shard)[0].bytes;
      return std::min<uint64_t>(table_->rows(e.shard) * (row + sizeof(uint64_t)), limits::kCallRowsBytes + row);
    case wire::Op::kScan:
      if (table_ == nullptr) return claimed;
      return std::min(claimed, table_->rows(e.shard) *
                                   (2 * RowForm::all(spec_.table).bytes(spec_.table) + kCopies * sizeof(uint64_t)));
    default: return claimed;
  }
}

}  // namespace windlass
