#include "client/net/remote_route.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "client/session.h"
#include "server/object/batch.h"

namespace windlass {

Trip::Common* RemoteRoute::add_common(const Plan& plan) {
  Trip::Common& common = commons_.emplace_back();
  common.op = plan.op;
  common.object = plan.object;
  common.dtype_in = static_cast<uint8_t>(plan.dtype_in);
  common.dtype_out = static_cast<uint8_t>(plan.dtype_out);
  common.places = plan.places;
  if (plan.hyper != nullptr) {
    common.hypers = limits::kRuleHyperMax;
    std::copy_n(plan.hyper->v, limits::kRuleHyperMax, common.hyper);
  }
  return &common;
}

Trip& RemoteRoute::trip_to(const Plan& plan, uint32_t server) {
  const auto it = std::find(servers_.begin(), servers_.end(), server);
  if (it != servers_.end()) return *trips_[it - servers_.begin()];
  Ref<Trip> trip(new Trip(this, &payload_));
  trip->header.op = static_cast<uint8_t>(wire::is_control(plan.op) ? plan.op : wire::Op::kStep);
  trip->header.priority = plan.priority;
  trip->object = plan.object;
  trip->bytes = plan.bytes;
  trip->deadline_ns = plan.deadline_ns;
  trip->patient = plan.patient;
  trip->placed = plan.places != nullptr;
  trip->segments = plan.segments;
  trips_.push_back(trip);
  servers_.push_back(server);
  return *trip;
}

void RemoteRoute::drop_empty() {
  for (size_t i = trips_.size(); i-- > 0;) {
    if (!trips_[i]->parts.empty()) continue;
    links_->trip_over(servers_[i], trips_[i]->patient);
    trips_.erase(trips_.begin() + static_cast<ptrdiff_t>(i));
    servers_.erase(servers_.begin() + static_cast<ptrdiff_t>(i));
  }
}

void RemoteRoute::write_weights(const Batch& batch, Trip::Common* common) {
  common->hypers = limits::kPushNumbersMax;
  batch.write_numbers(common->hyper);
}

void RemoteRoute::make_trips(const Plan& plan, const Owners& owners, const std::vector<uint32_t>& shards) {
  const Trip::Common* const common = add_common(plan);
  for (uint32_t i = 0; i < shards.size(); ++i) {
    const Owners::At at = owners.of(shards[i]);
    add_part(plan, at.server, {.part = i, .shard = shards[i], .term = at.term, .flags = plan.flags, .common = common});
  }
}

void RemoteRoute::add_part(const Plan& plan, uint32_t server, const Trip::Part& part) {
  Trip& trip = trip_to(plan, server);
  trip.parts.push_back(part);
  ++trip.unanswered;
}

void RemoteRoute::tell_clock(Session& session, uint64_t clock) {
  for (size_t i = 0; i < trips_.size(); ++i) trips_[i]->ticks = session.tells(servers_[i], clock);
}

void RemoteRoute::submit() {
  for (const Ref<Trip>& trip : trips_) {
    trip->owner = Ref<Future>(&future_);
    trip->make_blocks();
  }
  for (size_t i = 0; i < trips_.size(); ++i) lanes_.push_back(&links_->submit(trips_[i], servers_[i]));
}

void RemoteRoute::set_off(How how) {
  for (Lane* lane : lanes_) {
    lane->pump_send();
    if (how == How::kFuture) lane->attend();
  }
}

// Each lane once, in an order that is the same for everybody, so that holding them cannot deadlock.
std::vector<Lane*> RemoteRoute::all_lanes() const {
  std::vector<Lane*> all = lanes_;
  for (const Redirected& r : redirected_) all.push_back(r.lane);
  std::sort(all.begin(), all.end(), std::less<>());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

bool RemoteRoute::wait(int64_t deadline_ns) {
  const bool patient = is_patient();
  for (;;) {
    const uint32_t seen = sent_on_.load(std::memory_order_acquire);
    if (seen == 0) {
      if (links_->wait(future_, lanes_, deadline_ns, sent_on_, seen, patient)) return true;
    } else {
      std::unique_lock lock(mutex_);
      const std::vector<Lane*> lanes = all_lanes();
      lock.unlock();
      if (links_->wait(future_, lanes, deadline_ns, sent_on_, seen, patient)) return true;
    }
    if (os::now_ns() >= deadline_ns) return future_.done();
  }
}

void RemoteRoute::expect_redirected() {
  between_.fetch_add(1, std::memory_order_acq_rel);
  (void)future_.stay_open();  // the trip it comes from is not over
}

void RemoteRoute::end_redirected(const Ref<Trip>& trip, const Status& status) {
  const Ref<Future> alive = std::move(trip->owner);
  RemoteRoute& route = *trip->route;
  route.between_.fetch_sub(1, std::memory_order_acq_rel);
  route.over(status);
}

bool RemoteRoute::can_do_without(uint32_t server) const {
  const auto it = std::find(servers_.begin(), servers_.end(), server);
  const Trip& trip = *trips_[it - servers_.begin()];
  return std::all_of(trip.parts.begin(), trip.parts.end(),
                     [&](const Trip::Part& part) { return Trip::is_moot(part) || trip.has_moved(part, server); });
}

void RemoteRoute::go_on(const std::vector<Ref<Trip>>& redirected) {
  for (size_t i = 0, end = 0; i < redirected.size(); i = end) {
    for (end = i + 1; end < redirected.size() && redirected[end]->route == redirected[i]->route; ++end) {
    }
    redirected[i]->route->go_on(&redirected[i], end - i);
  }
}

// Sends parts of this request, each still a trip of its own, to the servers that have their shards by now. A server
// that knows less than we do, because we heard of a move before it was made, is asked again a little later.
void RemoteRoute::go_on(const Ref<Trip>* redirected, size_t n) {
  const Ref<Future> alive = redirected[0]->owner;
  std::vector<Redirected> going;
  std::vector<Status> ended;  // of parts that go nowhere, or with another trip
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < n; ++i) {
      const Ref<Trip>& trip = redirected[i];
      Trip::Part& part = trip->parts[0];
      uint32_t shard = 0;
      const Owners::At at = payload_.owners(part.part, &shard)->of(shard);
      Status status = withdrawn_;
      if (status.ok() && !traits_of(part.common->op)->numbered && os::now_ns() > trip->deadline_ns)
        status = Status(Code::kTimeout, "shard " + std::to_string(shard) + ": no server that has it was found in time");
      if (status.ok()) {
        const bool known = at.server != trip->came_from || at.term > part.term;
        if (!known && !std::exchange(trip->rested, true) && links_->rest(trip)) continue;
        trip->rested = false;
        part.term = at.term;
        const auto same = std::find_if(going.begin(), going.end(), [&](const Redirected& r) {
          return r.server == at.server && r.trip->detours == trip->detours;
        });
        if (same == going.end()) {
          going.push_back({trip, at.server, nullptr});
          continue;
        }
        same->trip->parts.push_back(part);
        same->trip->begun = same->trip->begun || trip->begun;
        ++same->trip->unanswered;
      }
      trip->owner = Ref<Future>();
      ended.push_back(std::move(status));
    }
    for (Redirected& r : going) {
      if (r.trip->parts.size() > 1) r.trip->make_blocks();
      r.lane = &links_->submit_redirected(r.trip, r.server);
      redirected_.push_back(r);
    }
    sent_on_.fetch_add(static_cast<uint32_t>(going.size()), std::memory_order_release);
    between_.fetch_sub(static_cast<uint32_t>(going.size() + ended.size()), std::memory_order_acq_rel);
  }
  for (const Status& status : ended) over(status);
  for (const Redirected& r : going) {
    r.lane->pump_send();
    r.lane->attend();
  }
}

std::string RemoteRoute::stuck() const {
  std::lock_guard lock(mutex_);
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
  for (size_t i = 0; i < redirected_.size() && text.empty(); ++i)
    text = unanswered(*redirected_[i].trip, redirected_[i].server, redirected_[i].lane);
  if (text.empty() && between_ != 0) text = "a shard has moved, and its new server does not know yet";
  return text;
}

bool RemoteRoute::take_back(bool* any) {
  std::lock_guard lock(mutex_);
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
  for (const Redirected& r : redirected_) take(*r.trip, r.lane);
  return all;
}

bool RemoteRoute::withdraw(bool begun, const Status& status, bool* any) {
  std::vector<Redirected> redirected;
  {
    std::lock_guard lock(mutex_);
    if (withdrawn_.ok()) withdrawn_ = status;
    redirected = redirected_;
  }
  bool all = true;
  *any = false;
  const auto take = [&](const Ref<Trip>& trip, Lane* lane) {
    const bool taken = lane->withdraw(trip, begun, status);
    all = all && taken;
    *any = *any || taken;
  };
  for (size_t i = 0; i < trips_.size(); ++i) take(trips_[i], lanes_[i]);
  for (const Redirected& r : redirected) take(r.trip, r.lane);
  return all;
}

void Trip::make_blocks() {
  blocks.clear();
  uint64_t bytes_in_block = 0;
  Parcel last;
  for (uint32_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    Parcel parcel;
    describe(part, false, &parcel);
    const uint64_t more = std::max(parcel.numbers_bytes, parcel.answer_bytes);
    const Part* const before = i != 0 ? &parts[i - 1] : nullptr;
    const bool joins = before != nullptr && part.common == before->common && part.part == before->part + 1 &&
                       part.term == before->term && part.clock == before->clock && parcel.flags == last.flags &&
                       parcel.value == last.value && payload->joins(part.part) &&
                       bytes_in_block + more <= limits::kBlockBytesMax && blocks.back().n < limits::kBlockEntriesMax;
    if (!joins) {
      blocks.push_back({i, 0});
      bytes_in_block = 0;
    }
    ++blocks.back().n;
    bytes_in_block += more;
    last = parcel;
  }
}

bool Trip::has_moved(const Part& part, uint32_t server) const {
  uint32_t shard = 0;
  const Owners* const owners = payload->owners(part.part, &shard);
  if (owners == nullptr) return false;
  const Owners::At at = owners->of(shard);
  return at.server != server && at.term > part.term;
}

Ref<Trip> Trip::redirect(const Part& part, uint32_t server, bool begun) const {
  Ref<Trip> trip(new Trip(route, payload));
  trip->header = header;
  trip->object = object;
  trip->segments = segments;
  trip->placed = placed;
  trip->parts.push_back(part);
  trip->blocks.push_back({0, 1});
  trip->unanswered = 1;
  trip->deadline_ns = deadline_ns;
  trip->bytes = bytes;
  trip->owner = owner;
  trip->came_from = server;
  trip->detours = detours + 1;
  trip->patient = patient;
  trip->begun = begun;
  route->expect_redirected();
  return trip;
}

}  // namespace windlass
