#include "server/hosted.h"

#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "server/look.h"
#include "tensor/planes.h"

namespace windlass {
namespace {

using wire::Op;

bool placed(const Order& o) { return (o.part.flags & wire::kPlaced) != 0; }
size_t span_bytes(const Order& o) { return (placed(o) ? 3 : 2) * sizeof(uint64_t); }

// A span as it was sent. In arenas it has a place in the arrays; `at` may be beyond them and is checked.
Span span_at(const Order& o, uint32_t i) {
  uint64_t s[3] = {};
  std::memcpy(s, o.items + i * span_bytes(o), span_bytes(o));
  return {s[0], s[1], placed(o) ? s[2] : o.lying != nullptr ? s[0] - o.lying->base : 0};
}

// The spans of an order that was checked. In a frame the numbers lie one behind the other.
const std::vector<Span>& spans_of(const Order& o, const Cut& cut) {
  static thread_local std::vector<Span> spans;
  spans.clear();
  if ((o.part.flags & wire::kWhole) != 0) {
    const uint64_t first = cut.first_of(o.part.shard);
    spans.push_back({first, cut.end_of(o.part.shard) - first, o.lying != nullptr ? first - o.lying->base : 0});
    return spans;
  }
  uint64_t at = 0;
  for (uint32_t i = 0; i < o.part.items; ++i) {
    spans.push_back(span_at(o, i));
    if (o.lying == nullptr) spans.back().at = at;
    at += spans.back().n;
  }
  return spans;
}

// Whether `n` elements at `at` lie within an array of so many bytes.
bool fits(uint64_t at, uint64_t n, uint64_t bytes, Dtype dtype) {
  const uint64_t elements = bytes / size_of(dtype);
  return at <= elements && n <= elements - at;
}

constexpr uint64_t kRowsMax = uint64_t{1} << 32;  // of an array: Keyed counts no further

// A key as it was sent, and where its row is in the arrays.
struct KeyAt {
  uint64_t key, at;
};
size_t key_bytes(const Order& o) { return (placed(o) ? 2 : 1) * sizeof(uint64_t); }
KeyAt key_at(const Order& o, uint32_t i) {
  uint64_t k[2] = {0, i};
  std::memcpy(k, o.items + i * key_bytes(o), key_bytes(o));
  return {k[0], k[1]};
}

const std::vector<Keyed>& keys_of(const Order& o) {
  static thread_local std::vector<Keyed> keyed;
  keyed.resize(o.part.items);
  for (uint32_t i = 0; i < o.part.items; ++i) {
    const auto [key, at] = key_at(o, i);
    keyed[i] = {mix(key), static_cast<decltype(keyed[i].at)>(at)};
  }
  return keyed;
}

// The predicate behind the keys of a delete.
Status erased_where(const Order& o, const RowType& rows, Program* where) {
  const size_t keys = o.part.items * key_bytes(o), bytes = o.part.items_bytes - keys;
  if (bytes > limits::kQueryBytesMax)
    return Status(Code::kInvalidArgument,
                  "where: " + std::to_string(bytes) + " bytes, at most " + std::to_string(limits::kQueryBytesMax));
  return Program::parse(o.items + keys, bytes, rows, Program::Type::kBool, "where", where);
}

Dtype dtype_in(const Order& o) { return static_cast<Dtype>(o.header.dtype_in); }
Dtype dtype_out(const Order& o) { return static_cast<Dtype>(o.header.dtype_out); }

bool wants_numbers(Op op) { return op == Op::kPull || op == Op::kPushPull; }
// Outputs that go past the cache: the client's own, where they are large.
bool streams(const Order& o) {
  const size_t least = o.op() == Op::kPull ? limits::kStreamPullBytesMin : limits::kStreamBytesMin;
  return o.lying != nullptr && o.lying->streamed >= least && o.lying->out_bytes >= limits::kStreamPartBytesMin;
}
bool brings_numbers(const Order& o) {
  return (o.op() == Op::kPush || o.op() == Op::kPushPull) && (o.part.flags & wire::kEmpty) == 0;
}

}  // namespace

Status Hosted::make(const ObjectSpec& spec, const Map& map, uint32_t index, Server& server, TablePools* pools,
                    const Company& company, std::shared_ptr<Hosted>* out) {
  uint32_t shards = 0;
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  std::shared_ptr<Hosted> made(new Hosted(spec, map, index, shards, &server.budget(), company));
  made->run_ = map.run_of_server(index, shards);
  made->user_code_ = server.user_code();
  WL_RETURN_IF_ERROR(server.find_rule(made->what(), made->rule(), &made->foreign_));
  if (spec.is_table) {
    std::unique_ptr<Table> table;
    WL_RETURN_IF_ERROR(Table::create(spec.own_name(), spec.table, pools, &table));
    made->table_ = std::move(table);
    made->table_->set_foreign(made->foreign_);
  } else {
    std::unique_ptr<Tensor> tensor;
    WL_RETURN_IF_ERROR(Tensor::create(spec.own_name(), spec.tensor, &server.budget(), &tensor, made->run_));
    made->tensor_ = std::move(tensor);
    made->tensor_->set_foreign(made->foreign_);
  }
  for (uint32_t shard = 0; shard < shards; ++shard) {
    const Map::Owned& owned = map.run_of(shard);
    const bool here = owned.server == index;
    if (here && !spec.is_table && !made->inside(shard)) {
      std::unique_ptr<Tensor> tensor;
      const Run run{shard, shard + 1};
      WL_RETURN_IF_ERROR(Tensor::create(spec.own_name(), spec.tensor, &server.budget(), &tensor, run));
      made->add_place(std::move(tensor));
    }
    if (!here && !spec.is_table) continue;
    made->add_gate(*made->find(shard));
    Residence& home = made->find(shard)->home;
    home.state = here ? Residence::kHere : Residence::kElsewhere;
    home.server = owned.server;
    home.term = owned.term;
  }
  *out = std::move(made);
  return {};
}

Shard* Hosted::find(uint32_t shard) {
  if (table_ != nullptr) return shard < shards_ ? &table_->shard(shard) : nullptr;
  if (inside(shard)) return &tensor_->shard(shard);
  Tensor* const tensor = came(shard);
  return tensor != nullptr ? &tensor->shard(shard) : nullptr;
}

// ---- shards that come and go --------------------------------------------------------------------------------------

void Hosted::add_place(std::unique_ptr<Tensor> tensor) {
  if (all_places_ == nullptr) {
    all_places_ = std::make_unique<std::atomic<Tensor*>[]>(shards_);
    places_.store(all_places_.get(), std::memory_order_release);
  }
  tensor->set_foreign(foreign_);
  all_places_[tensor->run().first].store(tensor.get(), std::memory_order_release);
  came_.push_back(std::move(tensor));
}

Shard& Hosted::make_place(uint32_t shard) {
  std::lock_guard lock(coming_);
  if (Shard* const there = find(shard); there != nullptr) return *there;
  const Run run{shard, shard + 1};
  std::unique_ptr<Tensor> tensor = Tensor::make_empty(spec_.own_name(), spec_.tensor, tensor_->cut(), budget_, run);
  const Map::Owned& owned = map_.run_of(shard);
  Shard& place = tensor->shard(shard);
  place.home.state = Residence::kElsewhere;
  place.home.server = owned.server;
  place.home.term = owned.term;
  add_gate(place);
  add_place(std::move(tensor));
  return place;
}

Status Hosted::take_memory(uint32_t shard) {
  if (table_ != nullptr || inside(shard) || came(shard)->bytes() != 0) return {};
  return came(shard)->take_memory();
}

void Hosted::give_memory(uint32_t shard) {
  if (table_ != nullptr) return table_->clear(shard);
  if (!inside(shard)) came(shard)->give_memory();
}

std::pair<uint32_t, uint32_t> Hosted::whereabouts(uint32_t index) {
  Shard* const shard = find(index);
  if (shard == nullptr) return {map_.run_of(index).server, map_.run_of(index).term};
  std::pair<uint32_t, uint32_t> at;
  with_turn(shard->turn, [&] {
    const Residence& home = shard->home;
    const bool here = home.state == Residence::kHere || home.state == Residence::kFrozen;
    at = {here ? index_ : home.server, home.term};
  });
  return at;
}

// Whether the shard is here under the order's term.
bool Hosted::lets_in(const Order& o, Shard& shard) const {
  Residence& home = shard.home;
  return home.serves(o.part.term) || home.opens(o.part.term) ||
         (home.state == Residence::kHere && broken(Break::kTerms));
}

void Hosted::turn_away(const Order& o, const Residence& home, Reply* reply) const {
  const bool here = home.state == Residence::kHere;
  const std::string what = "shard " + std::to_string(o.part.shard) + ": ";
  const std::string term = std::to_string(home.term), asked = std::to_string(o.part.term);
  reply->refuse(refused(Code::kStaleMap, here ? what + "expected term " + term + ", saw " + asked
                                              : what + "not on this server; since term " + term + " it is on number " +
                                                    std::to_string(home.server)));
  reply->part.term = home.term;
  reply->part.value = here ? index_ : home.server;
}

void Hosted::turn_away(const Order& o, Reply* reply) const {
  Residence home{.state = Residence::kElsewhere};
  if (o.part.shard < shards_) {
    const Map::Owned& owned = map_.run_of(o.part.shard);
    home.server = owned.server;
    home.term = owned.term;
  }
  turn_away(o, home, reply);
}

Status Hosted::refused(Code code, const std::string& why) const { return Status(code, what() + ": " + why); }

std::string Hosted::what() const {
  return std::string(spec_.is_table ? "table '" : "tensor '") + spec_.own_name() + "'";
}

Status Hosted::check(const Order& o, uint64_t* out_bytes) const {
  *out_bytes = 0;
  if (brings_numbers(o)) {
    const uint8_t least = layout_of(rule()).hypers;
    if (o.hypers < least) {
      return refused(Code::kInvalidArgument,
                     "expected " + std::to_string(least) + " hyperparameters, saw " + std::to_string(o.hypers));
    }
  } else if (o.part.numbers_bytes != 0 && o.op() != Op::kPut && o.op() != Op::kVector) {
    return refused(Code::kShapeMismatch, "expected no numbers, saw " + std::to_string(o.part.numbers_bytes) + " bytes");
  }
  if (placed(o) && o.lying == nullptr) return refused(Code::kInvalidArgument, "places without arenas");
  if (o.lying != nullptr) {
    if (o.op() != Op::kPush && !wants_numbers(o.op()))
      return refused(Code::kInvalidArgument, std::string(name_of(o.op())) + " has no arrays that could lie in arenas");
    if ((brings_numbers(o) && o.lying->in == nullptr) || (wants_numbers(o.op()) && o.lying->out == nullptr))
      return refused(Code::kInvalidArgument, std::string(name_of(o.op())) + " in arenas, but an array is missing");
  }
  if ((o.part.flags & wire::kEmpty) != 0 && o.op() == Op::kPush) return {};
  if (o.op() == Op::kCall) return check_call(o);
  return spec_.is_table ? check_table(o, out_bytes) : check_tensor(o, out_bytes);
}

Status Hosted::check_tensor(const Order& o, uint64_t* out_bytes) const {
  const Cut& cut = tensor_->cut();
  const TensorSpec& spec = spec_.tensor;
  if (o.op() == Op::kFingerprint) return {};
  if (o.op() == Op::kClose) return {};
  if (o.op() == Op::kPut) return check_put(o);
  if (o.op() == Op::kQuery) return check_query(o);
  if (o.op() == Op::kScan) return check_scan(o, out_bytes);
  if (o.op() == Op::kVector) return check_vector(o);
  if (o.op() == Op::kSnapshot) {
    for (const Plane& plane : planes_of(spec, cut, o.part.shard)) *out_bytes += plane.bytes;
    return {};
  }
  if (o.op() != Op::kPull && o.op() != Op::kPush && o.op() != Op::kPushPull) {
    return refused(Code::kInvalidArgument, std::string("a tensor has no ") + name_of(o.op()));
  }
  const uint64_t first = cut.first_of(o.part.shard), end = cut.end_of(o.part.shard);
  uint64_t elements = end - first;
  if ((o.part.flags & wire::kWhole) == 0) {
    if (o.part.items_bytes != uint64_t{o.part.items} * span_bytes(o)) {
      return refused(Code::kShapeMismatch, "expected " + std::to_string(uint64_t{o.part.items} * span_bytes(o)) +
                                               " bytes of spans, saw " + std::to_string(o.part.items_bytes));
    }
    const Layout layout = layout_of(spec.rule);
    const bool whole_rows = (layout.row_scalars != 0 || layout.by_row) && o.pushes();
    // A pull may want elements several times; a push has each once.
    const uint64_t most = o.pushes() ? end - first : limits::kNumbersBytesMax / size_of(dtype_out(o));
    elements = 0;
    for (uint32_t i = 0; i < o.part.items; ++i) {
      const Span s = span_at(o, i);
      if (s.first < first || s.first >= end || s.n > end - s.first || s.n > most - elements ||
          (whole_rows && (s.first % cut.row != 0 || s.n % cut.row != 0))) {
        return refused(Code::kShapeMismatch, "elements " + std::to_string(s.first) + " + " + std::to_string(s.n) +
                                                 " do not fit shard " + std::to_string(o.part.shard) + ", which has " +
                                                 std::to_string(first) + " to " + std::to_string(end));
      }
      elements += s.n;
    }
  }
  if (o.lying != nullptr) WL_RETURN_IF_ERROR(check_lying(o));
  if (brings_numbers(o)) {
    const uint64_t bytes = o.lying != nullptr ? 0 : elements * size_of(dtype_in(o));
    if (!may_travel(dtype_in(o), spec.dtype) || o.part.numbers_bytes != bytes) {
      return refused(Code::kShapeMismatch, "expected " + std::to_string(elements) + " numbers for " +
                                               name_of(spec.dtype) + ", saw " + std::to_string(o.part.numbers_bytes) +
                                               " bytes of " + name_of(dtype_in(o)));
    }
    if (spec.reject_nonfinite && !finite(o, elements) && !broken(Break::kNonfinite)) {
      return refused(Code::kNonFinite,
                     "the gradient has NaN or infinity; nothing was applied to shard " + std::to_string(o.part.shard));
    }
  }
  if (wants_numbers(o.op())) {
    if (!may_travel(dtype_out(o), spec.dtype)) {
      return refused(Code::kShapeMismatch,
                     std::string("holds ") + name_of(spec.dtype) + ", asked for " + name_of(dtype_out(o)));
    }
    *out_bytes = o.lying != nullptr ? 0 : elements * size_of(dtype_out(o));
  }
  return {};
}

Status Hosted::check_call(const Order& o) const {
  wire::CallItem item;
  const Status status = wire::decode(o.items, o.part.items_bytes, &item);
  return status.ok() ? status : refused(status.code(), status.message());
}

Status Hosted::check_put(const Order& o) const {
  const TensorSpec& spec = spec_.tensor;
  const std::vector<Plane> planes = planes_of(spec, tensor_->cut(), o.part.shard);
  wire::PutItem item;
  if (const Status status = wire::decode(o.items, o.part.items_bytes, planes.size(), &item); !status.ok())
    return refused(status.code(), status.message());
  uint64_t bytes = 0;
  for (size_t i = 0; i < planes.size(); ++i) bytes += (item.planes >> i & 1) != 0 ? planes[i].bytes : 0;
  if (dtype_in(o) != spec.dtype || o.part.numbers_bytes != bytes) {
    return refused(Code::kShapeMismatch, "put: expected " + std::to_string(bytes) + " bytes for " +
                                             name_of(spec.dtype) + ", saw " + std::to_string(o.part.numbers_bytes) +
                                             " bytes of " + name_of(dtype_in(o)));
  }
  const std::byte* from = o.numbers;
  for (size_t i = 0; i < planes.size() && spec.reject_nonfinite && !broken(Break::kNonfinite); ++i) {
    if ((item.planes >> i & 1) == 0) continue;
    const Dtype dtype = i == 0 ? spec.dtype : Dtype::kFloat32;
    if (!kernels().finite(dtype, from, planes[i].bytes / size_of(dtype)))
      return refused(Code::kNonFinite,
                     "put: NaN or infinity; nothing was put into shard " + std::to_string(o.part.shard));
    from += planes[i].bytes;
  }
  return {};
}

// Whether the client's arrays have what the spans are about.
Status Hosted::check_lying(const Order& o) const {
  for (const Span& s : spans_of(o, tensor_->cut())) {
    if (brings_numbers(o) && !fits(s.at, s.n, o.lying->in_bytes, dtype_in(o)))
      return refused(Code::kShapeMismatch, "the gradient has " + std::to_string(o.lying->in_bytes) +
                                               " bytes, too few for shard " + std::to_string(o.part.shard));
    if (wants_numbers(o.op()) && !fits(s.at, s.n, o.lying->out_bytes, dtype_out(o)))
      return refused(Code::kShapeMismatch, "the output has " + std::to_string(o.lying->out_bytes) +
                                               " bytes, too few for shard " + std::to_string(o.part.shard));
  }
  return {};
}

bool Hosted::finite(const Order& o, uint64_t elements) const {
  if (o.lying == nullptr) return kernels().finite(dtype_in(o), o.numbers, elements);
  for (const Span& s : spans_of(o, tensor_->cut())) {
    if (!kernels().finite(dtype_in(o), o.numbers + s.at * size_of(dtype_in(o)), s.n)) return false;
  }
  return true;
}

Status Hosted::check_table(const Order& o, uint64_t* out_bytes) const {
  const TableSpec& spec = spec_.table;
  if (o.op() == Op::kFingerprint || o.op() == Op::kRows || o.op() == Op::kClose) return {};
  const uint64_t row_out = uint64_t{spec.dim} * size_of(dtype_out(o));
  uint64_t rows = o.part.items;
  if (o.op() == Op::kQuery) return check_query(o);
  if (o.op() == Op::kScan) return check_scan(o, out_bytes);
  if (o.op() != Op::kPull && o.op() != Op::kPush && o.op() != Op::kPushPull && o.op() != Op::kErase)
    return refused(Code::kInvalidArgument, std::string("a table has no ") + name_of(o.op()));
  const uint64_t keys = rows * key_bytes(o);
  if (o.op() == Op::kErase && o.part.items_bytes > keys) {
    Program where;
    if (const Status status = erased_where(o, row_type(), &where); !status.ok())
      return refused(status.code(), status.message());
  } else if (o.part.items_bytes != keys) {
    return refused(Code::kShapeMismatch,
                   "expected " + std::to_string(keys) + " bytes of keys, saw " + std::to_string(o.part.items_bytes));
  }
  if ((o.lying != nullptr) != placed(o) && o.op() != Op::kErase && o.part.items != 0)
    return refused(Code::kInvalidArgument, "rows in arenas have places, others have none");
  const uint64_t row_bytes_in = uint64_t{spec.dim} * size_of(dtype_in(o));
  const uint64_t rows_in = o.lying != nullptr && brings_numbers(o) ? o.lying->in_bytes / row_bytes_in : ~uint64_t{0};
  const uint64_t rows_out = o.lying != nullptr && wants_numbers(o.op()) ? o.lying->out_bytes / row_out : ~uint64_t{0};
  for (uint32_t i = 0; i < o.part.items; ++i) {
    const auto [key, at] = key_at(o, i);
    if (at >= std::min({rows_in, rows_out, kRowsMax})) {
      return refused(Code::kShapeMismatch,
                     "row " + std::to_string(at) + " of arrays of " + std::to_string(std::min(rows_in, rows_out)));
    }
    if (shard_of_hash(mix(key)) != o.part.shard) {
      return refused(Code::kInvalidArgument, "key " + std::to_string(key) + " belongs to shard " +
                                                 std::to_string(shard_of_hash(mix(key))) + ", not " +
                                                 std::to_string(o.part.shard));
    }
  }
  if (brings_numbers(o)) {
    const uint64_t bytes = o.lying != nullptr ? 0 : rows * row_bytes_in;
    if (!may_travel(dtype_in(o), Dtype::kFloat32) || o.part.numbers_bytes != bytes) {
      return refused(Code::kShapeMismatch, "expected " + std::to_string(rows) + " rows of " + std::to_string(spec.dim) +
                                               ", saw " + std::to_string(o.part.numbers_bytes) + " bytes of " +
                                               name_of(dtype_in(o)));
    }
    if (spec.reject_nonfinite && !finite_rows(o) && !broken(Break::kNonfinite)) {
      return refused(Code::kNonFinite, "the gradients have NaN or infinity; nothing was applied to shard " +
                                           std::to_string(o.part.shard));
    }
  }
  if (wants_numbers(o.op())) {
    if (!may_travel(dtype_out(o), Dtype::kFloat32)) {
      return refused(Code::kShapeMismatch, std::string("holds float32, asked for ") + name_of(dtype_out(o)));
    }
    if (rows > limits::kNumbersBytesMax / row_out) {
      return refused(Code::kInvalidArgument, std::to_string(rows) + " rows of one shard at once, at most " +
                                                 std::to_string(limits::kNumbersBytesMax / row_out));
    }
    *out_bytes = o.lying != nullptr ? 0 : rows * row_out;
  }
  return {};
}

RowType Hosted::row_type() const {
  return table_ != nullptr ? table_->row_type() : row_type_of(spec_.tensor, tensor_->cut());
}

Status Hosted::check_query(const Order& o) const {
  Query query;
  const Status status = Query::parse(o.items, o.part.items_bytes, row_type(), &query);
  return status.ok() ? status : refused(status.code(), status.message());
}

Status Hosted::check_scan(const Order& o, uint64_t* out_bytes) const {
  const RowType rows = row_type();
  Scan scan;
  if (const Status status = Scan::parse(o.items, o.part.items_bytes, rows, &scan); !status.ok())
    return refused(status.code(), status.message());
  if (!spec_.is_table && !scan.keys_only) return refused(Code::kInvalidArgument, "a tensor has no export");
  if (dtype_out(o) != Dtype::kFloat32) return refused(Code::kShapeMismatch, "export: rows are float32");
  const uint64_t row_out = scan.keys_only ? sizeof(uint64_t) : rows.dim * sizeof(float);
  const uint64_t most = (scan.keys_only ? uint64_t{limits::kItemsBytesMax} : limits::kNumbersBytesMax) / row_out;
  if (scan.most == 0 || scan.most > most) {
    return refused(Code::kInvalidArgument,
                   "export: " + std::to_string(scan.most) + " rows at once, at most " + std::to_string(most));
  }
  if (!scan.keys_only) *out_bytes = scan.most * row_out;
  return {};
}

bool Hosted::finite_rows(const Order& o) const {
  const uint32_t dim = spec_.table.dim;
  if (o.lying == nullptr) return kernels().finite(dtype_in(o), o.numbers, uint64_t{o.part.items} * dim);
  for (uint32_t i = 0; i < o.part.items; ++i) {
    if (!kernels().finite(dtype_in(o), o.numbers + key_at(o, i).at * dim * size_of(dtype_in(o)), dim)) return false;
  }
  return true;
}

void Hosted::add_gate(Shard& shard) {
  if (!spec_.sync().gated()) return;
  shard.gate = std::make_unique<Gate>(spec_.sync());
  shard.gate->set_view(company_.crowd->view(map_.object), os::now_ns());
  shard.gate->begin();
}

void Hosted::set_view(Shard& shard, uint32_t index, const View& view) {
  if (shard.gate == nullptr) return;
  shard.gate->set_view(view, os::now_ns());
  if (spec_.sync().rounds()) make_updates(shard, target(index));
  company_.room->changed();
}

// The clock at which an order looks at the weights; 0 for who never waits.
static uint64_t clock_asked(const Order& o, const Sync& sync) {
  if (o.op() == Op::kPull || o.op() == Op::kQuery) return o.part.clock;
  const bool waits = o.op() == Op::kPushPull || (sync.rounds() && o.op() == Op::kPush);
  return waits && (o.part.flags & wire::kEmpty) == 0 ? o.part.clock + 1 : 0;
}

Waiting::Wants Hosted::wants(const Order& o) const {
  if (tensor_ == nullptr || o.lying == nullptr || !wants_numbers(o.op()) || (o.part.flags & wire::kWhole) == 0 ||
      dtype_out(o) != Dtype::kFloat32 || spec_.tensor.dtype != Dtype::kFloat32 || o.part.value != 0)
    return {};
  const uint64_t at = tensor_->cut().first_of(o.part.shard) - o.lying->base;
  return {reinterpret_cast<float*>(o.lying->out) + at, streams(o)};
}

// The order at hand, beside those that were parked.
class Present final : public Waiting {
 public:
  Present(const Order& order, const Hosted& object) : order_(order), object_(object) {}
  bool ready(Shard&) override { return true; }
  bool run(Shard&) override { return true; }
  Wants wants(uint64_t clock) override {
    return order_.op() == Op::kPushPull && clock == order_.part.clock + 1 ? object_.wants(order_) : Wants();
  }
  void served() override { served_ = true; }
  bool is_served() const { return served_; }

 private:
  const Order& order_;
  const Hosted& object_;
  bool served_ = false;
};

// With the turn: the order closes its iteration here, or says that it has closed those before.
void Hosted::close(const Order& o, Shard& shard, bool refused, bool* has_read) {
  Gate& gate = *shard.gate;
  const int64_t now = os::now_ns();
  bool moved = false;
  if ((o.part.flags & wire::kCloses) != 0) {
    const bool nothing = refused || (o.pushes() && !brings_numbers(o));  // or it was taken back
    const double weight = nothing ? o.other_weight : o.object_weight;
    moved = gate.close(o.rank, o.op() == Op::kClose ? o.part.clock : o.part.clock + 1, weight, now);
  } else if (!gate.sync().rounds()) {
    moved = gate.close(o.rank, o.part.clock, 0, now);
  }
  if (!moved || !gate.sync().rounds()) return;
  if (shard.staged != nullptr) static_cast<Rounds&>(*shard.staged).fold(gate, target(o.part.shard));
  Present own(o, *this);
  make_updates(shard, target(o.part.shard), refused ? nullptr : &own);
  if (own.is_served()) *has_read = true;
  company_.room->changed();
}

// Under BSP a push waits for its update. False: there is no room for it.
bool Hosted::contribute(const Order& o, Shard& shard, Stage stage) {
  const Gate& gate = *shard.gate;
  Rounds::Push push;
  push.rank = o.rank;
  push.incarnation = o.header.session;
  push.iteration = o.part.clock;
  push.weight = o.weight;
  push.hyper = o.hyper;
  push.dtype = dtype_in(o);
  push.numbers = o.numbers;
  const bool next = Rounds::is_next(o.rank, push.iteration, gate);
  const uint64_t bytes = o.part.numbers_bytes;
  if (o.lying != nullptr) {
    push.memory = std::make_shared<Lying>(*o.lying);
  } else if (push.iteration >= gate.made() && !(next && (o.part.flags & wire::kCloses) != 0)) {
    Room* const room = company_.room;
    if (!room->charge(bytes)) {
      if (!next && stage == kFresh) return false;
      room->force(bytes);
    }
    auto* const copy = new std::byte[bytes + 1];
    if (bytes != 0) std::memcpy(copy, o.numbers, bytes);
    push.numbers = copy;
    push.charged = true;
    push.memory = std::shared_ptr<const void>(copy, [room, bytes](const void* p) {
      delete[] static_cast<const std::byte*>(p);
      room->refund(bytes);
    });
  }
  if (table_ != nullptr) {
    push.keyed = keys_of(o);
  } else {
    push.spans = spans_of(o, tensor_->cut());
  }
  if (shard.staged == nullptr) shard.staged = std::make_unique<Rounds>();
  if (!static_cast<Rounds&>(*shard.staged).add(std::move(push), gate)) company_.crowd->count_late();
  return true;
}

// Whether a worker does again what the one whose place it took has closed here.
static bool is_redone(const Order& o, const Gate* gate) {
  return gate != nullptr && brings_numbers(o) && o.part.clock < gate->clock_of(o.rank);
}

// An order that is numbered and whose turn has come.
Ran Hosted::push(const Order& o, Shard& shard, Record& record, Status* status, std::byte* out, Reply* reply,
                 Stage stage, bool* has_read) {
  Gate* const gate = shard.gate.get();
  const bool rounds = gate != nullptr && gate->sync().rounds() && brings_numbers(o);
  const bool redone = is_redone(o, gate);
  if (rounds && o.rank == Gate::kOutsider && status->ok())
    *status = refused(Code::kInvalidArgument, "under BSP only workers of app '" + spec_.app() + "' push");
  if (gate != nullptr && status->ok() && company_.crowd->given_up(o.header.session))
    *status = refused(Code::kClosed, "rank " + std::to_string(o.rank) + " was given up, and others went on without it");
  if (rounds && !redone && status->ok() && !contribute(o, shard, stage)) return Ran::kFull;
  record.sequence = o.part.sequence;  // a refusal uses it up, too
  record.close((o.part.flags & wire::kCloses) != 0 ? o.part.clock + 1 : o.part.clock);
  bool waits = false;
  if (!rounds && !redone && status->ok()) {
    // Who will wait at the gate looks at the weights when it is open.
    const uint64_t asked = gate != nullptr ? clock_asked(o, gate->sync()) : 0;
    waits = asked != 0 && !gate->opens(o.rank, asked, os::now_ns());
    *status = apply(o, o.hyper.corrected(shard.version - record.seen), waits ? nullptr : out, reply);
    if (status->ok()) ++shard.version;
    if (o.op() == Op::kPushPull || o.op() == Op::kPut) record.seen = shard.version;  // who puts weights knows them
    *has_read = gate == nullptr || !gate->sync().rounds();
  }
  if (gate != nullptr && !o.sets()) close(o, shard, !status->ok(), has_read);
  if (!used()) used_.store(true, std::memory_order_relaxed);
  if (status->code() == Code::kStaleMap) reply->part.value = o.other_at;
  if (!status->ok() || o.op() == Op::kErase) record.keep(o.part.sequence, *status, reply->part.value);
  return waits ? Ran::kGated : Ran::kDone;
}

Ran Hosted::run(const Order& o, Shard& shard, const Status& checked, std::byte* out, Reply* reply, Stage stage) {
  if (!lets_in(o, shard)) [[unlikely]] {
    if (shard.home.state == Residence::kFrozen) return Ran::kEarly;
    turn_away(o, shard.home, reply);
    return Ran::kDone;
  }
  Record& record = shard.records.of(o.session, o.header.session);
  Gate* const gate = shard.gate.get();
  Status status = checked;
  bool has_read = stage == kServed;
  if (!o.pushes()) {
    if (o.part.sequence > record.sequence) return Ran::kEarly;
    if (o.op() == Op::kClose && status.ok() && gate != nullptr && !company_.crowd->given_up(o.header.session))
      close(o, shard, false, &has_read);
  } else {
    Admission admission = stage >= kTaken ? Admission::kRepeat : record.admit(o.part.sequence);
    if (admission != Admission::kApply && stage < kTaken && broken(Break::kSequence)) admission = Admission::kApply;
    switch (admission) {
      case Admission::kGap: return Ran::kEarly;
      case Admission::kRepeat:
        record.close(o.part.clock);
        if (const Record::Kept* kept = record.find(o.part.sequence); kept != nullptr) {
          status = kept->status;
          reply->part.value = kept->value;
        } else if (o.op() == Op::kVector) {
          status = {};  // it was done: what the other tensor is by now does not matter
        }
        break;
      case Admission::kApply: {
        const Ran ran = push(o, shard, record, &status, out, reply, stage, &has_read);
        if (ran != Ran::kDone) return ran;
        break;
      }
    }
  }
  if (gate != nullptr && status.ok()) {
    const uint64_t asked = clock_asked(o, gate->sync());
    if (asked != 0 && !gate->opens(o.rank, asked, os::now_ns())) return Ran::kGated;
    if (gate->sync().rounds() && o.pushes() && !o.sets() && shard.staged != nullptr)
      status = static_cast<Rounds&>(*shard.staged).error(o.part.clock);
  }
  if (status.ok() && !has_read && (!o.pushes() || o.op() == Op::kPushPull) && o.op() != Op::kClose)
    status = read(o, out, reply);
  if (wants_numbers(o.op())) record.seen = shard.version;
  reply->part.sequence = record.sequence;
  reply->part.clock = seen(o, shard);
  if (status.code() == Code::kStaleMap && o.op() == Op::kVector) {  // of the other shard
    if (!o.pushes()) reply->part.value = o.other_at;
    reply->part.flags |= wire::kApart;
    reply->items = status.message();
  } else if (!status.ok()) {
    reply->refuse(status);
  } else if (wants_numbers(o.op()) || o.op() == Op::kPush || o.sets() || o.op() == Op::kSnapshot) {
    reply->part.value = shard.version + 1;
  }
  return Ran::kDone;
}

// The clock up to which everybody's pushes are in what the order saw, its own worker's clock where there is nobody
// else. A worker whose pushes may be dropped learns it from every answer, else it would never catch up.
uint64_t Hosted::seen(const Order& o, const Shard& shard) const {
  const uint64_t asked = o.op() == Op::kPushPull ? o.part.clock + 1 : o.part.clock;
  const bool looks = wants_numbers(o.op());
  if (o.rank == Gate::kOutsider || company_.crowd->alone()) return asked;
  if (!looks && (shard.gate == nullptr || !shard.gate->sync().may_drop())) return asked;
  const uint64_t others = shard.gate != nullptr ? shard.gate->seen(o.rank) : company_.crowd->slowest(o.rank);
  const uint64_t seen = others == Gate::kNone ? asked : others;
  if (looks) company_.crowd->count_pull(asked, seen);
  return seen;
}

const std::byte* Hosted::peek(const Order& o, Shard& shard, Reply* reply) const {
  if (tensor_ == nullptr || o.lying != nullptr || o.op() != Op::kPull || o.part.flags != wire::kWhole ||
      o.part.bytes() != 0 || o.part.value != 0 || dtype_out(o) != spec_.tensor.dtype)
    return nullptr;
  if (!lets_in(o, shard)) return nullptr;
  Record& record = shard.records.of(o.session, o.header.session);
  if (o.part.sequence > record.sequence) return nullptr;
  if (shard.gate != nullptr && !shard.gate->opens(o.rank, o.part.clock, os::now_ns())) return nullptr;
  const Cut& cut = tensor_->cut();
  reply->part.sequence = record.sequence;
  reply->part.clock = seen(o, shard);
  record.seen = shard.version;
  reply->part.value = shard.version + 1;
  reply->numbers_bytes = (cut.end_of(o.part.shard) - cut.first_of(o.part.shard)) * size_of(spec_.tensor.dtype);
  return tensor_of(o.part.shard).weights_of(o.part.shard);
}

Status Hosted::apply(const Order& o, const Hyper& hyper, std::byte* out, Reply* reply) {
  if ((o.part.flags & wire::kEmpty) != 0) return {};
  const uint32_t shard = o.part.shard;
  if (o.op() == Op::kErase) {
    Program where;
    const bool filtered = o.part.items_bytes > o.part.items * key_bytes(o);
    if (filtered) WL_RETURN_IF_ERROR(erased_where(o, row_type(), &where));
    reply->part.value = table_->erase(shard, keys_of(o).data(), o.part.items, filtered ? &where : nullptr);
    return {};
  }
  if (o.op() == Op::kPut) {
    put(o);
    return {};
  }
  if (o.op() == Op::kVector) {
    write_vector(o);
    return {};
  }
  const bool answers = o.op() == Op::kPushPull;
  const Arrays arrays{o.numbers, answers ? out : nullptr, dtype_in(o), dtype_out(o), streams(o)};
  if (table_ != nullptr) {
    WL_RETURN_IF_ERROR(table_->apply(shard, hyper, keys_of(o).data(), o.part.items, arrays));
    if (answers && o.lying == nullptr)
      reply->numbers_bytes = uint64_t{o.part.items} * spec_.table.dim * size_of(dtype_out(o));
    return {};
  }
  const std::vector<Span>& spans = spans_of(o, tensor_->cut());
  WL_RETURN_IF_ERROR(tensor_of(shard).apply(shard, hyper, spans.data(), spans.size(), arrays));
  if (answers && !spans.empty() && o.lying == nullptr)
    reply->numbers_bytes = (spans.back().at + spans.back().n) * size_of(dtype_out(o));
  return {};
}

void Hosted::put(const Order& o) {
  const uint32_t index = o.part.shard;
  wire::PutItem item;
  std::memcpy(&item, o.items, sizeof item);  // it was checked
  const std::byte* from = o.numbers;
  const std::vector<Tensor::Piece> pieces = tensor_of(index).pieces_of(index);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if ((item.planes >> i & 1) == 0) continue;
    std::memcpy(pieces[i].data, from, pieces[i].bytes);
    from += pieces[i].bytes;
  }
  if (item.sets_count != 0) tensor_of(index).shard(index).count = item.count;
}

Status Hosted::read(const Order& o, std::byte* out, Reply* reply) {
  const uint32_t index = o.part.shard;
  const Arrays arrays{nullptr, out, Dtype::kFloat32, dtype_out(o), streams(o)};
  switch (o.op()) {
    case Op::kFingerprint:
      reply->part.value = table_ != nullptr ? table_->fingerprint(index) : tensor_of(index).fingerprint(index);
      return {};
    case Op::kCall: {
      wire::CallItem item;
      WL_RETURN_IF_ERROR(wire::decode(o.items, o.part.items_bytes, &item));
      uint64_t from = o.part.value;
      bool more = false;
      reply->call = read_part(what(), item, target(index), &from, &more);
      if (more) reply->part.flags |= wire::kMore;
      reply->part.value = from;
      return {};
    }
    case Op::kVector: reply->part.value = dot(o); return {};
    case Op::kRows: reply->part.value = table_->rows(index); return {};
    case Op::kSnapshot: {
      for (const Tensor::Piece& piece : tensor_of(index).pieces_of(index)) {
        std::memcpy(out + reply->numbers_bytes, piece.data, piece.bytes);
        reply->numbers_bytes += piece.bytes;
      }
      const uint64_t count = tensor_of(index).shard(index).count;
      reply->items.assign(reinterpret_cast<const char*>(&count), sizeof count);
      return {};
    }
    case Op::kScan: {
      uint64_t from = o.part.value;
      Scan asked;
      WL_RETURN_IF_ERROR(Scan::parse(o.items, o.part.items_bytes, row_type(), &asked));
      std::vector<uint64_t> keys;
      std::vector<float> weights;
      if (scan(asked, target(index), &from, &keys, &weights)) reply->part.flags |= wire::kMore;
      reply->part.value = from;
      reply->part.items = static_cast<uint32_t>(keys.size());
      reply->items.assign(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(uint64_t));
      reply->numbers_bytes = weights.size() * sizeof(float);
      if (!weights.empty()) std::memcpy(out, weights.data(), reply->numbers_bytes);
      return {};
    }
    case Op::kQuery: {
      Query query;
      WL_RETURN_IF_ERROR(Query::parse(o.items, o.part.items_bytes, row_type(), &query));
      reply->items = look(query, target(index));
      return {};
    }
    default: break;
  }
  if (table_ != nullptr) {
    // A push_pull that comes again only reads: its rows were made when it was applied, and may be gone since.
    const bool creates = (o.part.flags & wire::kCreates) != 0 && o.op() == Op::kPull;
    WL_RETURN_IF_ERROR(table_->read(index, keys_of(o).data(), o.part.items, arrays, creates));
    if (o.lying == nullptr) reply->numbers_bytes = uint64_t{o.part.items} * spec_.table.dim * size_of(dtype_out(o));
    return {};
  }
  if (o.op() == Op::kPull && o.part.value != 0 && tensor_of(index).shard(index).version + 1 <= o.part.value) {
    reply->part.flags |= wire::kUnchanged;
    return {};
  }
  const std::vector<Span>& spans = spans_of(o, tensor_->cut());
  tensor_of(index).read(spans.data(), spans.size(), arrays);
  if (!spans.empty() && o.lying == nullptr)
    reply->numbers_bytes = (spans.back().at + spans.back().n) * size_of(dtype_out(o));
  return {};
}

}  // namespace windlass
