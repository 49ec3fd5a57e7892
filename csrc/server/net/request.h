// Request: what a frame asks for, and how one of its blocks is served.
//
// A block is complete and its checksums are verified before any of its shards is touched. Its entries run one after the
// other, each at its shard's turn, or wait there if they came too early; the block is answered as a whole when the last
// has ended (server/net/waiting_block.h). A block may refer to what an earlier one says of its object.
//
// Thread safety: take() in the order of the frame, one thread at a time; serve() from several threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/net/answers.h"
#include "server/net/connection.h"
#include "server/net/direct_answer.h"
#include "server/object/ticket.h"

namespace windlass {

class Request {
 public:
  Request(std::shared_ptr<Connection> from, const wire::Header& header) : from_(std::move(from)), header_(header) {}

  const wire::Header& header() const { return header_; }
  // Whether its arrays are in the client's arenas.
  bool in_place() const { return (header_.flags & wire::kInArenas) != 0; }
  // Whether there is enough work for several threads.
  bool is_large() const {
    const bool many = (header_.flags & wire::kManyObjects) != 0;
    return header_.work_bytes >= (many ? limits::kBulkBytesMin : limits::kCrewBytesMin);
  }

  // What a block is about.
  struct About {
    std::shared_ptr<ServedObject> object;
    Batch batch;
    std::string argument;
    Status wrong;      // refuses all its blocks
    Status misplaced;  // the error of its arrays in arenas
  };
  // A whole block.
  struct Taken {
    wire::Block block;
    std::byte* bytes = nullptr;
    bool is_first = false;
    const About* about = nullptr;
    wire::Body body;
    const std::byte* argument = nullptr;
    uint32_t items_bytes = 0, argument_bytes = 0;
    Status wrong;   // refuses the block
    Status misfit;  // refuses its entries, which use up their sequences
  };
  static constexpr size_t kAtOnceMax = 16;

  // Whether a block that has not been read is of the worker whose turn it is in an update, so that it waits for nobody.
  bool is_next(const wire::Block& block) const;

  void take(Taken* taken);
  // Sends the weights from where they lie; false if the block must be served instead.
  bool answer_directly(const Taken& taken, DirectAnswer* direct) const;
  // *freed gets the tickets that these blocks have set free; the caller delivers them.
  void serve(Taken* taken, size_t n, Answers* answers, Freed* freed) const;

 private:
  struct Serving;
  void begin(const Taken& taken, About* about) const;
  void find_arrays(const wire::Places& places, About* about) const;
  Status check_numbers(const Taken& taken) const;
  Status tick(const Taken& taken) const;
  Status read_list(Taken* taken, const std::byte** items) const;
  static uint64_t items_in(const Taken& taken);
  static bool has_items(const About& about);
  void serve(Taken* taken, Answers* answers, Freed* freed) const;
  Status prepare(Taken* taken, Serving* serving) const;
  uint64_t largest_answer(const Serving& serving) const;
  bool await_turn(const Taken& taken, Answers* answers, Freed* freed) const;
  bool await_room(AnswerQuota& quota, uint64_t bytes, Answers* answers, Freed* freed, AnswerQuota::Room* room) const;
  template <class Full, class Wait>
  bool wait_while(Full full, Wait wait, Answers* answers, Freed* freed) const;
  bool run(uint32_t i, Serving* serving, Answers* answers, Freed* freed) const;
  bool park(uint32_t i, Verdict why, Shard& shard, Serving* serving) const;

  const std::shared_ptr<Connection> from_;
  const wire::Header header_;
  // Of the blocks taken so far. Most frames are about one object.
  About first_;
  std::vector<std::unique_ptr<About>> others_;
  About* last_ = nullptr;
  bool has_begun_ = false;
};

}  // namespace windlass
