#include "client/handle.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "client/remote.h"

namespace windlass {
namespace {

class EachShard final : public Call {
 public:
  EachShard(const Handle& handle, const What& what, uint32_t shards, std::function<Turn&(uint32_t)> turn,
            std::function<Status(uint32_t)> visit, std::shared_ptr<void> alive)
      : Call(handle.shared_session(), handle.progress(), what),
        turn_(std::move(turn)),
        visit_(std::move(visit)),
        alive_(std::move(alive)) {
    set_parts(shards);
  }

 protected:
  Turn& turn(uint32_t part) override { return turn_(part); }
  Status run(uint32_t part, bool) override { return visit_(part); }

 private:
  const std::function<Turn&(uint32_t)> turn_;
  const std::function<Status(uint32_t)> visit_;
  const std::shared_ptr<void> alive_;
};

}  // namespace

Status Handle::out_of_sequence(const Call& call, uint32_t index, const Record& record, uint64_t sequence) {
  return Status(Code::kInternal, call.what() + ": shard " + std::to_string(index) + " expected sequence " +
                                     std::to_string(record.sequence + 1) + ", saw " + std::to_string(sequence));
}

Status Handle::outsider(const Call& call) {
  return Status(Code::kInvalidArgument,
                call.what() + ": under BSP only its workers push, and this session is of another world");
}

Status Handle::begin_push(const std::vector<uint32_t>& shards, int64_t deadline_ns, bool alone) {
  {
    std::lock_guard lock(session_->clock_mutex());
    const uint64_t now = session_->clock();
    if (std::none_of(shards.begin(), shards.end(), [&](uint32_t s) { return progress_->closed[s] > now; })) return {};
  }
  return session_->tick(deadline_ns, alone && remote());
}

Iteration Handle::iteration_of_push(const std::vector<uint32_t>& shards, bool closes, double weight) {
  std::lock_guard lock(session_->clock_mutex());
  const uint64_t clock = session_->clock();
  if (closes) {
    for (const uint32_t s : shards) progress_->closed[s] = std::max(progress_->closed[s], clock + 1);
  }
  Progress& p = *progress_;
  const double others = p.weight;
  if (sync_.rounds()) {
    for (const uint32_t s : shards) p.weight = std::max(p.weight, p.weights[s] += weight);
  }
  return {clock, closes, weight, p.weight, others};
}

void Handle::uncount(const std::vector<uint32_t>& shards, const Iteration& iteration) {
  std::lock_guard lock(session_->clock_mutex());
  if (!sync_.rounds() || session_->clock() != iteration.clock) return;
  Progress& p = *progress_;
  for (const uint32_t s : shards) p.weights[s] -= iteration.weight;
  p.weight = p.weights.empty() ? 0 : *std::max_element(p.weights.begin(), p.weights.end());
}

std::vector<uint64_t> Handle::closed_beyond(const std::vector<uint32_t>& shards, uint64_t clock) const {
  if (!sync_.gated()) return {};
  std::vector<uint64_t> closed;
  std::lock_guard lock(session_->clock_mutex());
  const std::vector<uint64_t>& all = progress_->closed;
  if (std::none_of(shards.begin(), shards.end(), [&](uint32_t s) { return all[s] > clock; })) return {};
  for (const uint32_t s : shards) closed.push_back(all[s]);
  return closed;
}

bool Handle::is_open(const std::vector<uint32_t>& shards, uint64_t clock) const {
  std::lock_guard lock(session_->clock_mutex());
  return std::any_of(shards.begin(), shards.end(), [&](uint32_t s) { return progress_->closed[s] <= clock; });
}

Status Handle::each_shard(const What& what, uint32_t shards, const std::function<Turn&(uint32_t)>& turn,
                          const std::function<Status(uint32_t)>& visit, std::shared_ptr<void> alive,
                          int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(session_->engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const Ref<EachShard> call(new EachShard(*this, what, shards, turn, visit, std::move(alive)));
  WL_RETURN_IF_ERROR(call->start(nullptr, nullptr, How::kWait));
  Status status = call->finish(deadline_ns);
  if (status.code() == Code::kTimeout) call->cancel();  // `visit` may refer to the caller's stack
  return status;
}

void Handle::set_object(const Sync& sync, std::shared_ptr<Tensor> tensor, std::shared_ptr<Table> table) {
  sync_ = sync;
  std::lock_guard lock(session_->clock_mutex());
  if (std::exchange(progress_->opened, true)) return;  // others may be at work on it
  progress_->sync = sync;
  progress_->tensor = std::move(tensor);
  progress_->table = std::move(table);
}

void Handle::set_map(const Map& map, uint32_t shards) {
  map_ = map;
  owners_ = links()->owners(map, shards);
  std::lock_guard lock(session_->clock_mutex());
  if (progress_->owners == nullptr) progress_->owners = owners_;
}

std::vector<uint64_t> Handle::sent() {
  std::lock_guard lock(session_->order_mutex());
  return progress_->sent;
}

Status Handle::sum_of_shards(const What& what, wire::Op op, int64_t deadline_ns, uint64_t* out) {
  WL_RETURN_IF_ERROR(session_->engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const std::vector<uint64_t> sent = this->sent();
  std::vector<uint32_t> shards(sent.size());
  std::iota(shards.begin(), shards.end(), 0);
  const Ref<Exchange> exchange(new Exchange(links()));
  WL_RETURN_IF_ERROR(exchange->ask_shards(op, owners_, shards, sent, 0, "", what.text(), deadline_ns));
  *out = 0;
  for (const Exchange::Answer& answer : exchange->answers) *out += answer.part.value;
  return {};
}

}  // namespace windlass
