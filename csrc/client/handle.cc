#include "client/handle.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "client/remote.h"

namespace windlass {
namespace {

// A question to shards inside the process. All it needs is its own: nobody waits for it after its time.
class NearQuestion final : public Call {
 public:
  NearQuestion(std::shared_ptr<Session> session, std::shared_ptr<Progress> progress,
               std::shared_ptr<ServedObject> object, const What& what, wire::Op op, std::vector<uint32_t> shards,
               uint64_t value, std::string body)
      : Call(std::move(session), std::move(progress), what),
        alive_(std::move(object)),
        shards_(std::move(shards)),
        value_(value),
        body_(std::move(body)),
        answers(shards_.size()) {
    go_near(op, *alive_, shards_);
  }
  void fill(uint32_t part, bool, Entry* entry) override {
    entry->value = value_;
    entry->body = reinterpret_cast<const std::byte*>(body_.data());
    entry->body_bytes = static_cast<uint32_t>(body_.size());
    uint64_t out_bytes = 0;
    answers[part].wrong = near_.object().check(batch(), entry, &out_bytes);
    answers[part].numbers.resize(out_bytes);
    entry->out = answers[part].numbers.data();
  }
  Status checked(uint32_t part) override { return answers[part].wrong; }
  bool is_large() const override { return shards_.size() > 1; }  // all that its shards have
  Status landed(uint32_t part, Outcome* outcome) override {
    Handle::Answer& answer = answers[part];
    answer.value = outcome->value;
    answer.flags = outcome->flags;
    answer.body = std::move(outcome->body);
    answer.numbers.resize(outcome->numbers_bytes);
    answer.call = std::move(outcome->call);
    return outcome->status;
  }

 private:
  const std::shared_ptr<ServedObject> alive_;
  const std::vector<uint32_t> shards_;
  const uint64_t value_;
  const std::string body_;

 public:
  std::vector<Handle::Answer> answers;
};

}  // namespace

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

Status settle_near(const std::shared_ptr<Session>& session, const std::shared_ptr<Progress>& progress,
                   int64_t deadline_ns) {
  std::vector<uint32_t> shards(progress->closed.size());
  std::iota(shards.begin(), shards.end(), 0);
  const What what{"settle", "object", progress->object->spec().name};
  const Ref<NearQuestion> call(
      new NearQuestion(session, progress, progress->object, what, wire::Op::kSettle, std::move(shards), 0, ""));
  WL_RETURN_IF_ERROR(call->start(nullptr, nullptr, How::kWait));
  return call->finish(deadline_ns);
}

Status Handle::ask_shards(const What& what, wire::Op op, const std::vector<uint32_t>& shards, uint64_t value,
                          const std::string& body, int64_t deadline_ns, std::vector<Answer>* answers) {
  WL_RETURN_IF_ERROR(session_->engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  if (remote()) {
    const Ref<Exchange> exchange(new Exchange(links()));
    WL_RETURN_IF_ERROR(exchange->ask_shards(op, owners_, shards, sent(), value, body, what.text(), deadline_ns));
    answers->clear();
    for (Exchange::Answer& a : exchange->answers)
      answers->push_back({a.part.value, a.part.flags, std::move(a.items), std::move(a.numbers), nullptr});
    return {};
  }
  const Ref<NearQuestion> call(new NearQuestion(session_, progress_, object_, what, op, shards, value, body));
  WL_RETURN_IF_ERROR(call->start(nullptr, nullptr, How::kWait));
  WL_RETURN_IF_ERROR(call->finish(deadline_ns));
  *answers = std::move(call->answers);
  return {};
}

void Handle::set_object(const Sync& sync, std::shared_ptr<ServedObject> object) {
  sync_ = sync;
  object_ = object;
  std::lock_guard lock(session_->clock_mutex());
  if (std::exchange(progress_->opened, true)) return;  // others may be at work on it
  progress_->sync = sync;
  progress_->object = std::move(object);
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
  std::vector<uint32_t> shards(progress_->closed.size());
  std::iota(shards.begin(), shards.end(), 0);
  std::vector<Answer> answers;
  WL_RETURN_IF_ERROR(ask_shards(what, op, shards, 0, "", deadline_ns, &answers));
  *out = 0;
  for (const Answer& answer : answers) *out += answer.value;
  return {};
}

}  // namespace windlass
