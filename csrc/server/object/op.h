// OpTraits: what everybody must know of an operation about shards. The table in op.cc is the only list of them.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "wire/frame.h"

namespace windlass {

class ServedObject;
struct Batch;
struct Entry;
struct Outcome;
struct Shard;

struct OpTraits {
  // At which clock it looks at a shard that has a gate.
  enum class Looks : uint8_t {
    kUngated,  // whenever it comes
    kNow,      // at its caller's clock
    kNext,     // when the iteration it belongs to has been closed: at its clock plus one
    kUpdate,   // likewise, but only under BSP
  };

  wire::Op op;
  bool numbered = false;     // uses up a sequence and changes the shard
  bool contributes = false;  // brings a gradient, which under BSP waits for its update
  bool returns = false;      // answers with weights or rows
  bool closes = false;       // only closes an iteration
  bool keeps_value = false;  // its answer cannot be made again: a repeat gets the one that was kept
  bool versioned = false;    // answers with the shard's version
  bool walks = false;        // looks at all that its shards have, however few bytes it brings
  Looks looks = Looks::kUngated;
  bool of_tensors = true, of_tables = true;

  // Whether an entry makes sense, and makes it ready to run on this thread; *out_bytes is what its answer needs for
  // numbers, at most.
  Status (ServedObject::*check)(const Batch&, Entry*, uint64_t* out_bytes) const = nullptr;
  // At the shard's turn: what it does where it is numbered, and what it then, or else, reads.
  Status (ServedObject::*change)(const Batch&, const Entry&, Outcome*) = nullptr;
  Status (ServedObject::*read)(const Batch&, const Entry&, Outcome*) = nullptr;

  // Whether it changes weights as they are: no contribution to an update, no iteration that closes.
  bool sets() const { return numbered && !contributes; }
};

// Nullptr: it is not about shards.
const OpTraits* traits_of(wire::Op op);

}  // namespace windlass
