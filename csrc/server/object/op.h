// OpTraits: the properties of an operation on shards. The table in op.cc is the only list of operations.
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
  // At which clock it reads a shard that has a gate.
  enum class Looks : uint8_t {
    kUngated,  // at once
    kNow,      // at its caller's clock
    kNext,     // when the iteration it belongs to has been closed: at its clock plus one
    kUpdate,   // likewise, but only under BSP
  };

  wire::Op op;
  bool numbered = false;           // uses up a sequence and changes the shard
  bool contributes = false;        // brings a gradient, which under BSP waits for its update
  bool returns = false;            // answers with weights or rows
  bool closes = false;             // only closes an iteration
  bool keeps_value = false;        // its answer cannot be made again: a repeat gets the kept one
  bool versioned = false;          // answers with the shard's version
  bool answers_at_length = false;  // its answer has a body, and a block of its own
  Looks looks = Looks::kUngated;
  bool of_tensors = true, of_tables = true;

  // Checks that an entry makes sense and prepares it to run on this thread; sets *out_bytes to the most that the
  // numbers of its answer can take.
  Status (ServedObject::*check)(const Batch&, Entry*, uint64_t* out_bytes) const = nullptr;
  // At the shard's turn: `change` is what a numbered operation does; `read` is what it then returns, or what any other
  // operation reads.
  Status (ServedObject::*change)(const Batch&, const Entry&, Outcome*) = nullptr;
  Status (ServedObject::*read)(const Batch&, const Entry&, Outcome*) = nullptr;

  // Whether it changes a shard, or for whom others wait there. A reader may not.
  bool changes() const { return numbered || closes; }
  // Whether it writes weights directly: it contributes to no update and closes no iteration.
  bool sets() const { return numbered && !contributes; }
};

// Nullptr if the operation is not about shards.
const OpTraits* traits_of(wire::Op op);

}  // namespace windlass
