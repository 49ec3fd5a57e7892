// TableClient: a session's handle on a table.
//
// Thread safety: every method from any thread.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "client/op/array_call.h"
#include "client/op/query.h"
#include "table/table.h"

namespace windlass {

struct TableRequest {
  Keys keys;
  const Array* in = nullptr;   // a gradient per key
  const Array* out = nullptr;  // a row per key
  bool create = true;
  bool erase = false;  // deletes the keys instead
  std::string where;   // of a delete: only rows for which this Program holds
  Hyper hyper;
  double weight = 1;     // of the push in a mean over workers
  uint8_t priority = 0;  // to servers elsewhere: higher ones go first
  bool closes = false;
  const std::vector<uint32_t>* only = nullptr;  // leave out all other shards; ascending
};

// Rows that are put: their keys, each part of a row in an array of its own (nullptr: left out), and a count of updates
// of each row, if they have one.
struct RowArrays {
  Keys keys;
  std::vector<const float*> parts;
  const int64_t* counts = nullptr;
};

class TableClient;

// A request on a table, its keys sorted by shard. To servers elsewhere each key travels once: gradients of a repeated
// key are combined first, in order of occurrence, and its row is copied to every place that asked for it.
class TableCall final : public ArrayCall {
 public:
  TableCall(std::shared_ptr<TableClient> client, const What& what, const TableRequest& request);
  uint64_t erased() const { return erased_.load(std::memory_order_relaxed); }
  bool ok() const { return groups_.ok(); }

  Status fill(uint32_t part, bool kept, Entry* entry) override;
  void set_arrays(uint32_t part, bool kept, Entry* entry) override;
  void keep(uint32_t part) override;
  Status landed(uint32_t part, Outcome* outcome) override;

  void describe(uint32_t part, bool in_place, Parcel* to) override;
  void write_items(uint32_t part, bool in_place, std::byte* to) override;
  void write_argument(uint32_t part, std::byte* to) override;
  bool joins(uint32_t) const override { return true; }
  bool list(uint32_t part, uint32_t n, wire::ListedItems* list) override;
  void gather(uint32_t part, std::byte* to) override;
  Status land(uint32_t part, bool in_place, const PartAnswer& answer, const std::byte* numbers) override;

 protected:
  void describe_refused(uint32_t part, Refused* to) const override;
  Status add_to_plan(Arena::Segments* known, RemoteRoute::Plan* plan) override;
  uint64_t kept_besides() const override {
    return is_remote() ? groups_.total() * (sizeof(Keyed) + sizeof(uint32_t)) : 0;
  }

 private:
  const Keyed* keyed_of(uint32_t part) const { return groups_.begin(shards_[part]); }
  size_t size_of_part(uint32_t part) const { return groups_.size(shards_[part]); }
  // For every key of the part, its position among those that travel; nullptr if none repeats.
  const uint32_t* slots_of(uint32_t part) const {
    if (slots_.empty() || unique_[part] == size_of_part(part)) return nullptr;
    return slots_.data() + (keyed_of(part) - groups_.begin(0));
  }
  // Sums of 16-bit numbers travel as float32.
  Dtype wire_in() const { return repeats_ ? Dtype::kFloat32 : arrays_.in_dtype; }
  bool erases() const { return batch_.op->op == wire::Op::kErase; }
  void find_repeats();
  void gather_repeats(uint32_t part, float* to);

  const std::shared_ptr<TableClient> client_;
  const Groups groups_;  // copies of the keys, made first
  const bool create_;
  const uint8_t priority_;
  const std::string where_;       // of a delete
  std::vector<uint32_t> shards_;  // of each part
  std::atomic<uint64_t> erased_{0};
  std::mutex keep_mutex_;

  // For servers elsewhere.
  std::byte* list_ = nullptr;  // keys and places of all parts, in memory that the server can read
  bool repeats_ = false;
  std::vector<uint32_t> unique_;  // by part: how many keys travel
  std::vector<uint32_t> slots_;   // in the order of groups_
};

class TableClient : public Handle, public std::enable_shared_from_this<TableClient> {
 public:
  static Status open(std::shared_ptr<Session> session, const std::string& name, const TableSpec& spec,
                     std::shared_ptr<TableClient>* out, int64_t deadline_ns = limits::kNoDeadline,
                     std::string rule_text = "");
  static std::shared_ptr<TableClient> attach(std::shared_ptr<Session> session, std::shared_ptr<ServedObject> object);
  static std::shared_ptr<TableClient> attach(std::shared_ptr<Session> session, const Placed& placed);

  const std::string& name() const { return name_; }
  const TableSpec& spec() const { return spec_; }
  const RuleSpec& rule() const override { return spec_.rule; }
  Table& table() { return *object().table(); }  // inside this process

  What what(const TableRequest& request) const;
  // Checks that the request fits the table.
  Status check(const TableRequest& request, const What& what) const;
  using CallRef = Ref<TableCall>;
  // Checks a request and makes its call; begin_push() and (*call)->start() begin it.
  Status make(const TableRequest& request, Ref<TableCall>* call);
  Status prepare(const TableRequest& request, Ref<TableCall>* call);  // for a request that was checked
  bool rejects_nonfinite() const override { return spec_.reject_nonfinite; }
  // Starts a request: (*call)->finish() or (*call)->wait() returns its result.
  Status start(const TableRequest& request, How how, Ref<TableCall>* call, int64_t deadline_ns = limits::kNoDeadline);
  Status rows(int64_t deadline_ns, uint64_t* out);
  // Calls a user's function with some rows at a time. Waits at no gate.
  Status call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results);
  Status fingerprint(int64_t deadline_ns, uint64_t* out);

  // Sets rows (client/op/put_rows.cc), each portion of them within that time.
  Status put(const RowArrays& from, int64_t portion_ns);

  Status query(const std::string& query, int64_t deadline_ns, std::string* answer);
  // Rows in chunks, or only their keys: client/op/query.h.
  using Cursor = ScanCursor;
  Status scan(Cursor* cursor, size_t most, int64_t deadline_ns, std::vector<uint64_t>* keys,
              std::vector<float>* weights) {
    return scan(cursor, most, Scan::kRows, "", deadline_ns, keys, weights);
  }
  Status scan(Cursor* cursor, size_t most, Scan::What part, const std::string& where, int64_t deadline_ns,
              std::vector<uint64_t>* keys, std::vector<float>* rows);

 private:
  TableClient(std::shared_ptr<Session> session, const std::string& full_name, uint32_t number, const std::string& name,
              const TableSpec& spec)
      : Handle(std::move(session), full_name, number, limits::kTableShards), name_(name), spec_(spec) {}
  RowType row_type() const { return {Dtype::kFloat32, spec_.dim, true, true}; }
  Asked asked(const char* verb);
  Status check_finite(const What& what, const RowArrays& from) const;

  const std::string name_;
  const TableSpec spec_;
};

}  // namespace windlass
