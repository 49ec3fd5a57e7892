#include "client/remote.h"

#include <algorithm>
#include <cstring>

namespace windlass {

Trip& Remote::add_trip(const Plan& plan, uint32_t server) {
  Ref<Trip> trip(new Trip(this));
  trip->header.op = static_cast<uint8_t>(plan.op);
  trip->header.object = plan.object;
  trip->header.dtype_in = static_cast<uint8_t>(plan.dtype_in);
  trip->header.dtype_out = static_cast<uint8_t>(plan.dtype_out);
  trip->bytes = plan.bytes;
  trip->deadline_ns = plan.deadline_ns;
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

void Remote::make_trips(const Plan& plan, const Map& map, const std::vector<uint32_t>& shards) {
  for (uint32_t i = 0; i < shards.size(); ++i) {
    const Map::Owned& run = map.run_of(shards[i]);
    const auto it = std::find(servers_.begin(), servers_.end(), run.server);
    Trip& trip = it == servers_.end() ? add_trip(plan, run.server) : *trips_[it - servers_.begin()];
    trip.parts.push_back({.part = i, .shard = shards[i], .term = run.term, .flags = plan.flags});
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

void Remote::submit(Work* self) {
  for (const Ref<Trip>& trip : trips_) trip->owner = Ref<Work>(self);
  for (size_t i = 0; i < trips_.size(); ++i) lanes_.push_back(&links_->submit(trips_[i], servers_[i]));
}

void Remote::set_off(How how) {
  for (Lane* lane : lanes_) {
    lane->pump_send();
    if (how == How::kFuture) lane->attend();
  }
}

std::string Remote::stuck() const {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const std::string phase = links_->phase(servers_[i]);
    const Lane::Hold hold = lanes_[i]->hold();
    for (const Trip::Part& part : trips_[i]->parts) {
      if (!part.answered) return phase + ", shard " + std::to_string(part.shard);
    }
  }
  return "";
}

bool Remote::take_back(bool* any) {
  bool all = true;
  *any = false;
  for (size_t i = 0; i < trips_.size(); ++i) {
    const bool taken = lanes_[i]->change_unsent(*trips_[i], [&] {
      for (Trip::Part& part : trips_[i]->parts) part.flags |= wire::kEmpty;
    });
    all = all && taken;
    *any = *any || taken;
  }
  return all;
}

bool Remote::withdraw(bool begun, const Status& status, bool* any) {
  bool all = true;
  *any = false;
  for (size_t i = 0; i < trips_.size(); ++i) {
    const bool taken = lanes_[i]->withdraw(trips_[i], begun, status);
    all = all && taken;
    *any = *any || taken;
  }
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

Status Exchange::ask_shards(wire::Op op, const Map& map, const std::vector<uint32_t>& shards,
                            const std::vector<uint64_t>& sent, uint64_t value, const std::string& body,
                            const std::string& what, int64_t deadline_ns) {
  body_ = body;
  has_body_ = !body.empty();
  value_ = value;
  answers.resize(shards.size());
  make_trips({.op = op, .object = map.object, .deadline_ns = deadline_ns}, map, shards);
  number([&](uint32_t shard, Trip::Part* part) { part->sequence = sent[shard]; });
  return go(what, deadline_ns);
}

Status Exchange::go(const std::string& what, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(reserve(what, deadline_ns));
  begin_away(trips());
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
