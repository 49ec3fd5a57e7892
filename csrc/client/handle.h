// Handle: what a session knows of an object it has open, whatever the object is.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/call.h"
#include "client/owners.h"
#include "server/object/served_object.h"
#include "session/shard.h"
#include "transport/messages.h"

namespace windlass {

// Inside the process: until everything that the session has begun at the object has been done.
Status settle_near(const std::shared_ptr<Session>& session, const std::shared_ptr<Progress>& progress,
                   int64_t deadline_ns);

class Handle {
 public:
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  Session& session() const { return *session_; }
  const std::shared_ptr<Session>& shared_session() const { return session_; }
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  Status take_unseen() { return progress_->unseen.take(); }

  // Where the shards are, when the servers are elsewhere.
  bool remote() const { return !map_.runs.empty() || map_.object != 0; }
  ServedObject& object() const { return *object_; }  // inside this process
  const std::shared_ptr<ServedObject>& shared_object() const { return object_; }
  const Map& map() const { return map_; }  // as it was when the object was made
  const std::shared_ptr<Owners>& owners() const { return owners_; }
  const std::shared_ptr<Links>& links() const { return session_->engine().links(); }

  // A push to a shard that this worker has already closed belongs to its next iteration: ticks first.
  // alone: one request, after which tell_rest() comes.
  Status begin_push(const std::vector<uint32_t>& shards, int64_t deadline_ns, bool alone = false);
  // The iteration of a push, which counts from now on. With order_mutex() where the servers are elsewhere. What a
  // worker pushes to one shard adds up; what it pushes to several in pieces is one contribution to the object.
  Iteration iteration_of_push(const std::vector<uint32_t>& shards, bool closes, double weight);
  // It was taken back, all of it, and counts no more.
  void uncount(const std::vector<uint32_t>& shards, const Iteration& iteration);
  // For a pull, which waits for what its worker has closed already: the clock of each shard, or nothing where none is
  // beyond the worker's.
  std::vector<uint64_t> closed_beyond(const std::vector<uint32_t>& shards, uint64_t clock) const;
  // Whether the worker has not closed this iteration at some of the shards.
  bool is_open(const std::vector<uint32_t>& shards, uint64_t clock) const;
  const Sync& sync() const { return sync_; }

  // What shards answer to an operation that only reads, each at its turn. Waits at no gate.
  struct Answer {
    uint64_t value = 0;
    uint16_t flags = 0;
    std::string body;
    std::vector<std::byte> numbers;
    UserCode::Ref call;  // inside the process: a function of the user's that is still to run
    Status wrong;        // likewise: what its check said
  };
  // `value` and `body` go with each question.
  Status ask_shards(const What& what, wire::Op op, const std::vector<uint32_t>& shards, uint64_t value,
                    const std::string& body, int64_t deadline_ns, std::vector<Answer>* answers);
  std::vector<uint64_t> sent();  // the last sequence pushed to each shard, on servers elsewhere

 protected:
  Handle(std::shared_ptr<Session> session, const std::string& name, uint32_t shards)
      : session_(std::move(session)), progress_(session_->progress(name, shards)) {}
  ~Handle() = default;

  // A function of the user's, called with every shard; its results, in the order of shards.
  Status call_shards(const What& what, uint32_t shards, const wire::CallItem& item, int64_t deadline_ns,
                     std::vector<std::string>* results);
  // The sum of a number that every shard has.
  Status sum_of_shards(const What& what, wire::Op op, int64_t deadline_ns, uint64_t* out);
  void set_map(const Map& map, uint32_t shards);
  // object: nullptr where it is on servers elsewhere.
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
