// TableClient: a session's handle on a table.
//
// Thread safety: every method from any thread.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "client/handle.h"
#include "client/query.h"
#include "table/table.h"

namespace windlass {

struct TableRequest {
  Keys keys;
  const Array* in = nullptr;   // a gradient per key
  const Array* out = nullptr;  // a row per key
  bool create = true;
  bool erase = false;  // takes the keys out instead
  std::string where;   // only where this holds: a Program
  Hyper hyper;
  double weight = 1;  // of the push in a mean over workers
  bool closes = false;
};

class TableClient;

// A request on a table, its keys sorted by shard. How it goes to servers elsewhere is the subclass's business, as with
// tensors.
class TableCall : public Call {
 public:
  TableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& request);
  uint64_t erased() const { return erased_.load(std::memory_order_relaxed); }
  bool ok() const { return groups_.ok(); }
  const std::vector<uint32_t>& shards() const { return shards_; }
  bool waits_for_close() const override;

  void fill(uint32_t part, bool kept, Entry* entry) override;
  void set_arrays(uint32_t part, bool kept, Entry* entry) override;
  void keep(uint32_t part) override;
  Status landed(uint32_t part, Outcome* outcome) override;

 protected:
  bool pushes() const override { return pushes_; }
  bool waits_for_update() const override;
  bool would_deadlock() const override;
  void uncount() override;
  void admitted() override;
  bool is_alone() const override;
  // A push counts from now on; a pull is of the present clock, or of the one that its worker has closed at the shard.
  void begin_iteration();
  // The clock at which a part looks at the rows.
  uint64_t asked(uint32_t part) const { return closed_.empty() ? asked_ : std::max(asked_, closed_[part]); }

  const std::shared_ptr<TableClient> client_;
  const Groups groups_;  // the keys are copied before anything happens
  const Hyper hyper_;
  const double weight_;
  const bool create_, erase_, closes_, pushes_;
  const std::string where_;  // of a delete
  const wire::Op op_;
  Iteration iteration_;  // of a push
  uint64_t asked_ = 0;
  std::vector<uint64_t> closed_;  // of a pull, at each part, where it is beyond that
  Arrays arrays_;
  std::vector<uint32_t> shards_;  // of each part
  std::atomic<uint64_t> erased_{0};
  std::unique_ptr<std::byte[]> kept_;  // the input, where its caller has it back

 private:
  std::mutex keep_mutex_;
};

class TableClient : public Handle, public std::enable_shared_from_this<TableClient> {
 public:
  static Status open(std::shared_ptr<Session> session, const std::string& name, const TableSpec& spec,
                     std::shared_ptr<TableClient>* out, int64_t deadline_ns = limits::kNoDeadline);
  static std::shared_ptr<TableClient> attach(std::shared_ptr<Session> session, std::shared_ptr<ServedObject> object);
  static std::shared_ptr<TableClient> attach(std::shared_ptr<Session> session, const Placed& placed);

  const std::string& name() const { return name_; }
  const TableSpec& spec() const { return spec_; }
  Table& table() { return *object().table(); }  // inside this process

  What what(const TableRequest& request) const;
  // Ok when the request fits the table.
  Status check(const TableRequest& request, const What& what) const;
  // A request that is checked; begin_push() and (*call)->start() begin it.
  Status make(const TableRequest& request, Ref<TableCall>* call);
  // Starts a request: *call->finish() or *call->wait() says how it went.
  Status start(const TableRequest& request, How how, Ref<TableCall>* call, int64_t deadline_ns = limits::kNoDeadline);
  Status rows(int64_t deadline_ns, uint64_t* out);
  // A function of the user's, called with some rows at a time; its results. Waits at no gate.
  Status call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results);
  Status fingerprint(int64_t deadline_ns, uint64_t* out);

  Status query(const std::string& query, int64_t deadline_ns, std::string* answer);
  // Rows in chunks, or their keys alone: client/query.h.
  using Cursor = ScanCursor;
  Status scan(Cursor* cursor, size_t most, int64_t deadline_ns, std::vector<uint64_t>* keys,
              std::vector<float>* weights) {
    return scan(cursor, most, "", deadline_ns, keys, weights);
  }
  Status scan(Cursor* cursor, size_t most, const std::string& where, int64_t deadline_ns, std::vector<uint64_t>* keys,
              std::vector<float>* weights);

 private:
  TableClient(std::shared_ptr<Session> session, const std::string& full_name, const std::string& name,
              const TableSpec& spec)
      : Handle(std::move(session), full_name, limits::kTableShards), name_(name), spec_(spec) {}
  RowType row_type() const { return {Dtype::kFloat32, spec_.dim, true, true}; }
  Asked asked(const char* verb);

  const std::string name_;
  const TableSpec spec_;
};

// The same request to servers elsewhere.
Ref<TableCall> make_remote_call(std::shared_ptr<TableClient> client, const What& what, const TableRequest& request);

}  // namespace windlass
