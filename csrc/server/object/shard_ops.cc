// What operations do to a shard and read from it, at its turn. server/object/op.cc says which does what.
#include <cstring>

#include "base/breaks.h"
#include "server/object/function.h"
#include "server/object/served_object.h"
#include "tensor/planes.h"

namespace windlass {

Status ServedObject::apply(const Batch& b, const Entry& e, Outcome* out) {
  const bool reads = b.op->returns && !out->reads_later;
  const Arrays arrays{e.in, reads ? e.out : nullptr, b.in_dtype, b.out_dtype, b.streams, b.in_place};
  const bool answers = arrays.out != nullptr && !b.in_place;
  if (table_ != nullptr) {
    WL_RETURN_IF_ERROR(table_->apply(e.shard, *out->hyper, e.keyed, e.items, arrays));
    if (answers) out->numbers_bytes = uint64_t{e.items} * spec_.table.dim * size_of(b.out_dtype);
    return {};
  }
  WL_RETURN_IF_ERROR(tensor_of(e.shard).apply(e.shard, *out->hyper, e.spans, e.items, arrays));
  if (answers && e.items != 0)
    out->numbers_bytes = (e.spans[e.items - 1].at + e.spans[e.items - 1].n) * size_of(b.out_dtype);
  return {};
}

Status ServedObject::read_numbers(const Batch& b, const Entry& e, Outcome* out) {
  if (e.out == nullptr && b.in_place) return {};  // the caller has given up
  const Arrays arrays{nullptr, e.out, Dtype::kFloat32, b.out_dtype, b.streams, false};
  if (table_ != nullptr) {
    // A repeated push_pull only reads: its rows were made when it was applied, and may have been erased since.
    const bool creates = (e.flags & wire::kCreates) != 0 && !b.op->numbered && !b.caller.reads;
    WL_RETURN_IF_ERROR(table_->read(e.shard, e.keyed, e.items, arrays, creates));
    if (!b.in_place) out->numbers_bytes = uint64_t{e.items} * spec_.table.dim * size_of(b.out_dtype);
    return {};
  }
  const Tensor& tensor = tensor_of(e.shard);
  if (!b.op->numbered && e.value != 0 && tensor_of(e.shard).shard(e.shard).version + 1 <= e.value) {
    out->flags |= wire::kUnchanged;
    return {};
  }
  tensor.read(e.spans, e.items, arrays);
  if (!b.in_place && e.items != 0)
    out->numbers_bytes = (e.spans[e.items - 1].at + e.spans[e.items - 1].n) * size_of(b.out_dtype);
  return {};
}

Status ServedObject::erase(const Batch&, const Entry& e, Outcome* out) {
  Program where;
  if (e.body_bytes != 0) WL_RETURN_IF_ERROR(parse_where(e.body, e.body_bytes, row_type(), &where));
  out->value = table_->erase(e.shard, e.keyed, e.items, e.body_bytes != 0 ? &where : nullptr);
  return {};
}

Status ServedObject::put(const Batch& b, const Entry& e, Outcome*) {
  wire::PutItem item;
  std::memcpy(&item, e.body, sizeof item);  // checked before
  if (table_ != nullptr) return table_->put(e.shard, row_form(item), e.keyed, e.items, e.in);
  const std::byte* from = e.in;
  const std::vector<Tensor::Piece> pieces = tensor_of(e.shard).pieces_of(e.shard);
  std::vector<std::byte> own;  // of lent numbers, which may have changed since
  if (b.in_place && spec_.tensor.reject_nonfinite && !broken(Break::kNonfinite)) {
    const auto is_put = [&](size_t i) { return (item.planes >> i & 1) != 0; };
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (!is_put(i)) continue;
      const size_t at = own.size();
      own.insert(own.end(), from + at, from + at + pieces[i].bytes);
      const Dtype dtype = i == 0 ? spec_.tensor.dtype : Dtype::kFloat32;
      if (!kernels().finite(dtype, own.data() + at, pieces[i].bytes / size_of(dtype)))
        return changed_on_loan(what() + ": what is put", e.shard, false);
    }
    from = own.data();
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    if ((item.planes >> i & 1) == 0) continue;
    if (pieces[i].bytes != 0) std::memcpy(pieces[i].data, from, pieces[i].bytes);
    from += pieces[i].bytes;
  }
  if (item.sets_count != 0) tensor_of(e.shard).shard(e.shard).count = item.count;
  return {};
}

Status ServedObject::write_vector(const Batch&, const Entry& e, Outcome*) {
  const Tensor::Piece weights = tensor_of(e.shard).pieces_of(e.shard)[0];
  const std::byte* const x = e.numbers_bytes != 0 ? e.in : weights.data;
  const Dtype dtype = spec_.tensor.dtype;
  kernels().vector(e.vector->item.op(), dtype, weights.data, x, e.vector->item.a, weights.bytes / size_of(dtype));
  return {};
}

Status ServedObject::dot(const Batch&, const Entry& e, Outcome* out) {
  const Tensor::Piece weights = tensor_of(e.shard).pieces_of(e.shard)[0];
  const std::byte* const x = e.numbers_bytes != 0 ? e.in : weights.data;
  const Dtype dtype = spec_.tensor.dtype;
  out->value = kernels().dot(dtype, weights.data, x, weights.bytes / size_of(dtype));
  return {};
}

Status ServedObject::count_rows(const Batch&, const Entry& e, Outcome* out) {
  out->value = table_->rows(e.shard);
  return {};
}

Status ServedObject::fingerprint(const Batch&, const Entry& e, Outcome* out) {
  out->value = table_ != nullptr ? table_->fingerprint(e.shard) : tensor_of(e.shard).fingerprint(e.shard);
  return {};
}

Status ServedObject::snapshot(const Batch&, const Entry& e, Outcome* out) {
  for (const Tensor::Piece& piece : tensor_of(e.shard).pieces_of(e.shard)) {
    if (e.value == wire::kCountAlone) break;
    if (piece.bytes != 0) std::memcpy(e.out + out->numbers_bytes, piece.data, piece.bytes);
    out->numbers_bytes += piece.bytes;
  }
  const uint64_t count = tensor_of(e.shard).shard(e.shard).count;
  out->body.assign(reinterpret_cast<const char*>(&count), sizeof count);
  return {};
}

Status ServedObject::scan_rows(const Batch&, const Entry& e, Outcome* out) {
  uint64_t from = e.value;
  Scan asked;
  WL_RETURN_IF_ERROR(Scan::parse(e.body, e.body_bytes, row_type(), &asked));
  std::vector<uint64_t> keys;
  std::vector<float> rows;
  if (scan(asked, target(e.shard), &from, &keys, &rows)) out->flags |= wire::kMore;
  out->value = from;
  out->body.assign(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(uint64_t));
  out->numbers_bytes = rows.size() * sizeof(float);
  if (!rows.empty()) std::memcpy(e.out, rows.data(), out->numbers_bytes);
  return {};
}

Status ServedObject::answer(const Batch&, const Entry& e, Outcome* out) {
  Query query;
  WL_RETURN_IF_ERROR(Query::parse(e.body, e.body_bytes, row_type(), &query));
  out->body = shard_query(query, target(e.shard));
  return {};
}

Status ServedObject::begin_call(const Batch&, const Entry& e, Outcome* out) {
  wire::CallItem item;
  WL_RETURN_IF_ERROR(wire::decode(e.body, e.body_bytes, &item));
  uint64_t from = e.value;
  bool more = false;
  out->call = read_part(what(), item, target(e.shard), &from, &more);
  if (more) out->flags |= wire::kMore;
  out->value = from;
  return {};
}

void Outcome::finish(UserCode* code) {
  if (call == nullptr) return;
  const UserCode::Ref ran = std::move(call);
  if (Status failed = run_part(code, ran); !failed.ok()) return refuse(std::move(failed));
  body = std::move(ran->result);
}

}  // namespace windlass
