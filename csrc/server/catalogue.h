// Catalogue: which objects exist and which server owns which of their shards. The first server of the list keeps it if
// there is no scheduler. Pure: no thread, socket or time inside.
//
// A tensor's shards are placed in runs of neighbours, one per server, so that each server makes few long passes; the
// servers that hold least come first. A tensor that is like another is placed as that one was. A table's 256 shards are
// divided evenly; a hash of the key spreads the work.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "messages/messages.h"

namespace windlass {

class Catalogue {
 public:
  // The first client sets the list of servers; a client with another list is refused.
  Status join(const std::vector<std::string>& servers);
  bool agrees(const std::vector<std::string>& servers) const { return servers_.empty() || servers_ == servers; }
  // Without objects and clients: the next client sets another list. Numbers go on, above `highest`: other servers may
  // remember objects of those numbers as deleted.
  void disband(uint32_t highest);
  bool empty() const { return by_name_.empty(); }
  uint32_t servers() const { return static_cast<uint32_t>(servers_.size()); }

  // Creates the object, or opens it if its spec is the same.
  Status open(const ObjectSpec& spec, Map* map);

  bool has(const std::string& name) const { return by_name_.contains(name); }
  // Forgets an object that could not be made everywhere: its name is free again.
  void forget(const ObjectSpec& spec, uint32_t object);

  // Deletes an object, unless others are like it; one that is deleted already stays so.
  Status remove(const ObjectSpec& spec, uint32_t object);

  struct Entry {
    ObjectSpec spec;
    Map map;
  };
  std::vector<Entry> entries() const;

 private:
  Map place(uint32_t shards) const;
  Status place_like(const ObjectSpec& spec, Map* map) const;
  static uint64_t run_bytes(const Entry& entry, size_t i);

  std::vector<std::string> servers_;
  std::vector<uint64_t> load_bytes_;  // per server
  std::vector<Entry> entries_;        // object n is entry n - 1
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace windlass
