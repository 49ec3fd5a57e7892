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
#include "server/rounds.h"
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

  // With the turn of the shard held: the next push of this session. apply(updates since it last looked) applies it;
  // under BSP it is contributed instead: contribute(at_once) gives it, at_once when it is used before the turn ends.
  // Others that waited for it go on.
  template <class Apply, class Contribute>
  Status push_in_turn(const Call& call, const Target& target, Shard& shard, const Iteration& iteration, Apply apply,
                      Contribute contribute) {
    Record& record = shard.records.of(session_->number());
    const uint64_t sequence = ++progress_->sent[target.shard];
    if (record.admit(sequence) != Admission::kApply) return out_of_sequence(call, target.shard, record, sequence);
    record.sequence = sequence;  // a refusal consumes the sequence, too
    record.close(iteration.closes ? iteration.clock + 1 : iteration.clock);
    Gate* const gate = shard.gate.get();
    const uint32_t rank = gate != nullptr ? session_->rank_at_gates() : Gate::kOutsider;
    Status status;
    if (gate != nullptr && gate->sync().rounds()) {
      if (rank == Gate::kOutsider) return outsider(call);
      if (shard.staged == nullptr) shard.staged = std::make_unique<Rounds>();
      Rounds::Push push = contribute(iteration.closes && Rounds::is_next(rank, iteration.clock, *gate));
      push.rank = rank;
      push.incarnation = session_->incarnation();
      push.iteration = iteration.clock;
      push.weight = iteration.weight;
      if (!static_cast<Rounds&>(*shard.staged).add(std::move(push), *gate))
        session_->engine().server().crowd()->count_late();
    } else {
      status = apply(shard.version - record.seen);
      if (status.ok()) ++shard.version;
    }
    if (gate == nullptr) return status;
    if (iteration.closes) {
      close_in_turn(target, shard, rank, iteration.clock + 1, iteration.object_weight);
    } else if (!gate->sync().rounds()) {
      close_in_turn(target, shard, rank, iteration.clock, 0);
    }
    return status;
  }

  // The same for a push that was taken back before its turn: it still closes what the session counts as closed.
  void skip_in_turn(const Target& target, Shard& shard, const Iteration& iteration) {
    if (shard.gate == nullptr || !iteration.closes) return;
    shard.records.of(session_->number()).close(iteration.clock + 1);
    close_in_turn(target, shard, session_->rank_at_gates(), iteration.clock + 1, iteration.other_weight);
  }

  // Where the shards are, when the servers are elsewhere.
  bool remote() const { return !map_.runs.empty() || map_.object != 0; }
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

  // Runs `visit` on every shard at its turn, and waits for all of them. `alive` keeps the object while it runs.
  Status each_shard(const What& what, uint32_t shards, const std::function<Turn&(uint32_t)>& turn,
                    const std::function<Status(uint32_t)>& visit, std::shared_ptr<void> alive, int64_t deadline_ns);
  std::vector<uint64_t> sent();  // the last sequence pushed to each shard, on servers elsewhere

 protected:
  Handle(std::shared_ptr<Session> session, const std::string& name, uint32_t shards)
      : session_(std::move(session)), progress_(session_->progress(name, shards)) {}
  ~Handle() = default;

  // A function of the user's, called with every shard; its results, in the order of shards.
  Status call_shards(const What& what, uint32_t shards, const wire::CallItem& item,
                     const std::function<Target(uint32_t)>& target, const std::shared_ptr<void>& alive,
                     int64_t deadline_ns, std::vector<std::string>* results);
  // The sum of a number that every shard has, from servers elsewhere.
  Status sum_of_shards(const What& what, wire::Op op, int64_t deadline_ns, uint64_t* out);
  void set_map(const Map& map, uint32_t shards);
  void set_object(const Sync& sync, std::shared_ptr<Tensor> tensor, std::shared_ptr<Table> table);

 private:
  static Status outsider(const Call& call);
  static Status out_of_sequence(const Call& call, uint32_t index, const Record& record, uint64_t sequence);

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Progress> progress_;
  Sync sync_;
  Map map_;
  std::shared_ptr<Owners> owners_;
};

}  // namespace windlass
