// Server: holds objects and applies rules. It has no sockets; a transport brings it requests.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/pool.h"
#include "base/status.h"
#include "server/crew.h"
#include "server/rounds.h"
#include "server/user_code.h"
#include "sync/crowd.h"
#include "table/table.h"
#include "tensor/tensor.h"

namespace windlass {

class Server {
 public:
  // `threads` work on one large request at once, its caller among them; at least one is the crew's own.
  Server(int threads, uint64_t memory_bytes_max);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server();

  // Creates the object, or opens it if its spec is the same.
  Status open_tensor(const std::string& name, const TensorSpec& spec, std::shared_ptr<Tensor>* out);
  Status open_table(const std::string& name, const TableSpec& spec, std::shared_ptr<Table>* out);

  // Who runs the user's functions, where they are run at all. Before any object needs one.
  void set_user_code(std::shared_ptr<UserCode> code);
  UserCode* user_code() const { return user_code_.get(); }
  // The user's rule of an object; *out stays empty where the rule is ours.
  Status find_rule(const std::string& what, const RuleSpec& rule, std::shared_ptr<ForeignRule>* out);

  // A number for a new session, under which shards keep its records.
  Status new_session(uint32_t* session);

  struct Object {  // one of the two
    std::shared_ptr<Tensor> tensor;
    std::shared_ptr<Table> table;
  };
  std::vector<Object> objects();

  // The workers: those of the largest world that sessions spoke of. One of another world is an outsider.
  const std::shared_ptr<Crowd>& crowd() const { return crowd_; }
  void join(uint32_t rank, uint32_t world_size, uint64_t incarnation, uint64_t* clock);
  void leave(uint32_t rank, uint32_t world_size, uint64_t incarnation);
  // Every gate, at its shard's turn.
  void each_gate(const std::function<void(const Target&, Shard&)>& visit);

  Crew& crew() { return *crew_; }
  Budget& budget() { return budget_; }
  TablePools& pools() { return pools_; }
  int threads() const { return threads_; }
  uint64_t memory_bytes() const { return budget_.used(); }

 private:
  void add_gate(Shard* shard, const Sync& sync);
  void tell_gates();

  const int threads_;
  std::shared_ptr<UserCode> user_code_;
  Budget budget_;
  TablePools pools_;  // before the objects, which give their memory back to it
  std::mutex mutex_;
  std::unordered_map<std::string, Object> objects_;
  uint32_t sessions_ = 0;
  const std::shared_ptr<Crowd> crowd_ = std::make_shared<Crowd>("embedded");
  std::unique_ptr<Crew> crew_;
};

}  // namespace windlass
