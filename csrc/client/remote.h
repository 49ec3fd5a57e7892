// Remote: the part of a request that sends it to servers elsewhere. One trip per server that it touches, and one more
// for every part whose shard has moved meanwhile.
//
// A class that is a Future and has shards to ask derives from this as well, says what travels (Cargo), and ends one
// part of its work per trip.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/call.h"
#include "client/links.h"
#include "client/trip.h"

namespace windlass {

class Remote : public Cargo {
 protected:
  explicit Remote(std::shared_ptr<Links> links) : links_(std::move(links)) {}
  ~Remote() = default;

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
    // Where the arrays are, when a server on the same host can use them in place.
    const wire::Places* places = nullptr;
    std::vector<std::shared_ptr<const Segment>> segments = {};
  };
  // Part i is about shards[i], in ascending order.
  void make_trips(const Plan& plan, const Owners& owners, const std::vector<uint32_t>& shards);
  // One more part of the request to that server, whose parts are counted.
  void add_part(const Plan& plan, uint32_t server, Trip::Part part);
  // A request to one server, about no shard.
  void make_trip(const Plan& plan, uint32_t server);
  Status reserve(const std::string& what, int64_t deadline_ns) {
    return links_->reserve(servers_, what, deadline_ns, !trips_.empty() && trips_[0]->patient);
  }
  // Under BSP: the weights go with the hyperparameters.
  void write_weights(const Hyper& hyper, const Iteration& iteration, const wire::Places* places);
  // Numbers every part: number(shard, &part).
  template <class F>
  void number(F number) {
    for (const Ref<Trip>& trip : trips_) {
      for (Trip::Part& part : trip->parts) number(part.shard, &part);
    }
  }
  // Servers that have not heard of the worker's clock yet hear of it with this push.
  void tell_clock(Session& session, uint64_t clock);
  void submit(Future* self);  // in the order of the numbers
  void set_off(How how);
  bool wait_away(Future& work, int64_t deadline_ns);
  std::string stuck() const;
  // The caller's memory [from, from + bytes) is `to` now, and nothing is written into the caller's memory any more.
  template <class F>
  void move_out(const void* from, size_t bytes, const void* to, F change) {
    std::lock_guard lock(strays_mutex_);
    const std::vector<Lane*> order = all_lanes();
    std::vector<Lane::Hold> holds;
    for (Lane* lane : order) holds.push_back(lane->hold());
    change();
    for (Lane* lane : order) {
      if (to != nullptr) {
        lane->rebase(static_cast<const std::byte*>(from), bytes, static_cast<const std::byte*>(to));
      }
      for (const Ref<Trip>& trip : trips_) lane->abandon(*trip);
      for (const Stray& stray : strays_) lane->abandon(*stray.trip);
    }
  }
  // Turns what has not left yet into empty pushes; true when that was everything, *any when it was something.
  bool take_back(bool* any);
  // The same for a request that changes nothing, whose trips then end with this status; `begun`: whatever has left.
  bool withdraw(bool begun, const Status& status, bool* any);
  uint32_t trips() const { return static_cast<uint32_t>(trips_.size()); }

  // Cargo.
  void add_stray() override;
  void go_on(const Ref<Trip>& stray) override;

  const std::shared_ptr<Links> links_;

 private:
  struct Stray {
    Ref<Trip> trip;
    uint32_t server;
    Lane* lane;
  };
  Trip& add_trip(const Plan& plan, uint32_t server);
  std::vector<Lane*> all_lanes() const;

  Future* self_ = nullptr;
  std::vector<Ref<Trip>> trips_;
  std::vector<uint32_t> servers_;  // of each trip
  std::vector<Lane*> lanes_;       // likewise

  // Before the locks of any lane. What a lane sends for a stray is the caller's memory, too: none is sent while that
  // changes.
  mutable std::mutex strays_mutex_;
  std::vector<Stray> strays_;         // that have been sent on
  Status withdrawn_;                  // what further ones end with
  std::atomic<uint32_t> sent_on_{0};  // how many there are, for who waits
  std::atomic<uint32_t> between_{0};  // that are on no lane at the moment
};

// A question to servers: what is in the body or in the numbers of shards. For everything that is not a push or a pull.
class Exchange final : public Future, public Remote {
 public:
  struct Answer {
    wire::Part part;
    std::string items;
    std::vector<std::byte> numbers;
  };
  explicit Exchange(std::shared_ptr<Links> links) : Remote(std::move(links)) {}

  // To one server, with a body.
  Status ask(wire::Op op, uint32_t server, const std::string& body, const std::string& what, int64_t deadline_ns);
  // To all shards of an object, or one; `value` and body go with each. `sent` is what each must have seen.
  Status ask_shards(wire::Op op, std::shared_ptr<Owners> owners, const std::vector<uint32_t>& shards,
                    const std::vector<uint64_t>& sent, uint64_t value, const std::string& body, const std::string& what,
                    int64_t deadline_ns);
  std::vector<Answer> answers;

  void describe(uint32_t part, bool lies, wire::Part* to) override;
  void write_items(uint32_t part, bool lies, std::byte* to) override;
  const std::byte* numbers(uint32_t) override { return nullptr; }
  void gather(uint32_t, std::byte*) override {}
  std::byte* landing(uint32_t, uint64_t) override { return nullptr; }
  Status land(uint32_t part, bool lies, const wire::Part& answer, const std::string& items,
              const std::byte* numbers) override;
  void over(const Status& status) override { end(status); }
  Owners* owners(uint32_t part, uint32_t* shard) override {
    if (owners_ != nullptr) *shard = shards_[part];
    return owners_.get();
  }
  bool wait_until(int64_t deadline_ns) override { return done() || wait_away(*this, deadline_ns); }

 private:
  Status go(const std::string& what, int64_t deadline_ns);
  std::shared_ptr<Owners> owners_;
  std::vector<uint32_t> shards_;
  std::string body_;
  uint64_t value_ = 0;
  bool has_body_ = false;
};

}  // namespace windlass
