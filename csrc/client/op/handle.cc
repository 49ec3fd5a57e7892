#include "client/op/handle.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "client/op/finite_check.h"
#include "client/op/question.h"

namespace windlass {

bool Handle::are_finite(Dtype dtype, const void* numbers, uint64_t n) const {
  Engine& engine = session_->engine();
  const bool helped = !remote() && engine.server().threads() > 1;
  return windlass::are_finite(dtype, numbers, n, helped ? &engine.server().crew() : nullptr);
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
    if (shards.empty()) p.empty_weight += weight;
    p.weight = std::max(p.weight, p.empty_weight);
    for (const uint32_t s : shards) p.weight = std::max(p.weight, p.weights[s] += weight);
  }
  return {clock, closes, weight, p.weight, others};
}

void Handle::uncount(const std::vector<uint32_t>& shards, const Iteration& iteration) {
  std::lock_guard lock(session_->clock_mutex());
  if (!sync_.rounds() || session_->clock() != iteration.clock) return;
  Progress& p = *progress_;
  if (shards.empty()) p.empty_weight -= iteration.weight;
  for (const uint32_t s : shards) p.weights[s] -= iteration.weight;
  p.weight = p.empty_weight;
  for (const double at : p.weights) p.weight = std::max(p.weight, at);
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

Status Handle::ask_shards(const What& what, wire::Op op, const std::vector<uint32_t>& shards, uint64_t value,
                          const std::string& body, int64_t deadline_ns, std::vector<Answer>* answers) {
  WL_RETURN_IF_ERROR(session_->usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const Ref<Question> call(new Question(session_, progress_, {object_, owners_}, what, op, shards, value, body));
  WL_RETURN_IF_ERROR(call->ask(deadline_ns));
  *answers = call->take_answers();
  return {};
}

void Handle::set_object(const Sync& sync, std::shared_ptr<ServedObject> object) {
  sync_ = sync;
  object_ = object;
  std::lock_guard lock(session_->clock_mutex());
  if (std::exchange(progress_->opened, true)) return;  // set before; others may be using it
  progress_->sync = sync;
  progress_->object = std::move(object);
}

void Handle::set_map(const Map& map, uint32_t shards) {
  map_ = map;
  owners_ = links()->owners(map, shards);
  std::lock_guard lock(session_->clock_mutex());
  if (progress_->owners == nullptr) progress_->owners = owners_;
}

Status Handle::sum_of_shards(const What& what, wire::Op op, int64_t deadline_ns, uint64_t* out) {
  std::vector<uint32_t> shards(progress_->closed.size());
  std::iota(shards.begin(), shards.end(), 0);
  std::vector<Answer> answers;
  WL_RETURN_IF_ERROR(ask_shards(what, op, shards, 0, "", deadline_ns, &answers));
  *out = 0;
  for (const Answer& answer : answers) *out += answer.value;
  return {};
}

}  // namespace windlass
