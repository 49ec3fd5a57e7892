// Handle: what a session knows of an object it has open, tensor or table.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/net/owners.h"
#include "client/op/call.h"
#include "messages/messages.h"
#include "server/object/served_object.h"
#include "session/shard.h"

namespace windlass {

class Handle {
 public:
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  Session& session() const { return *session_; }
  const std::shared_ptr<Session>& shared_session() const { return session_; }
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  Status take_unseen() { return progress_->unseen.take(); }

  // Whether the servers are elsewhere; owners() then says where the shards are.
  bool remote() const { return !map_.runs.empty() || map_.object != 0; }
  ServedObject& object() const { return *object_; }  // inside this process
  const std::shared_ptr<ServedObject>& shared_object() const { return object_; }
  const Map& map() const { return map_; }  // as it was when the object was made
  const std::shared_ptr<Owners>& owners() const { return owners_; }
  const std::shared_ptr<Links>& links() const { return session_->engine().links(); }
  // Whether an array that a push brings is finite; the crew helps to look, if it is here.
  bool are_finite(Dtype dtype, const void* numbers, uint64_t n) const;

  // Call before a push. A push to a shard that this worker has already closed belongs to its next iteration: ticks
  // first. alone: it is a single request, after which the caller calls tell_rest().
  Status begin_push(const std::vector<uint32_t>& shards, int64_t deadline_ns, bool alone = false);
  // The iteration of a push, which counts from now on. With order_mutex() if the servers are elsewhere. Weights of
  // pushes to the same shard add up; a push in pieces to several shards is one contribution to the object. A push of
  // nothing (no keys, no rows) is a contribution, too: of zeros, whose weight counts in the mean.
  Iteration iteration_of_push(const std::vector<uint32_t>& shards, bool closes, double weight);
  // The whole push was taken back and does not count any more.
  void uncount(const std::vector<uint32_t>& shards, const Iteration& iteration);
  // For a pull, which waits for what its worker has closed already: the clock of each shard, or nothing if none is
  // beyond the worker's.
  std::vector<uint64_t> closed_beyond(const std::vector<uint32_t>& shards, uint64_t clock) const;
  // Whether the worker has not yet closed this iteration at some of the shards.
  bool is_open(const std::vector<uint32_t>& shards, uint64_t clock) const;
  const Sync& sync() const { return sync_; }
  virtual const RuleSpec& rule() const = 0;
  virtual bool rejects_nonfinite() const = 0;

  // A shard's answer to an operation that only reads, at its turn. Waits at no gate.
  struct Answer {
    uint64_t value = 0;
    uint16_t flags = 0;
    std::string body;
    std::vector<std::byte> numbers;
    UserCode::Ref call;  // inside the process: a user's function that has yet to run
  };
  // `value` and `body` go with each question.
  Status ask_shards(const What& what, wire::Op op, const std::vector<uint32_t>& shards, uint64_t value,
                    const std::string& body, int64_t deadline_ns, std::vector<Answer>* answers);

 protected:
  // number: the object's, as its map has it.
  Handle(std::shared_ptr<Session> session, const std::string& name, uint32_t number, uint32_t shards)
      : session_(std::move(session)), progress_(session_->progress(name, number, shards)) {}
  ~Handle() = default;

  // Calls a user's function with every shard; its results are in the order of shards.
  Status call_shards(const What& what, uint32_t shards, const wire::CallItem& item, int64_t deadline_ns,
                     std::vector<std::string>* results);
  // The sum of a number that every shard has.
  Status sum_of_shards(const What& what, wire::Op op, int64_t deadline_ns, uint64_t* out);
  void set_map(const Map& map, uint32_t shards);
  // object: nullptr if it is on servers elsewhere.
  void set_object(const Sync& sync, std::shared_ptr<ServedObject> object);

 private:
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Progress> progress_;
  Sync sync_;
  std::shared_ptr<ServedObject> object_;
  Map map_;
  std::shared_ptr<Owners> owners_;
};

}  // namespace windlass
