#include "client/table.h"

#include <cstring>

namespace windlass {

TableCall::TableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& r)
    : Call(client->shared_session(), client->progress(), what),
      client_(std::move(client)),
      groups_(r.keys),
      hyper_(r.hyper),
      create_(r.create),
      erase_(r.erase),
      closes_(r.closes),
      pushes_(r.in != nullptr) {
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
  void keep(uint32_t part) override;

 private:
  std::mutex keep_mutex_;
  std::unique_ptr<std::byte[]> kept_;
};

void LocalTableCall::admitted() {
  if (pushes_) clock_ = client_->clock_for_push(shards_, closes_);
}

Turn& LocalTableCall::turn(uint32_t part) { return client_->table().shard(shards_[part]).turn; }

Status LocalTableCall::run(uint32_t part, bool kept) {
  Table& table = client_->table();
  const uint32_t index = shards_[part];
  const Keyed* keyed = groups_.begin(index);
  const size_t n = groups_.size(index);
  if (pushes_) {
    return client_->push_in_turn(*this, index, table.shard(index), clock_, closes_, [&] {
      Arrays arrays = arrays_;
      if (kept) arrays.in = kept_.get();
      if (!answers()) arrays.out = nullptr;
      return table.apply(index, hyper_, keyed, n, arrays);
    });
  }
  if (erase_) {
    erased_.fetch_add(table.erase(index, keyed, n), std::memory_order_relaxed);
    return {};
  }
  return table.read(index, keyed, n, arrays_, create_);
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
  return client;
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session, const Placed& placed) {
  std::shared_ptr<TableClient> client(
      new TableClient(std::move(session), placed.spec.name, placed.spec.own_name(), placed.spec.table));
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

Status TableClient::start(const TableRequest& r, How how, Ref<TableCall>* out, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(session().engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const What w = what(r);
  WL_RETURN_IF_ERROR(check(r, w));
  const Ref<TableCall> call = remote() ? make_remote_call(shared_from_this(), w, r)
                                       : Ref<TableCall>(new LocalTableCall(shared_from_this(), w, r));
  if (!call->ok()) {
    return Status(Code::kResourceExhausted, w.text() + ": no memory to sort " + std::to_string(r.keys.n) + " keys");
  }
  *out = call;
  return call->start(r.in, r.out, how, deadline_ns);
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

Status TableClient::scan(Cursor* cursor, size_t most, int64_t deadline_ns, std::vector<uint64_t>* keys,
                         std::vector<float>* weights) {
  if (remote()) {
    WL_RETURN_IF_ERROR(session().engine().usable());
    WL_RETURN_IF_ERROR(take_unseen());
  }
  while (cursor->shard < limits::kTableShards && keys->size() < most) {
    bool more = false;
    const uint32_t shard = cursor->shard;
    if (remote()) {
      const size_t left = most - keys->size();
      WL_RETURN_IF_ERROR(scan_remote(shard, &cursor->from, left, deadline_ns, keys, weights, &more));
      if (!more) *cursor = {shard + 1, 0};
      continue;
    }
    WL_RETURN_IF_ERROR(each_shard(
        What{"export", "table", name_}, 1, [&](uint32_t) -> Turn& { return table_->shard(shard).turn; },
        [&](uint32_t) {
          more = table_->scan(shard, &cursor->from, most - keys->size(), keys, weights);
          return Status();
        },
        shared_from_this(), deadline_ns));
    if (!more) *cursor = {shard + 1, 0};
  }
  return {};
}

}  // namespace windlass
