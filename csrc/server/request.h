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
#include "server/hosted.h"
#include "server/lent.h"

namespace windlass {

using Freed = std::vector<std::unique_ptr<Waiting>>;
// Answers them, those of one request together.
void answer_all(Freed* freed);

class Request {
 public:
  Request(std::shared_ptr<Connection> from, const wire::Header& header);

  // The extensions, as they came.
  Status read_extensions(const std::byte* bytes);
  const wire::Header& header() const { return about_.header; }
  bool is_step() const { return header().operation() == wire::Op::kStep; }
  // Whether its arrays are in the client's arenas.
  bool lies() const { return (header().flags & wire::kInArenas) != 0; }
  // Whether there is enough to do for several threads.
  bool is_large() const;

  // Sends the answer from where the weights lie; false when it has to be served.
  bool lend(const wire::Part& part, Lent* lent) const;
  // Some parts, each whole.
  struct Taken {
    wire::Part part;
    std::byte* bytes = nullptr;
  };
  static constexpr size_t kAtOnceMax = 16;
  // *freed gets those who had waited for what these brought: they are to be answered.
  void serve(const Taken* parts, size_t n, Answers* answers, Freed* freed) const;

 private:
  // What parts are about.
  struct About {
    wire::Header header;
    std::shared_ptr<Hosted> object;
    Hyper hyper;
    size_t hypers = 0;
    double weight = 1, object_weight = 1, other_weight = 0;
    Lying lying;       // where the client's arrays are
    Status misplaced;  // what is wrong with that

    void take_numbers(const double* numbers) {
      std::copy_n(numbers, limits::kRuleHyperMax, hyper.v);
      if (hypers != limits::kPushNumbersMax) return;
      weight = numbers[limits::kRuleHyperMax];
      object_weight = numbers[limits::kRuleHyperMax + 1];
      other_weight = numbers[limits::kRuleHyperMax + 2];
    }
  };
  // A part that is about to be served.
  struct Ready {
    Order order;
    About own;  // in a step
    Shard* shard = nullptr;
    Status wrong;
    Status other;         // what is wrong with the other tensor of a vector operation
    bool absent = false;  // the object is here, the shard has never been
    bool ticks = false;   // it is about no shard: its worker closes all others
  };
  void prepare(const Taken& part, Ready* ready) const;
  Order order_of(const About& about, const wire::Part& part, std::byte* bytes) const;
  Status check_sums(const Order& order) const;
  Status read_item(Order* order, About* about) const;
  Status read_list(Order* order) const;
  void find_arrays(const wire::Places& places, About* about) const;
  Status tick(const Order& order) const;
  void serve(const Ready& ready, Answers* answers, Freed* freed) const;
  bool park(const About& about, const Order& order, const Status& checked, uint64_t out_bytes, Shard& shard, Ran ran,
            Reply* reply) const;

  const std::shared_ptr<Connection> from_;
  About about_;
};

}  // namespace windlass
