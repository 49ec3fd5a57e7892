// Call: any request about shards of one object. It lends the caller's arrays, holds a place in the engine, knows the
// iteration it belongs to, and is a future that must not lose its error.
//
// It takes one of two routes, and only the Call knows which: LocalRoute, to the server inside the process, or
// RemoteRoute, to servers elsewhere. A subclass says what its parts are (fill, describe, ...) and takes their outcomes
// (landed, land). Calls that leave together are members of a StepCall (client/op/step.h), which sends them.
//
// Thread safety: start() or the StepCall once; then every public method from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/recycled.h"
#include "base/status.h"
#include "client/net/remote_route.h"
#include "client/op/local_route.h"
#include "client/session.h"
#include "exec/future.h"

namespace windlass {

// An array of the caller's: contiguous, in C order.
struct Array {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  uint32_t dims = 0;
  uint64_t shape[limits::kTensorDimsMax + 1] = {};

  uint64_t elements() const {
    uint64_t n = 1;
    for (uint32_t i = 0; i < dims; ++i) n *= shape[i];
    return n;
  }
  uint64_t bytes() const { return elements() * size_of(dtype); }
  Range range() const { return {static_cast<const std::byte*>(data), bytes()}; }
};

// What a request does to which object; only errors put it into words.
struct What {
  const char* verb;
  const char* kind;
  const std::string& name;
  std::string text(const char* role = "") const { return std::string(verb) + " of " + kind + " '" + name + "'" + role; }
};

// Checks that the array has that shape and a dtype that may travel to an object that stores `stored`.
Status check_array(const What& what, const char* role, const Array& array, const uint64_t* shape, size_t dims,
                   Dtype stored);

// What a request saw of the other workers.
struct Seen {
  uint64_t asked = 0;     // the clock at which it read
  uint64_t clock = 0;     // up to which it saw everybody's pushes, at the shard that had least
  int64_t waited_ns = 0;  // at the gate, at the shard where it waited longest
  uint32_t rank = ~0u;    // for whom it waited
};

class Call : public Future, public Recycled, public Payload {
 public:
  // Starts the request on checked arrays, either of which may be missing; lends those that are registered. Waits, up to
  // the deadline, only while there is no room for copies of ordinary arrays.
  Status allowed() const;  // AccessDenied where it would change something, and the caller is a reader
  Status start(const Array* in, const Array* out, How how, int64_t deadline_ns = limits::kNoDeadline);
  // Waits for a request started with kWait. If it is not done in time this fails with kTimeout: a push continues, with
  // a copy of what it needs of an ordinary array, and its answer is lost; a pull is cancelled. Registered arrays stay
  // on loan until the request ends.
  Status finish(int64_t deadline_ns);
  // Waits for a request started with kFuture; can be called again after kTimeout.
  Status wait(int64_t deadline_ns);
  // The future is gone: an error that nobody saw is kept for the next caller.
  void drop();
  // Takes back the parts that have not begun; true if that was all of them, now or before. A request that was taken
  // back ends with kCancelled.
  bool take_back();

  // Whether this is a push that does not close its iteration but is answered only after that: its caller must close
  // before it waits.
  virtual bool waits_for_close() const { return false; }

  std::string what() const { return what_.text(); }
  Seen seen();                                // of a finished call
  void note_wait(int64_t ns, uint32_t rank);  // at a gate

  bool wait_until(int64_t deadline_ns) override;
  // Makes sure that the request does not touch the caller's arrays any more: parts that have not begun never will.
  void cancel();
  // The same for a request that must still be done.
  void let_go();

  // For LocalRoute: what all parts have in common, and each part at its shard's turn.
  const Batch& batch() const { return batch_; }
  // Fills in what the part is about, and its arrays; returns its error, if one is known.
  virtual Status fill(uint32_t, bool, Entry*) { return {}; }
  virtual void set_arrays(uint32_t, bool, Entry*) {}  // where they are now; true: keep() has copied the input
  virtual void keep(uint32_t) {}                      // copies the part's input
  virtual Status landed(uint32_t, Outcome* outcome) { return outcome->status; }
  void stopped();  // a part waits at a gate

  // Shards that refused a push, for a retry that sends it to them alone. A shard that got a part of it is not one.
  // At an object that was deleted there is nothing to close.
  bool refused(uint32_t part, Code code) override;
  void refuse_all();  // it never began
  // Adds them, if there are any; `request`: which one of its step this call is.
  void list_refused(uint32_t request, std::vector<Refused>* to);

  // For RemoteRoute.
  Owners* owners(uint32_t part, uint32_t* shard) override {
    *shard = (*shards_)[part];
    return owners_.get();
  }

  // For a StepCall, which does for its members what start() does for a single call.
  const std::vector<uint32_t>& shards() const { return *shards_; }
  Progress& progress() const { return *progress_; }
  const Owners* where() const { return owners_.get(); }
  void count_pull();  // once, when it was answered; of anything else than a pull: nothing
  // Plans what travels, and where its arrays are. known: for a member of a StepCall, whose arrays are registered: the
  // segments found for other members; *plan then has none of its own.
  Status plan(Arena::Segments* known, RemoteRoute::Plan* plan);
  // Called once, when nothing can refuse the request any more; with order_mutex() if servers are elsewhere.
  virtual void begin_iteration() {}
  void number(uint32_t part, Trip::Part* to);
  virtual bool waits_for_update() const { return false; }  // a push under BSP

 protected:
  Call(std::shared_ptr<Session> session, std::shared_ptr<Progress> progress, What what)
      : local_(*this), session_(std::move(session)), progress_(std::move(progress)), what_(what) {}
  // Call before it is started: the operation, the object, local (`object`) or remote (`owners`), and the shards of its
  // parts.
  void aim(wire::Op op, ServedObject* object, const std::shared_ptr<Owners>& owners,
           const std::vector<uint32_t>& shards);
  bool is_remote() const { return remote_.has_value(); }
  // Fills in what is particular to the request; an error refuses it.
  virtual Status add_to_plan(Arena::Segments*, RemoteRoute::Plan*) { return {}; }
  virtual uint64_t clock_of(uint32_t) const { return session_->clock(); }  // of a part
  virtual void admitted() {}  // inside the process: after begin_iteration() and before the first part runs
  // The caller takes its input back: copies what is still needed of it. `under_way`: lanes may be using it.
  virtual void keep_input(bool) {}
  bool pushes() const { return batch_.op->numbered; }
  bool take_back(bool* any);  // true if all of it was; *any: whether anything was
  virtual void uncount() {}   // all of it was taken back
  std::string stuck() { return remote_ ? remote_->stuck() : local_.stuck(); }  // where a late request is
  virtual uint64_t kept_besides() const { return 0; }    // bytes that a copy needs beyond the larger array
  virtual bool would_deadlock() const { return false; }  // it waits for an iteration that its caller has not closed
  void note_seen(uint64_t asked, uint64_t clock);
  // Notes from a remote server's answer what was seen, how long it waited at the gate and for whom.
  void note_answer(const PartAnswer& answer, uint64_t asked, const Sync& sync);
  std::shared_ptr<const void> kept_alive();  // keeps the call alive while it is held
  // Whether several threads would only wait for each other: a user's rule runs on one thread.
  virtual bool is_alone() const { return false; }
  virtual bool is_large() const { return bytes_ >= limits::kCrewBytesMin; }  // enough for several threads
  bool given_up() const { return (bits_ & kDropped) != 0; }                  // by its caller
  bool answers() const { return answers_; }    // false: the caller has given up the output
  bool ordinary() const { return ordinary_; }  // some array is not registered
  // What a part of a push is about: the object, and in it and in the request.
  virtual void describe_refused(uint32_t, Refused*) const {}
  uint64_t bytes() const { return bytes_; }  // of the larger array
  void finished() override;
  void over() override;
  Session& session() { return *session_; }

  Batch batch_;
  LocalRoute local_;
  std::optional<RemoteRoute> remote_;

 private:
  Status launch_local(How how, int64_t deadline_ns);
  Status launch_remote(How how, int64_t deadline_ns);
  bool withdraw(bool begun, bool* any);
  void give_way();
  Status stage(int64_t deadline_ns);
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Progress> progress_;
  const What what_;  // the name is the object's, which a call keeps alive
  std::shared_ptr<Owners> owners_;
  const std::vector<uint32_t>* shards_ = nullptr;
  const wire::Places* places_ = nullptr;  // of its arrays, if they are shared
  Range lent_[2];
  size_t n_lent_ = 0;
  bool ordinary_ = false;  // some array is not registered
  uint64_t bytes_ = 0;     // of the larger array
  std::optional<Unsettled> unsettled_;
  std::atomic<uint64_t> kept_bytes_{0};  // reserved with the engine
  uint64_t staged_bytes_ = 0;            // charged to the local server's staging quota
  std::atomic<bool> answers_{true};
  std::atomic<bool> taken_back_{false};  // all of it
  std::atomic<int64_t> gated_ns_{0};     // since when it waits at a gate inside the process; 0: it does not
  std::mutex seen_mutex_;
  Seen seen_;
  std::atomic<int64_t> waited_ns_{0};  // as in seen_
  bool has_seen_ = false;
  std::vector<uint32_t> refused_;             // parts; with seen_mutex_
  std::atomic<uint64_t> fresh_{Gate::kNone};  // the clock of a part that saw everything there was to see
  // Whichever of finished() and drop() comes second sees the other's bit, and reports the error unless it was seen.
  enum Bit : uint8_t { kFinished = 1, kSeen = 2, kDropped = 4 };
  bool wait_and_tell(int64_t deadline_ns);
  std::string where();
  Status named(const Status& status);
  void mark(Bit bit, uint8_t other);
  void release_kept();
  std::atomic<uint8_t> bits_{0};
};

}  // namespace windlass
