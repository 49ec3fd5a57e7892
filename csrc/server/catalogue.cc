#include "server/catalogue.h"

#include <algorithm>
#include <numeric>

namespace windlass {
namespace {

constexpr uint32_t kFirstTerm = 1;

std::string listed(const std::vector<std::string>& servers) {
  std::string text = "[";
  for (size_t i = 0; i < servers.size(); ++i) text += (i != 0 ? ", " : "") + servers[i];
  return text + "]";
}

}  // namespace

Status Catalogue::join(const std::vector<std::string>& servers) {
  if (servers_.empty()) {
    servers_ = servers;
    load_bytes_.assign(servers.size(), 0);
  }
  if (servers_ == servers) return {};
  return Status(Code::kSpecMismatch, "servers: the cluster was formed with another list\n  there: " + listed(servers_) +
                                         "\n  asked: " + listed(servers));
}

Status Catalogue::open(const ObjectSpec& spec, Map* map) {
  if (servers_.empty()) return Status(Code::kProtocolError, "open before hello");
  if (const auto it = by_name_.find(spec.name); it != by_name_.end()) {
    const Entry& entry = entries_[it->second];
    if (!(entry.spec == spec)) {
      return Status(Code::kSpecMismatch, "'" + spec.own_name() + "' exists with another spec\n  there: " +
                                             entry.spec.describe() + "\n  asked: " + spec.describe());
    }
    *map = entry.map;
    return {};
  }
  uint32_t shards = 0;
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  if (entries_.size() >= limits::kObjectsMax) {
    return Status(Code::kResourceExhausted,
                  "'" + spec.own_name() + "': at most " + std::to_string(limits::kObjectsMax) + " objects");
  }
  *map = place(spec, shards);
  by_name_.emplace(spec.name, entries_.size());
  entries_.push_back({spec, *map});
  return {};
}

Map Catalogue::place(const ObjectSpec& spec, uint32_t shards) {
  std::vector<uint32_t> order(servers_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [this](uint32_t a, uint32_t b) { return load_bytes_[a] < load_bytes_[b]; });
  const uint64_t n = std::min<uint64_t>(order.size(), shards);
  const uint64_t bytes = spec.is_table ? 0 : spec.tensor.elements() * size_of(spec.tensor.dtype);
  Map map;
  map.object = static_cast<uint32_t>(entries_.size() + 1);
  for (uint64_t i = 0; i < n; ++i) {
    map.runs.push_back({static_cast<uint32_t>(shards * i / n), order[i], kFirstTerm});
    load_bytes_[order[i]] += bytes / n;
  }
  return map;
}

}  // namespace windlass
