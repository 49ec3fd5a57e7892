#include "server/object/user_code.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/os.h"

namespace windlass {
namespace {

constexpr size_t kSpareMax = 4;
constexpr size_t kSpareBytesMax = size_t{64} << 20;
constexpr size_t kLine = 64;
constexpr int64_t kFindNs = 60'000'000'000;

// A time of os::now_ns() for condition variables.
template <class Predicate>
bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, int64_t deadline_ns,
                Predicate done) {
  while (!done()) {
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    changed.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left, 1'000'000'000)));
  }
  return true;
}

size_t lines(uint64_t numbers) { return (numbers * sizeof(float) + kLine - 1) / kLine * kLine; }

}  // namespace

// A rule that was found, by its number.
class FoundRule final : public ForeignRule {
 public:
  FoundRule(std::shared_ptr<UserCode> code, std::string what, uint64_t function)
      : code_(std::move(code)), what_(std::move(what)), function_(function) {}

  Status apply(const Size& size, const std::function<void(ForeignCall&)>& fill,
               const std::function<void(const ForeignCall&)>& take) override {
    UserCode::Ref call = code_->take_call();
    call->kind = UserCode::Call::kApply;
    call->what = what_;
    call->function = function_;
    call->size = size;
    WL_RETURN_IF_ERROR(lay_out(size, call.get()));
    fill(call->arrays);
    WL_RETURN_IF_ERROR(code_->run(call));
    take(call->arrays);
    code_->give_call(std::move(call));
    return {};
  }

 private:
  Status lay_out(const Size& size, UserCode::Call* call) const {
    const uint64_t rows = size.elements / size.row;
    const size_t each = lines(size.elements) + kLine;  // a line more, to vary the arrays' page offsets
    const size_t row_bytes = lines(rows * size.row_scalars), shard_bytes = lines(size.shard_scalars);
    const size_t bytes = each * (2u + size.vectors) + row_bytes + shard_bytes + lines(rows);
    std::byte* at = call->memory.room(bytes);
    if (at == nullptr)
      return Status(Code::kResourceExhausted,
                    what_ + ": no memory for the " + std::to_string(bytes) + " bytes that its rule works on");
    const auto next = [&](size_t n) {
      auto* const here = reinterpret_cast<float*>(at);
      at += n;
      return here;
    };
    ForeignCall& a = call->arrays;
    a = {};
    a.w = next(each);
    a.g = next(each);
    for (int v = 0; v < size.vectors; ++v) a.state[v] = next(each);
    a.row_scalars = next(row_bytes);
    a.shard_scalars = next(shard_bytes);
    a.counts = reinterpret_cast<uint32_t*>(next(lines(rows)));
    return {};
  }

  const std::shared_ptr<UserCode> code_;
  const std::string what_;
  const uint64_t function_;
};

Status UserCode::find(const std::string& what, const RuleSpec& rule, std::shared_ptr<ForeignRule>* out) {
  const auto call = std::make_shared<Call>();
  call->kind = Call::kFind;
  call->text = rule.foreign.name;
  call->foreign = rule.foreign;
  call->what = what;
  WL_RETURN_IF_ERROR(run(call));
  *out = std::make_shared<FoundRule>(shared_from_this(), what, call->function);
  return {};
}

// Reuses a call if it can, since fresh memory costs more than most functions do; but only one that nobody else holds:
// its thread lets go of it a moment after its end, and somebody may have kept one of its arrays.
UserCode::Ref UserCode::take_call() {
  std::lock_guard lock(mutex_);
  const auto free = std::find_if(spare_.begin(), spare_.end(), [](const Ref& call) { return call.use_count() == 1; });
  if (free == spare_.end()) return std::make_shared<Call>();
  std::atomic_thread_fence(std::memory_order_acquire);  // after everything the other holders did to it
  Ref call = std::move(*free);
  spare_.erase(free);
  call->state_ = Call::kWaiting;
  call->status_ = {};
  return call;
}

void UserCode::give_call(Ref call) {
  if (call->memory.bytes() > kSpareBytesMax) return;
  std::lock_guard lock(mutex_);
  if (spare_.size() == kSpareMax) spare_.erase(spare_.begin());
  spare_.push_back(std::move(call));
}

Status UserCode::run(const Ref& call) {
  Status status;
  let_go([&] { status = wait_for(call); });
  return status;
}

Status UserCode::wait_for(const Ref& call) {
  // Finding a rule may take longer: no shard waits for it.
  const int64_t limit = call->kind == Call::kFind ? std::max(limit_ns_, kFindNs) : limit_ns_;
  const int64_t deadline = os::now_ns() + limit;
  std::unique_lock lock(mutex_);
  if (closed_) return Status(Code::kClosed, call->what + ": functions of the user's are no longer run here");
  calls_.push_back(call);
  came_.notify_one();
  const bool over = wait_until(ended_, lock, deadline, [&] { return call->state_ == Call::kDone || closed_; });
  if (call->state_ == Call::kDone) return call->status_;
  if (over) {
    call->given_up = true;
    return Status(Code::kClosed, call->what + ": its function was still running; nothing was changed");
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(limit) / 1e9);
  if (call->state_ == Call::kWaiting) {
    std::erase(calls_, call);
    return Status(Code::kFunctionFailed, call->what + ": its function was not called within " + seconds +
                                             " s, others took too long; nothing was changed");
  }
  call->given_up = true;
  ++given_up_;
  stuck_.notify_all();
  return Status(Code::kFunctionFailed,
                call->what + ": its function took longer than " + seconds +
                    " s and was given up; nothing was changed (the server's setting is function_seconds)");
}

UserCode::Ref UserCode::next(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  if (!wait_until(came_, lock, deadline_ns, [&] { return closed_ || !calls_.empty(); }) || closed_) return nullptr;
  Ref call = std::move(calls_.front());
  calls_.pop_front();
  call->state_ = Call::kRunning;
  return call;
}

void UserCode::end(const Ref& call, Status status) {
  std::lock_guard lock(mutex_);
  if (call->state_ == Call::kDone) return;
  call->state_ = Call::kDone;
  call->status_ = std::move(status);
  ended_.notify_all();
}

bool UserCode::wait_given_up(int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  wait_until(stuck_, lock, deadline_ns, [&] { return closed_ || given_up_ != noticed_; });
  const bool any = given_up_ != noticed_;
  noticed_ = given_up_;
  return any;
}

bool UserCode::closed() {
  std::lock_guard lock(mutex_);
  return closed_;
}

void UserCode::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (const Ref& call : calls_) {
    call->state_ = Call::kDone;
    call->status_ = Status(Code::kClosed, call->what + ": functions of the user's are no longer run here");
  }
  calls_.clear();
  came_.notify_all();
  ended_.notify_all();
  stuck_.notify_all();
}

}  // namespace windlass
