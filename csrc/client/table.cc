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
  set_parts(static_cast<uint32_t>(shards_.size()));
}

void TableCall::admitted() {
  if (pushes_) clock_ = client_->clock_for_push(shards_, closes_);
}

Turn& TableCall::turn(uint32_t part) { return client_->table().shard(shards_[part]).turn; }

Status TableCall::run(uint32_t part, bool kept) {
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

void TableCall::keep(uint32_t part) {
  if (!pushes_) return;
  std::lock_guard lock(keep_mutex_);
  const size_t bytes = client_->table().spec().dim * size_of(arrays_.in_dtype);
  if (kept_ == nullptr) {
    kept_ = std::make_unique_for_overwrite<std::byte[]>(groups_.total() * bytes);
  }
  const Keyed* keyed = groups_.begin(shards_[part]);
  for (size_t i = 0; i < groups_.size(shards_[part]); ++i) {
    std::memcpy(kept_.get() + keyed[i].at * bytes, static_cast<const std::byte*>(arrays_.in) + keyed[i].at * bytes,
                bytes);
  }
}

TableClient::TableClient(std::shared_ptr<Session> session, std::shared_ptr<Table> table)
    : Handle(std::move(session), table->name(), limits::kTableShards), table_(std::move(table)) {}

Status TableClient::open(std::shared_ptr<Session> session, const std::string& name, const TableSpec& spec,
                         std::shared_ptr<TableClient>* out) {
  WL_RETURN_IF_ERROR(session->engine().usable());
  std::shared_ptr<Table> table;
  WL_RETURN_IF_ERROR(session->engine().server().open_table(name, spec, &table));
  *out = attach(std::move(session), std::move(table));
  return {};
}

std::shared_ptr<TableClient> TableClient::attach(std::shared_ptr<Session> session, std::shared_ptr<Table> table) {
  return std::shared_ptr<TableClient>(new TableClient(std::move(session), std::move(table)));
}

Status TableClient::check(const TableRequest& r, const What& what) const {
  if (r.keys.n > limits::kRequestKeysMax) {
    return Status(Code::kInvalidArgument, what.text() + ": at most " + std::to_string(limits::kRequestKeysMax) +
                                              " keys, not " + std::to_string(r.keys.n));
  }
  const uint64_t shape[2] = {r.keys.n, table_->spec().dim};
  if (r.in != nullptr) {
    WL_RETURN_IF_ERROR(check_array(what, ", gradients", *r.in, shape, 2, Dtype::kFloat32));
    if (table_->spec().reject_nonfinite && !kernels().finite(r.in->dtype, r.in->data, r.in->elements())) {
      return Status(Code::kNonFinite, what.text() + ": the gradients have NaN or infinity; nothing was applied");
    }
  }
  if (r.out != nullptr) WL_RETURN_IF_ERROR(check_array(what, ", out", *r.out, shape, 2, Dtype::kFloat32));
  return {};
}

Status TableClient::start(const TableRequest& r, How how, Ref<TableCall>* out, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(session().engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const char* verb = r.erase ? "delete" : r.in == nullptr ? "pull" : r.out == nullptr ? "push" : "push_pull";
  const What what{verb, "table", table_->name()};
  WL_RETURN_IF_ERROR(check(r, what));
  const Ref<TableCall> call(new TableCall(shared_from_this(), what, r));
  if (!call->groups_.ok()) {
    return Status(Code::kResourceExhausted, what.text() + ": no memory to sort " + std::to_string(r.keys.n) + " keys");
  }
  *out = call;
  return call->start(r.in, r.out, how, deadline_ns);
}

Status TableClient::each(const char* verb, const std::function<Status(uint32_t)>& visit, int64_t deadline_ns) {
  return each_shard(
      What{verb, "table", table_->name()}, limits::kTableShards,
      [this](uint32_t i) -> Turn& { return table_->shard(i).turn; }, visit, shared_from_this(), deadline_ns);
}

Status TableClient::rows(int64_t deadline_ns, uint64_t* out) {
  std::atomic<uint64_t> sum{0};
  WL_RETURN_IF_ERROR(each("len", [&](uint32_t i) { return sum.fetch_add(table_->rows(i)), Status(); }, deadline_ns));
  *out = sum.load();
  return {};
}

Status TableClient::fingerprint(int64_t deadline_ns, uint64_t* out) {
  std::atomic<uint64_t> sum{mix_text(table_->name())};
  WL_RETURN_IF_ERROR(
      each("fingerprint", [&](uint32_t i) { return sum.fetch_add(table_->fingerprint(i)), Status(); }, deadline_ns));
  *out = sum.load();
  return {};
}

Status TableClient::scan(Cursor* cursor, size_t most, int64_t deadline_ns, std::vector<uint64_t>* keys,
                         std::vector<float>* weights) {
  while (cursor->shard < limits::kTableShards && keys->size() < most) {
    bool more = false;
    const uint32_t shard = cursor->shard;
    WL_RETURN_IF_ERROR(each_shard(
        What{"export", "table", table_->name()}, 1, [&](uint32_t) -> Turn& { return table_->shard(shard).turn; },
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
