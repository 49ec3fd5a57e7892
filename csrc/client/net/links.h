// Links: a client's connections to its servers, and the thread that receives when no caller does.
//
// Python makes the connections, since it knows the token: need_dial() tells it which are wanted, attach() takes them. A
// server that stays out of reach, or comes back without its shards, is lost, and so is everything on its way there. In
// a cluster with a scheduler only that says who is lost, once it knows who has the shards now: until then such a
// server, or a stranger at its address, is out of reach, and requests to it wait as long as their callers do.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/os.h"
#include "client/net/lane.h"

namespace windlass {

class Links : public std::enable_shared_from_this<Links> {
 public:
  // world_size: 0 for a reader. cluster: the one these servers belong to; 0 if there is none.
  Links(std::vector<std::string> servers, std::string app, uint32_t rank, uint32_t world_size, int checksums,
        bool shares = true, uint64_t cluster = 0, uint64_t incarnation = 0);
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  ~Links();

  void start();                     // starts the thread
  void stop();                      // ends it and everything under way
  bool ended(int64_t deadline_ns);  // waits for the thread's end

  // How many servers there are, lost ones included. In a cluster with a scheduler more may come: grow() makes room for
  // those it is told of, in the order of their numbers. Whoever goes through all of them may miss the latest.
  uint32_t servers() const { return count_.load(std::memory_order_acquire); }
  const std::string& address(uint32_t server) const { return peers_[server]->address; }
  Status grow(const std::vector<std::string>& servers);
  const std::string& app() const { return app_; }
  uint64_t incarnation() const { return incarnation_; }
  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  bool may_grow() const { return cluster_ != 0; }  // a scheduler may add workers to an app that has started
  // Whether a server that refuses us so may be there again later: a scheduler would say if it was not.
  bool may_come_back(const Status& refusal) const { return cluster_ != 0 && refusal.code() != Code::kClosed; }

  // For Python: waits for the next connection that is wanted. False if the links are closed.
  struct Wanted {
    uint32_t server;
    uint8_t lane;
  };
  bool need_dial(Wanted* wanted);
  void attach(const Wanted& which, int fd) { lane(which.server, which.lane).attach(fd); }
  void rest_before_dial(uint32_t server);  // it has no room, or is not the one we knew: ask it again in a moment
  void lost(uint32_t server, const Status& status);
  // How long a server may acknowledge nothing before its connection counts as broken. Set before the first attach().
  void set_stall_ms(int ms) { stall_ms_ = ms; }
  int stall_ms() const { return stall_ms_; }
  // Asks the scheduler, if there is one, where objects are; without one the first server is asked.
  using Catalogue = std::function<Status(wire::Op op, const std::string& body, int64_t deadline_ns,
                                         std::vector<std::string>* answers)>;
  Catalogue take_catalogue(Catalogue next) {  // returns the previous one
    std::lock_guard lock(catalogue_mutex_);
    return std::exchange(catalogue_, std::move(next));
  }
  Catalogue catalogue() {
    std::lock_guard lock(catalogue_mutex_);
    return catalogue_;
  }
  // Puts fresh pages under memory that a server may still write when it is given up.
  using Renew = std::function<void(const std::vector<std::shared_ptr<const Segment>>&)>;
  void set_renew(Renew renew) { renew_ = std::move(renew); }
  // Breaks the connections to servers that have been told of any of that memory; everything is then sent again.
  void break_if_told(const std::vector<std::shared_ptr<const Segment>>& segments) {
    each_lane([&](Lane& lane) { lane.break_if_told(segments); });
  }
  // Waits until every lane is ready, or one server is lost. In a cluster with a scheduler those that it has given up do
  // not count, unless they are all.
  Status wait_ready(int64_t deadline_ns);
  // Why there is no use in asking a server any more; ok if there is.
  Status lost(uint32_t server) {
    std::lock_guard lock(peers_[server]->mutex);
    return peers_[server]->lost;
  }

  // To send trips: reserve() takes a place in each server's window, then submit() queues each trip, in order; somebody
  // will receive the answers. `patient`: pushes that are answered only when all workers have closed their iteration.
  // They have places of their own and wait for none, since they would fill the window until their caller goes on.
  // A lost server refuses the request, unless it can do `without` it; so do servers that are all lost.
  Status reserve(std::vector<uint32_t> servers, const std::string& what, int64_t deadline_ns, bool patient,
                 const std::function<bool(uint32_t server)>& without);
  Lane& submit(const Ref<Trip>& trip, uint32_t server);
  // Waits for work whose trips are on these lanes, and receives meanwhile if nobody else does; true if it is done. Also
  // returns when `sent_on` differs from `seen`: there are more lanes. patient: it waits for other workers.
  bool wait(Future& work, const std::vector<Lane*>& lanes, int64_t deadline_ns, const std::atomic<uint32_t>& sent_on,
            uint32_t seen, bool patient);

  // The owners of an object's shards: what is known already, and what the map says.
  std::shared_ptr<Owners> owners(const Map& map, uint32_t shards);
  // Learns that a shard has moved. Parts that wait for a server out of reach are redirected to the new one.
  Status moved(uint32_t object, uint32_t shard, uint32_t server, uint32_t term);
  // Sends a redirected trip beyond the window: its request has a place already, and waiting here is not allowed.
  Lane& submit_redirected(const Ref<Trip>& trip, uint32_t server);
  // Lets a redirected trip go on a little later; false if the links are ending.
  bool rest(const Ref<Trip>& trip);
  bool rest(const Ref<Trip>& trip, int64_t ns);

  // The state of a server's connections, for errors.
  std::string phase(uint32_t server);
  void trouble(uint32_t server, const std::string& why);  // notes why it cannot be reached
  void say_goodbye();

  // For lanes.
  Lane& lane(uint32_t server, uint8_t number) { return *lanes_[server * limits::kLanes + number]; }
  os::Watch& watch() { return watch_; }
  uint64_t tag(const Lane& lane) const { return lane.server() * limits::kLanes + lane.number(); }
  void want_dial(const Lane& lane, const std::string& why);
  Status welcomed(uint32_t server, const Welcome& welcome);  // an error: it is not the same server
  void became_ready();
  void trip_over(uint32_t server, bool patient);
  uint32_t app_number(uint32_t server) const { return peers_[server]->app.load(std::memory_order_relaxed); }
  uint64_t next_request() { return next_request_.fetch_add(1, std::memory_order_relaxed); }
  Hello hello(const Lane& lane) const;
  bool checksums(int fd) const { return checksums_ < 0 ? !os::same_host(fd) : checksums_ != 0; }
  // Whether memory may be shared with the server at the other end.
  bool shares(int fd) {
    const bool shares = shares_ && os::same_host(fd);
    if (shares) sharing_.store(true, std::memory_order_relaxed);
    return shares;
  }
  bool may_share() const { return shares_; }
  bool sharing() const { return sharing_.load(std::memory_order_relaxed); }  // with any server

 private:
  struct Peer {
    std::string address;
    std::atomic<uint32_t> app{0};
    std::atomic<uint64_t> incarnation{0};
    std::atomic<uint32_t> under_way{0}, patient{0};
    std::mutex mutex;
    Status lost;
    std::string trouble;        // why the last connection broke
    int64_t dial_after_ns = 0;  // with dial_mutex_
  };
  template <class Visit>
  void each_lane(Visit visit) const {
    const size_t n = size_t{servers()} * limits::kLanes;
    for (size_t i = 0; i < n; ++i) visit(*lanes_[i]);
  }
  void add(uint32_t server, const std::string& address);
  void run();
  int64_t wake_rested(int64_t now_ns, bool all);
  void give_up(const std::vector<uint32_t>& servers, const Status& status);
  bool all_lost();
  void lead(Future& work, const std::vector<Lane*>& lanes, int64_t deadline_ns, const std::atomic<uint32_t>& sent_on,
            uint32_t seen, bool patient);

  const std::string app_;
  const uint32_t rank_, world_size_;
  const int checksums_;  // of numbers: 0 never, 1 always, -1 except over Unix sockets
  const bool shares_;
  const uint64_t cluster_;
  const uint32_t servers_max_;  // places for them: as many as there are, where no more can come
  const uint64_t incarnation_;  // random, unless the cluster has given the worker one
  int stall_ms_ = limits::kStallMs;
  std::mutex catalogue_mutex_;
  Catalogue catalogue_;
  std::atomic<bool> sharing_{false};
  Renew renew_;
  std::mutex giving_up_;                   // one give_up() at a time
  std::atomic<uint64_t> next_request_{2};  // 1 is hello
  std::mutex growing_;
  std::atomic<uint32_t> count_{0};
  std::unique_ptr<std::unique_ptr<Peer>[]> peers_;
  std::unique_ptr<std::unique_ptr<Lane>[]> lanes_;
  os::Watch watch_;
  std::atomic<bool> stopped_{false};
  std::atomic<uint32_t> running_{0};
  std::atomic<uint32_t> changes_{0};  // of readiness or windows; waited on for either
  std::atomic<uint32_t> waiters_{0};
  void changed();

  std::mutex owners_mutex_;
  std::map<uint32_t, std::shared_ptr<Owners>> owners_;
  std::map<std::pair<uint32_t, uint32_t>, Owners::At> told_;  // of objects that are not open

  struct Resting {
    Ref<Trip> trip;
    int64_t due_ns;
  };
  std::mutex resting_mutex_;
  std::vector<Resting> resting_;
  bool rests_ = true;  // until the thread ends

  std::mutex dial_mutex_;
  std::condition_variable dial_wanted_;
  std::deque<Wanted> wanted_;
};

}  // namespace windlass
