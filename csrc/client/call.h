// Call: what requests of every kind have in common: arrays that are checked and lent, a place in the engine, and a
// future that must not lose its error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/recycled.h"
#include "base/status.h"
#include "client/engine.h"
#include "client/near.h"
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

// What a request does to which object: put into words only when something goes wrong.
struct What {
  const char* verb;
  const char* kind;
  const std::string& name;
  std::string text(const char* role = "") const { return std::string(verb) + " of " + kind + " '" + name + "'" + role; }
};

// Ok when the array has that shape and a dtype that may travel to an object that stores `stored`.
Status check_array(const What& what, const char* role, const Array& array, const uint64_t* shape, size_t dims,
                   Dtype stored);

// What a request saw of the other workers.
struct Seen {
  uint64_t asked = 0;     // the clock at which it looked
  uint64_t clock = 0;     // up to which everybody's pushes were there, at the shard that had least
  int64_t waited_ns = 0;  // at the gate, at the shard where it waited longest
  uint32_t rank = ~0u;    // for whom
};

enum class How : uint8_t {
  kWait,    // somebody will finish() it
  kFuture,  // nobody may, and ordinary arrays are free when start() returns
};

class Call : public Future, public Recycled {
 public:
  // Starts the request on arrays that are checked, either of which may be missing; lends those that are registered.
  // Only where too many copies of ordinary arrays are under way does it wait, up to the deadline.
  Status start(const Array* in, const Array* out, How how, int64_t deadline_ns = limits::kNoDeadline);
  // Waits for a request started with kWait. One that is not done in time fails with kTimeout. A push goes on, with a
  // copy of what it needs of an ordinary array; the answer is lost. A pull is cancelled. Registered arrays stay on loan
  // until the request ends.
  Status finish(int64_t deadline_ns);
  // Waits for a request started with kFuture; can be called again after kTimeout.
  Status wait(int64_t deadline_ns);
  // The future is gone: an error from now on is for the next caller.
  void drop();
  // Takes back what has not been begun; true when that was all of it, now or before. Something taken back ends with
  // kCancelled.
  bool take_back();

  // A push that does not close its iteration and is answered after that: its caller closes before it waits.
  virtual bool waits_for_close() const { return false; }

  std::string what() const { return what_.text(); }
  Seen seen();                                // of finished work
  void note_wait(int64_t ns, uint32_t rank);  // at a gate

  bool wait_until(int64_t deadline_ns) override;
  // Makes sure that nothing of the request touches the caller's arrays any more: what has not been begun never will be.
  virtual void cancel() { near_.cancel(); }
  // The same for a request that must be done all the same.
  virtual void let_go() { near_.let_go(); }

  // For the way inside the process: what all parts have in common, and each of them at its turn.
  const Batch& batch() const { return batch_; }
  virtual void fill(uint32_t, bool, Entry*) {}        // what it is about, and set_arrays()
  virtual void set_arrays(uint32_t, bool, Entry*) {}  // where they are by now; true: keep() has copied the input
  virtual void keep(uint32_t) {}                      // copies the part's input
  virtual Status checked(uint32_t) { return {}; }     // what is known to be wrong with it
  virtual Status landed(uint32_t, Outcome* outcome) { return outcome->status; }
  void stopped();  // a part waits at a gate

 protected:
  Call(std::shared_ptr<Session> session, std::shared_ptr<Progress> progress, What what)
      : near_(*this), session_(std::move(session)), progress_(std::move(progress)), what_(what) {}
  // Sends the request on its way, arrays lent and copies reserved. Here: to the server inside the process.
  virtual Status launch(How how, int64_t deadline_ns);
  // Of a request inside the process, before it is started: its object and the shards of its parts.
  void go_near(wire::Op op, ServedObject& object, const std::vector<uint32_t>& shards);
  // Of one that moves numbers between the caller's arrays and the object, once its iteration is known.
  void set_batch(const Arrays& arrays, const Hyper& hyper, const Iteration& iteration);
  virtual void admitted() {}  // once, when nothing can refuse the request any more and before its first part runs
  virtual bool pushes() const { return false; }
  virtual bool take_back(bool* any);  // what has not been begun: whether that was all, whether it was anything
  virtual void uncount() {}           // all of it was
  virtual std::string stuck() { return near_.stuck(); }  // where a request that is late is
  virtual uint64_t kept_besides() const { return 0; }    // bytes that a copy needs beyond the larger array
  virtual void give_way() {}  // a pull into registered arrays is late: what has not left need not leave
  virtual bool waits_for_update() const { return false; }  // a push under BSP
  virtual bool would_deadlock() const { return false; }    // it waits for an iteration that its caller has not closed
  void note_seen(uint64_t asked, uint64_t clock);
  // An answer of a server elsewhere: what was seen, how long it waited at the gate and for whom.
  void note_answer(const wire::Part& answer, const std::string& items, uint64_t asked, const Sync& sync);
  std::shared_ptr<const void> kept_alive();  // as long as this is held, so is the call
  // Whether several threads would only wait for each other: a rule of the user's runs on one.
  virtual bool is_alone() const { return false; }
  virtual bool is_large() const { return bytes_ >= limits::kCrewBytesMin; }  // enough for several threads
  virtual bool always_goes_on() const { return false; }      // a push that timed out, however many copies there are
  bool given_up() const { return (bits_ & kDropped) != 0; }  // by its caller
  bool answers() const { return answers_; }                  // false: nobody waits for the output any more
  bool ordinary() const { return ordinary_; }                // some array is not registered
  uint64_t bytes() const { return bytes_; }                  // of the larger array
  void finished() override;
  void over() override;
  Session& session() { return *session_; }

  Batch batch_;
  Near near_;

 private:
  Status stage(int64_t deadline_ns);
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Progress> progress_;
  const What what_;  // the name is the object's, which a call keeps alive
  Range lent_[2];
  size_t n_lent_ = 0;
  bool ordinary_ = false;                // some array is not registered
  uint64_t bytes_ = 0;                   // of the larger array
  std::atomic<uint64_t> kept_bytes_{0};  // reserved with the engine
  uint64_t staged_bytes_ = 0;            // charged to the server inside the process
  std::atomic<bool> answers_{true};
  std::atomic<bool> taken_back_{false};  // all of it
  std::atomic<int64_t> gated_ns_{0};     // since when it waits at a gate inside the process; 0: it does not
  std::mutex seen_mutex_;
  Seen seen_;
  bool has_seen_ = false;
  std::atomic<uint64_t> fresh_{Gate::kNone};  // the clock of a part that saw everything there could be
  // Whichever of finished() and drop() comes second sees the other's bit, and reports the error unless it was seen.
  enum Bit : uint8_t { kFinished = 1, kSeen = 2, kDropped = 4 };
  bool wait_and_tell(int64_t deadline_ns);
  std::string where();
  Status named(const Status& status) const;
  void mark(Bit bit, uint8_t other);
  void release_kept();
  std::atomic<uint8_t> bits_{0};
};

}  // namespace windlass
