// Request: what the header and the extensions of a frame ask for, and how one of its parts is served.
//
// A part is complete and its checksums are compared before its shard hears of it. It runs at the shard's turn, or is
// parked there if it came before its time. In a step every part says for itself what it asks for.
//
// Thread safety: read_extensions() first; then several threads may serve parts.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "server/answers.h"
#include "server/connection.h"
#include "server/direct_answer.h"
#include "server/object/ticket.h"

namespace windlass {

class Request {
 public:
  Request(std::shared_ptr<Connection> from, const wire::Header& header);

  // The extensions, as they came.
  Status read_extensions(const std::byte* bytes);
  const wire::Header& header() const { return about_.header; }
  bool is_step() const { return header().operation() == wire::Op::kStep; }
  // Whether its arrays are in the client's arenas.
  bool in_place() const { return (header().flags & wire::kInArenas) != 0; }
  // Whether there is enough to do for several threads.
  bool is_large() const;

  // Sends the answer from where the weights lie; false when it has to be served.
  bool answer_directly(const wire::Part& part, DirectAnswer* direct) const;
  // Some parts, each whole.
  struct Taken {
    wire::Part part;
    std::byte* bytes = nullptr;
  };
  static constexpr size_t kAtOnceMax = 16;
  // *freed gets those who had waited for what these brought: they are to be delivered.
  void serve(const Taken* parts, size_t n, Answers* answers, Freed* freed) const;

 private:
  // What parts are about.
  struct About {
    wire::Header header;
    std::shared_ptr<ServedObject> object;
    Batch batch;
    uint64_t streamed = 0;  // bytes of output of the whole request
    Status misplaced;       // what is wrong with its arrays in arenas

    void take_numbers(const double* numbers) {
      std::copy_n(numbers, limits::kRuleHyperMax, batch.hyper.v);
      if (batch.hypers != limits::kPushNumbersMax) return;
      batch.weight = numbers[limits::kRuleHyperMax];
      batch.object_weight = numbers[limits::kRuleHyperMax + 1];
      batch.other_weight = numbers[limits::kRuleHyperMax + 2];
    }
    bool is(wire::Op op) const { return batch.op != nullptr && batch.op->op == op; }
  };
  // A part that is about to be served.
  struct Ready {
    Entry entry;
    VectorStep vector;
    uint32_t label = 0;  // how its answer is addressed: within a step parts are counted
    About own;           // in a step
    Shard* shard = nullptr;
    Status wrong;
    Status other;         // what is wrong with the other tensor of a vector operation
    bool absent = false;  // the object is here, the shard has never been
    bool ticks = false;   // it is about no shard: its worker closes all others
  };
  void set_operation(About* about, wire::Op op) const;
  void prepare(const Taken& part, Ready* ready) const;
  Status check_sums(const wire::Part& part, const std::byte* bytes) const;
  Status read_item(Entry* entry, About* about) const;
  Status read_list(Entry* entry) const;
  void find_arrays(const wire::Places& places, About* about) const;
  Status tick(const Entry& entry) const;
  void serve(Ready* ready, Answers* answers, Freed* freed) const;
  bool park(const About& about, const Ready& ready, const Status& checked, uint64_t out_bytes, Verdict why,
            Outcome* outcome) const;

  const std::shared_ptr<Connection> from_;
  About about_;
};

}  // namespace windlass
