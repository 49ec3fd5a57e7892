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
      where_(r.where) {
  if (r.in != nullptr) {
    arrays_.in = r.in->data;
    arrays_.in_dtype = r.in->dtype;
  }
  if (r.out != nullptr) {
    arrays_.out = r.out->data;
    arrays_.out_dtype = r.out->dtype;
    arrays_.stream = r.out->bytes() >= limits::kStreamBytesMin;
  }
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    if (groups_.size(s) != 0) shards_.push_back(s);
  }
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

namespace {

class LocalTableCall final : public TableCall {
 public:
  LocalTableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& request)
      : TableCall(std::move(client), what, request) {
    set_parts(static_cast<uint32_t>(shards_.size()));
  }

 protected:
  void admitted() override;
  Turn& turn(uint32_t part) override;
  Status run(uint32_t part, bool kept) override;
  Status pass(uint32_t part) override;
  void skip(uint32_t part) override {
    client_->skip_in_turn({nullptr, &client_->table(), shards_[part]}, client_->table().shard(shards_[part]),
                          iteration_);
  }
  void leave_gate(uint32_t part) override { Call::leave_gate(client_->table().shard(shards_[part]), part); }
  bool is_alone() const override { return pushes_ && client_->spec().rule.kind == RuleKind::kForeign; }
  bool may_leave_gate() const override { return !pushes_; }
  std::string stuck() const override {
    for (uint32_t part = 0; part < shards_.size(); ++part) {
      if (is_waiting(part)) return stuck_at_gate(client_->table().shard(shards_[part]), asked(part));
    }
    return "";
  }
  void keep(uint32_t part) override;

 private:
  Rounds::Push contribution(uint32_t part, bool kept, bool at_once);

  std::mutex keep_mutex_;
  std::unique_ptr<std::byte[]> kept_;
};

void LocalTableCall::admitted() { begin_iteration(); }

Turn& LocalTableCall::turn(uint32_t part) { return client_->table().shard(shards_[part]).turn; }

Status LocalTableCall::run(uint32_t part, bool kept) {
  Table& table = client_->table();
  const uint32_t index = shards_[part];
  Shard& shard = table.shard(index);
  const Keyed* keyed = groups_.begin(index);
  const size_t n = groups_.size(index);
  if (erase_) {
    const Program* const where = where_.empty() ? nullptr : &erases_where_;
    erased_.fetch_add(table.erase(index, keyed, n, where), std::memory_order_relaxed);
    return {};
  }
  const bool late = shard.gate != nullptr;  // who has to wait looks at the rows when the gate is open
  if (pushes_) {
    WL_RETURN_IF_ERROR(client_->push_in_turn(
        *this, {nullptr, &table, index}, shard, iteration_,
        [&](uint64_t updates) {
          Arrays arrays = arrays_;
          if (kept) arrays.in = kept_.get();
          if (!answers() || late) arrays.out = nullptr;
          return table.apply(index, hyper_.corrected(updates), keyed, n, arrays);
        },
        [&](bool at_once) { return contribution(part, kept, at_once); }));
    if (arrays_.out == nullptr && !waits_for_update()) return {};
    if (!late) {
      look(shard, asked(part));
      return {};
    }
  }
  if (late && stop_at_gate(part, shard, asked(part))) return {};
  return pass(part);
}

Status LocalTableCall::pass(uint32_t part) {
  Table& table = client_->table();
  const uint32_t index = shards_[part];
  Shard& shard = table.shard(index);
  if (client_->sync().may_drop()) session().catch_up(shard.gate->made());
  if (waits_for_update() && shard.staged != nullptr)
    WL_RETURN_IF_ERROR(static_cast<const Rounds&>(*shard.staged).error(iteration_.clock));
  if (arrays_.out == nullptr || !answers()) return {};
  look(shard, asked(part));
  return table.read(index, groups_.begin(index), groups_.size(index), arrays_, create_ && !pushes_);
}

// What the part brings to an update. An ordinary array may be gone by then.
Rounds::Push LocalTableCall::contribution(uint32_t part, bool kept, bool at_once) {
  const Keyed* const keyed = groups_.begin(shards_[part]);
  Rounds::Push push;
  push.hyper = hyper_;
  push.dtype = arrays_.in_dtype;
  push.keyed.assign(keyed, keyed + groups_.size(shards_[part]));
  push.numbers = static_cast<const std::byte*>(kept ? kept_.get() : arrays_.in);
  if (at_once) return push;
  if (kept || !ordinary()) {
    push.memory = kept_alive();
    return push;
  }
  const size_t bytes = client_->spec().dim * size_of(push.dtype);
  auto* const copy = new std::byte[push.keyed.size() * bytes + 1];
  for (uint32_t i = 0; i < push.keyed.size(); ++i) {
    std::memcpy(copy + i * bytes, push.numbers + push.keyed[i].at * bytes, bytes);
    push.keyed[i].at = i;
  }
  push.numbers = copy;
  push.memory = std::shared_ptr<const void>(copy, [](const void* p) { delete[] static_cast<const std::byte*>(p); });
  return push;
}

void LocalTableCall::keep(uint32_t part) {
  if (!pushes_) return;
  std::lock_guard lock(keep_mutex_);
  const size_t bytes = client_->spec().dim * size_of(arrays_.in_dtype);
  if (kept_ == nullptr) {
    kept_ = std::make_unique_for_overwrite<std::byte[]>(groups_.total() * bytes);
  }
  const Keyed* keyed = groups_.begin(shards_[part]);
  for (size_t i = 0; i < groups_.size(shards_[part]); ++i) {
    std::memcpy(kept_.get() + keyed[i].at * bytes, static_cast<const std::byte*>(arrays_.in) + keyed[i].at * bytes,
                bytes);
  }
}

}  // namespace

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
  std::shared_ptr<Table> table;
  WL_RETURN_IF_ERROR(session->engine().server().open_table(name, spec, &table));
  *out = attach(std::move(session), std::move(table));
  return {};
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session, std::shared_ptr<Table> table) {
  std::shared_ptr<TableClient> client(new TableClient(std::move(session), table->name(), table->name(), table->spec()));
  client->table_ = std::move(table);
  client->set_object(client->table_->spec().sync, nullptr, client->table_);
  return client;
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session, const Placed& placed) {
  std::shared_ptr<TableClient> client(
      new TableClient(std::move(session), placed.spec.name, placed.spec.own_name(), placed.spec.table));
  client->set_object(placed.spec.table.sync, nullptr, nullptr);
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
  const Ref<TableCall> call = remote() ? make_remote_call(shared_from_this(), w, r)
                                       : Ref<TableCall>(new LocalTableCall(shared_from_this(), w, r));
  if (!call->ok()) {
    return Status(Code::kResourceExhausted, w.text() + ": no memory to sort " + std::to_string(r.keys.n) + " keys");
  }
  call->set_where(std::move(where));
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

Status TableClient::each(const char* verb, const std::function<Status(uint32_t)>& visit, int64_t deadline_ns) {
  return each_shard(
      What{verb, "table", name_}, limits::kTableShards, [this](uint32_t i) -> Turn& { return table_->shard(i).turn; },
      visit, shared_from_this(), deadline_ns);
}

Status TableClient::rows(int64_t deadline_ns, uint64_t* out) {
  if (remote()) return sum_of_shards(What{"len", "table", name_}, wire::Op::kRows, deadline_ns, out);
  std::atomic<uint64_t> sum{0};
  WL_RETURN_IF_ERROR(each("len", [&](uint32_t i) { return sum.fetch_add(table_->rows(i)), Status(); }, deadline_ns));
  *out = sum.load();
  return {};
}

Status TableClient::fingerprint(int64_t deadline_ns, uint64_t* out) {
  std::atomic<uint64_t> sum{mix_text(name_)};
  if (remote()) {
    WL_RETURN_IF_ERROR(sum_of_shards(What{"fingerprint", "table", name_}, wire::Op::kFingerprint, deadline_ns, out));
    *out += sum;
    return {};
  }
  WL_RETURN_IF_ERROR(
      each("fingerprint", [&](uint32_t i) { return sum.fetch_add(table_->fingerprint(i)), Status(); }, deadline_ns));
  *out = sum.load();
  return {};
}

Asked TableClient::asked(const char* verb) {
  return {shared_from_this(), {verb, "table", name_}, limits::kTableShards, row_type(), nullptr, table_.get()};
}

Status TableClient::query(const std::string& query, int64_t deadline_ns, std::string* answer) {
  return ask(asked(verb_of(query)), query, deadline_ns, answer);
}

Status TableClient::scan(ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
                         std::vector<uint64_t>* keys, std::vector<float>* weights) {
  return windlass::scan(asked(weights != nullptr ? "export" : "keys"), cursor, most, where, deadline_ns, keys, weights);
}

}  // namespace windlass
