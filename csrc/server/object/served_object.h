// ServedObject: an object as a server holds it, and what one entry of a request does to one of its shards. The server
// may be a process of its own or inside its client's.
//
// run() belongs to the holder of the shard's turn: it admits the entry by its sequence, applies or reads, and fills the
// outcome. Whoever has a turn sends nothing, waits for nothing and takes no second turn. Sockets are none of its
// business; nor is where an entry came from, but for check(), which an entry from a frame must pass first.
//
// Which shards are here changes (session/residence.h). A tensor's first run lies in one piece; a shard that comes later
// has memory of its own, and its place here stays when it leaves, so that a Shard that was found once can always be
// asked. A table has a place for every shard from the beginning.
//
//     tensor_    | 8 9 10 11 12 13 |        came_    3 -> | 3 |    27 -> | 27 |
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/object/batch.h"
#include "server/object/bsp_updates.h"
#include "server/object/shard_query.h"
#include "server/object/staging_quota.h"
#include "sync/crowd.h"
#include "transport/messages.h"

namespace windlass {

class Server;

// What became of an entry.
enum class Verdict : uint8_t {
  kDone,   // the outcome says how it went
  kEarly,  // it must wait for earlier pushes of its session, and nothing has happened
  kGated,  // it must wait for other workers; what it pushed has been taken
  kFull,   // there is no room for what it pushes, and nothing has happened
};

// How far an entry has got.
enum class Stage : uint8_t {
  kFresh,
  kParked,  // what it brings has waited already, and may take room beyond the limit
  kTaken,   // its push has been taken: it waited at the gate
  kServed,  // and what it wants was written
};

// Where an object's workers are known, and what their pushes may take.
struct ObjectContext {
  std::shared_ptr<Crowd> crowd;
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
  // Nullptr when the shard has never been here. Otherwise it may be here no longer: that is run()'s to see.
  Shard* find(uint32_t shard) {
    if (table_ != nullptr) return shard < shards_ ? &table_->shard(shard) : nullptr;
    if (inside(shard)) return &tensor_->shard(shard);
    Tensor* const tensor = came(shard);
    return tensor != nullptr ? &tensor->shard(shard) : nullptr;
  }

  // Ok when an entry from a frame fits the object, and makes it ready to run on this thread. *out_bytes is what its
  // answer needs for numbers, at most.
  Status check(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  // `checked` is what check() said: a push that is refused uses up its sequence all the same.
  Verdict run(const Batch& b, const Entry& e, Shard& shard, const Status& checked, Outcome* out,
              Stage stage = Stage::kFresh);
  // With the turn: a pull of a whole shard as it is can be answered from where its weights lie. Nullptr: it is no such
  // pull, or must wait.
  const std::byte* peek(const Batch& b, const Entry& e, Shard& shard, Outcome* out) const;
  // Where an entry wants a whole shard's weights as they are stored, in its caller's own memory.
  Waiting::Wants wants(const Batch& b, const Entry& e) const;
  // With the turn: whether it must wait for what its session did before: an earlier push, or an earlier close.
  bool is_early(const Batch& b, const Entry& e, Shard& shard) const;
  // The clock at which an entry looks at the shard; 0: it never waits at the gate.
  uint64_t clock_asked(const Batch& b, const Entry& e) const;
  // The refusal of an entry for a shard that has never been here.
  void turn_away(const Entry& e, Outcome* out) const;
  Status refused(Code code, const std::string& why) const;

  const RuleSpec& rule() const { return spec_.is_table ? spec_.table.rule : spec_.tensor.rule; }
  UserCode* user_code() const { return user_code_; }
  StagingQuota& staging() const { return *context_.staging; }
  const std::shared_ptr<Crowd>& crowd() const { return context_.crowd; }
  // With the turn: everybody who is waited for, anew.
  void set_view(Shard& shard, uint32_t index, const View& view);

  // For shards that move (server/departure.h, server/arrival.h). index: of this server in the list.
  uint32_t index() const { return index_; }
  uint32_t shards() const { return shards_; }
  void set_used() { used_.store(true, std::memory_order_relaxed); }
  // A place for a shard to come to; where it has never been here, one is made.
  Shard& make_place(uint32_t shard);
  // Memory for its numbers, where it needs any of its own; and what it held is given back, where that is cheap. The
  // holder's of its turn, or of a shard that is elsewhere.
  Status take_memory(uint32_t shard);
  void give_memory(uint32_t shard);
  Tensor& tensor_of(uint32_t shard) const { return inside(shard) ? *tensor_ : *came(shard); }
  Table* table() const { return table_.get(); }
  Tensor& tensor() const { return *tensor_; }  // the first run of it
  Target target(uint32_t shard) const { return {table_ == nullptr ? &tensor_of(shard) : nullptr, table_.get(), shard}; }
  // Whether another tensor has the same cut, and was made to lie where this one does.
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
  bool lets_in(const Entry& e, Shard& shard) const;
  void turn_away(const Entry& e, const Residence& home, Outcome* out) const;
  Status check_spans(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_keys(const Batch& b, Entry* e, uint64_t* out_bytes) const;
  Status check_in_place(const Batch& b, const Entry& e) const;
  RowType row_type() const;
  bool is_whole(const Entry& e) const;
  bool finite(const Batch& b, const Entry& e) const;
  std::string what() const;  // in words
  void add_gate(Shard& shard);
  uint64_t seen(const Batch& b, const Entry& e, const Shard& shard) const;
  void close(const Batch& b, const Entry& e, Shard& shard, bool refused, bool* has_read);
  Verdict push(const Batch& b, const Entry& e, Shard& shard, Record& record, Status* status, Outcome* out, Stage stage,
               bool* has_read);
  bool contribute(const Batch& b, const Entry& e, Shard& shard, Stage stage);

  const ObjectSpec spec_;
  const Map map_;  // as it was when the object was made
  const uint32_t index_, shards_;
  Budget* const budget_;
  const ObjectContext context_;
  Run run_;
  std::shared_ptr<ForeignRule> foreign_;  // where its rule is the user's
  UserCode* user_code_ = nullptr;
  std::atomic<bool> used_{false};
  std::shared_ptr<Tensor> tensor_;  // one of the two
  std::shared_ptr<Table> table_;

  std::mutex coming_;  // of what follows; places_ is read without it
  std::vector<std::unique_ptr<Tensor>> came_;
  std::unique_ptr<std::atomic<Tensor*>[]> all_places_;
  std::atomic<std::atomic<Tensor*>*> places_{nullptr};  // of every shard, once one has come
};

}  // namespace windlass
