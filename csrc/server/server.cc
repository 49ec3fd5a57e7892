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
  WL_RETURN_IF_ERROR(Tensor::create(name, spec, &budget_, &made));
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
  WL_RETURN_IF_ERROR(Table::create(name, spec, &pools_, &made));
  *out = std::move(made);
  objects_[name].table = *out;
  return {};
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
