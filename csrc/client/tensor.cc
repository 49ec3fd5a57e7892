#include "client/tensor.h"

#include <algorithm>
#include <cstring>

#include "server/object/shard_query.h"

namespace windlass {

TensorCall::TensorCall(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& r)
    : Call(client->shared_session(), client->progress(), what),
      client_(std::move(client)),
      hyper_(r.hyper),
      weight_(r.weight),
      closes_(r.closes),
      pushes_(r.in != nullptr),
      versioned_(r.versioned),
      op_(!pushes_           ? wire::Op::kPull
          : r.out == nullptr ? wire::Op::kPush
                             : wire::Op::kPushPull) {
  if (r.in != nullptr) {
    arrays_.in = r.in->data;
    arrays_.in_dtype = r.in->dtype;
  }
  if (r.out != nullptr) {
    arrays_.out = r.out->data;
    arrays_.out_dtype = r.out->dtype;
    arrays_.stream = streams(*traits_of(op_), r.out->bytes(), r.out->bytes());
  }
  const uint32_t shards = client_->cut().shards;
  if (r.newer_than != nullptr) {
    newer_than_ = *r.newer_than;
    newer_than_.resize(shards);
  }
  if (versioned_) versions_ = newer_than_;
  if (versioned_) versions_.resize(shards);

  const uint64_t row = client_->cut().row;
  const bool empty = client_->spec().elements() == 0;
  switch (empty ? Selection::kAll : r.rows.kind) {
    case Selection::kAll: add(0, client_->spec().elements(), 0); break;
    case Selection::kRange: add(r.rows.begin * row, (r.rows.end - r.rows.begin) * row, 0); break;
    case Selection::kList:
      for (uint64_t i = 0; i < r.rows.n; ++i) add(static_cast<uint64_t>(r.rows.list[i]) * row, row, i * row);
      if (r.in != nullptr) combine_repeats(r.rows, *r.in);
      sort_by_shard(&spans_);
      break;
  }
  make_parts();
  if (!client_->remote()) go_near(op_, client_->object(), shards_);
}

bool TensorCall::waits_for_update() const { return pushes_ && client_->sync().rounds(); }

bool TensorCall::waits_for_close() const {
  const Sync& sync = client_->sync();
  return pushes_ && !closes_ && (sync.rounds() || (sync.gated() && arrays_.out != nullptr));
}

bool TensorCall::would_deadlock() const { return waits_for_update() && client_->is_open(shards_, iteration_.clock); }

void TensorCall::uncount() {
  if (pushes_) client_->uncount(shards_, iteration_);
}

void TensorCall::begin_iteration() {
  if (pushes_) iteration_ = client_->iteration_of_push(shards_, closes_, weight_);
  asked_ = pushes_ ? iteration_.clock + 1 : session().clock();
  if (!pushes_) closed_ = client_->closed_beyond(shards_, asked_);
}

// Cuts [first, first + n) of the tensor, which is at `at` in the caller's arrays, by shard.
void TensorCall::add(uint64_t first, uint64_t n, uint64_t at) {
  const Cut& cut = client_->cut();
  while (n > 0) {
    const uint64_t here = std::min(n, cut.end_of(cut.shard_of(first)) - first);
    spans_.push_back({first, here, at});
    first += here;
    at += here;
    n -= here;
  }
}

void TensorCall::sort_by_shard(std::vector<Span>* spans) const {
  const Cut& cut = client_->cut();
  std::stable_sort(spans->begin(), spans->end(),
                   [&](const Span& a, const Span& b) { return cut.shard_of(a.first) < cut.shard_of(b.first); });
}

// Rows that come several times are combined, in order, into one gradient each; the answer still has them all.
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
  if (arrays_.out != nullptr) repeats_ = std::move(spans_);
  sort_by_shard(&repeats_);
  spans_.clear();
  uint64_t made = 0, times = 0;
  for (uint64_t i = 0; i < rows.n; ++i) {
    const std::byte* g = static_cast<const std::byte*>(in.data) + order[i].second * row * size_of(in.dtype);
    const bool first = i == 0 || !same_row(order[i], order[i - 1]);
    if (first) add(static_cast<uint64_t>(order[i].first) * row, row, made++ * row);
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
  arrays_.in_dtype = spec.dtype;
}

void TensorCall::make_parts() {
  const Cut& cut = client_->cut();
  for (size_t i = 0; i < spans_.size(); ++i) {
    const uint32_t shard = cut.shard_of(spans_[i].first);
    if (shards_.empty() || shards_.back() != shard) {
      shards_.push_back(shard);
      starts_.push_back(i);
    }
  }
  starts_.push_back(spans_.size());
}

// ---- inside the process
// ----------------------------------------------------------------------------------------------

void TensorCall::admitted() {
  begin_iteration();
  set_batch(arrays_, hyper_, iteration_);
  if (repeats_.empty() || arrays_.out == nullptr) return;
  unrepeated_ =
      std::make_unique_for_overwrite<std::byte[]>(spans_.size() * client_->cut().row * size_of(arrays_.out_dtype));
}

bool TensorCall::is_alone() const { return pushes_ && client_->spec().rule.kind == RuleKind::kForeign; }

void TensorCall::fill(uint32_t part, bool kept, Entry* entry) {
  entry->spans = spans(part);
  entry->items = static_cast<uint32_t>(span_count(part));
  entry->clock = pushes_ ? iteration_.clock : asked(part);
  if (closes_) entry->flags |= wire::kCloses;
  if (!newer_than_.empty()) entry->value = newer_than_[shards_[part]];
  TensorCall::set_arrays(part, kept, entry);
}

void TensorCall::set_arrays(uint32_t, bool kept, Entry* entry) {
  entry->in = static_cast<const std::byte*>(kept && combined_ == nullptr ? kept_.get() : arrays_.in);
  std::byte* const out = unrepeated_ != nullptr ? unrepeated_.get() : static_cast<std::byte*>(arrays_.out);
  entry->out = answers() ? out : nullptr;
}

void TensorCall::keep(uint32_t part) {
  std::lock_guard lock(keep_mutex_);
  if (combined_ != nullptr || !pushes_) return;
  const size_t size = size_of(arrays_.in_dtype);
  if (kept_ == nullptr) {
    uint64_t end = 0;
    for (const Span& s : spans_) end = std::max(end, s.at + s.n);
    kept_ = std::make_unique_for_overwrite<std::byte[]>(end * size);
  }
  for (size_t i = starts_[part]; i < starts_[part + 1]; ++i) {
    const Span& s = spans_[i];
    std::memcpy(kept_.get() + s.at * size, static_cast<const std::byte*>(arrays_.in) + s.at * size, s.n * size);
  }
}

Status TensorCall::landed(uint32_t part, Outcome* outcome) {
  WL_RETURN_IF_ERROR(outcome->status);
  if (arrays_.out != nullptr) note_seen(asked(part), outcome->clock);
  if (client_->sync().may_drop()) session().catch_up(outcome->clock);
  if (versioned_) versions_[shards_[part]] = outcome->value;
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
  const uint32_t shard = shards_[part];
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

// ---- the handle
// ------------------------------------------------------------------------------------------------------

Status TensorClient::open(std::shared_ptr<Session> session, const std::string& name, const TensorSpec& spec,
                          std::shared_ptr<TensorClient>* out, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(session->engine().usable());
  if (session->engine().links() != nullptr) {
    Placed placed;
    ObjectSpec full;
    full.name = name;
    full.is_table = false;
    full.tensor = spec;
    WL_RETURN_IF_ERROR(session->place(std::move(full), deadline_ns, &placed));
    *out = attach(std::move(session), placed);
    return {};
  }
  std::shared_ptr<ServedObject> object;
  ObjectSpec full;
  full.name = session->engine().server().crowd()->app() + "/" + name;
  full.tensor = spec;
  WL_RETURN_IF_ERROR(session->engine().server().open(full, &object));
  *out = attach(std::move(session), std::move(object));
  return {};
}

std::shared_ptr<TensorClient> TensorClient::attach(std::shared_ptr<Session> session,
                                                   std::shared_ptr<ServedObject> object) {
  const std::string name = object->spec().own_name();
  const TensorSpec& spec = object->spec().tensor;
  std::shared_ptr<TensorClient> client(new TensorClient(std::move(session), name, name, spec, cut_of(spec)));
  client->set_object(spec.sync, std::move(object));
  return client;
}

std::shared_ptr<TensorClient> TensorClient::attach(std::shared_ptr<Session> session, const Placed& placed) {
  const TensorSpec& spec = placed.spec.tensor;
  const Cut cut = cut_of(spec);
  std::shared_ptr<TensorClient> client(
      new TensorClient(std::move(session), placed.spec.name, placed.spec.own_name(), spec, cut));
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
    if (spec.reject_nonfinite && !kernels().finite(r.in->dtype, r.in->data, r.in->elements())) {
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
  WL_RETURN_IF_ERROR(session().engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const What w = what(r);
  WL_RETURN_IF_ERROR(check(r, w));
  *out =
      remote() ? make_remote_call(shared_from_this(), w, r) : Ref<TensorCall>(new TensorCall(shared_from_this(), w, r));
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
  return windlass::scan(asked("keys"), cursor, most, where, deadline_ns, keys, nullptr);
}

}  // namespace windlass
