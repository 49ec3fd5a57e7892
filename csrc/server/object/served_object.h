// ServedObject: an object as a server holds it, and what one entry of a request does to one of its shards. The server
// may be a process of its own or inside its client's.
//
// The holder of the shard's turn calls run(), which admits the entry by its sequence, applies or reads, and fills the
// outcome. It sends nothing, waits for nothing and takes no second turn. It does not know where an entry came from; but
// an entry from a frame must pass check() first.
//
// The set of shards that are here changes (session/residence.h). A tensor's first run is one piece of memory; a shard
// that arrives later has its own. A Shard stays when its contents leave, so pointers from find() stay valid. A table
// has a Shard for every shard from the beginning.
//
//     tensor_    | 8 9 10 11 12 13 |        came_    3 -> | 3 |    27 -> | 27 |
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/os.h"
#include "messages/messages.h"
#include "server/object/batch.h"
#include "server/object/bsp_updates.h"
#include "server/object/shard_query.h"
#include "server/object/staging_quota.h"
#include "sync/workers.h"

namespace windlass {

class Server;

// What became of an entry.
enum class Verdict : uint8_t {
  kDone,   // the outcome says how it went
  kEarly,  // it must wait for earlier pushes of its session; nothing has happened
  kGated,  // it must wait for other workers; what it pushed has been taken
  kFull,   // there is no room for its push, or for what a checkpoint must set aside first; nothing has happened
};

// How far an entry has got.
enum class Stage : uint8_t {
  kFresh,
  kParked,  // it has waited already, and may exceed the staging quota
  kTaken,   // its push has been taken, and it waits at the gate
  kServed,  // and its output has been written
};

// The time for a gate, 0 if its policy does not depend on it: a request may ask hundreds of gates.
inline int64_t time_for(const Gate& gate) { return gate.sync().timed() ? os::now_ns() : 0; }

// The workers of an object's app, and the quota of their staged pushes.
struct ObjectContext {
  std::shared_ptr<Workers> workers;
  StagingQuota* staging = nullptr;
};

class ServedObject {
 public:
  // pools: where tables take their memory from.
  static Status make(const ObjectSpec& spec, const Map& map, uint32_t index, Server& server, TablePools* pools,
                     const ObjectContext& context, std::shared_ptr<ServedObject>* out);

  const ObjectSpec& spec() const { return spec_; }
  const Map& map() const { return map_; }
  bool used() const { return used_.load(std::memory_order_relaxed); }  // whether anything was ever pushed to it
  // Nullptr if the shard has never been here. It may have left since: run() sees to that.
  Shard* find(uint32_t shard) {
    if (table_ != nullptr) return shard < shards_ ? &table_->shard(shard) : nullptr;
    if (inside(shard)) return &tensor_->shard(shard);
    Tensor* const tensor = came(shard);
    return tensor != nullptr ? &tensor->shard(shard) : nullptr;
  }

  // Checks that an entry from a frame fits the object and prepares it to run on this thread. Sets *out_bytes to the
  // most that the numbers of its answer can take.
  Status check(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  // Call before a series of checks that decode `items` items in all. They decode into memory of this thread, which the
  // next begin_checks() reuses.
  static void begin_checks(uint64_t items);
  // The bytes of numbers that an entry must bring with it.
  uint64_t numbers_bytes(const Batch& b, const Entry& e) const;
  // `checked` is the result of check(): a refused push uses up its sequence, too.
  Verdict run(const Batch& b, const Entry& e, Shard& shard, const Status& checked, Outcome* out,
              Stage stage = Stage::kFresh);
  // With the turn: the weights in place, for a pull of a whole shard as it is stored. Nullptr if the entry is no such
  // pull, or must wait.
  const std::byte* peek(const Batch& b, const Entry& e, Shard& shard, Outcome* out) const;
  // Where in its caller's own memory an entry wants a whole shard's weights as they are stored; empty if it does not.
  Waiting::Wants wants(const Batch& b, const Entry& e) const;
  // With the turn: whether the shard is here under the entry's term.
  bool lets_in(const Entry& e, Shard& shard) const;
  // With the turn: whether it must wait for an earlier push or close of its session.
  bool is_early(const Batch& b, const Entry& e, Shard& shard) const;
  // The clock at which an entry reads the shard; 0: it never waits at the gate.
  uint64_t clock_asked(const Batch& b, const Entry& e) const;
  // With the turn: the memory that the answer of an early entry takes once it has run. out_bytes: what its numbers
  // claim.
  uint64_t kept_bytes(const Batch& b, const Entry& e, uint64_t out_bytes);
  // The refusal of an entry for a shard that has never been here.
  void turn_away(const Entry& e, Outcome* out) const;
  Status refused(Code code, const std::string& why) const;
  std::string what() const;  // kind and name, for messages
  Status gone() const { return Status(Code::kDeleted, what() + " was deleted"); }

  const RuleSpec& rule() const { return spec_.is_table ? spec_.table.rule : spec_.tensor.rule; }
  UserCode* user_code() const { return user_code_; }
  StagingQuota& staging() const { return *context_.staging; }
  const std::shared_ptr<Workers>& workers() const { return context_.workers; }
  // With the turn: replaces the workers that the gate waits for.
  void set_view(Shard& shard, uint32_t index, const View& view);

  // For a checkpoint: begins to capture a shard that is here, and ends it. False: it is not here.
  bool begin_capture(uint32_t shard, ShardCapture* capture);
  void end_capture(uint32_t shard);

  // For shards that move (server/move/departure.h, server/move/arrival.h). index: of this server in the list.
  uint32_t index() const { return index_; }
  uint32_t shards() const { return shards_; }
  void set_used() { used_.store(true, std::memory_order_relaxed); }
  // The Shard for an arrival; makes one if the shard has never been here.
  Shard& make_place(uint32_t shard);
  // Allocates memory for the shard's numbers if it needs its own; frees it where that is cheap. Call with the turn, or
  // while the shard is elsewhere.
  Status take_memory(uint32_t shard);
  void give_memory(uint32_t shard);
  Tensor& tensor_of(uint32_t shard) const { return inside(shard) ? *tensor_ : *came(shard); }
  Table* table() const { return table_.get(); }
  Tensor& tensor() const { return *tensor_; }  // the first run of it
  Target target(uint32_t shard) const { return {table_ == nullptr ? &tensor_of(shard) : nullptr, table_.get(), shard}; }
  // The object is deleted, for whoever still has it: entries are refused from now on, those that wait at its shards,
  // too (*freed gets them), and its memory is given back. What a move or a checkpoint is using is given back when
  // that ends.
  void remove(std::vector<std::unique_ptr<Waiting>>* freed);
  // Whether another tensor has the same cut and was made to lie on the same servers (`like=`).
  bool is_like(const ServedObject& other) const;
  // The server that has a shard, as far as is known here, and since which term.
  std::pair<uint32_t, uint32_t> whereabouts(uint32_t shard);

  // What operations check, change and read: server/object/op.cc says which does what.
  Status check_numbers(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_erase(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_put(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_vector(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_scan(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_snapshot(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_query(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_call(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status apply(const Batch& b, const Entry& e, Outcome* out);
  Status erase(const Batch& b, const Entry& e, Outcome* out);
  Status put(const Batch& b, const Entry& e, Outcome* out);
  Status write_vector(const Batch& b, const Entry& e, Outcome* out);
  Status dot(const Batch& b, const Entry& e, Outcome* out);
  Status read_numbers(const Batch& b, const Entry& e, Outcome* out);
  Status count_rows(const Batch& b, const Entry& e, Outcome* out);
  Status fingerprint(const Batch& b, const Entry& e, Outcome* out);
  Status scan_rows(const Batch& b, const Entry& e, Outcome* out);
  Status snapshot(const Batch& b, const Entry& e, Outcome* out);
  Status answer(const Batch& b, const Entry& e, Outcome* out);
  Status begin_call(const Batch& b, const Entry& e, Outcome* out);

 private:
  ServedObject(ObjectSpec spec, Map map, uint32_t index, uint32_t shards, Budget* budget, ObjectContext context)
      : spec_(std::move(spec)),
        map_(std::move(map)),
        index_(index),
        shards_(shards),
        budget_(budget),
        context_(std::move(context)) {}
  bool inside(uint32_t shard) const { return shard >= run_.first && shard < run_.end; }
  Tensor* came(uint32_t shard) const {
    const auto* const places = places_.load(std::memory_order_acquire);
    return places != nullptr && shard < shards_ ? places[shard].load(std::memory_order_acquire) : nullptr;
  }
  void add_place(std::unique_ptr<Tensor> tensor);
  void turn_away(const Entry& e, const Residence& home, Outcome* out) const;
  Status check_spans(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_keys(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_in_place(const Batch& b, const Entry& e) const;
  Status check_put_rows(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  RowType row_type() const;
  bool is_whole(const Entry& e) const;
  bool finite(const Batch& b, const Entry& e) const;
  void add_gate(Shard& shard);
  uint64_t seen(const Batch& b, const Entry& e, const Shard& shard) const;
  void close(const Batch& b, const Entry& e, Shard& shard, bool refused, bool* has_read);
  Verdict push(const Batch& b, const Entry& e, Shard& shard, Record& record, Status* status, Outcome* out, Stage stage,
               bool* has_read);
  Verdict contribute(const Batch& b, const Entry& e, Shard& shard, Stage stage, Status* status);

  const ObjectSpec spec_;
  const Map map_;  // as it was when the object was made
  const uint32_t index_, shards_;
  Budget* const budget_;
  const ObjectContext context_;
  Run run_;
  std::shared_ptr<ForeignRule> foreign_;  // if the rule is the user's
  UserCode* user_code_ = nullptr;
  std::atomic<bool> used_{false};
  std::shared_ptr<Tensor> tensor_;  // one of the two
  std::shared_ptr<Table> table_;

  std::mutex coming_;  // guards what follows; places_ is read without it
  std::vector<std::unique_ptr<Tensor>> came_;
  std::unique_ptr<std::atomic<Tensor*>[]> all_places_;
  std::atomic<std::atomic<Tensor*>*> places_{nullptr};  // by shard, once one has arrived
};

}  // namespace windlass
