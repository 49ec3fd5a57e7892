// Server: the objects, the memory they take, and the threads that work on them. It has no sockets: a Host brings it the
// requests of other processes, an Engine those of its own.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/pool.h"
#include "base/status.h"
#include "exec/crew.h"
#include "server/object/served_object.h"
#include "server/object/user_code.h"
#include "sync/crowd.h"

namespace windlass {

class Server {
 public:
  // `threads` work on one large request at once, its caller among them; at least one is the crew's own.
  // staging_bytes_max: for pushes that wait for their update, unless they lie in their caller's registered arrays.
  Server(int threads, uint64_t memory_bytes_max, uint64_t staging_bytes_max = limits::kRoundsBytesMax);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server();

  // Who runs the user's functions, where they are run at all. Before any object needs one.
  void set_user_code(std::shared_ptr<UserCode> code);
  UserCode* user_code() const { return user_code_.get(); }
  // The user's rule of an object; *out stays empty where the rule is ours.
  Status find_rule(const std::string& what, const RuleSpec& rule, std::shared_ptr<ForeignRule>* out);

  // Objects, by the numbers that their maps have.
  std::shared_ptr<ServedObject> find(uint32_t object);
  std::vector<std::shared_ptr<ServedObject>> objects();
  // Makes an object, or finds it if it is there and the same. index: of this server in the map. pools: where tables
  // take their memory from.
  Status make(const ObjectSpec& spec, const Map& map, uint32_t index, TablePools* pools,
              const std::shared_ptr<Crowd>& crowd, std::shared_ptr<ServedObject>* out);
  // Forgets it, unless somebody has pushed to it.
  Status forget(const ObjectSpec& spec, const Map& map);

  // Tells every gate of an app who is waited for; whoever need not wait any more goes on.
  void tell_gates(const std::shared_ptr<Crowd>& crowd);
  // A worker has closed everything before a clock, except at shards of the objects it has open, ascending.
  void tick(const std::shared_ptr<Crowd>& crowd, uint32_t rank, uint64_t clock, std::vector<uint32_t> open);
  void tick(const std::shared_ptr<Crowd>& crowd, uint32_t rank, uint64_t clock);  // the same as the last time
  // Every shard that is here of an app's objects that have gates, at its turn.
  void each_gate(const std::shared_ptr<Crowd>& crowd, const std::function<void(ServedObject&, Shard&)>& visit);
  StagingQuota& staging() { return staging_; }

  // For a client inside the process: there is one app, and every shard is here.
  Status open(const ObjectSpec& spec, std::shared_ptr<ServedObject>* out);
  // A number for a new session, under which shards keep its records.
  Status new_session(uint32_t* session);
  // The workers: those of the largest world that sessions spoke of. One of another world is an outsider.
  const std::shared_ptr<Crowd>& crowd() const { return crowd_; }
  void join(uint32_t rank, uint32_t world_size, uint64_t incarnation, uint64_t* clock);
  void leave(uint32_t rank, uint32_t world_size, uint64_t incarnation);
  // Whoever waits at a gate, or for room, ends with this.
  void end_waits(const Status& status);

  Crew& crew() { return *crew_; }
  Budget& budget() { return budget_; }
  TablePools& pools() { return pools_; }
  int threads() const { return threads_; }
  uint64_t memory_bytes() const { return budget_.used(); }

 private:
  void tell_others(const std::shared_ptr<Crowd>& crowd, const std::vector<uint32_t>& open);

  const int threads_;
  std::shared_ptr<UserCode> user_code_;
  Budget budget_;
  TablePools pools_;  // before the objects, which give their memory back to it
  StagingQuota staging_;
  const std::shared_ptr<Crowd> crowd_ = std::make_shared<Crowd>("embedded");

  std::mutex making_;  // one object is made at a time
  std::unordered_map<std::string, uint32_t> numbers_;
  uint32_t sessions_ = 0;
  std::shared_mutex objects_mutex_;
  std::vector<std::shared_ptr<ServedObject>> objects_;  // by number
  std::unique_ptr<Crew> crew_;
};

}  // namespace windlass
