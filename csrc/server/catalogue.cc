#include "server/catalogue.h"

#include <algorithm>
#include <numeric>

namespace windlass {
namespace {

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
  if (agrees(servers)) return {};
  return Status(Code::kSpecMismatch, "servers: the cluster was formed with another list\n  there: " + listed(servers_) +
                                         "\n  asked: " + listed(servers));
}

void Catalogue::disband(uint32_t highest) {
  servers_.clear();
  load_bytes_.clear();
  entries_.assign(std::max<size_t>(entries_.size(), highest), {});
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
  if (!spec.is_table && !spec.tensor.like.empty()) {
    WL_RETURN_IF_ERROR(place_like(spec, map));
  } else {
    *map = place(shards);
  }
  by_name_.emplace(spec.name, entries_.size());
  entries_.push_back({spec, *map});
  for (size_t i = 0; i < map->runs.size(); ++i) load_bytes_[map->runs[i].server] += run_bytes(entries_.back(), i);
  return {};
}

// Moves since then are not known here: such shards are apart until they are moved, too.
Status Catalogue::place_like(const ObjectSpec& spec, Map* map) const {
  const auto it = by_name_.find(spec.app() + "/" + spec.tensor.like);
  const Entry* const anchor = it == by_name_.end() ? nullptr : &entries_[it->second];
  const bool there = anchor != nullptr && !anchor->spec.is_table;
  WL_RETURN_IF_ERROR(check_like(spec.own_name(), spec.tensor, there ? &anchor->spec.tensor : nullptr));
  map->object = static_cast<uint32_t>(entries_.size() + 1);
  map->runs = anchor->map.runs;
  return {};
}

void Catalogue::forget(const ObjectSpec& spec, uint32_t object) {
  const auto it = by_name_.find(spec.name);
  if (it == by_name_.end() || entries_[it->second].map.object != object) return;
  Entry& entry = entries_[it->second];
  for (size_t i = 0; i < entry.map.runs.size(); ++i) load_bytes_[entry.map.runs[i].server] -= run_bytes(entry, i);
  entry.map.runs.clear();
  by_name_.erase(it);
}

Status Catalogue::remove(const ObjectSpec& spec, uint32_t object) {
  if (object == 0 || object > entries_.size() || entries_[object - 1].spec.name != spec.name)
    return Status(Code::kNotFound, "there is no such object");
  std::vector<std::string> alike;
  for (const Entry& entry : entries()) {
    if (spec.is_anchor_of(entry.spec)) alike.push_back(entry.spec.own_name());
  }
  const auto it = by_name_.find(spec.name);
  const bool there = it != by_name_.end() && entries_[it->second].map.object == object;
  if (there) WL_RETURN_IF_ERROR(check_no_anchor(std::move(alike)));
  forget(spec, object);
  return {};
}

std::vector<Catalogue::Entry> Catalogue::entries() const {
  std::vector<Entry> all;
  for (const Entry& entry : entries_) {
    if (by_name_.count(entry.spec.name) != 0 && by_name_.at(entry.spec.name) == entry.map.object - 1)
      all.push_back(entry);
  }
  return all;
}

// The bytes that the i-th run of an object adds to its server.
uint64_t Catalogue::run_bytes(const Entry& entry, size_t i) {
  const TensorSpec& tensor = entry.spec.tensor;
  if (entry.spec.is_table) return 0;
  const Cut cut = cut_of(tensor);
  const std::vector<Map::Owned>& runs = entry.map.runs;
  const uint32_t end = i + 1 < runs.size() ? runs[i + 1].first : cut.shards;
  return (cut.end_of(end - 1) - cut.first_of(runs[i].first)) * size_of(tensor.dtype);
}

Map Catalogue::place(uint32_t shards) const {
  std::vector<uint32_t> order(servers_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [this](uint32_t a, uint32_t b) { return load_bytes_[a] < load_bytes_[b]; });
  const uint64_t n = std::min<uint64_t>(order.size(), shards);
  Map map;
  map.object = static_cast<uint32_t>(entries_.size() + 1);
  for (uint64_t i = 0; i < n; ++i) map.runs.push_back({static_cast<uint32_t>(shards * i / n), 0, Map::kFirstTerm});
  // Runs may differ by a shard: the longest go to the least loaded servers, or one server would always get them.
  const auto length = [&](uint64_t i) { return (i + 1 < n ? map.runs[i + 1].first : shards) - map.runs[i].first; };
  std::vector<uint32_t> runs(n);
  std::iota(runs.begin(), runs.end(), 0);
  std::stable_sort(runs.begin(), runs.end(), [&](uint32_t a, uint32_t b) { return length(a) > length(b); });
  for (uint64_t i = 0; i < n; ++i) map.runs[runs[i]].server = order[i];
  return map;
}

}  // namespace windlass
