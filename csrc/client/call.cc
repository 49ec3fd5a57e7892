#include "client/call.h"

#include <algorithm>

#include "client/local_gate.h"

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

Status Call::launch(How how, int64_t) {
  Engine& engine = session_->engine();
  admitted();
  const bool large = bytes_ >= limits::kCrewBytesMin && !is_alone();
  Crew* helpers = large && engine.server().threads() > 1 ? &engine.server().crew() : nullptr;
  const Ref<Work> self(this);
  if (how == How::kWait || (!ordinary_ && bytes_ < limits::kAsyncBytesMin)) {
    begin(helpers);
  } else if (!ordinary_) {
    begin_later(&engine.server().crew(), engine.server().threads() > 1);
  } else {
    begin_kept(helpers);
  }
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
  return {new Ref<Work>(this), [](const void* p) { delete static_cast<const Ref<Work>*>(p); }};
}

bool Call::stop_at_gate(uint32_t part, Shard& shard, uint64_t asked) {
  const uint32_t rank = session_->rank_at_gates();
  if (shard.gate->opens(rank, asked, os::now_ns())) return false;
  std::unique_ptr<Waiting> waiting = std::make_unique<LocalGate>(
      Ref<Call>(this), part, *session_->engine().server().crowd(), *shard.gate, rank, asked);
  (void)shard.parked.park(&waiting, true);
  int64_t never = 0;
  gated_ns_.compare_exchange_strong(never, os::now_ns(), std::memory_order_acq_rel);
  wait_at_gate(part);
  return true;
}

void Call::look(Shard& shard, uint64_t asked) {
  shard.records.of(session_->number()).seen = shard.version;
  Crowd& crowd = *session_->engine().server().crowd();
  if (crowd.alone()) return;
  const uint32_t rank = session_->rank_at_gates();
  if (rank == Gate::kOutsider) return;
  const uint64_t others = shard.gate != nullptr ? shard.gate->seen(rank) : crowd.slowest(rank);
  const uint64_t clock = others == Gate::kNone ? asked : others;
  crowd.count_pull(asked, clock);
  note_seen(asked, clock);
  if (shard.gate != nullptr && shard.gate->sync().may_drop()) session_->catch_up(clock);
}

std::string Call::stuck_at_gate(Shard& shard, uint64_t asked) const {
  View::Worker who;
  const uint32_t rank = session_->rank_at_gates();
  with_turn(shard.turn, [&] { who = shard.gate->blocker(rank, asked, os::now_ns()); });
  return "rank " + std::to_string(rank) + " at clock " + std::to_string(asked) + " waits " + waits_for(who);
}

void Call::leave_gate(Shard& shard, uint32_t part) {
  with_turn(shard.turn, [&] {
    shard.parked.drop_if([&](const Waiting& w) { return static_cast<const LocalGate&>(w).is(this, part); });
  });
}

Seen Call::seen() {
  std::lock_guard lock(seen_mutex_);
  return seen_;
}

// What a server says names the shard; the request is ours to name.
Status Call::named(const Status& s) const {
  if (s.ok() || s.message().compare(0, what().size(), what()) == 0) return s;
  return Status(s.code(), what() + ": " + s.message());
}

std::string Call::where() const {
  const std::string at = stuck();
  return at.empty() ? at : "; " + at;
}

bool Call::take_back() {
  if (!stay_open()) return taken_back_;
  bool any = false;
  const bool all = take_back(&any);
  if (all && !taken_back_.exchange(true)) uncount();
  end_away(any ? Status(Code::kCancelled, what() + ": cancelled") : Status());
  return taken_back_;
}

bool Call::take_back(bool* any) { return cancel_queued(any); }

void Call::mark(Bit bit, uint8_t other) {
  const uint8_t before = bits_.fetch_or(bit);
  if ((before & other) == 0 || (before & kSeen) != 0) return;
  if (Status s = status(); !s.ok() && s.code() != Code::kCancelled) progress_->unseen.add(named(s));
}

void Call::drop() { mark(kDropped, kFinished); }

void Call::finished() {
  Engine& engine = session_->engine();
  engine.arena().end(lent_, n_lent_);
  mark(kFinished, kDropped);
  release_kept();
}

void Call::release_kept() {
  if (const uint64_t bytes = kept_bytes_.exchange(0); bytes != 0) session_->engine().release_kept(bytes);
}

void Call::over() { session_->engine().leave(); }

}  // namespace windlass
