#include "server/server.h"

#include <algorithm>

#include "transport/messages.h"

namespace windlass {
namespace {

Status mismatch(const std::string& name, const std::string& there, const std::string& asked) {
  return Status(Code::kSpecMismatch,
                "'" + name + "' exists with another spec\n  there: " + there + "\n  asked: " + asked);
}

}  // namespace

Server::Server(int threads, uint64_t memory_bytes_max)
    : threads_(threads),
      budget_(memory_bytes_max),
      pools_(&budget_),
      crew_(std::make_unique<Crew>(std::max(1, threads - 1))) {}

Server::~Server() { crew_.reset(); }

void Server::set_user_code(std::shared_ptr<UserCode> code) {
  std::lock_guard lock(mutex_);
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

Status Server::open_tensor(const std::string& name, const TensorSpec& spec, std::shared_ptr<Tensor>* out) {
  WL_RETURN_IF_ERROR(check_name("tensor", name));
  std::lock_guard lock(mutex_);
  if (auto it = objects_.find(name); it != objects_.end()) {
    if (it->second.tensor == nullptr) return mismatch(name, describe(it->second.table->spec()), describe(spec));
    if (!(it->second.tensor->spec() == spec))
      return mismatch(name, describe(it->second.tensor->spec()), describe(spec));
    *out = it->second.tensor;
    return {};
  }
  std::unique_ptr<Tensor> made;
  std::shared_ptr<ForeignRule> foreign;
  WL_RETURN_IF_ERROR(find_rule("tensor '" + name + "'", spec.rule, &foreign));
  WL_RETURN_IF_ERROR(Tensor::create(name, spec, &budget_, &made));
  made->set_foreign(std::move(foreign));
  for (uint32_t i = 0; i < made->cut().shards; ++i) add_gate(&made->shard(i), spec.sync);
  *out = std::move(made);
  objects_[name].tensor = *out;
  return {};
}

Status Server::open_table(const std::string& name, const TableSpec& spec, std::shared_ptr<Table>* out) {
  WL_RETURN_IF_ERROR(check_name("table", name));
  std::lock_guard lock(mutex_);
  if (auto it = objects_.find(name); it != objects_.end()) {
    if (it->second.table == nullptr) return mismatch(name, describe(it->second.tensor->spec()), describe(spec));
    if (!(it->second.table->spec() == spec)) return mismatch(name, describe(it->second.table->spec()), describe(spec));
    *out = it->second.table;
    return {};
  }
  std::unique_ptr<Table> made;
  std::shared_ptr<ForeignRule> foreign;
  WL_RETURN_IF_ERROR(find_rule("table '" + name + "'", spec.rule, &foreign));
  WL_RETURN_IF_ERROR(Table::create(name, spec, &pools_, &made));
  made->set_foreign(std::move(foreign));
  for (uint32_t i = 0; i < limits::kTableShards; ++i) add_gate(&made->shard(i), spec.sync);
  *out = std::move(made);
  objects_[name].table = *out;
  return {};
}

void Server::add_gate(Shard* shard, const Sync& sync) {
  if (!sync.gated()) return;
  shard->gate = std::make_unique<Gate>(sync);
  shard->gate->set_view(crowd_->view(0), os::now_ns());
  shard->gate->begin();
}

void Server::each_gate(const std::function<void(const Target&, Shard&)>& visit) {
  for (const Object& object : objects()) {
    const bool is_table = object.table != nullptr;
    const Sync& sync = is_table ? object.table->spec().sync : object.tensor->spec().sync;
    if (!sync.gated()) continue;
    const uint32_t shards = is_table ? limits::kTableShards : object.tensor->cut().shards;
    for (uint32_t i = 0; i < shards; ++i) {
      Shard& shard = is_table ? object.table->shard(i) : object.tensor->shard(i);
      with_turn(shard.turn, [&] { visit({object.tensor.get(), object.table.get(), i}, shard); });
    }
  }
}

void Server::tell_gates() {
  const View view = crowd_->view(0);
  each_gate([&](const Target& target, Shard& shard) {
    shard.gate->set_view(view, os::now_ns());
    if (shard.gate->sync().rounds()) make_updates(shard, target);
    std::vector<std::unique_ptr<Waiting>> freed;
    shard.parked.free(shard, &freed);
  });
}

// A worker begins with the others, where the one before it under its rank had got to, or where they all are by now.
void Server::join(uint32_t rank, uint32_t world_size, uint64_t incarnation, uint64_t* clock) {
  uint64_t highest = 0, own = Gate::kNone;
  each_gate([&](const Target&, Shard& shard) {
    highest = std::max(highest, shard.gate->highest());
    own = std::min(own, shard.gate->clock_of(rank));
  });
  *clock = 0;
  const bool begins = crowd_->assume(world_size, highest);
  if (crowd_->world_size() != world_size) return;
  crowd_->came(rank, incarnation);
  if (begins) {
    *clock = highest;
    return tell_gates();
  }
  if (own != Gate::kNone) *clock = crowd_->waits_for(rank) ? own : highest;
  if (crowd_->enter(rank, incarnation, *clock)) tell_gates();
}

void Server::leave(uint32_t rank, uint32_t world_size, uint64_t incarnation) {
  if (crowd_->world_size() == world_size && crowd_->left(rank, incarnation)) tell_gates();
}

std::vector<Server::Object> Server::objects() {
  std::lock_guard lock(mutex_);
  std::vector<Object> all;
  for (const auto& [name, object] : objects_) all.push_back(object);
  return all;
}

Status Server::new_session(uint32_t* session) {
  std::lock_guard lock(mutex_);
  if (sessions_ >= limits::kSessionsMax) {
    return Status(Code::kResourceExhausted, "at most " + std::to_string(limits::kSessionsMax) + " sessions");
  }
  *session = sessions_++;
  return {};
}

}  // namespace windlass
