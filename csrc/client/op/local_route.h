// LocalRoute: takes a request to the shards of a server inside this process.
//
// Every part becomes an entry (server/object/batch.h) at its shard's turn, with the arrays where they are then: the
// caller may have taken its output back, or its input may have been copied. An entry that must wait leaves a ticket in
// the shard and ends when that has run.
//
// Thread safety: every public method from any thread. Memory: a member of the call, which lives until it is done.
#pragma once

#include <string>
#include <vector>

#include "exec/shard_work.h"
#include "server/object/ticket.h"

namespace windlass {

class Call;

class LocalRoute final : public ShardWork, public Sink {
 public:
  explicit LocalRoute(Call& call);

  // Call before it begins: the object, and the shards of its parts.
  void set(ServedObject* object, const std::vector<uint32_t>* shards);
  ServedObject& object() const { return *object_; }

  void deliver(Ticket* const* tickets, size_t n) override;
  // Copies the input of all parts, before any of them begins.
  void keep_all();
  // Whether a push of this iteration is next at all of its shards, so that it waits for nobody; else *blocker says for
  // whom.
  bool is_next(uint64_t iteration, View::Worker* blocker);
  // Where a part waits, for messages; "" if none does.
  std::string stuck();

 private:
  Status landed(uint32_t part, Outcome* outcome);
  friend class LocalTicket;
  Shard& shard(uint32_t part) const { return *object_->find((*shards_)[part]); }
  Turn& turn(uint32_t part) override { return shard(part).turn; }
  Ran run(uint32_t part, bool kept, Status* status) override;
  void skip(uint32_t part) override;
  void keep(uint32_t part) override;
  bool leave_gate(uint32_t part) override;
  bool detach(uint32_t part) override;
  Ticket* find_ticket(uint32_t part) const;  // with the turn

  Call& call_;
  ServedObject* object_ = nullptr;
  const std::vector<uint32_t>* shards_ = nullptr;
};

}  // namespace windlass
