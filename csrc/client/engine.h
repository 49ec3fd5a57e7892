// Engine and Session: what a client process holds.
//
// An Engine has an arena and either a server inside the process or links to servers elsewhere. A Session is one worker:
// inside the process there may be several, threads that act as workers; links belong to one. Handles (client/tensor.h,
// client/table.h) belong to a session.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/os.h"
#include "base/status.h"
#include "client/arena.h"
#include "server/server.h"
#include "transport/messages.h"

namespace windlass {

class Links;
class Owners;

// An object on servers elsewhere: what it is and where.
struct Placed {
  ObjectSpec spec;
  Map map;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(int threads, uint64_t memory_bytes_max);
  // On servers elsewhere; registered arrays may be those of another engine.
  Engine(std::shared_ptr<Links> links, const std::shared_ptr<Engine>& arena_of);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  Server& server() { return *server_; }                           // unless there are links
  const std::shared_ptr<Links>& links() const { return links_; }  // null when the server is inside the process
  Arena& arena() { return *arena_; }

  // Ok while the engine can be used: not closed, and not the copy of it that a fork made.
  Status usable() const;
  bool forked() const { return generation_ != os::fork_generation(); }
  // Refuses further requests and waits for those under way; kTimeout names how many are left.
  Status close(int64_t deadline_ns);
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // Asynchronous pushes of ordinary arrays may need copies of them. Together they are limited: who would pass the
  // limit waits for room, and false means that there was none in time.
  bool reserve_kept(uint64_t bytes, int64_t deadline_ns);
  void release_kept(uint64_t bytes);
  bool would_wait(uint64_t bytes) const {
    return kept_bytes_.load(std::memory_order_relaxed) + bytes > limits::kKeptBytesMax ||
           (server_ != nullptr && !server_->staging().has_room(bytes));
  }

  // Inside the process nobody watches the gates: who waits at one says itself for whom, every so often. Set before
  // anybody can wait.
  struct Overdue {
    int64_t every_ns = 0;
    std::function<void(const std::string& line)> say;
  };
  void set_overdue(Overdue overdue) { overdue_ = std::move(overdue); }
  const Overdue& overdue() const { return overdue_; }

  // Requests under way, so that close() can wait for them.
  Status enter();
  void leave();

 private:
  Status wait_for_all(int64_t deadline_ns);

  const uint32_t generation_ = os::fork_generation();
  std::unique_ptr<Server> server_;
  std::shared_ptr<Links> links_;
  std::shared_ptr<Arena> arena_;
  std::atomic<bool> closed_{false};
  std::atomic<uint32_t> under_way_{0};
  std::atomic<uint64_t> kept_bytes_{0};
  std::atomic<uint32_t> kept_releases_{0};  // for who waits for room
  std::atomic<uint32_t> kept_waiters_{0};
  Overdue overdue_;
};

// The error of a request whose future nobody looked at. The next call on the object, tick() or close() raises it.
class Unseen {
 public:
  void add(const Status& status);
  Status take();  // the first one, and how many there were

 private:
  std::atomic<uint32_t> count_{0};
  std::mutex mutex_;
  Status first_;
};

// How far a session has got with one object. It outlives handles: an object that is opened again goes on from here.
struct Progress {
  Progress(uint32_t shards, uint64_t clock) : sent(shards), closed(shards, clock), weights(shards) {}
  std::vector<uint64_t> sent;    // the last sequence pushed to each shard: the holder of its turn, or order_mutex()
  std::vector<uint64_t> closed;  // the clock up to which each shard is closed: the session's clock_mutex()
  // Under BSP, of the pushes in the present iteration: at each shard, and the largest of those. Likewise.
  std::vector<double> weights;
  double weight = 0;
  Unseen unseen;

  // The object, for who closes its shards: one of the two, once it is open; the session's clock_mutex().
  bool opened = false;
  Sync sync;
  std::shared_ptr<ServedObject> object;  // inside the process
  std::shared_ptr<Owners> owners;        // on servers elsewhere
};

// The iteration that a push belongs to.
struct Iteration {
  uint64_t clock = 0;
  bool closes = false;       // it ends with the push, at the shards that it touches
  double weight = 1;         // of the push
  double object_weight = 1;  // of its worker's pushes to the object in this iteration, with this one
  double other_weight = 0;   // and without it
};

struct ClosingShards;

class Session : public std::enable_shared_from_this<Session> {
 public:
  static Status open(std::shared_ptr<Engine> engine, uint32_t rank, uint32_t world_size, std::shared_ptr<Session>* out);

  Engine& engine() { return *engine_; }
  const std::shared_ptr<Engine>& shared_engine() const { return engine_; }
  uint32_t number() const { return number_; }  // under which the server keeps its records
  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  uint64_t incarnation() const { return incarnation_; }

  // How many iterations this worker has closed.
  uint64_t clock() const { return clock_.load(std::memory_order_acquire); }
  // Closes everything that is open of the app. Does not wait for servers elsewhere.
  // push_follows: where nothing is left to close, servers hear of it with the next push to them; tell_rest() comes
  // after that.
  Status tick(int64_t deadline_ns, bool push_follows = false);
  Status tell_rest(int64_t deadline_ns);
  // Every server knows this worker's clock: an object that is made now begins there.
  Status tell_clock(int64_t deadline_ns);
  // Whether a push of this clock to that server should say that all before it is closed.
  bool tells(uint32_t server, uint64_t clock);
  bool has_listeners() const;  // whether servers want to know this worker's clock
  // Updates up to this one were made without us: the next tick goes on from there.
  void catch_up(uint64_t clock);
  // Where others have begun: this worker begins at a clock that fits theirs.
  Status enter(int64_t deadline_ns);
  // Waits until everything that this worker has pushed and closed has arrived where it belongs.
  Status settle(int64_t deadline_ns);
  // It is waited for no more, and need not wait itself.
  Status leave(int64_t deadline_ns);
  bool await_closes(int64_t deadline_ns);             // that are on their way to servers elsewhere
  bool has_open_pushes();                             // that wait for an iteration which this worker has not closed
  uint32_t rank_at_gates() const;                     // inside the process
  std::mutex& clock_mutex() { return clock_mutex_; }  // held while a push finds its clock
  // When it was last said for whom this worker waits; whoever changes that says it.
  std::atomic<int64_t>& told_ns() { return told_ns_; }

  std::mutex& order_mutex() { return order_mutex_; }  // held while pushes to servers elsewhere are numbered and queued

  // Creates or opens an object on servers elsewhere. `spec.name` is a name of this app, or app/name.
  Status place(ObjectSpec spec, int64_t deadline_ns, Placed* out);
  Status list(int64_t deadline_ns, std::vector<Placed>* out);

  std::shared_ptr<Progress> progress(const std::string& name, uint32_t shards);
  Status take_unseen();  // of any object
  // The sum over all objects of the engine, also those that other sessions made.
  Status fingerprint(int64_t deadline_ns, uint64_t* out);

 private:
  Session(std::shared_ptr<Engine> engine, uint32_t number, uint32_t rank, uint32_t world_size);

  const std::shared_ptr<Engine> engine_;
  Status attach(const ObjectSpec& spec, const Map& map, const std::string& what, int64_t deadline_ns);
  void close_here(const std::vector<ClosingShards>& closing, uint64_t clock, std::vector<uint32_t> open);
  Status settle(bool gated_only, int64_t deadline_ns);
  Status ask_standing(uint64_t clock, int64_t deadline_ns, Standing* all);
  friend class CloseCall;

  const uint32_t number_, rank_, world_size_;
  const uint64_t incarnation_;
  std::atomic<uint64_t> clock_{0}, catch_up_{0};
  std::atomic<bool> left_{false};
  std::atomic<int64_t> told_ns_{0};
  std::atomic<uint32_t> closes_under_way_{0};
  // With clock_mutex_:
  std::vector<uint32_t> told_open_;  // objects that every server knows this worker has open
  std::vector<uint8_t> untold_;      // by server: it has not heard of the present clock
  std::atomic<bool> any_untold_{false};
  Unseen unseen_;  // of closes
  std::mutex clock_mutex_, order_mutex_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Progress>> progress_;
};

}  // namespace windlass
