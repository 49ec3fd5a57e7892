// Batch, Entry, Outcome: a request as shards see it, whoever brings it.
//
// A Batch is what all shards of a request about one object have in common; an Entry is one shard's share; an Outcome is
// what became of it. A server decodes them from a client's frames and trusts nothing in them before check(); a client
// inside the process makes them from its own arrays. What happens to a shard is written once, in ServedObject::run().
//
//     Batch   push_pull of 'w', SGD's hyperparameters, session 3, arrays
//     Entry   shard 0, sequence 17, clock 4, spans      ->  turn of shard 0  ->  Outcome
//     Entry   shard 1, sequence 12, clock 4, spans      ->  turn of shard 1  ->  Outcome
//
// Thread safety: a Batch does not change once its first entry runs; an Entry belongs to the thread that runs it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "rule/kernels.h"
#include "server/object/op.h"
#include "server/object/user_code.h"
#include "sync/gate.h"
#include "table/table.h"
#include "tensor/tensor.h"
#include "wire/frame.h"

namespace windlass {

// The caller of a request: its session and its worker.
struct Caller {
  uint32_t number = 0;  // of its session: shards keep its records under this
  uint64_t incarnation = 0;
  uint32_t rank = Gate::kOutsider;  // of its worker in the object's app
  bool reads = false;               // a reader: it changes nothing
};

// Arrays of the caller that are used in place, by all entries of a batch. `memory` keeps them alive; null: they are
// valid only while an entry runs.
struct InPlace {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  uint64_t in_bytes = 0, out_bytes = 0;
  uint64_t base = 0;  // element e of a tensor is at e - base
  std::shared_ptr<const void> memory;
};

struct Batch {
  const OpTraits* op = nullptr;
  Caller caller;
  Dtype in_dtype = Dtype::kFloat32, out_dtype = Dtype::kFloat32;
  Hyper hyper;
  size_t hypers = 0;         // how many were given
  double weight = 1;         // of the push
  double object_weight = 1;  // of its worker's pushes to the object in the iteration, with this one
  double other_weight = 0;   // and without it
  bool in_place = false;     // the arrays are the caller's own
  InPlace arrays;
  bool staged = false;       // under BSP: the caller has charged the staging quota for its copies
  bool streams = false;      // outputs bypass the cache
  uint32_t deadline_ms = 0;  // after which the caller no longer waits for a read; 0: none

  // The numbers that travel with a push: hyperparameters, followed under BSP by the weights.
  void write_numbers(double* to) const {
    std::copy_n(hyper.v, limits::kRuleHyperMax, to);
    to[limits::kRuleHyperMax] = weight;
    to[limits::kRuleHyperMax + 1] = object_weight;
    to[limits::kRuleHyperMax + 2] = other_weight;
  }
  // `hypers` says how many there are.
  void read_numbers(const double* from) {
    std::copy_n(from, limits::kRuleHyperMax, hyper.v);
    if (hypers != limits::kPushNumbersMax) return;
    weight = from[limits::kRuleHyperMax];
    object_weight = from[limits::kRuleHyperMax + 1];
    other_weight = from[limits::kRuleHyperMax + 2];
  }
};

// What a vector operation does, and where the other shard is if it is not here (server/object/vector.h).
struct VectorStep {
  wire::VectorItem item;
  uint64_t other_at = 0;
};

struct Entry {
  static constexpr uint64_t kNextSequence = ~uint64_t{0};  // from inside the process: assigned at the turn

  Entry() {}  // NOLINT: a defaulted one is a memset, which GCC makes an instruction that takes longer than 14 stores

  uint32_t shard = 0;
  uint32_t term = 0;
  uint64_t sequence = kNextSequence;  // its own if the operation is numbered, else the last push it must see
  uint64_t clock = 0;
  uint64_t value = 0;           // the operation's own: a version, a position in a scan, the weight of a close
  uint64_t follows = 0;         // of a close: the clock up to which its worker closed the shard before
  uint16_t flags = 0;           // wire::BlockFlag
  uint32_t items = 0;           // spans or keys
  const Span* spans = nullptr;  // one of the two, if it moves numbers; `at` counts from `in` and `out`
  const Keyed* keyed = nullptr;
  const std::byte* encoded = nullptr;  // from a frame: spans or keys that check() has not decoded yet
  const std::byte* in = nullptr;       // the numbers it brings
  std::byte* out = nullptr;            // where the numbers of its answer are written
  const std::byte* body = nullptr;     // its argument: a query, an expression, the planes of a put
  uint32_t body_bytes = 0;
  uint64_t numbers_bytes = 0;          // of `in`, if they came with the entry
  uint64_t length = 0;                 // the memory that the body of its answer takes, at most
  const VectorStep* vector = nullptr;  // of a vector operation

  bool closes() const { return (flags & wire::kCloses) != 0; }
  bool empty() const { return (flags & wire::kEmpty) != 0; }  // only uses up its sequence
};

// Whether an operation's outputs bypass the cache: the request writes much in all (`all_bytes`), and not too little to
// this object (`own_bytes`).
inline bool streams(const OpTraits& op, uint64_t all_bytes, uint64_t own_bytes) {
  const size_t least = op.numbered ? limits::kStreamBytesMin : limits::kStreamPullBytesMin;
  return all_bytes >= least && own_bytes >= limits::kStreamPartBytesMin;
}

// What a put into a table brings of each row.
inline RowForm row_form(const wire::PutItem& item) { return {.parts = item.planes, .counted = item.sets_count != 0}; }

// Whether the entry brings a gradient.
inline bool brings_gradient(const Batch& b, const Entry& e) { return b.op->contributes && !e.empty(); }

struct Outcome {
  Status status;
  uint64_t sequence = 0;  // the caller's last that was applied to the shard
  uint64_t clock = 0;     // up to which the entry saw everybody's pushes
  uint64_t value = 0;     // the shard's version plus one, or what the operation counts
  uint32_t term = 0;      // of a shard that is elsewhere: since which term
  uint16_t flags = 0;
  std::string body;            // keys, the answer to a query
  uint64_t numbers_bytes = 0;  // written to Entry::out, if that is not the caller's own array
  int64_t waited_ns = 0;       // at the gate
  uint32_t waited_for = Gate::kOutsider;
  UserCode::Ref call;            // a user's function that must run first, without the turn
  const Hyper* hyper = nullptr;  // of a push, while it is applied: corrected for its staleness
  bool reads_later = false;      // its push was applied; it reads the weights when the gate opens

  // Runs the function, without the turn; its result becomes the body.
  void finish(UserCode* code);
  void refuse(Status why) {
    status = std::move(why);
    numbers_bytes = 0;
  }
};

}  // namespace windlass
