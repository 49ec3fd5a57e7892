#include "client/remote.h"

#include <algorithm>
#include <cstring>

#include "server/object/op.h"

namespace windlass {

Trip& Remote::add_trip(const Plan& plan, uint32_t server) {
  Ref<Trip> trip(new Trip(this));
  trip->header.op = static_cast<uint8_t>(plan.op);
  trip->header.object = plan.object;
  trip->header.dtype_in = static_cast<uint8_t>(plan.dtype_in);
  trip->header.dtype_out = static_cast<uint8_t>(plan.dtype_out);
  trip->header.priority = plan.priority;
  trip->bytes = plan.bytes;
  trip->deadline_ns = plan.deadline_ns;
  trip->patient = plan.patient;
  const size_t hypers = plan.hyper != nullptr ? limits::kRuleHyperMax : 0;
  if (hypers != 0) wire::write_hyper(plan.hyper->v, hypers, &trip->extensions);
  if (plan.places != nullptr) {
    wire::write_extensions(*plan.places, hypers != 0 ? plan.hyper->v : nullptr, hypers, &trip->places);
    trip->segments = plan.segments;
  }
  trips_.push_back(trip);
  servers_.push_back(server);
  return *trip;
}

void Remote::write_weights(const Hyper& hyper, const Iteration& iteration, const wire::Places* places) {
  double numbers[limits::kPushNumbersMax];
  std::copy_n(hyper.v, limits::kRuleHyperMax, numbers);
  numbers[limits::kRuleHyperMax] = iteration.weight;
  numbers[limits::kRuleHyperMax + 1] = iteration.object_weight;
  numbers[limits::kRuleHyperMax + 2] = iteration.other_weight;
  for (const Ref<Trip>& trip : trips_) {
    wire::write_hyper(numbers, limits::kPushNumbersMax, &trip->extensions);
    if (places != nullptr) wire::write_extensions(*places, numbers, limits::kPushNumbersMax, &trip->places);
  }
}

void Remote::make_trips(const Plan& plan, const Owners& owners, const std::vector<uint32_t>& shards) {
  for (uint32_t i = 0; i < shards.size(); ++i) {
    const Owners::At at = owners.of(shards[i]);
    const auto it = std::find(servers_.begin(), servers_.end(), at.server);
    Trip& trip = it == servers_.end() ? add_trip(plan, at.server) : *trips_[it - servers_.begin()];
    trip.parts.push_back({.part = i, .shard = shards[i], .term = at.term, .flags = plan.flags});
    ++trip.unanswered;
  }
}

void Remote::add_part(const Plan& plan, uint32_t server, Trip::Part part) {
  const auto it = std::find(servers_.begin(), servers_.end(), server);
  Trip& trip = it == servers_.end() ? add_trip(plan, server) : *trips_[it - servers_.begin()];
  part.shard = trip.unanswered++;
  trip.parts.push_back(part);
}

void Remote::make_trip(const Plan& plan, uint32_t server) {
  Trip& trip = add_trip(plan, server);
  trip.parts.push_back({.part = 0, .shard = 0});
  trip.unanswered = 1;
}

void Remote::tell_clock(Session& session, uint64_t clock) {
  for (size_t i = 0; i < trips_.size(); ++i) {
    if (session.tells(servers_[i], clock)) trips_[i]->parts[0].flags |= wire::kTicks;
  }
}

void Remote::submit(Future* self) {
  self_ = self;
  for (const Ref<Trip>& trip : trips_) trip->owner = Ref<Future>(self);
  for (size_t i = 0; i < trips_.size(); ++i) lanes_.push_back(&links_->submit(trips_[i], servers_[i]));
}

void Remote::set_off(How how) {
  for (Lane* lane : lanes_) {
    lane->pump_send();
    if (how == How::kFuture) lane->attend();
  }
}

// Each once, in an order that is the same for everybody: two that hold each other's would wait for ever.
std::vector<Lane*> Remote::all_lanes() const {
  std::vector<Lane*> all = lanes_;
  for (const Stray& stray : strays_) all.push_back(stray.lane);
  std::sort(all.begin(), all.end(), std::less<>());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

bool Remote::wait_away(Future& work, int64_t deadline_ns) {
  const bool patient = !trips_.empty() && trips_[0]->patient;
  for (;;) {
    const uint32_t seen = sent_on_.load(std::memory_order_acquire);
    if (seen == 0) {
      if (links_->wait(work, lanes_, deadline_ns, sent_on_, seen, patient)) return true;
    } else {
      std::unique_lock lock(strays_mutex_);
      const std::vector<Lane*> lanes = all_lanes();
      lock.unlock();
      if (links_->wait(work, lanes, deadline_ns, sent_on_, seen, patient)) return true;
    }
    if (os::now_ns() >= deadline_ns) return work.done();
  }
}

void Remote::add_stray() {
  between_.fetch_add(1, std::memory_order_acq_rel);
  (void)self_->stay_open();  // the trip that it comes from is not over
}

// To whoever has its shard by now. A server that knows less than we do, because somebody told us of a move before it
// was made, is asked again a little later.
void Remote::go_on(const Ref<Trip>& stray) {
  const Ref<Future> alive = stray->owner;
  Trip::Part& part = stray->parts[0];
  uint32_t shard = 0;
  const Owners::At at = owners(part.part, &shard)->of(shard);
  const OpTraits* const op = traits_of(stray->header.operation());
  const bool pushes = op == nullptr || op->numbered;  // a step may
  Lane* lane = nullptr;
  Status status;
  {
    std::lock_guard lock(strays_mutex_);
    status = withdrawn_;
    if (status.ok() && !pushes && os::now_ns() > stray->deadline_ns)
      status = Status(Code::kTimeout, "shard " + std::to_string(shard) + ": no server that has it was found in time");
    if (status.ok()) {
      const bool known = at.server != stray->came_from || at.term > part.term;
      if (!known && !std::exchange(stray->rested, true) && links_->rest(stray)) return;
      stray->rested = false;
      part.term = at.term;
      lane = &links_->submit_stray(stray, at.server);
      strays_.push_back({stray, at.server, lane});
      sent_on_.fetch_add(1, std::memory_order_release);
    }
    between_.fetch_sub(1, std::memory_order_acq_rel);
  }
  if (lane == nullptr) {
    stray->owner = Ref<Future>();
    return over(status);
  }
  lane->pump_send();
  lane->attend();
}

std::string Remote::stuck() const {
  std::lock_guard lock(strays_mutex_);
  const auto unanswered = [&](const Trip& trip, uint32_t server, Lane* lane) -> std::string {
    const std::string phase = links_->phase(server);
    const Lane::Hold hold = lane->hold();
    for (const Trip::Part& part : trip.parts) {
      if (part.answered) continue;
      if (trip.waits_for.rank != Gate::kOutsider) {
        return "app '" + links_->app() + "': at clock " +
               std::to_string(part.clock + (part.flags & wire::kCloses ? 1 : 0)) + " it waits " +
               waits_for(trip.waits_for);
      }
      return phase + ", shard " + std::to_string(part.shard);
    }
    return "";
  };
  std::string text;
  for (size_t i = 0; i < lanes_.size() && text.empty(); ++i) text = unanswered(*trips_[i], servers_[i], lanes_[i]);
  for (size_t i = 0; i < strays_.size() && text.empty(); ++i)
    text = unanswered(*strays_[i].trip, strays_[i].server, strays_[i].lane);
  if (text.empty() && between_ != 0) text = "a shard has moved, and its new server does not know yet";
  return text;
}

bool Remote::take_back(bool* any) {
  std::lock_guard lock(strays_mutex_);
  bool all = between_ == 0;
  *any = false;
  const auto take = [&](Trip& trip, Lane* lane) {
    const bool taken = lane->change_unsent(trip, [&] {
      for (Trip::Part& part : trip.parts) part.flags |= wire::kEmpty;
    });
    all = all && taken;
    *any = *any || taken;
  };
  for (size_t i = 0; i < trips_.size(); ++i) take(*trips_[i], lanes_[i]);
  for (const Stray& stray : strays_) take(*stray.trip, stray.lane);
  return all;
}

bool Remote::withdraw(bool begun, const Status& status, bool* any) {
  std::vector<Stray> strays;
  {
    std::lock_guard lock(strays_mutex_);
    if (withdrawn_.ok()) withdrawn_ = status;
    strays = strays_;
  }
  bool all = true;
  *any = false;
  const auto take = [&](const Ref<Trip>& trip, Lane* lane) {
    const bool taken = lane->withdraw(trip, begun, status);
    all = all && taken;
    *any = *any || taken;
  };
  for (size_t i = 0; i < trips_.size(); ++i) take(trips_[i], lanes_[i]);
  for (const Stray& stray : strays) take(stray.trip, stray.lane);
  return all;
}

Status Exchange::ask(wire::Op op, uint32_t server, const std::string& body, const std::string& what,
                     int64_t deadline_ns) {
  body_ = body;
  has_body_ = true;
  answers.resize(1);
  make_trip({.op = op, .deadline_ns = deadline_ns}, server);
  return go(what, deadline_ns);
}

Status Exchange::ask_shards(wire::Op op, std::shared_ptr<Owners> owners, const std::vector<uint32_t>& shards,
                            const std::vector<uint64_t>& sent, uint64_t value, const std::string& body,
                            const std::string& what, int64_t deadline_ns) {
  owners_ = std::move(owners);
  shards_ = shards;
  body_ = body;
  has_body_ = !body.empty();
  value_ = value;
  answers.resize(shards.size());
  make_trips({.op = op, .object = owners_->object(), .deadline_ns = deadline_ns}, *owners_, shards);
  number([&](uint32_t shard, Trip::Part* part) { part->sequence = sent[shard]; });
  return go(what, deadline_ns);
}

Status Exchange::go(const std::string& what, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(reserve(what, deadline_ns));
  expect(trips());
  submit(this);
  set_off(How::kWait);
  if (!wait_until(deadline_ns)) {
    const Status late(Code::kTimeout, what + ": not done in time; " + stuck());
    bool any = false;
    withdraw(true, late, &any);
    return late;
  }
  const Status s = status();
  return s.ok() ? s : Status(s.code(), what + ": " + s.message());
}

void Exchange::describe(uint32_t, bool, wire::Part* to) {
  to->value = value_;
  to->items_bytes = static_cast<uint32_t>(body_.size());
}

void Exchange::write_items(uint32_t, bool, std::byte* to) { std::memcpy(to, body_.data(), body_.size()); }

Status Exchange::land(uint32_t part, bool, const wire::Part& answer, const std::string& items,
                      const std::byte* numbers) {
  if (part >= answers.size()) answers.resize(part + 1);
  Answer& a = answers[part];
  a.part = answer;
  a.items = items;
  if (numbers != nullptr) a.numbers.assign(numbers, numbers + answer.numbers_bytes);
  return {};
}

}  // namespace windlass
