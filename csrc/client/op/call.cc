#include "client/op/call.h"

#include <algorithm>
#include <utility>

#include "tensor/tensor.h"

namespace windlass {

Status check_array(const What& what, const char* role, const Array& array, const uint64_t* shape, size_t dims,
                   Dtype stored) {
  bool same = array.dims == dims;
  for (size_t i = 0; same && i < dims; ++i) same = array.shape[i] == shape[i];
  const bool fits = may_travel(array.dtype, stored);
  if (same && fits) return {};
  const std::string wanted = "shape " + describe_shape(shape, dims),
                    seen = "shape " + describe_shape(array.shape, array.dims);
  // What a caller gave as another dtype was converted: only its shape is to blame.
  if (fits) return Status(Code::kShapeMismatch, what.text(role) + ": expected " + wanted + ", saw " + seen);
  const std::string expected = stored == Dtype::kFloat32 ? "float32, bfloat16 or float16" : name_of(stored);
  return Status(Code::kShapeMismatch, what.text(role) + ": expected " + expected + " of " + wanted + ", saw " +
                                          name_of(array.dtype) + " of " + seen);
}

// Servers refuse it, too. Asked here a reader learns it at once, and nothing travels.
Status Call::allowed() const {
  if (!session_->reads() || !batch_.op->changes()) return {};
  return Status(Code::kAccessDenied, what() + kOnlyReads);
}

Status Call::start(const Array* in, const Array* out, How how, int64_t deadline_ns) {
  Engine& engine = session_->engine();
  WL_RETURN_IF_ERROR(allowed());
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
  if (how == How::kFuture && ordinary_ && !waits_for_update()) {  // else room could depend on the caller's next call
    if (!engine.reserve_kept(bytes_ + kept_besides(), deadline_ns)) {
      engine.arena().end(lent_, n_lent_);
      engine.leave();
      return Status(Code::kTimeout, what() + ": not begun; " + std::to_string(limits::kKeptBytesMax) +
                                        " bytes of earlier pushes wait for busy shards");
    }
    kept_bytes_ = bytes_ + kept_besides();
  }
  Status launched = remote_ ? launch_remote(how, deadline_ns) : launch_local(how, deadline_ns);
  if (!launched.ok()) {
    engine.arena().end(lent_, n_lent_);
    release_kept();
    engine.leave();
  }
  return launched;
}

void Call::aim(wire::Op op, ServedObject* object, const std::shared_ptr<Owners>& owners,
               const std::vector<uint32_t>& shards) {
  batch_.op = traits_of(op);
  shards_ = &shards;
  owners_ = owners;
  if (owners_ != nullptr) {
    remote_.emplace(session_->engine().links(), *this, *this);
    return;
  }
  batch_.caller.number = session_->number();
  batch_.caller.incarnation = session_->incarnation();
  batch_.caller.reads = session_->reads();
  local_.set(object, &shards);
}

Status Call::plan(Arena::Segments* known, RemoteRoute::Plan* plan) {
  plan->op = batch_.op->op;
  plan->object = owners_->object();
  plan->dtype_in = batch_.in_dtype;
  plan->dtype_out = batch_.out_dtype;
  plan->bytes = bytes_;
  plan->hyper = batch_.op->contributes ? &batch_.hyper : nullptr;
  plan->patient = waits_for_close();
  WL_RETURN_IF_ERROR(add_to_plan(known, plan));
  places_ = plan->places;
  return {};
}

void Call::number(uint32_t part, Trip::Part* to) {
  uint64_t& sent = progress_->sent[(*shards_)[part]];
  to->sequence = batch_.op->numbered ? ++sent : sent;
  to->clock = clock_of(part);
}

Status Call::launch_remote(How how, int64_t deadline_ns) {
  RemoteRoute::Plan plan;
  WL_RETURN_IF_ERROR(this->plan(nullptr, &plan));
  plan.deadline_ns = deadline_ns;
  remote_->make_trips(plan, *owners_, *shards_);
  WL_RETURN_IF_ERROR(remote_->reserve(what(), deadline_ns));
  if (how == How::kFuture && pushes() && ordinary_) keep_input(false);
  expect(remote_->trips());
  {
    std::lock_guard lock(session_->order_mutex());
    if (pushes()) unsettled_.emplace(*session_);
    begin_iteration();
    if (waits_for_update()) RemoteRoute::write_weights(batch_, remote_->common());
    remote_->number([this](Trip::Part* part) { number(part->part, part); });
    if (batch_.op->contributes && remote_->trips() != 0) remote_->tell_clock(*session_, clock_of(0));
    remote_->submit();
  }
  remote_->set_off(how);
  return {};
}

Status Call::launch_local(How how, int64_t deadline_ns) {
  Server& server = session_->engine().server();
  const bool stays = waits_for_update() && !ordinary_;  // registered: the update may use them in place
  const bool copies = waits_for_update() && ordinary_ && how == How::kFuture;
  batch_.caller.rank = session_->rank_at_gates();
  if (waits_for_update() && ordinary_) WL_RETURN_IF_ERROR(stage(deadline_ns));
  if (pushes()) unsettled_.emplace(*session_);
  begin_iteration();
  admitted();
  if (copies) local_.keep_all();
  if (stays || copies) batch_.arrays.memory = kept_alive();
  const bool large = is_large() && !is_alone();
  Crew* helpers = large && server.threads() > 1 ? &server.crew() : nullptr;
  const Ref<Call> self(this);
  if (how == How::kWait || copies || (!ordinary_ && bytes_ < limits::kAsyncBytesMin)) {
    local_.begin(helpers);
  } else if (!ordinary_) {
    local_.begin_later(&server.crew(), server.threads() > 1);
  } else {
    local_.begin_kept(helpers);
  }
  return {};
}

// Charges the staging quota for copies that stay until the update is made. The request begins only afterwards: a caller
// that gives up here has pushed nothing. The lowest rank that has not closed the oldest iteration never waits, since
// others may wait for it.
Status Call::stage(int64_t deadline_ns) {
  Engine& engine = session_->engine();
  StagingQuota& staging = engine.server().staging();
  for (;;) {
    const uint32_t seen = staging.changes();
    if (staging.charge(bytes_)) break;
    View::Worker blocker;
    if (local_.is_next(session_->clock(), &blocker)) {
      staging.force(bytes_);
      break;
    }
    WL_RETURN_IF_ERROR(engine.usable());
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) {
      return Status(Code::kTimeout, what() + ": not begun; " + std::to_string(staging.used()) +
                                        " bytes of pushes wait for their update, which waits " + waits_for(blocker));
    }
    staging.wait(seen, std::min<int64_t>(left, 100'000'000));
  }
  staged_bytes_ = bytes_;
  batch_.staged = true;
  return {};
}

Status Call::finish(int64_t deadline_ns) {
  Status status = wait(deadline_ns);
  if (status.code() != Code::kTimeout) return status;
  const std::string at = where();  // while it still waits there
  drop();
  if (ordinary_) answers_ = false;
  const uint64_t copied = bytes_ + kept_besides();
  const bool has_room = pushes() && ordinary_ && session_->engine().reserve_kept(copied, 0);
  if (has_room) kept_bytes_ = copied;
  if (has_room && (bits_ & kFinished) != 0) release_kept();  // finished() has run already
  if (!has_room && ordinary_ && pushes() && remote_) {
    // No room for copies: take back what has not begun instead.
    bool any = false;
    if (take_back(&any)) {
      uncount();
      return Status(Code::kTimeout, what() + ": not done in time" + at + "; not begun, and taken back");
    }
  }
  const bool goes_on = pushes() && (!ordinary_ || has_room || remote_);
  if (ordinary_ && goes_on) {
    let_go();
  } else if (ordinary_) {
    cancel();
  } else if (!pushes()) {
    give_way();
  }
  return Status(Code::kTimeout, what() + ": not done in time" + at +
                                    (goes_on    ? batch_.op->contributes ? "; the push goes on" : "; it goes on"
                                     : pushes() ? "; shards that were busy never got it"
                                                : ""));
}

Status Call::wait(int64_t deadline_ns) {
  if (session_->engine().forked()) return session_->usable();
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

// Waits, and reports for whom if that takes long. The waiting thread reports itself, so no other thread is needed.
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
    // Another thread of this worker may have reported it, or the gate may just have opened.
    if (since != 0 && now >= next && told_ns.compare_exchange_strong(told, now, std::memory_order_acq_rel)) {
      if (const std::string at = stuck(); !at.empty())
        overdue.say(what() + " has waited for " + std::to_string((now - since) / 1'000'000'000) + " s: " + at);
    }
    if (now >= deadline_ns) return false;
  }
}

// Keeps the worst of what was seen at its shards.
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
  waited_ns_.store(ns, std::memory_order_relaxed);
  seen_.rank = rank;
}

void Call::note_answer(const PartAnswer& answer, uint64_t asked, const Sync& sync) {
  note_seen(asked, answer.clock);
  if (answer.waited.ns != 0) note_wait(static_cast<int64_t>(answer.waited.ns), answer.waited.rank);
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
  if (remote_) return done() || remote_->wait(deadline_ns);
  if (!done()) local_.help();
  return Future::wait_until(deadline_ns);
}

Seen Call::seen() {
  std::lock_guard lock(seen_mutex_);
  Seen seen = seen_;
  if (const uint64_t fresh = fresh_.load(std::memory_order_relaxed); !has_seen_ && fresh != Gate::kNone)
    seen.asked = seen.clock = fresh;
  return seen;
}

// A server's message names the shard; adds the request, and which shards it was not applied to.
Status Call::named(const Status& s) {
  if (s.ok()) return s;
  std::vector<Refused> refused;
  list_refused(0, &refused);
  const bool is_named = s.message().compare(0, what().size(), what()) == 0;
  if (is_named && refused.empty()) return s;
  std::string text = is_named ? s.message() : what() + ": " + s.message();
  if (!refused.empty() && refused[0].shards.size() < shards_->size())
    text += "; not applied to " + std::to_string(refused[0].shards.size()) + " of " + std::to_string(shards_->size()) +
            " shards, which the error lists as not_applied";
  return Status(s.code(), std::move(text), std::move(refused));
}

bool Call::refused(uint32_t part, Code code) {
  if (code == Code::kDeleted) {
    progress_->deleted = true;
    if (batch_.op->closes) return true;
  }
  if (!batch_.op->contributes || code == Code::kBufferInUse) return false;
  std::lock_guard lock(seen_mutex_);
  refused_.push_back(part);
  return false;
}

void Call::refuse_all() {
  for (uint32_t part = 0; part < shards_->size(); ++part) refused(part, Code::kCancelled);
}

void Call::list_refused(uint32_t request, std::vector<Refused>* to) {
  std::vector<uint32_t> parts;
  {
    std::lock_guard lock(seen_mutex_);
    parts = refused_;
  }
  if (parts.empty()) return;
  std::sort(parts.begin(), parts.end());
  Refused& refused = to->emplace_back();
  refused.object = what_.name;
  refused.request = request;
  for (const uint32_t part : parts) {
    refused.shards.push_back((*shards_)[part]);
    describe_refused(part, &refused);
  }
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

bool Call::take_back(bool* any) {
  if (!remote_) return local_.cancel_queued(any);
  if (batch_.op->contributes) return remote_->take_back(any);
  return !pushes() && withdraw(false, any);
}

bool Call::withdraw(bool begun, bool* any) {
  return remote_->withdraw(begun, Status(Code::kCancelled, what() + ": cancelled"), any);
}

void Call::cancel() {
  if (!remote_) return local_.cancel();
  if (pushes()) return keep_input(true);
  // A server that was told where the output is may still write there.
  bool any = false;
  (void)withdraw(places_ == nullptr, &any);
  remote_->move_out(nullptr, 0, nullptr, [] {});
}

void Call::let_go() { remote_ ? keep_input(true) : local_.let_go(); }

// A request that only reads is late: withdraws what was not sent. A request into registered arrays keeps what was sent
// until its answer comes.
void Call::give_way() {
  bool any = false;
  if (remote_) (void)withdraw(n_lent_ == 0, &any);
}

void Call::mark(Bit bit, uint8_t other) {
  const uint8_t before = bits_.fetch_or(bit);
  if ((before & other) == 0 || (before & kSeen) != 0) return;
  if (Status s = status(); !s.ok() && s.code() != Code::kCancelled) progress_->unseen.add(named(s));
}

void Call::drop() { mark(kDropped, kFinished); }

void Call::finished() {
  Engine& engine = session_->engine();
  unsettled_.reset();
  engine.arena().end(lent_, n_lent_);
  batch_.arrays.memory.reset();  // a reference to this call
  if (status().ok()) count_pull();
  mark(kFinished, kDropped);
  release_kept();
  if (staged_bytes_ != 0) engine.server().staging().refund(staged_bytes_);
}

void Call::count_pull() {
  if (batch_.op->returns) session_->count_pull(waited_ns_.load(std::memory_order_relaxed));
}

void Call::release_kept() {
  if (const uint64_t bytes = kept_bytes_.exchange(0); bytes != 0) session_->engine().release_kept(bytes);
}

void Call::over() { session_->engine().leave(); }

}  // namespace windlass
