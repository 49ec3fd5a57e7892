#include "client/op/tensor.h"

#include <algorithm>
#include <cstring>

#include "server/object/shard_query.h"

namespace windlass {

namespace {

// Cuts elements [first, first + n) of a tensor by shard; they begin at `at` in the caller's arrays.
void add_spans(const Cut& cut, uint64_t first, uint64_t n, uint64_t at, std::vector<Span>* spans) {
  while (n > 0) {
    const uint64_t here = std::min(n, cut.end_of(cut.shard_of(first)) - first);
    spans->push_back({first, here, at});
    first += here;
    at += here;
    n -= here;
  }
}

void sort_by_shard(const Cut& cut, std::vector<Span>* spans) {
  std::stable_sort(spans->begin(), spans->end(),
                   [&](const Span& a, const Span& b) { return cut.shard_of(a.first) < cut.shard_of(b.first); });
}

void make_parts(const Cut& cut, TensorParts* parts) {
  for (size_t i = 0; i < parts->spans.size(); ++i) {
    const uint32_t shard = cut.shard_of(parts->spans[i].first);
    if (parts->shards.empty() || parts->shards.back() != shard) {
      parts->shards.push_back(shard);
      parts->starts.push_back(i);
    }
  }
  parts->starts.push_back(parts->spans.size());
}

wire::Op op_of(const TensorRequest& r) {
  return r.in == nullptr ? wire::Op::kPull : r.out == nullptr ? wire::Op::kPush : wire::Op::kPushPull;
}

}  // namespace

TensorParts TensorClient::whole_of(const TensorSpec& spec, const Cut& cut) {
  TensorParts parts;
  add_spans(cut, 0, spec.elements(), 0, &parts.spans);
  make_parts(cut, &parts);
  return parts;
}

TensorCall::TensorCall(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& r)
    : ArrayCall(client, what, op_of(r), r.in, r.out, r.hyper, r.weight, r.closes),
      client_(std::move(client)),
      versioned_(r.versioned),
      priority_(r.priority),
      parts_(&client_->whole()) {
  const uint32_t shards = client_->cut().shards;
  if (r.newer_than != nullptr) {
    newer_than_ = *r.newer_than;
    newer_than_.resize(shards);
  }
  if (versioned_) versions_ = newer_than_;
  if (versioned_) versions_.resize(shards);
  if (r.rows.kind != Selection::kAll && client_->spec().elements() != 0) choose(r);
  if (r.only != nullptr) keep_only(*r.only);
  aim(op_of(r), client_->shared_object().get(), client_->owners(), parts_->shards);
}

// Cuts a request for some of the rows.
void TensorCall::choose(const TensorRequest& r) {
  const Cut& cut = client_->cut();
  const uint64_t row = cut.row;
  if (r.rows.kind == Selection::kRange) {
    add_spans(cut, r.rows.begin * row, (r.rows.end - r.rows.begin) * row, 0, &own_.spans);
  } else {
    for (uint64_t i = 0; i < r.rows.n; ++i)
      add_spans(cut, static_cast<uint64_t>(r.rows.list[i]) * row, row, i * row, &own_.spans);
    if (r.in != nullptr) combine_repeats(r.rows, *r.in);
    sort_by_shard(cut, &own_.spans);
  }
  make_parts(cut, &own_);
  parts_ = &own_;
}

void TensorCall::keep_only(const std::vector<uint32_t>& shards) {
  TensorParts some;
  for (uint32_t part = 0; part < parts_->shards.size(); ++part) {
    if (!std::binary_search(shards.begin(), shards.end(), shard(part))) continue;
    some.shards.push_back(shard(part));
    some.starts.push_back(some.spans.size());
    some.spans.insert(some.spans.end(), spans(part), spans(part) + span_count(part));
  }
  some.starts.push_back(some.spans.size());
  own_ = std::move(some);
  parts_ = &own_;
}

void TensorCall::describe_refused(uint32_t part, Refused* to) const {
  std::vector<uint64_t>& ranges = to->places;
  for (size_t i = 0; i < span_count(part); ++i) {
    const Span& span = spans(part)[i];
    if (!ranges.empty() && ranges[ranges.size() - 2] + ranges.back() == span.first) {
      ranges.back() += span.n;
    } else {
      ranges.insert(ranges.end(), {span.first, span.n});
    }
  }
}

// Combines the gradients of repeated rows, in order, into one each; the answer still has them all.
void TensorCall::combine_repeats(const Selection& rows, const Array& in) {
  std::vector<std::pair<int64_t, uint64_t>> order(rows.n);
  for (uint64_t i = 0; i < rows.n; ++i) order[i] = {rows.list[i], i};
  std::sort(order.begin(), order.end());
  const auto same_row = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (std::adjacent_find(order.begin(), order.end(), same_row) == order.end()) return;

  const TensorSpec& spec = client_->spec();
  const uint64_t row = client_->cut().row;
  const Combine how = layout_of(spec.rule).combine;
  const bool is_f32 = spec.dtype == Dtype::kFloat32;
  const size_t bytes = row * size_of(spec.dtype);
  combined_ = std::make_unique_for_overwrite<std::byte[]>(rows.n * bytes);
  const auto one = std::make_unique_for_overwrite<float[]>(is_f32 ? row : 0);
  if (arrays_.out != nullptr) repeats_ = std::move(own_.spans);
  sort_by_shard(client_->cut(), &repeats_);
  own_.spans.clear();
  uint64_t made = 0, times = 0;
  for (uint64_t i = 0; i < rows.n; ++i) {
    const std::byte* g = static_cast<const std::byte*>(in.data) + order[i].second * row * size_of(in.dtype);
    const bool first = i == 0 || !same_row(order[i], order[i - 1]);
    if (first) add_spans(client_->cut(), static_cast<uint64_t>(order[i].first) * row, row, made++ * row, &own_.spans);
    times = first ? 1 : times + 1;
    std::byte* into = combined_.get() + (made - 1) * bytes;
    if (first && is_f32) {
      kernels().to_f32(in.dtype, g, reinterpret_cast<float*>(into), row);
    } else if (first) {
      std::memcpy(into, g, bytes);
    } else if (is_f32) {
      kernels().to_f32(in.dtype, g, one.get(), row);
      kernels().combine(how, reinterpret_cast<float*>(into), one.get(), row);
    } else {
      Dense d;  // Sum, Max, Min and Assign combine gradients as they treat weights
      d.w = into;
      d.g = g;
      d.n = row;
      const RuleKernels& rule = kernels(spec.rule.kind);
      (spec.dtype == Dtype::kFloat64 ? rule.dense_f64 : rule.dense_i64)({}, d);
    }
    const bool last = i + 1 == rows.n || !same_row(order[i], order[i + 1]);
    if (how == Combine::kMean && last && times > 1)
      kernels().divide(reinterpret_cast<float*>(into), static_cast<float>(times), row);
  }
  arrays_.in = combined_.get();
  batch_.in_dtype = arrays_.in_dtype = spec.dtype;
  owns_input_ = true;
}

// ---- inside the process -------------------------------------------------------------------------------------------

void TensorCall::admitted() {
  if (repeats_.empty() || arrays_.out == nullptr) return;
  unrepeated_ = std::make_unique_for_overwrite<std::byte[]>(parts_->spans.size() * client_->cut().row *
                                                            size_of(arrays_.out_dtype));
}

Status TensorCall::fill(uint32_t part, bool kept, Entry* entry) {
  entry->spans = spans(part);
  entry->items = static_cast<uint32_t>(span_count(part));
  entry->clock = clock_of(part);
  if (closes_) entry->flags |= wire::kCloses;
  if (!newer_than_.empty()) entry->value = newer_than_[shard(part)];
  TensorCall::set_arrays(part, kept, entry);
  // What was combined here may be infinite although its terms are not.
  for (size_t i = 0; i < span_count(part) && combined_ != nullptr && client_->rejects_nonfinite(); ++i) {
    const Span& span = spans(part)[i];
    if (!kernels().finite(arrays_.in_dtype, entry->in + span.at * size_of(arrays_.in_dtype), span.n))
      return changed_on_loan(what() + ": the gradient of repeated rows", shard(part), false);
  }
  return {};
}

void TensorCall::set_arrays(uint32_t, bool kept, Entry* entry) {
  entry->in = static_cast<const std::byte*>(kept && !owns_input_ ? kept_.get() : arrays_.in);
  std::byte* const out = unrepeated_ != nullptr ? unrepeated_.get() : static_cast<std::byte*>(arrays_.out);
  entry->out = answers() ? out : nullptr;
}

void TensorCall::keep(uint32_t part) {
  std::lock_guard lock(keep_mutex_);
  if (owns_input_ || !contributes()) return;
  const size_t size = size_of(arrays_.in_dtype);
  if (kept_ == nullptr) {
    uint64_t end = 0;
    for (const Span& s : parts_->spans) end = std::max(end, s.at + s.n);
    kept_ = std::make_unique_for_overwrite<std::byte[]>(end * size);
  }
  for (size_t i = 0; i < span_count(part); ++i) {
    const Span& s = spans(part)[i];
    std::memcpy(kept_.get() + s.at * size, static_cast<const std::byte*>(arrays_.in) + s.at * size, s.n * size);
  }
}

Status TensorCall::landed(uint32_t part, Outcome* outcome) {
  WL_RETURN_IF_ERROR(outcome->status);
  if (arrays_.out != nullptr) note_seen(asked(part), outcome->clock);
  if (client_->sync().may_drop()) session().catch_up(outcome->clock);
  if (versioned_) versions_[shard(part)] = outcome->value;
  if ((outcome->flags & wire::kUnchanged) != 0) return {};
  changed_.store(true, std::memory_order_relaxed);
  if (unrepeated_ != nullptr && answers())
    scatter_repeats(part, unrepeated_.get() + spans(part)[0].at * size_of(arrays_.out_dtype));
  return {};
}

uint64_t TensorCall::count(uint32_t part) const {
  uint64_t n = 0;
  for (size_t i = 0; i < span_count(part); ++i) n += spans(part)[i].n;
  return n;
}

void TensorCall::scatter_repeats(uint32_t part, const std::byte* from) {
  const size_t size = size_of(arrays_.out_dtype);
  const Span* const begin = spans(part);
  const Cut& cut = client_->cut();
  const uint32_t shard = this->shard(part);
  auto it = std::partition_point(repeats_.begin(), repeats_.end(),
                                 [&](const Span& s) { return cut.shard_of(s.first) < shard; });
  for (; it != repeats_.end() && cut.shard_of(it->first) == shard; ++it) {
    const Span* const row = std::upper_bound(begin, begin + span_count(part), it->first,
                                             [](uint64_t first, const Span& s) { return first < s.first; }) -
                            1;
    const uint64_t at = row->at - begin->at + (it->first - row->first);
    std::memcpy(static_cast<std::byte*>(arrays_.out) + it->at * size, from + at * size, it->n * size);
  }
}

// ---- on servers elsewhere -----------------------------------------------------------------------------------------

Status TensorCall::add_to_plan(Arena::Segments* known, RemoteRoute::Plan* plan) {
  plan->flags = closes_ ? wire::kCloses : 0;
  plan->bytes = std::max(in_bytes_, out_bytes_);
  plan->priority = priority_;
  if (!repeats_.empty() || combined_ != nullptr || !share(known, plan)) return {};
  sharing_->places.base = parts_->spans[0].first - parts_->spans[0].at;
  along_ = along();
  return {};
}

bool TensorCall::along() const {
  return std::all_of(parts_->spans.begin(), parts_->spans.end(),
                     [this](const Span& s) { return s.at == s.first - sharing_->places.base; });
}

bool TensorCall::together(uint32_t part) const {
  for (size_t i = 1; i < span_count(part); ++i) {
    if (spans(part)[i].at != spans(part)[i - 1].at + spans(part)[i - 1].n) return false;
  }
  return true;
}

void TensorCall::describe(uint32_t part, bool in_place, Parcel* to) {
  const Cut& cut = client_->cut();
  const uint64_t n = count(part);
  const uint64_t in_bytes = contributes() ? n * size_of(arrays_.in_dtype) : 0;
  const uint64_t out_bytes = arrays_.out != nullptr ? n * size_of(arrays_.out_dtype) : 0;
  const bool places = in_place && !along_;
  const bool whole =
      span_count(part) == 1 && !places && spans(part)[0].n == cut.end_of(shard(part)) - cut.first_of(shard(part));
  if (!newer_than_.empty()) to->value = newer_than_[shard(part)];
  to->work_bytes = work_of(in_place, in_bytes, out_bytes, whole);
  if (!in_place) {
    to->numbers_bytes = in_bytes;
    to->answer_bytes = out_bytes;
  }
  if (whole) {
    to->flags |= wire::kWhole;
    return;
  }
  if (places) to->flags |= wire::kPlaced;
  to->items = static_cast<uint32_t>(span_count(part));
  to->items_bytes = static_cast<uint32_t>(span_count(part) * (places ? 3 : 2) * sizeof(uint64_t));
}

void TensorCall::write_items(uint32_t part, bool in_place, std::byte* to) {
  const size_t bytes = (in_place && !along_ ? 3 : 2) * sizeof(uint64_t);
  for (size_t i = 0; i < span_count(part); ++i) {
    const uint64_t item[3] = {spans(part)[i].first, spans(part)[i].n, spans(part)[i].at};
    std::memcpy(to + i * bytes, item, bytes);
  }
}

const std::byte* TensorCall::numbers(uint32_t part) {
  if (!together(part)) return nullptr;
  return static_cast<const std::byte*>(arrays_.in) + spans(part)[0].at * size_of(arrays_.in_dtype);
}

void TensorCall::gather(uint32_t part, std::byte* to) {
  const size_t size = size_of(arrays_.in_dtype);
  for (size_t i = 0; i < span_count(part); ++i) {
    const Span& s = spans(part)[i];
    std::memcpy(to, static_cast<const std::byte*>(arrays_.in) + s.at * size, s.n * size);
    to += s.n * size;
  }
}

std::byte* TensorCall::landing(uint32_t part, uint64_t bytes) {
  const size_t size = size_of(arrays_.out_dtype);
  if (!answers() || arrays_.out == nullptr || !repeats_.empty() || !together(part) || bytes != count(part) * size)
    return nullptr;
  return static_cast<std::byte*>(arrays_.out) + spans(part)[0].at * size;
}

Status TensorCall::land(uint32_t part, bool in_place, const PartAnswer& answer, const std::byte* numbers) {
  const bool changed = (answer.flags & wire::kUnchanged) == 0;
  const uint64_t bytes = changed && arrays_.out != nullptr ? count(part) * size_of(arrays_.out_dtype) : 0;
  WL_RETURN_IF_ERROR(check_answer(part, in_place, answer, bytes));
  if (versioned_) versions_[shard(part)] = answer.value;
  if (!changed) return {};
  changed_.store(true, std::memory_order_relaxed);
  if (!answers() || arrays_.out == nullptr) return {};
  if (in_place && sharing_->staged_out() != nullptr) scatter(part, sharing_->staged_out(), true);
  if (numbers != nullptr) repeats_.empty() ? scatter(part, numbers, false) : scatter_repeats(part, numbers);
  return {};
}

void TensorCall::scatter(uint32_t part, const std::byte* from, bool same_places) {
  const size_t size = size_of(arrays_.out_dtype);
  for (size_t i = 0; i < span_count(part); ++i) {
    const Span& s = spans(part)[i];
    std::memcpy(static_cast<std::byte*>(arrays_.out) + s.at * size, same_places ? from + s.at * size : from,
                s.n * size);
    if (!same_places) from += s.n * size;
  }
}

// ---- the handle ---------------------------------------------------------------------------------------------------

Status TensorClient::open(std::shared_ptr<Session> session, const std::string& name, const TensorSpec& spec,
                          std::shared_ptr<TensorClient>* out, int64_t deadline_ns, std::string rule_text) {
  Engine& engine = session->engine();
  WL_RETURN_IF_ERROR(session->usable());
  ObjectSpec full;
  full.name = name;
  full.tensor = spec;
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

std::shared_ptr<TensorClient> TensorClient::attach(std::shared_ptr<Session> session,
                                                   std::shared_ptr<ServedObject> object) {
  const std::string name = object->spec().own_name();
  const TensorSpec& spec = object->spec().tensor;
  std::shared_ptr<TensorClient> client(
      new TensorClient(std::move(session), name, object->map().object, name, spec, cut_of(spec)));
  client->set_object(spec.sync, std::move(object));
  return client;
}

std::shared_ptr<TensorClient> TensorClient::attach(std::shared_ptr<Session> session, const Placed& placed) {
  const TensorSpec& spec = placed.spec.tensor;
  const Cut cut = cut_of(spec);
  std::shared_ptr<TensorClient> client(
      new TensorClient(std::move(session), placed.spec.name, placed.map.object, placed.spec.own_name(), spec, cut));
  client->set_object(spec.sync, nullptr);
  client->set_map(placed.map, cut.shards);
  return client;
}

Status TensorClient::check(const TensorRequest& r, const What& what) const {
  const TensorSpec& spec = spec_;
  const uint64_t rows = spec.shape.empty() ? 1 : spec.shape[0];
  uint64_t shape[limits::kTensorDimsMax];
  const size_t dims = spec.shape.size();
  std::copy(spec.shape.begin(), spec.shape.end(), shape);
  if (r.rows.kind != Selection::kAll && dims == 0) {
    return Status(Code::kInvalidArgument, what.text() + ": a scalar has no rows");
  }
  if (r.rows.kind == Selection::kRange) {
    if (r.rows.begin > r.rows.end || r.rows.end > rows) {
      return Status(Code::kInvalidArgument, what.text() + ": rows " + std::to_string(r.rows.begin) + ":" +
                                                std::to_string(r.rows.end) + " of " + std::to_string(rows));
    }
    shape[0] = r.rows.end - r.rows.begin;
  } else if (r.rows.kind == Selection::kList) {
    for (uint64_t i = 0; i < r.rows.n; ++i) {
      if (r.rows.list[i] < 0 || static_cast<uint64_t>(r.rows.list[i]) >= rows) {
        return Status(Code::kInvalidArgument,
                      what.text() + ": row " + std::to_string(r.rows.list[i]) + " of " + std::to_string(rows));
      }
    }
    shape[0] = r.rows.n;
  }
  if (r.in != nullptr) {
    WL_RETURN_IF_ERROR(check_array(what, ", gradient", *r.in, shape, dims, spec.dtype));
    if (spec.reject_nonfinite && !are_finite(r.in->dtype, r.in->data, r.in->elements())) {
      return Status(Code::kNonFinite, what.text() + ": the gradient has NaN or infinity; nothing was applied");
    }
  }
  if (r.out != nullptr) WL_RETURN_IF_ERROR(check_array(what, ", out", *r.out, shape, dims, spec.dtype));
  return {};
}

What TensorClient::what(const TensorRequest& r) const {
  return {r.in == nullptr ? "pull" : r.out == nullptr ? "push" : "push_pull", "tensor", name_};
}

Status TensorClient::make(const TensorRequest& r, Ref<TensorCall>* out) {
  WL_RETURN_IF_ERROR(session().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  WL_RETURN_IF_ERROR(check(r, what(r)));
  return prepare(r, out);
}

Status TensorClient::prepare(const TensorRequest& r, Ref<TensorCall>* out) {
  *out = Ref<TensorCall>(new TensorCall(shared_from_this(), what(r), r));
  return {};
}

Status TensorClient::start(const TensorRequest& r, How how, Ref<TensorCall>* out, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(make(r, out));
  if (r.in == nullptr) return (*out)->start(nullptr, r.out, how, deadline_ns);
  WL_RETURN_IF_ERROR(begin_push((*out)->shards(), deadline_ns, true));
  const Status status = (*out)->start(r.in, r.out, how, deadline_ns);
  const Status told = session().tell_rest(deadline_ns);
  return status.ok() ? told : status;
}

Status TensorClient::fingerprint(int64_t deadline_ns, uint64_t* out) {
  WL_RETURN_IF_ERROR(sum_of_shards(What{"fingerprint", "tensor", name_}, wire::Op::kFingerprint, deadline_ns, out));
  *out += mix_text(name_);
  return {};
}

Asked TensorClient::asked(const char* verb) {
  return {shared_from_this(), {verb, "tensor", name_}, cut_.shards, row_type_of(spec_, cut_)};
}

Status TensorClient::query(const std::string& query, int64_t deadline_ns, std::string* answer) {
  return ask(asked(verb_of(query)), query, deadline_ns, answer);
}

Status TensorClient::scan(ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
                          std::vector<uint64_t>* keys) {
  return windlass::scan(asked("keys"), cursor, most, {Scan::kKeys, 0}, where, deadline_ns, keys, nullptr);
}

}  // namespace windlass
