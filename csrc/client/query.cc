#include "client/query.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>

#include "client/remote.h"
#include "server/look.h"

namespace windlass {
namespace {

class QueryCall : public Call {
 public:
  QueryCall(const Asked& asked, Query query)
      : Call(asked.handle->shared_session(), asked.handle->progress(), asked.what),
        asked_of_(asked),
        query_(std::move(query)),
        tally_(query_),
        shards_(asked.shards) {
    std::iota(shards_.begin(), shards_.end(), 0);
  }
  std::string take() {  // after it is done
    std::lock_guard lock(mutex_);
    return tally_.take();
  }

 protected:
  // A query is of the present clock, or of the one that its worker has closed at the shard.
  void begin_iteration() {
    clock_ = session().clock();
    closed_ = asked_of_.handle->closed_beyond(shards_, clock_);
  }
  uint64_t asked(uint32_t part) const { return closed_.empty() ? clock_ : std::max(clock_, closed_[part]); }
  Status merge(const std::string& answer) {
    std::lock_guard lock(mutex_);
    return tally_.merge(answer);
  }

  const Asked asked_of_;
  const Query query_;

 private:
  std::mutex mutex_;  // of the tally
  Tally tally_;
  uint64_t clock_ = 0;
  std::vector<uint64_t> closed_;

 protected:
  std::vector<uint32_t> shards_;  // of each part: all of them
};

class LocalQuery final : public QueryCall {
 public:
  LocalQuery(const Asked& asked, Query query) : QueryCall(asked, std::move(query)) { set_parts(asked.shards); }

 protected:
  Status launch(How, int64_t) override {
    Server& server = session().engine().server();
    begin_iteration();
    const Ref<Work> self(this);
    begin(server.threads() > 1 ? &server.crew() : nullptr);
    return {};
  }
  Turn& turn(uint32_t part) override { return shard(part).turn; }
  Status run(uint32_t part, bool) override {
    if (shard(part).gate != nullptr && stop_at_gate(part, shard(part), asked(part))) return {};
    return pass(part);
  }
  Status pass(uint32_t part) override {
    return merge(windlass::look(query_, {asked_of_.tensor, asked_of_.table, part}));
  }
  void leave_gate(uint32_t part) override { Call::leave_gate(shard(part), part); }
  bool may_leave_gate() const override { return true; }
  std::string stuck() const override {
    for (uint32_t part = 0; part < shards_.size(); ++part) {
      if (is_waiting(part)) return stuck_at_gate(shard(part), asked(part));
    }
    return "";
  }

 private:
  Shard& shard(uint32_t i) const {
    return asked_of_.table != nullptr ? asked_of_.table->shard(i) : asked_of_.tensor->shard(i);
  }
};

class RemoteQuery final : public QueryCall, public Remote {
 public:
  RemoteQuery(const Asked& asked, Query query, const std::string& bytes)
      : QueryCall(asked, std::move(query)), Remote(asked.handle->links()), bytes_(bytes) {}

 protected:
  // Work.
  bool wait_until(int64_t deadline_ns) override { return done() || wait_away(*this, deadline_ns); }
  void cancel() override {
    bool any = false;
    withdraw(true, Status(Code::kCancelled, what() + ": cancelled"), &any);
  }
  Turn& turn(uint32_t) override { __builtin_unreachable(); }
  Status run(uint32_t, bool) override { return {}; }

  // Call.
  std::string stuck() const override { return Remote::stuck(); }
  Status launch(How how, int64_t deadline_ns) override {
    const Handle& handle = *asked_of_.handle;
    make_trips({.op = wire::Op::kQuery,
                .object = handle.map().object,
                .bytes = query_.counts_all() ? 0 : limits::kBulkBytesMin,  // small requests need not wait for it
                .deadline_ns = deadline_ns},
               *handle.owners(), shards_);
    WL_RETURN_IF_ERROR(reserve(what(), deadline_ns));
    begin_away(trips());
    {
      std::lock_guard lock(session().order_mutex());
      const std::vector<uint64_t>& sent = handle.progress()->sent;
      begin_iteration();
      number([&](uint32_t shard, Trip::Part* part) {
        part->sequence = sent[shard];
        part->clock = asked(part->part);
      });
      submit(this);
    }
    set_off(how);
    return {};
  }

  // Cargo.
  void describe(uint32_t, bool, wire::Part* to) override { to->items_bytes = static_cast<uint32_t>(bytes_.size()); }
  void write_items(uint32_t, bool, std::byte* to) override { std::memcpy(to, bytes_.data(), bytes_.size()); }
  const std::byte* numbers(uint32_t) override { return nullptr; }
  void gather(uint32_t, std::byte*) override {}
  std::byte* landing(uint32_t, uint64_t) override { return nullptr; }
  Status land(uint32_t, bool, const wire::Part&, const std::string& items, const std::byte*) override {
    return merge(items);
  }
  void over(const Status& status) override { end_away(status); }
  Owners* owners(uint32_t part, uint32_t* shard) override {
    *shard = shards_[part];
    return asked_of_.handle->owners().get();
  }

 private:
  const std::string bytes_;
};

}  // namespace

const char* verb_of(const std::string& query) {
  constexpr const char* kVerbs[] = {"query", "count", "sum",  "mean", "norm",      "norm",
                                    "min",   "max",   "norm", "nnz",  "histogram", "top_k"};
  const size_t function = query.empty() ? 0 : static_cast<unsigned char>(query[0]);
  return kVerbs[function < std::size(kVerbs) ? function : 0];
}

Status ask(const Asked& asked, const std::string& bytes, int64_t deadline_ns, std::string* answer) {
  Handle& handle = *asked.handle;
  WL_RETURN_IF_ERROR(handle.session().engine().usable());
  WL_RETURN_IF_ERROR(handle.take_unseen());
  Query query;
  const Status parsed =
      Query::parse(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), asked.rows, &query);
  if (!parsed.ok()) return Status(parsed.code(), asked.what.text() + ": " + parsed.message());
  const Ref<QueryCall> call = handle.remote() ? Ref<QueryCall>(new RemoteQuery(asked, std::move(query), bytes))
                                              : Ref<QueryCall>(new LocalQuery(asked, std::move(query)));
  WL_RETURN_IF_ERROR(call->start(nullptr, nullptr, How::kWait, deadline_ns));
  const Status status = call->finish(deadline_ns);
  if (status.code() == Code::kTimeout) call->cancel();  // nobody wants it any more
  WL_RETURN_IF_ERROR(status);
  *answer = call->take();
  return {};
}

namespace {

constexpr uint64_t kAtOnceBytes = uint64_t{16} << 20;

// What one turn of the shard gives.
Status scan_shard(const Asked& asked, ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
                  std::vector<uint64_t>* keys, std::vector<float>* weights, bool* more) {
  Handle& handle = *asked.handle;
  const uint32_t shard = cursor->shard;
  const uint64_t row = weights != nullptr ? asked.rows.dim * sizeof(float) : sizeof(uint64_t);
  const uint64_t rows = std::min<uint64_t>(most, std::max<uint64_t>(1, kAtOnceBytes / row));
  const std::string body = Scan::encode(rows, weights == nullptr, where);
  if (!handle.remote()) {
    Scan wanted;
    WL_RETURN_IF_ERROR(Scan::parse(reinterpret_cast<const std::byte*>(body.data()), body.size(), asked.rows, &wanted));
    const Target target{asked.tensor, asked.table, shard};
    return handle.each_shard(
        asked.what, 1,
        [&](uint32_t) -> Turn& {
          return target.table != nullptr ? target.table->shard(shard).turn : target.tensor->shard(shard).turn;
        },
        [&](uint32_t) {
          *more = scan(wanted, target, &cursor->from, keys, weights);
          return Status();
        },
        asked.handle, deadline_ns);
  }
  const Ref<Exchange> exchange(new Exchange(handle.links()));
  const std::string what = asked.what.text();
  WL_RETURN_IF_ERROR(exchange->ask_shards(wire::Op::kScan, handle.owners(), {shard}, handle.sent(), cursor->from, body,
                                          what, deadline_ns));
  const Exchange::Answer& answer = exchange->answers[0];
  const size_t n = answer.items.size() / sizeof(uint64_t);
  const uint64_t expected = weights != nullptr ? n * row : 0;
  if (n > rows || answer.items.size() % sizeof(uint64_t) != 0 || answer.numbers.size() != expected)
    return Status(Code::kProtocolError, what + ": shard " + std::to_string(shard) + ": keys and rows do not fit");
  const size_t before = keys->size();
  keys->resize(before + n);
  if (n != 0) std::memcpy(keys->data() + before, answer.items.data(), n * sizeof(uint64_t));
  if (expected != 0) {
    const size_t floats = weights->size();
    weights->resize(floats + n * asked.rows.dim);
    std::memcpy(weights->data() + floats, answer.numbers.data(), expected);
  }
  *more = (answer.part.flags & wire::kMore) != 0;
  // A server that goes on without getting on would be asked for ever.
  if (*more && answer.part.value <= cursor->from && n == 0)
    return Status(Code::kProtocolError, what + ": shard " + std::to_string(shard) + " does not get on");
  cursor->from = answer.part.value;
  return {};
}

}  // namespace

Status scan(const Asked& asked, ScanCursor* cursor, size_t most, const std::string& where, int64_t deadline_ns,
            std::vector<uint64_t>* keys, std::vector<float>* weights) {
  WL_RETURN_IF_ERROR(asked.handle->session().engine().usable());
  WL_RETURN_IF_ERROR(asked.handle->take_unseen());
  Scan wanted;
  const std::string body = Scan::encode(1, weights == nullptr, where);
  const Status parsed = Scan::parse(reinterpret_cast<const std::byte*>(body.data()), body.size(), asked.rows, &wanted);
  if (!parsed.ok()) return Status(parsed.code(), asked.what.text() + ": " + parsed.message());
  while (cursor->shard < asked.shards && keys->size() < most) {
    bool more = false;
    WL_RETURN_IF_ERROR(scan_shard(asked, cursor, most - keys->size(), where, deadline_ns, keys, weights, &more));
    if (!more) *cursor = {cursor->shard + 1, 0};
  }
  return {};
}

}  // namespace windlass
