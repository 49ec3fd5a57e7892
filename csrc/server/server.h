// Server: owns the objects, their memory, and the threads that work on them. It has no sockets: a Host brings it the
// requests of other processes, an Engine those of its own process.
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
#include "server/object/shard_capture.h"
#include "server/object/user_code.h"
#include "sync/workers.h"

namespace windlass {

class Server {
 public:
  // `threads` work on one large request at once, including its caller; at least one is the crew's own.
  // staging_bytes_max: for pushes that wait for their update, unless they lie in their caller's registered arrays.
  Server(int threads, uint64_t memory_bytes_max, uint64_t staging_bytes_max = limits::kRoundsBytesMax);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server();

  // Sets who runs the user's functions, if anybody does. Call before any object needs one.
  void set_user_code(std::shared_ptr<UserCode> code);
  UserCode* user_code() const { return user_code_.get(); }
  // The user's rule of an object; *out stays empty if the rule is built in.
  Status find_rule(const std::string& what, const RuleSpec& rule, std::shared_ptr<ForeignRule>* out);

  // Objects, by the numbers that their maps have.
  std::shared_ptr<ServedObject> find(uint32_t object);
  std::vector<std::shared_ptr<ServedObject>> objects();
  // Makes an object, or finds it if it exists with the same spec. index: of this server in the map. pools: where tables
  // take their memory from.
  Status make(const ObjectSpec& spec, const Map& map, uint32_t index, TablePools* pools,
              const std::shared_ptr<Workers>& workers, std::shared_ptr<ServedObject>* out);
  // Forgets an object, unless somebody has pushed to it.
  Status forget(const ObjectSpec& spec, const Map& map);
  // An object is deleted, whether it is here or not: its number is never used again, and who asks for it is told.
  void remove(const ObjectSpec& spec, uint32_t object);
  uint32_t highest_deleted();  // of their numbers
  // Why there is no object of this number.
  Status absent(uint32_t object);

  // Tells every gate of an app whom to wait for, and runs the entries that need not wait any more.
  void tell_gates(const std::shared_ptr<Workers>& workers);
  // A worker has closed everything before a clock, except shards of the objects it has open (`open`, ascending).
  void tick(const std::shared_ptr<Workers>& workers, uint32_t rank, uint64_t clock, std::vector<uint32_t> open);
  void tick(const std::shared_ptr<Workers>& workers, uint32_t rank, uint64_t clock);  // open as last time
  // Visits every shard here of an app's gated objects, with its turn.
  void each_gate(const std::shared_ptr<Workers>& workers, const std::function<void(ServedObject&, Shard&)>& visit);
  StagingQuota& staging() { return staging_; }
  CaptureMemory& captures() { return captures_; }

  // For clients inside the process, where there is one app and every shard is here.
  Status open(const ObjectSpec& spec, std::shared_ptr<ServedObject>* out, bool makes = true);
  // Deletes an object by its full name; *number becomes the one it had.
  Status remove(const std::string& name, uint32_t* number);
  // A number for a new session: shards keep its records under it.
  Status new_session(uint32_t* session);
  // From now on workers that nobody's clock says more about begin at this one: where a checkpoint was cut.
  void begin_at(uint64_t clock) { base_clock_.store(clock, std::memory_order_relaxed); }
  // The workers of the largest world_size that sessions have named. A session of another world_size is an outsider.
  const std::shared_ptr<Workers>& workers() const { return workers_; }
  void join(uint32_t rank, uint32_t world_size, uint64_t incarnation, uint64_t* clock);
  void leave(uint32_t rank, uint32_t world_size, uint64_t incarnation);
  // Ends everything that waits at a gate or for room with this status.
  void end_waits(const Status& status);

  Crew& crew() { return *crew_; }
  Budget& budget() { return budget_; }
  TablePools& pools() { return pools_; }
  int threads() const { return threads_; }
  uint64_t memory_bytes() const { return budget_.used(); }

 private:
  void tell_others(const std::shared_ptr<Workers>& workers, const std::vector<uint32_t>& open);

  const int threads_;
  std::shared_ptr<UserCode> user_code_;
  Budget budget_;
  TablePools pools_;  // before the objects, which return their memory to it
  StagingQuota staging_;
  CaptureMemory captures_{limits::kCaptureBytesMax};
  const std::shared_ptr<Workers> workers_ = std::make_shared<Workers>("embedded");

  std::mutex making_;  // one object is made at a time
  std::unordered_map<std::string, uint32_t> numbers_;
  uint32_t last_number_ = 0;
  uint32_t sessions_ = 0;
  std::atomic<uint64_t> base_clock_{0};
  std::shared_mutex objects_mutex_;
  std::vector<std::shared_ptr<ServedObject>> objects_;  // by number
  std::unordered_map<uint32_t, std::string> deleted_;   // names of those that were deleted
  std::mutex removing_;                                 // one object is removed at a time, whoever asks for it
  std::unique_ptr<Crew> crew_;
};

}  // namespace windlass
