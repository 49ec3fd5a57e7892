// Session: one worker: its clock, and how far it has got with each object. Inside the process there may be several, for
// threads that act as workers; links belong to one session. Handles (client/op/tensor.h, client/op/table.h) belong to a
// session.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "client/engine.h"
#include "client/settled_clock.h"
#include "messages/messages.h"

namespace windlass {

class Owners;
class Unsettled;

// Pulls and push_pulls that were answered, for people to read.
struct PullStats {
  uint64_t pulls = 0;
  uint64_t waits = 0;  // how many waited at a gate, and for how long, each at the shard where it waited longest
  double waited_seconds = 0;
};

// An object on servers elsewhere: its spec and its map.
struct Placed {
  ObjectSpec spec;
  Map map;
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

// How far a session has got with one object. It outlives handles: an object that is opened again continues from here.
struct Progress {
  Progress(uint32_t number, uint32_t shards, uint64_t clock)
      : number(number), sent(shards), closed(shards, clock), weights(shards) {}
  const uint32_t number;         // the object's: after it was deleted, another may have its name
  std::vector<uint64_t> sent;    // the last sequence pushed to each shard; with its turn, or order_mutex()
  std::vector<uint64_t> closed;  // the clock up to which each shard is closed; with clock_mutex()
  // Under BSP, the weight of the present iteration's pushes at each shard, that of pushes to no shard, and the largest
  // of those; with clock_mutex().
  std::vector<double> weights;
  double empty_weight = 0;
  double weight = 0;
  Unseen unseen;
  std::atomic<bool> deleted{false};  // it has nothing left to close or to wait for

  // The object, for closing its shards: one of the two, once it is open; with clock_mutex().
  bool opened = false;
  Sync sync;
  std::shared_ptr<ServedObject> object;  // inside the process
  std::shared_ptr<Owners> owners;        // on servers elsewhere
};

// The iteration that a push belongs to.
struct Iteration {
  uint64_t clock = 0;
  bool closes = false;       // the push closes it, at the shards that it touches
  double weight = 1;         // of the push
  double object_weight = 1;  // of its worker's pushes to the object in this iteration, with this one
  double other_weight = 0;   // and without it
};

// Shards of an object that a worker closes.
struct ClosingShards {
  std::shared_ptr<Progress> progress;
  std::vector<uint32_t> shards;
  std::vector<uint64_t> follows;  // by shard: the clock up to which it was closed before
  double weight;                  // of the iteration's pushes to the object
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  static Status open(std::shared_ptr<Engine> engine, uint32_t rank, uint32_t world_size, std::shared_ptr<Session>* out);

  Engine& engine() { return *engine_; }
  const std::shared_ptr<Engine>& shared_engine() const { return engine_; }
  uint32_t number() const { return number_; }  // the server keeps its records under it
  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  uint64_t incarnation() const { return incarnation_; }
  bool reads() const { return world_size_ == 0; }  // a reader: it has no clock and changes nothing

  // How many iterations this worker has closed.
  uint64_t clock() const { return clock_.load(std::memory_order_acquire); }
  // The clock below which everything that this worker has pushed and closed is answered: a server has it, whatever
  // becomes of this worker.
  uint64_t settled_clock() { return settled_.lowest(clock(), clock_); }
  // Waits until everything that was begun before this clock is answered; one beyond the present clock: everything.
  bool await_settled(uint64_t clock, int64_t deadline_ns) { return settled_.await(clock, clock_, deadline_ns); }
  // Closes the iteration at every object that is still open. Does not wait for servers elsewhere.
  // push_follows: if nothing is left to close, servers learn the clock with the next push to them; call tell_rest()
  // after it.
  Status tick(int64_t deadline_ns, bool push_follows = false);
  Status tell_rest(int64_t deadline_ns);
  // Tells every server this worker's clock, so that an object made now begins there.
  Status tell_clock(int64_t deadline_ns);
  // An iteration that has ended: the new clock, what closes with it, and the objects that the worker has open.
  struct Ended {
    uint64_t clock = 0;
    std::vector<ClosingShards> closing;
    std::vector<uint32_t> open;
  };
  // For a StepCall to servers elsewhere, which tells them.
  Ended end_iteration();
  bool may_close();                          // whether any server may have to hear of an iteration's end
  bool must_tell(const Ended& ended) const;  // whether servers must hear of this one
  void close_begins() { closes_under_way_.fetch_add(1, std::memory_order_relaxed); }
  void close_ended();
  // These servers have learned which objects the worker has open.
  void heard_open(const std::vector<uint32_t>& open, const std::vector<uint32_t>& servers);
  void add_unseen(const Status& status) { unseen_.add(status); }
  // Whether a push of this clock to that server should also say that everything before it is closed.
  bool tells(uint32_t server, uint64_t clock);
  bool has_listeners() const;  // whether servers want to know this worker's clock
  // Updates up to this clock were made without us: the next tick continues from there.
  void catch_up(uint64_t clock);
  // If others have begun already, begins at a clock that fits theirs.
  Status enter(int64_t deadline_ns);
  // Waits until everything that this worker has pushed and closed has arrived at its shards.
  Status settle(int64_t deadline_ns);
  // From then on nobody waits for this worker, and it waits for nobody.
  Status leave(int64_t deadline_ns);
  // Ends this worker, not the engine, which others may share: whatever it asks for from then on is kClosed.
  void close() { closed_.store(true, std::memory_order_release); }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  Status usable() const;
  bool await_closes(int64_t deadline_ns);  // on their way to servers elsewhere
  // How much of the present iteration of BSP objects this worker has pushed or closed already.
  enum class Begun : uint8_t { kNone, kSome, kAll };
  Begun begun();
  bool only_rounds();      // whether all objects that this worker has used are under BSP
  uint64_t iteration();    // that the next push belongs to: beyond the clock where a push_pull has closed its object
  bool has_open_pushes();  // that wait for this worker to close their iteration
  uint32_t rank_at_gates() const;                     // inside the process
  std::mutex& clock_mutex() { return clock_mutex_; }  // held while a push finds its clock
  // When it was last reported for whom this worker waits; the thread that advances it reports.
  std::atomic<int64_t>& told_ns() { return told_ns_; }

  std::mutex& order_mutex() { return order_mutex_; }  // held while pushes to servers elsewhere are numbered and queued

  // Creates or opens an object on servers elsewhere. `spec.name` is a name of this app, or app/name.
  Status place(ObjectSpec spec, int64_t deadline_ns, Placed* out);
  // All objects of all apps, wherever they are; inside the process their maps say nothing.
  Status list(int64_t deadline_ns, std::vector<Placed>* out);
  // How many rows the table has that list() told of.
  Status rows_of(const Placed& table, int64_t deadline_ns, uint64_t* out);
  // Deletes an object of this app on all servers: its name is free again, and whoever has it open is told.
  Status remove(const std::string& name, int64_t deadline_ns);

  std::shared_ptr<Progress> progress(const std::string& name, uint32_t number, uint32_t shards);
  Status take_unseen();  // of any object
  void count_pull(int64_t waited_ns);
  PullStats pull_stats() const;
  // The sum over all objects of the engine, including those that other sessions made.
  Status fingerprint(int64_t deadline_ns, uint64_t* out);

 private:
  Session(std::shared_ptr<Engine> engine, uint32_t number, uint32_t rank, uint32_t world_size);

  const std::shared_ptr<Engine> engine_;
  Status attach(const ObjectSpec& spec, const Map& map, const std::string& what, int64_t deadline_ns);
  void forget(uint32_t number);
  Status remove_elsewhere(const std::string& name, const std::string& what, int64_t deadline_ns);
  Ended end_iteration_locked();
  void close_here(Ended ended);
  Status tell(std::vector<uint32_t> servers, uint64_t clock, std::vector<uint32_t> open, int64_t deadline_ns);
  Status tell(Ended ended, Unsettled unsettled, int64_t deadline_ns);
  bool has_gates();
  Status settle(bool leaves, int64_t deadline_ns);  // before leaving only gates count
  Status ask_clocks(uint64_t clock, int64_t deadline_ns, ClockReport* all);

  const uint32_t number_, rank_, world_size_;
  const uint64_t incarnation_;
  friend class Unsettled;
  std::atomic<uint64_t> clock_{0}, catch_up_{0};
  SettledClock settled_;
  std::atomic<bool> left_{false}, closed_{false};
  std::atomic<int64_t> told_ns_{0};
  std::atomic<uint64_t> pulls_{0}, waits_{0}, waited_ns_{0};
  std::atomic<uint32_t> closes_under_way_{0};
  // With clock_mutex_:
  uint32_t told_servers_;            // how many servers those were
  std::vector<uint32_t> told_open_;  // objects that every server knows this worker has open
  std::vector<uint8_t> untold_;      // by server: whether it does not know the present clock yet
  std::atomic<bool> any_untold_{false};
  Unseen unseen_;  // of closes
  std::mutex clock_mutex_, order_mutex_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Progress>> progress_;
};

// A request that changes shards, from before it finds its iteration until it is answered.
class Unsettled {
 public:
  explicit Unsettled(Session& session) : settled_(&session.settled_), began_(settled_->begin(session.clock_)) {}
  Unsettled(Unsettled&& other) noexcept : settled_(std::exchange(other.settled_, nullptr)), began_(other.began_) {}
  Unsettled(const Unsettled&) = delete;
  Unsettled& operator=(const Unsettled&) = delete;
  ~Unsettled() {
    if (settled_ != nullptr) settled_->end(began_);
  }

 private:
  SettledClock* settled_;
  uint64_t began_;
};

}  // namespace windlass
