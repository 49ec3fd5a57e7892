#include "server/server.h"

#include <algorithm>

#include "server/object/ticket.h"

namespace windlass {
namespace {

// Tells the gates of one object whom to wait for; entries that need not wait any more go to `freed`.
void tell_gates_of(ServedObject& object, Freed* freed) {
  if (!object.spec().sync().gated()) return;
  for (uint32_t i = 0; i < object.shards(); ++i) {
    Shard* const shard = object.find(i);
    if (shard == nullptr) continue;
    with_turn(shard->turn, [&] {
      if (shard->home.state == Residence::kFrozen) return;  // it is being copied; its new server asks for the view
      object.set_view(*shard, i, object.workers()->view(object.map().object));
      if (!shard->parked.empty()) shard->parked.free(*shard, freed);
    });
  }
}

}  // namespace

Server::Server(int threads, uint64_t memory_bytes_max, uint64_t staging_bytes_max)
    : threads_(threads),
      budget_(memory_bytes_max),
      pools_(&budget_),
      staging_(staging_bytes_max, &budget_),
      crew_(std::make_unique<Crew>(std::max(1, threads - 1))) {}

Server::~Server() { crew_.reset(); }

void Server::set_user_code(std::shared_ptr<UserCode> code) {
  std::lock_guard lock(making_);
  user_code_ = std::move(code);
}

Status Server::find_rule(const std::string& what, const RuleSpec& rule, std::shared_ptr<ForeignRule>* out) {
  if (rule.kind != RuleKind::kForeign) return {};
  if (user_code_ == nullptr)
    return Status(Code::kAccessDenied, what + ": " + describe(rule) +
                                           " is not one of Windlass, and this server allows no others; start servers "
                                           "with --allow MODULE (WINDLASS_ALLOW)");
  return user_code_->find(what, rule, out);
}

// ---- objects --------------------------------------------------------------------------------------------------------

std::shared_ptr<ServedObject> Server::find(uint32_t object) {
  std::shared_lock lock(objects_mutex_);
  return object < objects_.size() ? objects_[object] : nullptr;
}

std::vector<std::shared_ptr<ServedObject>> Server::objects() {
  std::vector<std::shared_ptr<ServedObject>> all;
  std::shared_lock lock(objects_mutex_);
  std::copy_if(objects_.begin(), objects_.end(), std::back_inserter(all), [](const auto& o) { return o != nullptr; });
  return all;
}

Status Server::make(const ObjectSpec& spec, const Map& map, uint32_t index, TablePools* pools,
                    const std::shared_ptr<Workers>& workers, std::shared_ptr<ServedObject>* out) {
  std::unique_lock lock(making_);
  *out = find(map.object);
  if (*out == nullptr) {
    const Status why = absent(map.object);
    if (why.code() == Code::kDeleted) return why;
  }
  if (const auto& there = *out; there != nullptr) {
    uint32_t shards = 0;
    WL_RETURN_IF_ERROR(spec.shards(&shards));
    if (there->spec() == spec && there->map().agrees(map, shards)) return {};
    return Status(Code::kSpecMismatch, "object " + std::to_string(map.object) + " is '" + there->spec().name +
                                           "' here, not '" + spec.name + "', or is placed otherwise");
  }
  WL_RETURN_IF_ERROR(ServedObject::make(spec, map, index, *this, pools, {workers, &staging_}, out));
  {
    std::unique_lock objects(objects_mutex_);
    if (objects_.size() <= map.object) objects_.resize(map.object + 1);
    objects_[map.object] = *out;
  }
  lock.unlock();
  // A tick or a view that came while it was being made did not find it in the list.
  Freed freed;
  tell_gates_of(**out, &freed);
  deliver(&freed);
  return {};
}

Status Server::forget(const ObjectSpec& spec, const Map& map) {
  std::lock_guard lock(making_);
  const std::shared_ptr<ServedObject> there = find(map.object);
  if (there == nullptr) return {};
  if (!(there->spec() == spec) || !(there->map() == map) || there->used())
    return Status(Code::kInvalidArgument, "detach: '" + spec.own_name() + "' is in use, or another");
  std::unique_lock objects(objects_mutex_);
  objects_[map.object] = nullptr;
  return {};
}

void Server::remove(const ObjectSpec& spec, uint32_t object) {
  Freed freed;
  {
    std::lock_guard removing(removing_);
    std::shared_ptr<ServedObject> there;
    {
      std::lock_guard lock(making_);
      std::unique_lock objects(objects_mutex_);
      if (object < objects_.size()) there = std::move(objects_[object]);
      deleted_[object] = std::string(spec.is_table ? "table '" : "tensor '") + spec.own_name() + "'";
    }
    if (there != nullptr) there->remove(&freed);
  }
  deliver(&freed);
}

uint32_t Server::highest_deleted() {
  uint32_t highest = 0;
  std::shared_lock lock(objects_mutex_);
  for (const auto& [object, name] : deleted_) highest = std::max(highest, object);
  return highest;
}

Status Server::absent(uint32_t object) {
  std::shared_lock lock(objects_mutex_);
  const auto it = deleted_.find(object);
  if (it != deleted_.end()) return Status(Code::kDeleted, it->second + " was deleted");
  return Status(Code::kNotFound, "object " + std::to_string(object) + " is not on this server");
}

// ---- workers --------------------------------------------------------------------------------------------------------

void Server::each_gate(const std::shared_ptr<Workers>& workers,
                       const std::function<void(ServedObject&, Shard&)>& visit) {
  for (const auto& object : objects()) {
    if (object->workers() != workers || !object->spec().sync().gated()) continue;
    for (uint32_t i = 0; i < object->shards(); ++i) {
      Shard* const shard = object->find(i);
      if (shard != nullptr) with_turn(shard->turn, [&] { visit(*object, *shard); });
    }
  }
}

void Server::tell_gates(const std::shared_ptr<Workers>& workers) {
  Freed freed;
  for (const auto& object : objects()) {
    if (object->workers() == workers) tell_gates_of(*object, &freed);
  }
  deliver(&freed);
}

void Server::tick(const std::shared_ptr<Workers>& workers, uint32_t rank, uint64_t clock, std::vector<uint32_t> open) {
  if (workers->tick(rank, clock, open)) tell_others(workers, open);
}

void Server::tick(const std::shared_ptr<Workers>& workers, uint32_t rank, uint64_t clock) {
  if (workers->tick(rank, clock)) tell_others(workers, workers->open_of(rank));
}

// Closes objects that the worker does not have open, too.
void Server::tell_others(const std::shared_ptr<Workers>& workers, const std::vector<uint32_t>& open) {
  std::shared_lock lock(objects_mutex_);
  const bool others = std::any_of(objects_.begin(), objects_.end(), [&](const auto& object) {
    return object != nullptr && object->workers() == workers && object->spec().sync().gated() &&
           !std::binary_search(open.begin(), open.end(), object->map().object);
  });
  lock.unlock();
  if (others) tell_gates(workers);
}

// ---- inside the process ---------------------------------------------------------------------------------------------

Status Server::open(const ObjectSpec& spec, std::shared_ptr<ServedObject>* out, bool makes) {
  WL_RETURN_IF_ERROR(check_name(spec.is_table ? "table" : "tensor", spec.own_name()));
  Map map;
  {
    std::lock_guard lock(making_);
    if (const auto it = numbers_.find(spec.name); it != numbers_.end()) {
      *out = find(it->second);
      if (*out == nullptr || (*out)->spec() == spec) map.object = it->second;
      if (*out != nullptr && map.object == 0)
        return Status(Code::kSpecMismatch, "'" + spec.own_name() + "' exists with another spec\n  there: " +
                                               (*out)->spec().describe() + "\n  asked: " + spec.describe());
      if (*out != nullptr) return {};
    }
    if (!makes) return not_there("open", spec);
    if (!spec.is_table && !spec.tensor.like.empty()) {
      const auto it = numbers_.find(spec.app() + "/" + spec.tensor.like);
      const std::shared_ptr<ServedObject> like = it != numbers_.end() ? find(it->second) : nullptr;
      const bool there = like != nullptr && !like->spec().is_table;
      WL_RETURN_IF_ERROR(check_like(spec.own_name(), spec.tensor, there ? &like->spec().tensor : nullptr));
    }
    if (map.object == 0) map.object = numbers_[spec.name] = ++last_number_;
  }
  map.runs = {{0, 0, Map::kFirstTerm}};
  return make(spec, map, 0, &pools_, workers_, out);
}

Status Server::remove(const std::string& name, uint32_t* number) {
  std::shared_ptr<ServedObject> there;
  {
    std::lock_guard lock(making_);
    const auto it = numbers_.find(name);
    there = it != numbers_.end() ? find(it->second) : nullptr;
    if (there == nullptr) return Status(Code::kNotFound, "there is no such object");
    std::vector<std::string> alike;
    for (const auto& object : objects()) {
      if (there->spec().is_anchor_of(object->spec())) alike.push_back(object->spec().own_name());
    }
    WL_RETURN_IF_ERROR(check_no_anchor(alike));
    numbers_.erase(it);
  }
  *number = there->map().object;
  remove(there->spec(), *number);
  return {};
}

// A worker begins with the others, where its predecessor of the same rank had got to, or where they all are by now.
void Server::join(uint32_t rank, uint32_t world_size, uint64_t incarnation, uint64_t* clock) {
  const uint64_t base = base_clock_.load(std::memory_order_relaxed);
  uint64_t highest = base, own = Gate::kNone;
  each_gate(workers_, [&](ServedObject&, Shard& shard) {
    highest = std::max(highest, shard.gate->highest());
    own = std::min(own, shard.gate->clock_of(rank));
  });
  *clock = base;
  const bool begins = workers_->assume(world_size, highest);
  if (workers_->world_size() != world_size) return;
  workers_->came(rank, incarnation);
  if (begins) {
    *clock = highest;
    return tell_gates(workers_);
  }
  if (own != Gate::kNone) *clock = workers_->waits_for(rank) ? own : highest;
  if (workers_->enter(rank, incarnation, *clock)) tell_gates(workers_);
}

void Server::leave(uint32_t rank, uint32_t world_size, uint64_t incarnation) {
  if (workers_->world_size() == world_size && workers_->left(rank, incarnation)) tell_gates(workers_);
}

void Server::end_waits(const Status& status) {
  Freed freed;
  each_gate(workers_, [&](ServedObject&, Shard& shard) {
    while (std::unique_ptr<Waiting> waiting = shard.parked.take_if([](const Waiting&) { return true; })) {
      static_cast<Ticket&>(*waiting).end(status);
      freed.push_back(std::move(waiting));
    }
  });
  deliver(&freed);
  staging_.changed();
}

Status Server::new_session(uint32_t* session) {
  std::lock_guard lock(making_);
  if (sessions_ >= limits::kSessionsMax) {
    return Status(Code::kResourceExhausted, "at most " + std::to_string(limits::kSessionsMax) + " sessions");
  }
  *session = sessions_++;
  return {};
}

}  // namespace windlass
