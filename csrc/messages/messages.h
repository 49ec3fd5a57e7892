// Messages: the bodies of operations that are about no shard (docs/formats/wire.md), and the types they carry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "sync/gate.h"
#include "table/table.h"
#include "tensor/tensor.h"
#include "wire/frame.h"

namespace windlass {

// What a client says of itself on each of its connections.
struct Hello {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint8_t lane = 0;
  uint32_t index = 0;    // of this server in the list
  uint64_t known = 0;    // incarnation of the server that welcomed this session before; 0: none
  uint64_t cluster = 0;  // that the client believes the server belongs to; 0: none
  std::string app;
  std::vector<std::string> servers;

  bool reads() const { return world_size == 0; }  // a reader: it has no clock, and nobody waits for it
};
// What a reader is refused, after the operation and its object.
inline constexpr char kOnlyReads[] = ": a reader only reads; connect as a worker to change anything";
inline Status no_clock(const char* what) {
  return Status(Code::kAccessDenied, std::string(what) + ": a reader has no clock, and nobody waits for it");
}
std::string encode(const Hello& hello);
Status decode(const std::string& body, Hello* hello);

struct Welcome {
  uint64_t incarnation = 0;  // of the server
  uint32_t app = 0;          // the number it gave the app
};
std::string encode(const Welcome& welcome);
Status decode(const std::string& body, Welcome* welcome);

// The clocks of an app at a server, for a worker that joins; Gate::kNone: there are none.
struct ClockReport {
  uint64_t own = Gate::kNone;     // the lowest of its rank, or of the next update if that has passed it
  uint64_t own_highest = 0;       // likewise the highest
  uint64_t lowest = Gate::kNone;  // of the workers that are waited for
  uint64_t highest = 0;           // of all workers; no update beyond it was made
  bool waited = false;            // its rank is waited for already
  bool starts = false;            // it starts with all others, rather than as a replacement
  bool rounds = false;            // some object is under BSP
};
std::string encode(const ClockReport& report);
Status decode(const std::string& body, ClockReport* report);

// An object of either kind: its full name, app/name, and its spec.
struct ObjectSpec {
  std::string name;
  bool is_table = false;
  TensorSpec tensor;
  TableSpec table;
  // How its maker's client writes down its rule, with the numbers that travel with a push unless others are given. For
  // who opens it by name: servers keep it and do not read it, and no two specs differ by it.
  std::string rule_text;

  std::string describe() const { return is_table ? windlass::describe(table) : windlass::describe(tensor); }
  std::string own_name() const { return name.substr(name.find('/') + 1); }
  std::string app() const { return name.substr(0, name.find('/')); }
  const Sync& sync() const { return is_table ? table.sync : tensor.sync; }
  // Whether the other is a tensor that was made like this one.
  bool is_anchor_of(const ObjectSpec& other) const {
    return !is_table && !other.is_table && app() == other.app() && other.tensor.like == own_name();
  }
  // How many shards it is cut into; an error if the spec is impossible.
  Status shards(uint32_t* out) const;
  friend bool operator==(const ObjectSpec& a, const ObjectSpec& b) {
    return a.name == b.name && a.is_table == b.is_table && (a.is_table ? a.table == b.table : a.tensor == b.tensor);
  }
};
// What a reader is told that would have to make it.
Status not_there(const char* what, const ObjectSpec& spec);
void encode(const ObjectSpec& spec, wire::Writer* to);
Status decode(wire::Reader* from, ObjectSpec* spec);

// Which server owns which shard, and since which term.
struct Map {
  static constexpr uint32_t kFirstTerm = 1;  // of every shard, until it moves
  struct Owned {
    uint32_t first;   // shard; the run ends at the next run's first
    uint32_t server;  // its index in the list
    uint32_t term;
    friend bool operator==(const Owned&, const Owned&) = default;
  };
  uint32_t object = 0;
  std::vector<Owned> runs;
  friend bool operator==(const Map&, const Map&) = default;

  const Owned& run_of(uint32_t shard) const;
  // The longest run of one server, or an empty one. When an object is made a server has at most one.
  Run run_of_server(uint32_t server, uint32_t shards) const;
  // Checks that the runs cover all shards in order.
  Status check(uint32_t shards, uint32_t servers) const;
  // Whether both can be maps of the same object at different times: a term belongs to one server.
  bool agrees(const Map& other, uint32_t shards) const;
};
void encode(const Map& map, wire::Writer* to);
Status decode(wire::Reader* from, Map* map);

Status check_name(const char* what, const std::string& name);
// An object is to be deleted: ok unless tensors are like it.
Status check_no_anchor(std::vector<std::string> alike);

}  // namespace windlass
