#include "client/call.h"

#include <algorithm>
#include <utility>

#include "tensor/tensor.h"

namespace windlass {

Status check_array(const What& what, const char* role, const Array& array, const uint64_t* shape, size_t dims,
                   Dtype stored) {
  bool same = array.dims == dims;
  for (size_t i = 0; same && i < dims; ++i) same = array.shape[i] == shape[i];
  if (same && may_travel(array.dtype, stored)) return {};
  std::string expected = stored == Dtype::kFloat32 ? "float32, bfloat16 or float16" : name_of(stored);
  return Status(Code::kShapeMismatch, what.text(role) + ": expected " + expected + " of shape " +
                                          describe_shape(shape, dims) + ", saw " + name_of(array.dtype) + " of shape " +
                                          describe_shape(array.shape, array.dims));
}

Status Call::start(const Array* in, const Array* out, How how, int64_t deadline_ns) {
  Engine& engine = session_->engine();
  WL_RETURN_IF_ERROR(engine.enter());
  for (const Array* array : {in, out}) {
    if (array == nullptr || array->bytes() == 0) continue;
    lent_[n_lent_++] = array->range();
    bytes_ = std::max(bytes_, array->bytes());
  }
  if (n_lent_ != 0) {
    Status lent = engine.arena().lend(lent_, n_lent_, "", &ordinary_);
    if (!lent.ok()) {
      engine.leave();
      return Status(lent.code(), what() + lent.message());
    }
  }
  if (how == How::kFuture && ordinary_ && !waits_for_update()) {  // it would wait for what its caller does later
    if (!engine.reserve_kept(bytes_ + kept_besides(), deadline_ns)) {
      engine.arena().end(lent_, n_lent_);
      engine.leave();
      return Status(Code::kTimeout, what() + ": not begun; " + std::to_string(limits::kKeptBytesMax) +
                                        " bytes of earlier pushes wait for busy shards");
    }
    kept_bytes_ = bytes_ + kept_besides();
  }
  Status launched = launch(how, deadline_ns);
  if (!launched.ok()) {
    engine.arena().end(lent_, n_lent_);
    release_kept();
    engine.leave();
  }
  return launched;
}

void Call::go_near(wire::Op op, ServedObject& object, const std::vector<uint32_t>& shards) {
  batch_.op = traits_of(op);
  batch_.caller.number = session_->number();
  batch_.caller.incarnation = session_->incarnation();
  near_.set(&object, &shards);
}

void Call::set_batch(const Arrays& arrays, const Hyper& hyper, const Iteration& iteration) {
  batch_.hyper = hyper;
  batch_.in_dtype = arrays.in_dtype;
  batch_.out_dtype = arrays.out_dtype;
  batch_.streams = arrays.stream;
  batch_.in_place = true;
  batch_.weight = iteration.weight;
  batch_.object_weight = iteration.object_weight;
  batch_.other_weight = iteration.other_weight;
}

Status Call::launch(How how, int64_t deadline_ns) {
  Server& server = session_->engine().server();
  const bool stays = waits_for_update() && !ordinary_;  // registered: the update may use them where they are
  const bool copies = waits_for_update() && ordinary_ && how == How::kFuture;
  if (copies) WL_RETURN_IF_ERROR(stage(deadline_ns));
  batch_.caller.rank = session_->rank_at_gates();
  admitted();
  if (copies) near_.keep_all();
  if (stays || copies) batch_.arrays.memory = kept_alive();
  const bool large = is_large() && !is_alone();
  Crew* helpers = large && server.threads() > 1 ? &server.crew() : nullptr;
  const Ref<Call> self(this);
  if (how == How::kWait || copies || (!ordinary_ && bytes_ < limits::kAsyncBytesMin)) {
    near_.begin(helpers);
  } else if (!ordinary_) {
    near_.begin_later(&server.crew(), server.threads() > 1);
  } else {
    near_.begin_kept(helpers);
  }
  return {};
}

// Room for a copy of what waits for its update after the caller has gone on. The lowest rank never waits for it: the
// others' pushes may be waiting for its.
Status Call::stage(int64_t deadline_ns) {
  StagingQuota& staging = session_->engine().server().staging();
  for (;;) {
    const uint32_t seen = staging.changes();
    if (staging.charge(bytes_)) break;
    View::Worker blocker;
    if (near_.is_next(&blocker)) {
      staging.force(bytes_);
      break;
    }
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) {
      return Status(Code::kTimeout, what() + ": not begun; " + std::to_string(staging.used()) +
                                        " bytes of pushes wait for their update, which waits " + waits_for(blocker));
    }
    staging.wait(seen, std::min<int64_t>(left, 100'000'000));
  }
  staged_bytes_ = bytes_;
  return {};
}

Status Call::finish(int64_t deadline_ns) {
  Status status = wait(deadline_ns);
  if (status.code() != Code::kTimeout) return status;
  drop();
  if (ordinary_) answers_ = false;
  const uint64_t copied = bytes_ + kept_besides();
  const bool has_room = pushes() && ordinary_ && session_->engine().reserve_kept(copied, 0);
  if (has_room) kept_bytes_ = copied;
  if (has_room && (bits_ & kFinished) != 0) release_kept();  // too late for finished() to do it
  if (!has_room && ordinary_ && pushes() && always_goes_on()) {
    // Copies are limited. What has not been begun is taken back rather than copied.
    bool any = false;
    if (take_back(&any)) {
      uncount();
      return Status(Code::kTimeout, what() + ": not done in time" + where() + "; not begun, and taken back");
    }
  }
  const bool goes_on = pushes() && (!ordinary_ || has_room || always_goes_on());
  if (ordinary_ && goes_on) {
    let_go();
  } else if (ordinary_) {
    cancel();
  } else if (!pushes()) {
    give_way();
  }
  return Status(Code::kTimeout, what() + ": not done in time" + where() +
                                    (goes_on    ? "; the push goes on"
                                     : pushes() ? "; shards that were busy never got it"
                                                : ""));
}

Status Call::wait(int64_t deadline_ns) {
  if (session_->engine().forked()) return session_->engine().usable();
  if (!done() && would_deadlock()) {
    return Status(Code::kWouldDeadlock, what() +
                                            ": under BSP it is applied when every worker has closed the iteration, " +
                                            "and this one has not; call tick() first");
  }
  if (!wait_and_tell(deadline_ns))
    return Status(Code::kTimeout, what() + ": not done in time" + where() + "; it goes on and can be waited for again");
  bits_.fetch_or(kSeen, std::memory_order_acq_rel);
  return named(status());
}

// Waits, and says for whom where that lasts. Whoever waits has a thread: no other is needed, and none while nobody
// does.
bool Call::wait_and_tell(int64_t deadline_ns) {
  const Engine::Overdue& overdue = session_->engine().overdue();
  if (overdue.say == nullptr) return wait_until(deadline_ns);
  std::atomic<int64_t>& told_ns = session_->told_ns();
  for (;;) {
    const int64_t since = gated_ns_.load(std::memory_order_acquire);
    int64_t told = told_ns.load(std::memory_order_acquire);
    const int64_t next = (since != 0 ? std::max(since, told) : os::now_ns()) + overdue.every_ns;
    if (wait_until(std::min(deadline_ns, next))) return true;
    const int64_t now = os::now_ns();
    // Another thread of this worker may have said it; and the gate may have opened at this moment.
    if (since != 0 && now >= next && told_ns.compare_exchange_strong(told, now, std::memory_order_acq_rel)) {
      if (const std::string at = stuck(); !at.empty())
        overdue.say(what() + " has waited for " + std::to_string((now - since) / 1'000'000'000) + " s: " + at);
    }
    if (now >= deadline_ns) return false;
  }
}

// The worst of what was seen at its shards.
void Call::note_seen(uint64_t asked, uint64_t clock) {
  if (clock >= asked) return fresh_.store(asked, std::memory_order_relaxed);
  std::lock_guard lock(seen_mutex_);
  if (has_seen_ && clock >= seen_.clock) return;
  seen_.asked = asked;
  seen_.clock = clock;
  has_seen_ = true;
}

void Call::note_wait(int64_t ns, uint32_t rank) {
  std::lock_guard lock(seen_mutex_);
  if (ns <= seen_.waited_ns) return;
  seen_.waited_ns = ns;
  seen_.rank = rank;
}

void Call::note_answer(const wire::Part& answer, const std::string& items, uint64_t asked, const Sync& sync) {
  note_seen(asked, answer.clock);
  wire::Reader reader(items);
  if (reader.left() >= sizeof(uint64_t) + sizeof(uint32_t)) {
    const auto ns = static_cast<int64_t>(reader.get<uint64_t>());
    note_wait(ns, reader.get<uint32_t>());
  }
  if (sync.may_drop()) session_->catch_up(answer.clock);
}

std::shared_ptr<const void> Call::kept_alive() {
  return {new Ref<Call>(this), [](const void* p) { delete static_cast<const Ref<Call>*>(p); }};
}

void Call::stopped() {
  int64_t never = 0;
  gated_ns_.compare_exchange_strong(never, os::now_ns(), std::memory_order_acq_rel);
}

bool Call::wait_until(int64_t deadline_ns) {
  if (!done()) near_.help();
  return Future::wait_until(deadline_ns);
}

Seen Call::seen() {
  std::lock_guard lock(seen_mutex_);
  Seen seen = seen_;
  if (const uint64_t fresh = fresh_.load(std::memory_order_relaxed); !has_seen_ && fresh != Gate::kNone)
    seen.asked = seen.clock = fresh;
  return seen;
}

// What a server says names the shard; the request is ours to name.
Status Call::named(const Status& s) const {
  if (s.ok() || s.message().compare(0, what().size(), what()) == 0) return s;
  return Status(s.code(), what() + ": " + s.message());
}

std::string Call::where() {
  const std::string at = stuck();
  return at.empty() ? at : "; " + at;
}

bool Call::take_back() {
  if (!stay_open()) return taken_back_;
  bool any = false;
  const bool all = take_back(&any);
  if (all && !taken_back_.exchange(true)) uncount();
  end(any ? Status(Code::kCancelled, what() + ": cancelled") : Status());
  return taken_back_;
}

bool Call::take_back(bool* any) { return near_.cancel_queued(any); }

void Call::mark(Bit bit, uint8_t other) {
  const uint8_t before = bits_.fetch_or(bit);
  if ((before & other) == 0 || (before & kSeen) != 0) return;
  if (Status s = status(); !s.ok() && s.code() != Code::kCancelled) progress_->unseen.add(named(s));
}

void Call::drop() { mark(kDropped, kFinished); }

void Call::finished() {
  Engine& engine = session_->engine();
  engine.arena().end(lent_, n_lent_);
  batch_.arrays.memory.reset();  // which is this call itself
  mark(kFinished, kDropped);
  release_kept();
}

void Call::release_kept() {
  if (staged_bytes_ != 0) session_->engine().server().staging().refund(std::exchange(staged_bytes_, 0));
  if (const uint64_t bytes = kept_bytes_.exchange(0); bytes != 0) session_->engine().release_kept(bytes);
}

void Call::over() { session_->engine().leave(); }

}  // namespace windlass
