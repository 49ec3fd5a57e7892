// Messages: the bodies of operations that are about no shard (docs/formats/wire.md), and what they speak of.
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
  uint64_t known = 0;    // the incarnation of the server that welcomed this session before; 0: none did
  uint64_t cluster = 0;  // which the client believes the server is of; 0: of none
  std::string app;
  std::vector<std::string> servers;

  bool reads() const { return world_size == 0; }  // a reader: it has no clock, and nobody waits for it
};
std::string encode(const Hello& hello);
Status decode(const std::string& body, Hello* hello);

struct Welcome {
  uint64_t incarnation = 0;  // of the server
  uint32_t app = 0;          // the number it gave the app
};
std::string encode(const Welcome& welcome);
Status decode(const std::string& body, Welcome* welcome);

// Where an app stands at a server, for a worker that comes: clocks, Gate::kNone where there are none.
struct Standing {
  uint64_t own = Gate::kNone;     // the lowest of its rank, or of the next update where that has passed it
  uint64_t own_highest = 0;       // likewise the highest
  uint64_t lowest = Gate::kNone;  // of those who are waited for
  uint64_t highest = 0;           // of all; no update beyond it was made
  bool known = false;             // it is in the app's view; if not, the rest says nothing
  bool waited = false;            // its rank is waited for already
  bool starts = false;            // with all the others, rather than in somebody's place
  bool rounds = false;            // some object has updates that wait for everybody
};
std::string encode(const Standing& standing);
Status decode(const std::string& body, Standing* standing);

// An object of either kind: its full name, app/name, and its spec.
struct ObjectSpec {
  std::string name;
  bool is_table = false;
  TensorSpec tensor;
  TableSpec table;

  std::string describe() const { return is_table ? windlass::describe(table) : windlass::describe(tensor); }
  std::string own_name() const { return name.substr(name.find('/') + 1); }
  std::string app() const { return name.substr(0, name.find('/')); }
  const Sync& sync() const { return is_table ? table.sync : tensor.sync; }
  // How many shards it is cut into; refuses what can never be.
  Status shards(uint32_t* out) const;
  friend bool operator==(const ObjectSpec& a, const ObjectSpec& b) {
    return a.name == b.name && a.is_table == b.is_table && (a.is_table ? a.table == b.table : a.tensor == b.tensor);
  }
};
void encode(const ObjectSpec& spec, wire::Writer* to);
Status decode(wire::Reader* from, ObjectSpec* spec);

// Which server owns which shard, and since which term.
struct Map {
  static constexpr uint32_t kFirstTerm = 1;  // of every shard, until it moves
  struct Owned {
    uint32_t first;   // shard; up to the next run's
    uint32_t server;  // its index in the list
    uint32_t term;
    friend bool operator==(const Owned&, const Owned&) = default;
  };
  uint32_t object = 0;
  std::vector<Owned> runs;
  friend bool operator==(const Map&, const Map&) = default;

  const Owned& run_of(uint32_t shard) const;
  // The longest run of one server, or an empty one. When an object is made a server has one at most.
  Run run_of_server(uint32_t server, uint32_t shards) const;
  // Ok when the runs cover all shards in order.
  Status check(uint32_t shards, uint32_t servers) const;
  // Whether both can be true of the same object, one of them earlier than the other: a term belongs to one server.
  bool agrees(const Map& other, uint32_t shards) const;
};
void encode(const Map& map, wire::Writer* to);
Status decode(wire::Reader* from, Map* map);

Status check_name(const char* what, const std::string& name);

}  // namespace windlass
