#include "client/op/table.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace windlass {

namespace {

constexpr size_t kKernelRows = 256;    // rows per call of a kernel
constexpr size_t kListKeysMin = 1024;  // fewer keys travel in the frame

// A key whose row lies in an arena, and its position in the arrays.
struct Pair {
  uint64_t key, at;
};

void write_pairs(const Keyed* keyed, size_t n, std::byte* to) {
  for (size_t i = 0; i < n; ++i) {
    const Pair pair = {unmix(keyed[i].hash), keyed[i].at};
    std::memcpy(to + i * sizeof pair, &pair, sizeof pair);
  }
}

wire::Op op_of(const TableRequest& r) {
  return r.erase            ? wire::Op::kErase
         : r.in == nullptr  ? wire::Op::kPull
         : r.out == nullptr ? wire::Op::kPush
                            : wire::Op::kPushPull;
}

}  // namespace

TableCall::TableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& r)
    : ArrayCall(client, what, op_of(r), r.in, r.out, r.hyper, r.weight, r.closes),
      client_(std::move(client)),
      groups_(r.keys),
      create_(r.create),
      priority_(r.priority),
      where_(r.where) {
  shards_.reserve(std::min<size_t>(groups_.total(), limits::kTableShards));
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    if (groups_.size(s) == 0 || (r.only != nullptr && !std::binary_search(r.only->begin(), r.only->end(), s))) continue;
    shards_.push_back(s);
  }
  aim(op_of(r), client_->shared_object().get(), client_->owners(), shards_);
  if (is_remote()) find_repeats();
}

void TableCall::describe_refused(uint32_t part, Refused* to) const {
  to->is_table = true;
  const Keyed* const keyed = keyed_of(part);
  for (size_t i = 0; i < size_of_part(part); ++i) {
    to->places.push_back(keyed[i].at);
    to->keys.push_back(unmix(keyed[i].hash));
  }
}

// ---- inside the process -------------------------------------------------------------------------------------------

Status TableCall::fill(uint32_t part, bool kept, Entry* entry) {
  entry->keyed = keyed_of(part);
  entry->items = static_cast<uint32_t>(size_of_part(part));
  entry->clock = clock_of(part);
  if (closes_) entry->flags |= wire::kCloses;
  if (create_) entry->flags |= wire::kCreates;
  entry->body = reinterpret_cast<const std::byte*>(where_.data());
  entry->body_bytes = static_cast<uint32_t>(where_.size());
  TableCall::set_arrays(part, kept, entry);
  return {};
}

void TableCall::set_arrays(uint32_t, bool kept, Entry* entry) {
  entry->in = static_cast<const std::byte*>(kept ? kept_.get() : arrays_.in);
  entry->out = answers() ? static_cast<std::byte*>(arrays_.out) : nullptr;
}

void TableCall::keep(uint32_t part) {
  if (!contributes()) return;
  std::lock_guard lock(keep_mutex_);
  const size_t bytes = client_->spec().dim * size_of(arrays_.in_dtype);
  if (kept_ == nullptr) kept_ = std::make_unique_for_overwrite<std::byte[]>(groups_.total() * bytes);
  const Keyed* keyed = keyed_of(part);
  for (size_t i = 0; i < size_of_part(part); ++i) {
    std::memcpy(kept_.get() + keyed[i].at * bytes, static_cast<const std::byte*>(arrays_.in) + keyed[i].at * bytes,
                bytes);
  }
}

Status TableCall::landed(uint32_t part, Outcome* outcome) {
  WL_RETURN_IF_ERROR(outcome->status);
  if (arrays_.out != nullptr) note_seen(asked(part), outcome->clock);
  if (client_->sync().may_drop()) session().catch_up(outcome->clock);
  if (erases()) erased_.fetch_add(outcome->value, std::memory_order_relaxed);
  return {};
}

// ---- on servers elsewhere -----------------------------------------------------------------------------------------

Status TableCall::add_to_plan(Arena::Segments* known, RemoteRoute::Plan* plan) {
  plan->dtype_in = wire_in();
  plan->priority = priority_;
  plan->flags = static_cast<uint16_t>((closes_ ? wire::kCloses : 0) | (create_ ? wire::kCreates : 0));
  const uint64_t row_bytes = erases() ? sizeof(uint64_t) : client_->spec().dim * sizeof(float);
  plan->bytes = groups_.total() * row_bytes;
  for (uint32_t part = 0; part < shards_.size(); ++part) {
    const uint64_t bytes = uint64_t{unique_[part]} * row_bytes;
    if (erases() || bytes <= limits::kNumbersBytesMax) continue;
    return Status(Code::kInvalidArgument, what() + ": " + std::to_string(bytes) + " bytes of rows for shard " +
                                              std::to_string(shards_[part]) + ", at most " +
                                              std::to_string(limits::kNumbersBytesMax) + "; use smaller batches");
  }
  // In place, repeated keys are sent as they are and the server combines them. But it would read 16-bit numbers, while
  // our sum is in float32.
  const bool combines = repeats_ && contributes() && arrays_.in_dtype != Dtype::kFloat32;
  if (combines || !share(known, plan)) return {};
  if (groups_.total() >= kListKeysMin) list_ = sharing_->take_list(groups_.total() * sizeof(Pair));
  if (list_ != nullptr) write_pairs(groups_.begin(0), groups_.total(), list_);
  return {};
}

void TableCall::describe(uint32_t part, bool in_place, Parcel* to) {
  const uint64_t n = in_place ? size_of_part(part) : unique_[part], dim = client_->spec().dim;
  const uint64_t in_bytes = contributes() ? n * dim * size_of(in_place ? arrays_.in_dtype : wire_in()) : 0;
  const uint64_t out_bytes = batch_.op->returns ? n * dim * size_of(arrays_.out_dtype) : 0;
  to->items = static_cast<uint32_t>(n);
  to->items_bytes = static_cast<uint32_t>(n * (in_place ? sizeof(Pair) : sizeof(uint64_t)));
  to->argument_bytes = static_cast<uint32_t>(where_.size());
  to->same_argument = true;
  to->work_bytes = work_of(in_place, in_bytes, out_bytes, false);
  if (in_place) {
    to->flags |= wire::kPlaced;
  } else {
    to->numbers_bytes = in_bytes;
    to->answer_bytes = out_bytes;
  }
}

bool TableCall::list(uint32_t part, uint32_t n, wire::ListedItems* list) {
  if (list_ == nullptr) return false;
  size_t bytes = 0;
  for (uint32_t i = part; i < part + n; ++i) bytes += size_of_part(i) * sizeof(Pair);
  const size_t from = static_cast<size_t>(keyed_of(part) - groups_.begin(0)) * sizeof(Pair);
  const size_t end = static_cast<size_t>(keyed_of(part + n - 1) - groups_.begin(0)) + size_of_part(part + n - 1);
  if (end * sizeof(Pair) - from != bytes) return false;  // shards between them were left out
  *list = sharing_->list;
  list->offset += from;
  list->bytes = bytes;
  list->crc = crc32c(list_ + from, list->bytes);
  return true;
}

void TableCall::write_items(uint32_t part, bool in_place, std::byte* to) {
  const Keyed* const keyed = keyed_of(part);
  if (in_place) return write_pairs(keyed, size_of_part(part), to);
  const uint32_t* const slot = slots_of(part);
  for (size_t i = 0; i < size_of_part(part); ++i) {
    const uint64_t key = unmix(keyed[i].hash);
    std::memcpy(to + (slot != nullptr ? slot[i] : i) * sizeof key, &key, sizeof key);
  }
}

void TableCall::write_argument(uint32_t, std::byte* to) { std::memcpy(to, where_.data(), where_.size()); }

void TableCall::gather(uint32_t part, std::byte* to) {
  const Keyed* const keyed = keyed_of(part);
  const size_t n = size_of_part(part), dim = client_->spec().dim, bytes = dim * size_of(arrays_.in_dtype);
  const auto* const in = static_cast<const std::byte*>(arrays_.in);
  if (repeats_ && slots_of(part) != nullptr) return gather_repeats(part, reinterpret_cast<float*>(to));
  if (wire_in() != arrays_.in_dtype) {
    for (size_t i = 0; i < n; ++i) {
      kernels().to_f32(arrays_.in_dtype, in + keyed[i].at * bytes, reinterpret_cast<float*>(to) + i * dim, dim);
    }
  } else if (arrays_.in_dtype == Dtype::kFloat32) {
    const float* from[kKernelRows];
    float* into[kKernelRows];
    for (size_t at = 0; at < n; at += kKernelRows) {
      const size_t m = std::min(kKernelRows, n - at);
      for (size_t i = 0; i < m; ++i) {
        from[i] = reinterpret_cast<const float*>(in + keyed[at + i].at * bytes);
        into[i] = reinterpret_cast<float*>(to + (at + i) * bytes);
      }
      kernels().copy_rows(from, into, m, static_cast<uint32_t>(dim), false);
    }
  } else {
    for (size_t i = 0; i < n; ++i) std::memcpy(to + i * bytes, in + keyed[i].at * bytes, bytes);
  }
}

Status TableCall::land(uint32_t part, bool in_place, const PartAnswer& answer, const std::byte* numbers) {
  const size_t dim = client_->spec().dim, bytes = dim * size_of(arrays_.out_dtype);
  WL_RETURN_IF_ERROR(check_answer(part, in_place, answer, arrays_.out != nullptr ? unique_[part] * bytes : 0));
  if (erases()) erased_.fetch_add(answer.value, std::memory_order_relaxed);
  if (arrays_.out == nullptr || !answers()) return {};
  const Keyed* const keyed = keyed_of(part);
  const size_t n = size_of_part(part);
  auto* const out = static_cast<std::byte*>(arrays_.out);
  if (in_place) {
    if (sharing_->staged_out() == nullptr) return {};
    for (size_t i = 0; i < n; ++i)
      std::memcpy(out + keyed[i].at * bytes, sharing_->staged_out() + keyed[i].at * bytes, bytes);
    return {};
  }
  if (numbers == nullptr) return {};
  const uint32_t* const slot = slots_of(part);
  const auto row = [&](size_t i) { return numbers + (slot != nullptr ? slot[i] : i) * bytes; };
  if (arrays_.out_dtype != Dtype::kFloat32) {
    for (size_t i = 0; i < n; ++i) std::memcpy(out + keyed[i].at * bytes, row(i), bytes);
    return {};
  }
  const float* from[kKernelRows];
  float* into[kKernelRows];
  for (size_t at = 0; at < n; at += kKernelRows) {
    const size_t m = std::min(kKernelRows, n - at);
    for (size_t i = 0; i < m; ++i) {
      from[i] = reinterpret_cast<const float*>(row(at + i));
      into[i] = reinterpret_cast<float*>(out + keyed[at + i].at * bytes);
    }
    kernels().copy_rows(from, into, m, static_cast<uint32_t>(dim), arrays_.stream);
  }
  if (arrays_.stream) kernels().fence();
  return {};
}

void TableCall::find_repeats() {
  unique_.resize(shards_.size());
  std::vector<uint32_t> table;  // index in `hashes` plus one; 0: empty
  std::vector<uint64_t> hashes;
  for (uint32_t part = 0; part < shards_.size(); ++part) {
    const Keyed* const keyed = keyed_of(part);
    const size_t n = size_of_part(part);
    size_t size = 16;
    int bits = 4;
    while (size < n * 2) size *= 2, ++bits;
    table.assign(size, 0);
    hashes.resize(std::max(hashes.size(), n));
    uint32_t found = 0;
    uint32_t* slot = nullptr;  // set from the first repeat on
    for (size_t i = 0; i < n; ++i) {
      const uint64_t h = keyed[i].hash;
      size_t at = place_of(h) >> (64 - bits);
      while (table[at] != 0 && hashes[table[at] - 1] != h) at = (at + 1) & (size - 1);
      if (table[at] == 0) {
        hashes[found] = h;
        table[at] = ++found;
      } else if (slot == nullptr) {
        slots_.resize(groups_.total());
        slot = slots_.data() + (keyed - groups_.begin(0));
        for (uint32_t k = 0; k < i; ++k) slot[k] = k;
      }
      if (slot != nullptr) slot[i] = table[at] - 1;
    }
    unique_[part] = found;
    repeats_ = repeats_ || found != n;
  }
}

void TableCall::gather_repeats(uint32_t part, float* to) {
  const Keyed* const keyed = keyed_of(part);
  const uint32_t* const slot = slots_of(part);
  const size_t dim = client_->spec().dim, bytes = dim * size_of(arrays_.in_dtype);
  const auto* const in = static_cast<const std::byte*>(arrays_.in);
  const Combine combine = layout_of(client_->spec().rule).combine;
  std::vector<float> one(dim);
  std::vector<uint32_t> times(unique_[part]);
  uint32_t seen = 0;
  for (size_t i = 0; i < size_of_part(part); ++i) {
    float* const row = to + slot[i] * dim;
    ++times[slot[i]];
    if (slot[i] == seen) {
      kernels().to_f32(arrays_.in_dtype, in + keyed[i].at * bytes, row, dim);
      ++seen;
    } else {
      kernels().to_f32(arrays_.in_dtype, in + keyed[i].at * bytes, one.data(), dim);
      kernels().combine(combine, row, one.data(), dim);
    }
  }
  for (size_t i = 0; i < times.size() && combine == Combine::kMean; ++i) {
    if (times[i] > 1) kernels().divide(to + i * dim, static_cast<float>(times[i]), dim);
  }
}

// ---- the handle ---------------------------------------------------------------------------------------------------

Status TableClient::open(std::shared_ptr<Session> session, const std::string& name, const TableSpec& spec,
                         std::shared_ptr<TableClient>* out, int64_t deadline_ns, std::string rule_text) {
  Engine& engine = session->engine();
  WL_RETURN_IF_ERROR(session->usable());
  ObjectSpec full;
  full.name = name;
  full.is_table = true;
  full.table = spec;
  full.rule_text = std::move(rule_text);
  if (engine.links() != nullptr) {
    Placed placed;
    WL_RETURN_IF_ERROR(session->place(std::move(full), deadline_ns, &placed));
    *out = attach(std::move(session), placed);
    return {};
  }
  full.name = engine.server().workers()->app() + "/" + name;
  std::shared_ptr<ServedObject> object;
  WL_RETURN_IF_ERROR(engine.server().open(full, &object, !session->reads()));
  *out = attach(std::move(session), std::move(object));
  return {};
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session,
                                                 std::shared_ptr<ServedObject> object) {
  const std::string name = object->spec().own_name();
  std::shared_ptr<TableClient> client(
      new TableClient(std::move(session), name, object->map().object, name, object->spec().table));
  client->set_object(object->spec().table.sync, object);
  return client;
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session, const Placed& placed) {
  std::shared_ptr<TableClient> client(new TableClient(std::move(session), placed.spec.name, placed.map.object,
                                                      placed.spec.own_name(), placed.spec.table));
  client->set_object(placed.spec.table.sync, nullptr);
  client->set_map(placed.map, limits::kTableShards);
  return client;
}

Status TableClient::check(const TableRequest& r, const What& what) const {
  if (r.keys.n > limits::kRequestKeysMax) {
    return Status(Code::kInvalidArgument, what.text() + ": at most " + std::to_string(limits::kRequestKeysMax) +
                                              " keys, not " + std::to_string(r.keys.n));
  }
  const uint64_t shape[2] = {r.keys.n, spec_.dim};
  if (r.in != nullptr) {
    WL_RETURN_IF_ERROR(check_array(what, ", gradients", *r.in, shape, 2, Dtype::kFloat32));
    if (spec_.reject_nonfinite && !are_finite(r.in->dtype, r.in->data, r.in->elements())) {
      return Status(Code::kNonFinite, what.text() + ": the gradients have NaN or infinity; nothing was applied");
    }
  }
  if (r.out != nullptr) WL_RETURN_IF_ERROR(check_array(what, ", out", *r.out, shape, 2, Dtype::kFloat32));
  return {};
}

What TableClient::what(const TableRequest& r) const {
  const char* verb = r.erase ? "delete" : r.in == nullptr ? "pull" : r.out == nullptr ? "push" : "push_pull";
  return {verb, "table", name_};
}

Status TableClient::make(const TableRequest& r, Ref<TableCall>* out) {
  WL_RETURN_IF_ERROR(session().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const What w = what(r);
  WL_RETURN_IF_ERROR(check(r, w));
  Program where;
  if (!r.where.empty()) {
    const Status parsed = Program::parse(reinterpret_cast<const std::byte*>(r.where.data()), r.where.size(), row_type(),
                                         Program::Type::kBool, "where", &where);
    if (!parsed.ok()) return Status(parsed.code(), w.text() + ": " + parsed.message());
  }
  return prepare(r, out);
}

Status TableClient::prepare(const TableRequest& r, Ref<TableCall>* out) {
  const What w = what(r);
  const Ref<TableCall> call(new TableCall(shared_from_this(), w, r));
  if (!call->ok()) {
    return Status(Code::kResourceExhausted, w.text() + ": no memory to sort " + std::to_string(r.keys.n) + " keys");
  }
  *out = call;
  return {};
}

Status TableClient::start(const TableRequest& r, How how, Ref<TableCall>* out, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(make(r, out));
  if (r.in == nullptr) return (*out)->start(nullptr, r.out, how, deadline_ns);
  WL_RETURN_IF_ERROR(begin_push((*out)->shards(), deadline_ns, true));
  const Status status = (*out)->start(r.in, r.out, how, deadline_ns);
  const Status told = session().tell_rest(deadline_ns);
  return status.ok() ? told : status;
}

Status TableClient::rows(int64_t deadline_ns, uint64_t* out) {
  return sum_of_shards(What{"len", "table", name_}, wire::Op::kRows, deadline_ns, out);
}

Status TableClient::fingerprint(int64_t deadline_ns, uint64_t* out) {
  WL_RETURN_IF_ERROR(sum_of_shards(What{"fingerprint", "table", name_}, wire::Op::kFingerprint, deadline_ns, out));
  *out += mix_text(name_);
  return {};
}

Asked TableClient::asked(const char* verb) {
  return {shared_from_this(), {verb, "table", name_}, limits::kTableShards, row_type()};
}

Status TableClient::query(const std::string& query, int64_t deadline_ns, std::string* answer) {
  return ask(asked(verb_of(query)), query, deadline_ns, answer);
}

Status TableClient::scan(ScanCursor* cursor, size_t most, Scan::What part, const std::string& where,
                         int64_t deadline_ns, std::vector<uint64_t>* keys, std::vector<float>* rows) {
  const size_t numbers = part == Scan::kKeys ? 0 : part == Scan::kRows ? spec_.dim : RowForm::all(spec_).numbers(spec_);
  return windlass::scan(asked(part == Scan::kKeys ? "keys" : "export"), cursor, most, {part, numbers}, where,
                        deadline_ns, keys, rows);
}

}  // namespace windlass
