// RemoteRoute: takes a request to servers elsewhere, with one trip per server that it touches, and one more for every
// part whose shard has moved meanwhile.
//
//     make_trips()   reserve()   number()   submit()   set_off()   ...   wait()
//
// The Payload knows what travels; every trip that is over ends one part of the Future.
//
// Thread safety: one thread's up to set_off(); then every method from any thread. Memory: a member of its future, which
// every trip keeps alive.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/net/links.h"
#include "client/net/payload.h"
#include "client/net/trip.h"
#include "exec/future.h"

namespace windlass {

struct Batch;
class Session;

enum class How : uint8_t {
  kWait,    // the caller waits for it
  kFuture,  // the caller need not wait, and gets ordinary arrays back at once
};

class RemoteRoute {
 public:
  RemoteRoute(std::shared_ptr<Links> links, Future& future, Payload& payload)
      : links_(std::move(links)), future_(future), payload_(payload) {}
  RemoteRoute(const RemoteRoute&) = delete;
  RemoteRoute& operator=(const RemoteRoute&) = delete;

  // What all parts about one object have in common, and how their trips travel.
  struct Plan {
    wire::Op op;
    uint32_t object = 0;
    Dtype dtype_in = Dtype::kFloat32, dtype_out = Dtype::kFloat32;
    uint16_t flags = 0;  // of every part
    uint64_t bytes = 0;  // of the larger array
    uint8_t priority = 0;
    const Hyper* hyper = nullptr;
    bool patient = false;  // a push that waits for its update
    int64_t deadline_ns = limits::kNoDeadline;
    // Where the arrays are, if a server on the same host can use them in place.
    const wire::Places* places = nullptr;
    std::vector<std::shared_ptr<const Segment>> segments = {};
  };
  Trip::Common* add_common(const Plan& plan);
  // Part i is about shards[i], in ascending order.
  void make_trips(const Plan& plan, const Owners& owners, const std::vector<uint32_t>& shards);
  // Adds a part to the trip to that server, which may be about several objects.
  void add_part(const Plan& trip, uint32_t server, const Trip::Part& part);
  // The trip to that server; makes one without parts if there is none.
  Trip& trip_to(const Plan& trip, uint32_t server);
  void drop_empty();  // trips without parts

  Status reserve(const std::string& what, int64_t deadline_ns) {
    const auto without = [this](uint32_t server) { return can_do_without(server); };
    return links_->reserve(servers_, what, deadline_ns, is_patient(), without);
  }
  // Under BSP: the weights travel with the hyperparameters.
  static void write_weights(const Batch& batch, Trip::Common* common);
  Trip::Common* common() { return &commons_.front(); }  // of a request about one object
  // Calls number(part) for every part.
  template <class F>
  void number(F number) {
    for (const Ref<Trip>& trip : trips_) {
      for (Trip::Part& part : trip->parts) number(&part);
    }
  }
  // Tells the worker's clock, with this push, to servers that do not know it yet.
  void tell_clock(Session& session, uint64_t clock);
  void submit();  // in the order of the numbers
  void set_off(How how);

  bool wait(int64_t deadline_ns);
  std::string stuck() const;  // where a late request is
  // Runs `change`, after which the caller's [from, from + bytes) is at `to`; nothing is written into the caller's
  // memory any more.
  template <class F>
  void move_out(const void* from, size_t bytes, const void* to, F change) {
    std::lock_guard lock(mutex_);
    const std::vector<Lane*> order = all_lanes();
    std::vector<Lane::Hold> holds;
    for (Lane* lane : order) holds.push_back(lane->hold());
    change();
    for (Lane* lane : order) {
      if (to != nullptr) {
        lane->rebase(static_cast<const std::byte*>(from), bytes, static_cast<const std::byte*>(to));
      }
      for (const Ref<Trip>& trip : trips_) lane->abandon(*trip);
      for (const Redirected& redirected : redirected_) lane->abandon(*redirected.trip);
    }
  }
  // Turns what was not sent yet into empty pushes; true if that was everything; *any: whether it was anything.
  bool take_back(bool* any);
  // The same for a request that changes nothing; its trips end with this status. `begun`: even those that were sent.
  bool withdraw(bool begun, const Status& status, bool* any);
  uint32_t trips() const { return static_cast<uint32_t>(trips_.size()); }
  Links& links() const { return *links_; }

  // For lanes. A trip is over: all of its parts have their answers, or never will.
  void over(const Status& status) { future_.end(status); }
  // A part is redirected, so over() will be called once more. With a lane's locks held.
  void expect_redirected();
  // Sends redirected parts on, those of one request that go to one server as one trip. Without locks.
  static void go_on(const std::vector<Ref<Trip>>& redirected);
  // Ends a redirected part that can go nowhere any more.
  static void end_redirected(const Ref<Trip>& trip, const Status& status);

 private:
  struct Redirected {
    Ref<Trip> trip;
    uint32_t server;
    Lane* lane;
  };
  void go_on(const Ref<Trip>* redirected, size_t n);
  // Whether the request loses nothing if that server is gone: what was to go there goes elsewhere, or is moot.
  bool can_do_without(uint32_t server) const;
  bool is_patient() const { return !trips_.empty() && trips_[0]->patient; }
  std::vector<Lane*> all_lanes() const;

  const std::shared_ptr<Links> links_;
  Future& future_;
  Payload& payload_;
  std::deque<Trip::Common> commons_;
  std::vector<Ref<Trip>> trips_;
  std::vector<uint32_t> servers_;  // of each trip
  std::vector<Lane*> lanes_;       // likewise

  // Taken before the locks of any lane. Redirected parts use the caller's memory, too: none is sent while that changes.
  mutable std::mutex mutex_;
  std::vector<Redirected> redirected_;  // sent on so far
  Status withdrawn_;                    // the status that later ones end with
  std::atomic<uint32_t> sent_on_{0};    // how many there are; wait() returns on a change
  std::atomic<uint32_t> between_{0};    // how many are on no lane at the moment
};

}  // namespace windlass
