// Hosted: an object as a server process holds it, and what one part of a request does to one of its shards.
//
// An Order is complete, private to us, and its checksums are right; whether it makes sense is check()'s to say. run()
// then belongs to the holder of the shard's turn: it admits the order by its sequence, applies or reads, and fills the
// reply. Sockets are none of its business.
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

#include "server/arenas.h"
#include "server/function.h"
#include "server/room.h"
#include "server/rounds.h"
#include "server/server.h"
#include "sync/crowd.h"
#include "transport/messages.h"
#include "wire/frame.h"

namespace windlass {

// Arrays of a client that are mapped here, of all parts of a request.
struct Lying {
  std::shared_ptr<const Mapping> in_mapping, out_mapping;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  uint64_t in_bytes = 0, out_bytes = 0;
  uint64_t base = 0;      // element e of a tensor is at e - base
  uint64_t streamed = 0;  // bytes of output of the whole request: many go past the cache
};

// One part of a request.
struct Order {
  wire::Header header;
  wire::Part part;
  Hyper hyper;
  size_t hypers = 0;                // how many were sent
  uint32_t session = 0;             // the number under which shards keep its records
  uint32_t rank = Gate::kOutsider;  // of its worker in the object's app
  double weight = 1;                // of the push
  double object_weight = 1;         // of its worker's pushes to the object in the iteration, with this one
  double other_weight = 0;          // and without it
  const std::byte* items = nullptr;
  const std::byte* numbers = nullptr;
  // Where the client's own arrays are, when they are in arenas: `numbers` is then the beginning of the input.
  const Lying* lying = nullptr;
  // How the answer is addressed: within a step parts are counted, whichever shards they are about.
  wire::Op frame_op{};
  uint32_t label = 0;
  // Of a vector operation: what it is, and where the other shard is if it is not here (server/vector.h).
  wire::VectorItem vector;
  uint64_t other_at = 0;

  wire::Op op() const { return header.operation(); }
  // Whether it is numbered and changes the shard.
  bool pushes() const {
    return op() == wire::Op::kPush || op() == wire::Op::kPushPull || op() == wire::Op::kErase || sets();
  }
  // Whether it changes weights as they are: no contribution to an update, no iteration that closes.
  bool sets() const { return op() == wire::Op::kPut || (op() == wire::Op::kVector && writes(vector.op())); }
};

// What is answered: the part's header (bytes and checksums are the sender's to fill in), and a message or keys.
struct Reply {
  wire::Part part;
  std::string items;
  uint64_t numbers_bytes = 0;
  UserCode::Ref call;  // a function that is to run first, without the turn

  // Without the turn: runs the function, whose result are the items.
  void finish(UserCode* code) {
    if (call == nullptr) return;
    const UserCode::Ref ran = std::move(call);
    if (const Status status = run_part(code, ran); !status.ok()) return refuse(status);
    items = std::move(ran->result);
  }
  void refuse(const Status& status) {
    part.status = static_cast<uint8_t>(status.code());
    items = status.message();
    numbers_bytes = 0;
  }
};

// What became of an order.
enum class Ran : uint8_t {
  kDone,   // the reply says how it went
  kEarly,  // it must wait for earlier pushes of its session, and nothing has happened
  kGated,  // it must wait for other workers; what it pushed has been taken
  kFull,   // there is no room for what it pushes, and nothing has happened
};

// Where an object's workers are known, and what their pushes may take.
struct Company {
  std::shared_ptr<Crowd> crowd;
  Room* room = nullptr;
};

class Hosted {
 public:
  // pools: where tables take their memory from.
  static Status make(const ObjectSpec& spec, const Map& map, uint32_t index, Server& server, TablePools* pools,
                     const Company& company, std::shared_ptr<Hosted>* out);

  const ObjectSpec& spec() const { return spec_; }
  const Map& map() const { return map_; }
  bool used() const { return used_.load(std::memory_order_relaxed); }  // whether anything was ever pushed to it
  // Nullptr when the shard has never been here. Otherwise it may be here no longer: that is run()'s to see.
  Shard* find(uint32_t shard);

  // Ok when the order fits the object; *out_bytes is what its answer needs for numbers, at most.
  Status check(const Order& order, uint64_t* out_bytes) const;
  // `checked` is what check() said: a push that is refused uses up its sequence all the same.
  enum Stage : uint8_t {
    kFresh,
    kParked,  // what it brings has waited already, and may take room beyond the limit
    kTaken,   // its push has been taken: it waited at the gate
    kServed,  // and what it wants was written
  };
  Ran run(const Order& order, Shard& shard, const Status& checked, std::byte* out, Reply* reply, Stage stage = kFresh);
  // With the turn: a pull of a whole shard as it is can be answered from where its weights lie. Nullptr: it is no such
  // pull, or must wait.
  const std::byte* peek(const Order& order, Shard& shard, Reply* reply) const;
  // Where a checked order wants a whole shard's weights as they are stored, in its client's own memory.
  Waiting::Wants wants(const Order& order) const;
  // The refusal of an order for a shard that has never been here.
  void turn_away(const Order& order, Reply* reply) const;

  const RuleSpec& rule() const { return spec_.is_table ? spec_.table.rule : spec_.tensor.rule; }
  UserCode* user_code() const { return user_code_; }
  Room& room() const { return *company_.room; }
  const std::shared_ptr<Crowd>& crowd() const { return company_.crowd; }
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
  Target target(uint32_t shard) const { return {table_ == nullptr ? &tensor_of(shard) : nullptr, table_.get(), shard}; }
  // Whether another tensor has the same cut, and was made to lie where this one does.
  bool is_like(const Hosted& other) const;
  // What is wrong with a vector operation on this tensor, but for the other one.
  Status check_vector(const Order& order) const;
  // The server that has a shard, as far as is known here, and since which term.
  std::pair<uint32_t, uint32_t> whereabouts(uint32_t shard);

 private:
  Hosted(ObjectSpec spec, Map map, uint32_t index, uint32_t shards, Budget* budget, Company company)
      : spec_(std::move(spec)),
        map_(std::move(map)),
        index_(index),
        shards_(shards),
        budget_(budget),
        company_(std::move(company)) {}
  bool inside(uint32_t shard) const { return shard >= run_.first && shard < run_.end; }
  Tensor* came(uint32_t shard) const {
    const auto* const places = places_.load(std::memory_order_acquire);
    return places != nullptr && shard < shards_ ? places[shard].load(std::memory_order_acquire) : nullptr;
  }
  void add_place(std::unique_ptr<Tensor> tensor);
  bool lets_in(const Order& order, Shard& shard) const;
  void turn_away(const Order& order, const Residence& home, Reply* reply) const;
  Status check_tensor(const Order& order, uint64_t* out_bytes) const;
  Status check_table(const Order& order, uint64_t* out_bytes) const;
  Status check_put(const Order& order) const;
  Status check_call(const Order& order) const;
  Status check_lying(const Order& order) const;
  Status check_query(const Order& order) const;
  Status check_scan(const Order& order, uint64_t* out_bytes) const;
  RowType row_type() const;
  bool finite(const Order& order, uint64_t elements) const;
  bool finite_rows(const Order& order) const;
  std::string what() const;  // in words
  Status refused(Code code, const std::string& why) const;
  void add_gate(Shard& shard);
  uint64_t seen(const Order& order, const Shard& shard) const;
  void close(const Order& order, Shard& shard, bool refused, bool* has_read);
  Ran push(const Order& order, Shard& shard, Record& record, Status* status, std::byte* out, Reply* reply, Stage stage,
           bool* has_read);
  bool contribute(const Order& order, Shard& shard, Stage stage);
  Status apply(const Order& order, const Hyper& hyper, std::byte* out, Reply* reply);
  void put(const Order& order);
  void write_vector(const Order& order);
  uint64_t dot(const Order& order) const;
  Status read(const Order& order, std::byte* out, Reply* reply);

  const ObjectSpec spec_;
  const Map map_;  // as it was when the object was made
  const uint32_t index_, shards_;
  Budget* const budget_;
  const Company company_;
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
