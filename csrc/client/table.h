// TableClient: a session's handle on a table.
//
// Thread safety: every method from any thread.
#pragma once

#include <memory>
#include <vector>

#include "client/handle.h"
#include "table/table.h"

namespace windlass {

struct TableRequest {
  Keys keys;
  const Array* in = nullptr;   // a gradient per key
  const Array* out = nullptr;  // a row per key
  bool create = true;
  bool erase = false;  // takes the keys out instead
  Hyper hyper;
  bool closes = false;
};

class TableClient;

class TableCall final : public Call {
 public:
  TableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& request);
  uint64_t erased() const { return erased_.load(std::memory_order_relaxed); }

 protected:
  void admitted() override;
  bool pushes() const override { return pushes_; }
  Turn& turn(uint32_t part) override;
  Status run(uint32_t part, bool kept) override;
  void keep(uint32_t part) override;

 private:
  friend class TableClient;
  const std::shared_ptr<TableClient> client_;
  const Groups groups_;  // the keys are copied before anything happens
  const Hyper hyper_;
  const bool create_, erase_, closes_, pushes_;
  uint64_t clock_ = 0;
  Arrays arrays_;
  std::vector<uint32_t> shards_;  // of each part
  std::atomic<uint64_t> erased_{0};
  std::mutex keep_mutex_;
  std::unique_ptr<std::byte[]> kept_;
};

class TableClient : public Handle, public std::enable_shared_from_this<TableClient> {
 public:
  static Status open(std::shared_ptr<Session> session, const std::string& name, const TableSpec& spec,
                     std::shared_ptr<TableClient>* out);
  static std::shared_ptr<TableClient> attach(std::shared_ptr<Session> session, std::shared_ptr<Table> table);

  Table& table() { return *table_; }

  // Starts a request: *call->finish() or *call->wait() says how it went.
  Status start(const TableRequest& request, How how, Ref<TableCall>* call, int64_t deadline_ns = limits::kNoDeadline);
  Status rows(int64_t deadline_ns, uint64_t* out);
  Status fingerprint(int64_t deadline_ns, uint64_t* out);

  // Where an export has got to. A row that is there from start to end is exported once, whatever else grows or goes.
  struct Cursor {
    uint32_t shard = 0;
    uint64_t from = 0;
  };
  // Up to `most` rows from the cursor on. Nothing comes when all have come.
  Status scan(Cursor* cursor, size_t most, int64_t deadline_ns, std::vector<uint64_t>* keys,
              std::vector<float>* weights);

 private:
  TableClient(std::shared_ptr<Session> session, std::shared_ptr<Table> table);
  Status check(const TableRequest& request, const What& what) const;
  Status each(const char* verb, const std::function<Status(uint32_t)>& visit, int64_t deadline_ns);

  const std::shared_ptr<Table> table_;
};

}  // namespace windlass
