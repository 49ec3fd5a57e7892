#include "client/table.h"

#include <cstring>

namespace windlass {

TableCall::TableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& r)
    : Call(client->shared_session(), client->progress(), what),
      client_(std::move(client)),
      groups_(r.keys),
      hyper_(r.hyper),
      weight_(r.weight),
      create_(r.create),
      erase_(r.erase),
      closes_(r.closes),
      pushes_(r.in != nullptr),
      where_(r.where),
      op_(erase_             ? wire::Op::kErase
          : !pushes_         ? wire::Op::kPull
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
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    if (groups_.size(s) != 0) shards_.push_back(s);
  }
  if (!client_->remote()) go_near(op_, client_->object(), shards_);
}

bool TableCall::waits_for_update() const { return pushes_ && client_->sync().rounds(); }

bool TableCall::waits_for_close() const {
  const Sync& sync = client_->sync();
  return pushes_ && !closes_ && (sync.rounds() || (sync.gated() && arrays_.out != nullptr));
}

bool TableCall::would_deadlock() const { return waits_for_update() && client_->is_open(shards_, iteration_.clock); }

void TableCall::uncount() {
  if (pushes_) client_->uncount(shards_, iteration_);
}

void TableCall::begin_iteration() {
  if (pushes_) iteration_ = client_->iteration_of_push(shards_, closes_, weight_);
  asked_ = pushes_ ? iteration_.clock + 1 : session().clock();
  if (!pushes_ && !erase_) closed_ = client_->closed_beyond(shards_, asked_);
}

// ---- inside the process
// ----------------------------------------------------------------------------------------------

void TableCall::admitted() {
  begin_iteration();
  set_batch(arrays_, hyper_, iteration_);
}

bool TableCall::is_alone() const { return pushes_ && client_->spec().rule.kind == RuleKind::kForeign; }

void TableCall::fill(uint32_t part, bool kept, Entry* entry) {
  entry->keyed = groups_.begin(shards_[part]);
  entry->items = static_cast<uint32_t>(groups_.size(shards_[part]));
  entry->clock = pushes_ ? iteration_.clock : asked(part);
  if (closes_) entry->flags |= wire::kCloses;
  if (create_) entry->flags |= wire::kCreates;
  entry->body = reinterpret_cast<const std::byte*>(where_.data());
  entry->body_bytes = static_cast<uint32_t>(where_.size());
  TableCall::set_arrays(part, kept, entry);
}

void TableCall::set_arrays(uint32_t, bool kept, Entry* entry) {
  entry->in = static_cast<const std::byte*>(kept ? kept_.get() : arrays_.in);
  entry->out = answers() ? static_cast<std::byte*>(arrays_.out) : nullptr;
}

void TableCall::keep(uint32_t part) {
  if (!pushes_) return;
  std::lock_guard lock(keep_mutex_);
  const size_t bytes = client_->spec().dim * size_of(arrays_.in_dtype);
  if (kept_ == nullptr) kept_ = std::make_unique_for_overwrite<std::byte[]>(groups_.total() * bytes);
  const Keyed* keyed = groups_.begin(shards_[part]);
  for (size_t i = 0; i < groups_.size(shards_[part]); ++i) {
    std::memcpy(kept_.get() + keyed[i].at * bytes, static_cast<const std::byte*>(arrays_.in) + keyed[i].at * bytes,
                bytes);
  }
}

Status TableCall::landed(uint32_t part, Outcome* outcome) {
  WL_RETURN_IF_ERROR(outcome->status);
  if (arrays_.out != nullptr) note_seen(asked(part), outcome->clock);
  if (client_->sync().may_drop()) session().catch_up(outcome->clock);
  if (erase_) erased_.fetch_add(outcome->value, std::memory_order_relaxed);
  return {};
}

// ---- the handle
// ------------------------------------------------------------------------------------------------------

Status TableClient::open(std::shared_ptr<Session> session, const std::string& name, const TableSpec& spec,
                         std::shared_ptr<TableClient>* out, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(session->engine().usable());
  if (session->engine().links() != nullptr) {
    Placed placed;
    ObjectSpec full;
    full.name = name;
    full.is_table = true;
    full.table = spec;
    WL_RETURN_IF_ERROR(session->place(std::move(full), deadline_ns, &placed));
    *out = attach(std::move(session), placed);
    return {};
  }
  std::shared_ptr<ServedObject> object;
  ObjectSpec full;
  full.name = session->engine().server().crowd()->app() + "/" + name;
  full.is_table = true;
  full.table = spec;
  WL_RETURN_IF_ERROR(session->engine().server().open(full, &object));
  *out = attach(std::move(session), std::move(object));
  return {};
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session,
                                                 std::shared_ptr<ServedObject> object) {
  const std::string name = object->spec().own_name();
  std::shared_ptr<TableClient> client(new TableClient(std::move(session), name, name, object->spec().table));
  client->set_object(object->spec().table.sync, object);
  return client;
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session, const Placed& placed) {
  std::shared_ptr<TableClient> client(
      new TableClient(std::move(session), placed.spec.name, placed.spec.own_name(), placed.spec.table));
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
    if (spec_.reject_nonfinite && !kernels().finite(r.in->dtype, r.in->data, r.in->elements())) {
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
  WL_RETURN_IF_ERROR(session().engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const What w = what(r);
  WL_RETURN_IF_ERROR(check(r, w));
  Program where;
  if (!r.where.empty()) {
    const Status parsed = Program::parse(reinterpret_cast<const std::byte*>(r.where.data()), r.where.size(), row_type(),
                                         Program::Type::kBool, "where", &where);
    if (!parsed.ok()) return Status(parsed.code(), w.text() + ": " + parsed.message());
  }
  const Ref<TableCall> call =
      remote() ? make_remote_call(shared_from_this(), w, r) : Ref<TableCall>(new TableCall(shared_from_this(), w, r));
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

Status TableClient::scan(ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
                         std::vector<uint64_t>* keys, std::vector<float>* weights) {
  return windlass::scan(asked(weights != nullptr ? "export" : "keys"), cursor, most, where, deadline_ns, keys, weights);
}

}  // namespace windlass
