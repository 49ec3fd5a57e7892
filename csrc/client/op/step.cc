#include "client/op/step.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/hash.h"

namespace windlass {

static const wire::Places kSomewhere;  // a placeholder: each member has its own places

StepCall::StepCall(std::shared_ptr<Session> session, const char* verb)
    : session_(std::move(session)), verb_(verb), remote_(session_->engine().links(), *this, *this) {
  plan_.op = wire::Op::kStep;
}

void StepCall::add(Ref<Call> member, Range in, Range out) {
  Member& m = members_.emplace_back();
  m.call = std::move(member);
  m.in = in;
  m.out = out;
}

void StepCall::tell(uint64_t clock, std::vector<uint32_t> open, std::vector<uint32_t> servers) {
  ticks_ = true;
  clock_ = clock;
  open_ = std::move(open);
  told_ = std::move(servers);
}

// Lends neighbours in memory as one range.
Status StepCall::lend() {
  Arena& arena = session_->engine().arena();
  Range block;  // that the last loan lies in
  for (const bool in : {true, false}) {
    for (const Member& member : members_) {
      const Range& array = in ? member.in : member.out;
      if (array.bytes == 0) continue;
      const Range whole = lent_.empty() ? Range() : Range{lent_.back().begin, lent_.back().bytes + array.bytes};
      if (!lent_.empty() && whole.begin + whole.bytes == array.begin + array.bytes && block.contains(whole)) {
        lent_.back() = whole;
        continue;
      }
      lent_.push_back(array);
      if (!block.contains(array) && !arena.registered(array, &block)) block = {};
    }
  }
  return arena.lend(lent_.data(), lent_.size(), verb_);
}

void StepCall::add_member(Member* member, const RemoteRoute::Plan& plan) {
  member->common = remote_.add_common(plan);
  member->flags = plan.flags;
}

Status StepCall::plan() {
  Arena::Segments segments;
  bool any_placed = false;
  parts_.reserve(members_.size());
  for (Member& member : members_) {
    RemoteRoute::Plan plan;
    WL_RETURN_IF_ERROR(member.call->plan(&segments, &plan));
    add_member(&member, plan);
    plan_.bytes += plan.bytes;
    any_placed = any_placed || plan.places != nullptr;
  }
  if (!any_placed || plan_.bytes < limits::kArenaBytesMin) return {};
  plan_.places = &kSomewhere;
  plan_.segments = std::move(segments);
  return {};
}

void StepCall::add_parts(uint32_t member) {
  const Call& call = *members_[member].call;
  const std::vector<uint32_t>& shards = call.shards();
  for (uint32_t part = 0; part < shards.size(); ++part) {
    const Owners::At at = call.where()->of(shards[part]);
    const auto number = static_cast<uint32_t>(parts_.size());
    remote_.add_part(plan_, at.server,
                     {.part = number,
                      .shard = shards[part],
                      .term = at.term,
                      .flags = members_[member].flags,
                      .common = members_[member].common});
    parts_.push_back({member, part});
  }
}

Status StepCall::start(How how, int64_t deadline_ns) {
  Engine& engine = session_->engine();
  WL_RETURN_IF_ERROR(engine.enter());
  waited_for_ = how == How::kWait;
  plan_.deadline_ns = waited_for_ ? deadline_ns : limits::kNoDeadline;
  Status status = lend();
  if (!status.ok()) {
    engine.leave();
    return status;
  }
  status = plan();
  for (uint32_t m = 0; m < members_.size() && status.ok(); ++m) add_parts(m);
  // If an iteration ends, every server may have something to close.
  std::vector<uint32_t> others = told_;
  if (ends_ && session_->may_close()) {
    others.resize(remote_.links().servers());
    std::iota(others.begin(), others.end(), 0);
    hear_end_ = others;
  }
  for (const uint32_t server : others) (void)remote_.trip_to(plan_, server);
  if (status.ok() && remote_.trips() != 0) status = remote_.reserve(verb_, deadline_ns);
  if (!status.ok()) {
    engine.arena().end(lent_.data(), lent_.size());
    engine.leave();
    return status;
  }
  const Ref<StepCall> self(this);
  if (ends_) unsettled_.emplace(*session_);
  {
    std::lock_guard lock(session_->order_mutex());
    begin();
  }
  remote_.set_off(how);
  return {};
}

// With order_mutex(): gives the members their iteration, and closes the rest of it.
void StepCall::begin() {
  for (const Member& member : members_) {
    member.call->begin_iteration();
    if (member.call->waits_for_update()) RemoteRoute::write_weights(member.call->batch(), member.common);
  }
  if (ends_) {
    Session::Ended ended = session_->end_iteration();
    if (session_->must_tell(ended)) {
      tell(ended.clock, std::move(ended.open), hear_end_);
      for (ClosingShards& closing : ended.closing) {
        Member& member = members_.emplace_back();
        member.call = Ref<Call>(new CloseCall(session_, std::move(closing), clock_));
        RemoteRoute::Plan plan;
        (void)member.call->plan(nullptr, &plan);  // a close is never refused
        add_member(&member, plan);
        add_parts(static_cast<uint32_t>(members_.size() - 1));
      }
    }
  }
  const Trip::Common* const tick = told_.empty() ? nullptr : remote_.add_common({.op = wire::Op::kTick});
  for (const uint32_t server : told_) {
    remote_.add_part(plan_, server, {.part = static_cast<uint32_t>(parts_.size()), .common = tick});
    parts_.push_back({kTick, 0});
  }
  remote_.drop_empty();
  if (ticks_) session_->close_begins();
  expect(remote_.trips());
  remote_.number([this](Trip::Part* part) {
    const Part& p = parts_[part->part];
    p.member == kTick ? void(part->clock = clock_) : members_[p.member].call->number(p.part, part);
  });
  remote_.submit();
}

Status StepCall::finish(int64_t deadline_ns) {
  if (wait_until(deadline_ns)) return named(status());
  given_up_ = true;
  return Status(Code::kTimeout, std::string(verb_) + ": not done in time; " + remote_.stuck() + "; its pushes go on");
}

Status StepCall::named(const Status& s) const {
  if (s.ok()) return s;
  std::vector<Refused> refused;
  for (uint32_t m = 0; m < members_.size(); ++m) members_[m].call->list_refused(m, &refused);
  return Status(s.code(), std::string(verb_) + ": " + s.message(), std::move(refused));
}

void StepCall::finished() {
  unsettled_.reset();
  session_->engine().arena().end(lent_.data(), lent_.size());
  const Status s = status();
  if (ticks_ && s.ok()) session_->heard_open(open_, told_);
  for (const Member& member : members_) {
    if (s.ok()) member.call->count_pull();
  }
  if (s.ok() || (waited_for_ && !given_up_)) return;
  const Status all = named(s);
  waited_for_ && !members_.empty() ? members_[0].call->progress().unseen.add(all) : session_->add_unseen(all);
}

void StepCall::over() {
  if (ticks_) session_->close_ended();
  session_->engine().leave();
}

// ---- what travels -------------------------------------------------------------------------------------------------

void StepCall::describe(uint32_t part, bool in_place, Parcel* to) {
  if (parts_[part].member == kTick) {
    to->argument_bytes = static_cast<uint32_t>(open_.size() * sizeof(uint32_t));
    return;
  }
  call_of(part).describe(parts_[part].part, in_place, to);
}

void StepCall::write_items(uint32_t part, bool in_place, std::byte* to) {
  call_of(part).write_items(parts_[part].part, in_place, to);
}

void StepCall::write_argument(uint32_t part, std::byte* to) {
  if (parts_[part].member != kTick) return call_of(part).write_argument(parts_[part].part, to);
  std::memcpy(to, open_.data(), open_.size() * sizeof(uint32_t));
}

bool StepCall::joins(uint32_t part) const {
  return parts_[part].member != kTick && call_of(part).joins(parts_[part].part);
}

bool StepCall::list(uint32_t part, uint32_t n, wire::ListedItems* list) {
  return call_of(part).list(parts_[part].part, n, list);
}

const std::byte* StepCall::numbers(uint32_t part) { return call_of(part).numbers(parts_[part].part); }

void StepCall::gather(uint32_t part, std::byte* to) { call_of(part).gather(parts_[part].part, to); }

std::byte* StepCall::landing(uint32_t part, uint64_t bytes) {
  return parts_[part].member == kTick ? nullptr : call_of(part).landing(parts_[part].part, bytes);
}

Status StepCall::land(uint32_t part, bool in_place, const PartAnswer& answer, const std::byte* numbers) {
  if (parts_[part].member == kTick) return {};
  return call_of(part).land(parts_[part].part, in_place, answer, numbers);
}

bool StepCall::refused(uint32_t part, Code code) {
  return parts_[part].member != kTick && call_of(part).refused(parts_[part].part, code);
}

Owners* StepCall::owners(uint32_t part, uint32_t* shard) {
  return parts_[part].member == kTick ? nullptr : call_of(part).owners(parts_[part].part, shard);
}

// ---- the client ---------------------------------------------------------------------------------------------------

StepClient::~StepClient() {
  if (session_->engine().forked()) return;
  for (std::byte* copy : copies_) session_->engine().arena().give(copy);
}

std::byte* StepClient::copy(const void* data, size_t bytes) {
  std::byte* const to = session_->engine().arena().take(bytes);
  if (to == nullptr) return nullptr;
  copies_.push_back(to);
  if (bytes != 0 && data != nullptr) std::memcpy(to, data, bytes);
  return to;
}

bool StepClient::registered(const Array& array) {
  const Range range = array.range();
  for (const Range& block : known_) {
    if (range.bytes != 0 && block.contains(range)) return true;
  }
  std::swap(known_[0], known_[1]);
  if (session_->engine().arena().registered(range, &known_[0])) return true;
  std::swap(known_[0], known_[1]);
  return false;
}

// Copies an ordinary input, which the caller may change later.
bool StepClient::keep(Array* array) {
  if (registered(*array)) return true;
  array->data = copy(array->data, array->bytes());
  return array->data != nullptr;
}

// Stages an ordinary output, which the caller may use meanwhile.
bool StepClient::stage(Array* array) {
  if (registered(*array)) return true;
  std::byte* const staged = copy(nullptr, array->bytes());
  if (staged == nullptr) return false;
  landings_.push_back({array->data, staged, array->bytes()});
  array->data = staged;
  return true;
}

// Makes a call whose arrays are the step's own or registered, so that it can be sent at any time.
template <class Client, class Request, class Copy>
Status StepClient::add_call(Client& client, Request r, Copy copy_items) {
  WL_RETURN_IF_ERROR(session_->usable());
  WL_RETURN_IF_ERROR(client.take_unseen());
  Status status = client.check(r, client.what(r));
  Item& item = items_.emplace_back();
  bool kept = true;
  if (status.ok()) {
    kept = copy_items(&r);
    if (kept && r.in != nullptr) {
      item.in = *r.in;
      kept = keep(&item.in);
      r.in = &item.in;
    }
    if (kept && r.out != nullptr) {
      item.out = *r.out;
      kept = stage(&item.out);
      r.out = &item.out;
    }
  }
  if (!kept) status = Status(Code::kResourceExhausted, client.what(r).text() + ": no memory for a copy of its arrays");
  if (status.ok()) {
    auto call = typename Client::CallRef();
    status = client.prepare(r, &call);
    if (status.ok()) status = call->allowed();
    if (status.ok()) item.call = call;
  }
  if (!status.ok()) items_.pop_back();
  return status;
}

Status StepClient::add(std::shared_ptr<TensorClient> tensor, const TensorRequest& request) {
  return add_call(*tensor, request, [this](TensorRequest* r) {
    if (r->rows.kind != Selection::kList) return true;
    r->rows.list = reinterpret_cast<const int64_t*>(copy(r->rows.list, r->rows.n * sizeof(int64_t)));
    return r->rows.list != nullptr;
  });
}

Status StepClient::add(std::shared_ptr<TableClient> table, const TableRequest& request) {
  return add_call(*table, request, [](TableRequest*) { return true; });  // the call copies its keys
}

// Only the last push to an object may close: later pushes of the step would fall into the next iteration.
void StepClient::let_the_last_close() {
  std::vector<const Progress*> pushed(std::bit_ceil(2 * items_.size() + 1));  // a hash set; null: free
  const auto is_new = [&](const Progress* progress) {
    size_t at = mix(reinterpret_cast<uintptr_t>(progress));
    for (;; ++at) {
      const Progress*& here = pushed[at & (pushed.size() - 1)];
      if (here == progress) return false;
      if (here == nullptr) return here = progress, true;
    }
  };
  for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
    if (item->call->contributes() && !is_new(&item->call->progress())) item->call->leave_open();
  }
}

Status StepClient::run(int64_t deadline_ns) {
  let_the_last_close();
  // If this begins a new iteration, it does so before the first request of the step.
  for (const Item& item : items_) {
    WL_RETURN_IF_ERROR(item.call->check_again());
    if (item.call->contributes()) WL_RETURN_IF_ERROR(item.call->handle().begin_push(item.call->shards(), deadline_ns));
  }
  const Status status = session_->engine().links() != nullptr ? run_remote(deadline_ns) : run_local(deadline_ns);
  if (status.ok()) {
    for (const Landing& l : landings_) std::memcpy(l.out, l.staged, l.bytes);
  }
  return status;
}

Status StepClient::run_remote(int64_t deadline_ns) {
  const Ref<StepCall> step(new StepCall(session_, "step"));
  for (const Item& item : items_) {
    step->add(item.call, item.call->contributes() ? item.in.range() : Range(),
              item.call->returns() ? item.out.range() : Range());
  }
  if (!session_->reads()) step->end_iteration();
  WL_RETURN_IF_ERROR(step->start(How::kWait, deadline_ns));
  return step->finish(deadline_ns);
}

Status StepClient::run_local(int64_t deadline_ns) {
  Status first;
  const auto note = [&](const Status& status) {
    if (first.ok()) first = status;
  };
  std::vector<Call*> begun, after_tick;
  for (const Item& item : items_) {
    const Array* const in = item.call->contributes() ? &item.in : nullptr;
    const Array* const out = item.call->returns() ? &item.out : nullptr;
    if (first.ok()) note(item.call->start(in, out, How::kWait, deadline_ns));
    if (first.ok()) {
      (item.call->waits_for_close() ? after_tick : begun).push_back(item.call.get());
    } else {
      item.call->refuse_all();
    }
  }
  // Under BSP nothing is answered before the iteration is closed.
  if (first.ok() && !session_->reads()) note(session_->tick(deadline_ns));
  for (Call* call : begun) note(call->finish(deadline_ns));
  for (Call* call : after_tick) note(call->finish(deadline_ns));
  if (first.ok()) return first;
  std::vector<Refused> refused;
  for (uint32_t i = 0; i < items_.size(); ++i) items_[i].call->list_refused(i, &refused);
  return Status(first.code(), first.message(), std::move(refused));
}

}  // namespace windlass
