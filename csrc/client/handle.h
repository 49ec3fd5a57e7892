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
#include "session/shard.h"
#include "transport/messages.h"

namespace windlass {

class Handle {
 public:
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  Session& session() { return *session_; }
  const std::shared_ptr<Session>& shared_session() const { return session_; }
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  Status take_unseen() { return progress_->unseen.take(); }

  // With the turn of the shard held: apply(), under the next sequence of this session. `clock` is the worker's when
  // it pushed, `closes` whether the push ends the iteration here.
  template <class Apply>
  Status push_in_turn(const Call& call, uint32_t index, Shard& shard, uint64_t clock, bool closes, Apply apply) {
    Record& record = shard.records.of(session_->number());
    const uint64_t sequence = ++progress_->sent[index];
    if (record.admit(sequence) != Admission::kApply) return out_of_sequence(call, index, record, sequence);
    record.sequence = sequence;  // a refusal consumes the sequence, too
    record.close(closes ? clock + 1 : clock);
    Status status = apply();
    if (status.ok()) ++shard.version;
    return status;
  }

  // Where the shards are, when the servers are elsewhere.
  bool remote() const { return !map_.runs.empty() || map_.object != 0; }
  const Map& map() const { return map_; }  // as it was when the object was made
  const std::shared_ptr<Owners>& owners() const { return owners_; }
  const std::shared_ptr<Links>& links() const { return session_->engine().links(); }

  // A push to a shard that this worker has already closed belongs to its next iteration: ticks first. Returns the
  // clock of the push.
  uint64_t clock_for_push(const std::vector<uint32_t>& shards, bool closes);

 protected:
  Handle(std::shared_ptr<Session> session, const std::string& name, uint32_t shards)
      : session_(std::move(session)), progress_(session_->progress(name, shards)) {}
  ~Handle() = default;

  // Runs `visit` on every shard at its turn, and waits for all of them. `alive` keeps the object while it runs.
  Status each_shard(const What& what, uint32_t shards, const std::function<Turn&(uint32_t)>& turn,
                    const std::function<Status(uint32_t)>& visit, std::shared_ptr<void> alive, int64_t deadline_ns);
  // The sum of a number that every shard has, from servers elsewhere.
  Status sum_of_shards(const What& what, wire::Op op, int64_t deadline_ns, uint64_t* out);
  std::vector<uint64_t> sent();  // the last sequence pushed to each shard, on servers elsewhere
  void set_map(const Map& map, uint32_t shards);

 private:
  static Status out_of_sequence(const Call& call, uint32_t index, const Record& record, uint64_t sequence);

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Progress> progress_;
  Map map_;
  std::shared_ptr<Owners> owners_;
};

}  // namespace windlass
