#include "client/op/query.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>

namespace windlass {
namespace {

class QueryCall final : public Call {
 public:
  QueryCall(const Asked& asked, Query query, const std::string& bytes)
      : Call(asked.handle->shared_session(), asked.handle->progress(), asked.what),
        asked_of_(asked),
        bytes_(bytes),
        query_(std::move(query)),
        shards_(asked.shards),
        tally_(query_) {
    std::iota(shards_.begin(), shards_.end(), 0);
    aim(wire::Op::kQuery, asked.handle->shared_object().get(), asked.handle->owners(), shards_);
  }
  std::string take() {  // after it is done
    std::lock_guard lock(mutex_);
    return tally_.take();
  }

  Status fill(uint32_t part, bool, Entry* entry) override {
    entry->clock = clock_of(part);
    entry->body = reinterpret_cast<const std::byte*>(bytes_.data());
    entry->body_bytes = static_cast<uint32_t>(bytes_.size());
    return {};
  }
  Status landed(uint32_t, Outcome* outcome) override {
    WL_RETURN_IF_ERROR(outcome->status);
    return merge(outcome->body);
  }

  void describe(uint32_t, bool, Parcel* to) override {
    to->argument_bytes = static_cast<uint32_t>(bytes_.size());
    to->same_argument = true;
    to->work_bytes = limits::kCrewBytesMin;  // it may read the whole shard
  }
  void write_argument(uint32_t, std::byte* to) override { std::memcpy(to, bytes_.data(), bytes_.size()); }
  Status land(uint32_t, bool, const PartAnswer& answer, const std::byte*) override { return merge(answer.body); }

  // A query asks for the present clock, or for the one that its worker has closed at the shard.
  void begin_iteration() override {
    clock_ = session().clock();
    closed_ = asked_of_.handle->closed_beyond(shards_, clock_);
  }

 protected:
  bool is_large() const override { return true; }
  uint64_t clock_of(uint32_t part) const override { return closed_.empty() ? clock_ : std::max(clock_, closed_[part]); }
  Status add_to_plan(Arena::Segments*, RemoteRoute::Plan* plan) override {
    plan->bytes = query_.counts_all() ? 0 : limits::kBulkBytesMin;  // on the bulk lane: small requests do not wait
    return {};
  }

 private:
  Status merge(const std::string& answer) {
    std::lock_guard lock(mutex_);
    return tally_.merge(answer);
  }

  const Asked asked_of_;
  const std::string bytes_;
  const Query query_;
  std::vector<uint32_t> shards_;  // of each part: all shards

  std::mutex mutex_;  // guards tally_
  Tally tally_;
  uint64_t clock_ = 0;
  std::vector<uint64_t> closed_;
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
  WL_RETURN_IF_ERROR(handle.session().usable());
  WL_RETURN_IF_ERROR(handle.take_unseen());
  Query query;
  const Status parsed =
      Query::parse(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), asked.rows, &query);
  if (!parsed.ok()) return Status(parsed.code(), asked.what.text() + ": " + parsed.message());
  const Ref<QueryCall> call(new QueryCall(asked, std::move(query), bytes));
  WL_RETURN_IF_ERROR(call->start(nullptr, nullptr, How::kWait, deadline_ns));
  const Status status = call->finish(deadline_ns);
  if (status.code() == Code::kTimeout) call->cancel();  // the caller has given up
  WL_RETURN_IF_ERROR(status);
  *answer = call->take();
  return {};
}

namespace {

constexpr uint64_t kKeysAtOnceBytes = uint64_t{16} << 20;

// Scans a shard for one turn.
Status scan_shard(const Asked& asked, ScanCursor* cursor, size_t most, const Scanned& scanned, const std::string& where,
                  int64_t deadline_ns, std::vector<uint64_t>* keys, std::vector<float>* rows, bool* more) {
  Handle& handle = *asked.handle;
  const uint32_t shard = cursor->shard;
  const uint64_t row = scanned.numbers != 0 ? scanned.numbers * sizeof(float) : sizeof(uint64_t);
  const uint64_t wanted = std::min<uint64_t>(most, std::max<uint64_t>(1, kKeysAtOnceBytes / row));
  const std::string body = Scan::encode(wanted, scanned.what, where);
  std::vector<Handle::Answer> answers;
  WL_RETURN_IF_ERROR(
      handle.ask_shards(asked.what, wire::Op::kScan, {shard}, cursor->from, body, deadline_ns, &answers));
  const Handle::Answer& answer = answers[0];
  const size_t n = answer.body.size() / sizeof(uint64_t);
  const uint64_t expected = n * scanned.numbers * sizeof(float);
  const std::string what = asked.what.text();
  if (n > wanted || answer.body.size() % sizeof(uint64_t) != 0 || answer.numbers.size() != expected)
    return Status(Code::kProtocolError, what + ": shard " + std::to_string(shard) + ": keys and rows do not fit");
  const size_t before = keys->size();
  keys->resize(before + n);
  if (n != 0) std::memcpy(keys->data() + before, answer.body.data(), n * sizeof(uint64_t));
  if (expected != 0) {
    const size_t floats = rows->size();
    rows->resize(floats + n * scanned.numbers);
    std::memcpy(rows->data() + floats, answer.numbers.data(), expected);
  }
  *more = (answer.flags & wire::kMore) != 0;
  // A server that makes no progress would be asked for ever.
  if (*more && answer.value <= cursor->from && n == 0)
    return Status(Code::kProtocolError, what + ": shard " + std::to_string(shard) + " makes no progress");
  cursor->from = answer.value;
  return {};
}

}  // namespace

Status scan(const Asked& asked, ScanCursor* cursor, size_t most, const Scanned& scanned, const std::string& where,
            int64_t deadline_ns, std::vector<uint64_t>* keys, std::vector<float>* rows) {
  WL_RETURN_IF_ERROR(asked.handle->session().usable());
  WL_RETURN_IF_ERROR(asked.handle->take_unseen());
  Scan wanted;
  const std::string body = Scan::encode(1, scanned.what, where);
  const Status parsed = Scan::parse(reinterpret_cast<const std::byte*>(body.data()), body.size(), asked.rows, &wanted);
  if (!parsed.ok()) return Status(parsed.code(), asked.what.text() + ": " + parsed.message());
  while (cursor->shard < asked.shards && keys->size() < most) {
    bool more = false;
    WL_RETURN_IF_ERROR(scan_shard(asked, cursor, most - keys->size(), scanned, where, deadline_ns, keys, rows, &more));
    if (!more) *cursor = {cursor->shard + 1, 0};
  }
  return {};
}

}  // namespace windlass
