// Host: a server process. It has the objects, the sessions of the clients, and a thread per connection.
//
// A connection arrives authenticated: the first bytes of a stranger are read in Python (windlass/_serve.py), which then
// hands the socket over. From there a thread of its own reads frames and answers them (server/connection.h); an idle
// connection costs a blocked thread and nothing else.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/os.h"
#include "server/arenas.h"
#include "server/catalogue.h"
#include "server/channel.h"
#include "server/departure.h"
#include "server/server.h"

namespace windlass {

class Connection;

// A session as the server sees it.
struct Guest {
  std::string key;           // what its connections present
  uint64_t incarnation = 0;  // what its frames carry
  uint32_t number = 0;       // under which shards keep its records
  uint32_t app = 0;
  uint32_t rank = Gate::kOutsider;  // unless it is a reader
  std::shared_ptr<Crowd> crowd;     // of its app

  uint32_t world_size = 0;
  uint32_t rank_in(const Crowd& of) const {
    return &of == crowd.get() ? of.rank_of(rank, world_size) : Gate::kOutsider;
  }
  uint32_t rank_at_home() const { return rank_in(*crowd); }
  std::weak_ptr<Connection> lanes[limits::kLanes];
  uint32_t connections = 0;
  int64_t left_ns = 0;  // when its last connection ended
  bool over = false;    // it said goodbye
  Arenas arenas;        // while it has a connection
};

class Host {
 public:
  // arena_bytes_max: what one session may share. staging_bytes_max: for pushes that came over sockets and wait for
  // their update.
  Host(int threads, uint64_t memory_bytes_max, uint64_t arena_bytes_max = ~uint64_t{0},
       uint64_t staging_bytes_max = limits::kRoundsBytesMax);
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  ~Host();

  // Takes the socket, also when it fails. `session_key` joins connections to their session.
  Status adopt(int fd, const std::string& peer, const std::string& session_key);
  // Who runs the user's functions. Before the first connection.
  void set_user_code(std::shared_ptr<UserCode> code) { server_.set_user_code(std::move(code)); }
  // Ends all connections and waits for their threads.
  Status close(int64_t deadline_ns);

  // Which cluster this server belongs to: clients of another are refused. 0, until it is set: of none.
  void set_cluster(uint64_t cluster) { cluster_.store(cluster, std::memory_order_relaxed); }

  // Who trains together in an app, and whose place is kept for somebody else.
  void set_view(const std::string& app, uint64_t number, const std::vector<Crowd::Member>& workers,
                const std::vector<uint32_t>& waited);
  std::vector<std::pair<std::string, SyncStats>> sync_stats();
  // A line for everybody who has waited at a gate for so long since it was last said.
  std::vector<std::string> overdue(int64_t ns);
  uint64_t rounds_bytes() { return server_.staging().used(); }

  // What the tables of an app may take here, from now on; the first word counts. Before any of them is made.
  void set_quota(const std::string& app, uint64_t table_bytes_max);
  std::map<std::string, uint64_t> quotas_used();  // by app
  Traffic traffic();                              // since the start

  uint64_t incarnation() const { return incarnation_; }
  uint32_t connections() const { return running_.load(std::memory_order_relaxed); }
  size_t guests();
  Server& server() { return server_; }

  // A shard leaves for another server of the list, under a higher term. *out stays null when it has left already.
  Status depart(uint32_t object, uint32_t shard, uint32_t server, uint32_t term, std::unique_ptr<Departure>* out);
  // For arrivals: the object, which is made if it is not known here. `index`: what the sender takes this server for.
  Status receive(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<ServedObject>* out);

  // For connections.
  // In a thread of its own, which close() waits for.
  template <class F>
  void run_beside(F f) {
    running_.fetch_add(1, std::memory_order_relaxed);
    std::thread([this, f = std::move(f)]() mutable {
      f();
      {
        const F gone = std::move(f);
      }  // what it held goes before close() may return
      std::lock_guard lock(mutex_);
      running_.fetch_sub(1, std::memory_order_release);
      os::wake_all(running_);
    }).detach();
  }
  void tick(const Guest& guest, uint64_t clock, std::vector<uint32_t> open);
  void tick(const Guest& guest, uint64_t clock);  // with the same objects open as the last time
  // A worker begins at a clock; Gate::kNone: it only asks; Gate::kOver: it is done.
  Status enter(const Guest& guest, uint64_t clock, Standing* standing);
  Status welcome(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                 uint64_t incarnation, std::shared_ptr<Guest>* guest);
  void goodbye(const std::shared_ptr<Guest>& guest);
  void leave(const std::shared_ptr<Guest>& guest);
  Status open(const ObjectSpec& spec, Map* map);
  Status attach(const ObjectSpec& spec, const Map& map);
  // Forgets an object that could not be made everywhere, unless somebody has pushed to it.
  Status detach(const ObjectSpec& spec, const Map& map);
  Status list(std::vector<Catalogue::Entry>* out);
  std::shared_ptr<ServedObject> find(uint32_t object) { return server_.find(object); }
  uint64_t arena_bytes_max() const { return arena_bytes_max_; }

  // Memory for the bytes of requests, together: who would pass the limit waits, and its client feels it. Parts that are
  // huge have a place of their own, for one at a time, so that others do not wait for them.
  bool reserve(uint64_t bytes, int64_t deadline_ns);
  void release(uint64_t bytes);
  // Memory for requests that came before their time.
  bool charge_parked(uint64_t bytes) { return parked_.charge(bytes); }
  void refund_parked(uint64_t bytes) { parked_.refund(bytes); }

  // One thread at most spins for the next request.
  bool begin_spin() { return may_spin_ && !spinning_.exchange(true, std::memory_order_acq_rel); }
  void end_spin() { spinning_.store(false, std::memory_order_release); }

 private:
  void ended(Connection* connection);
  Status welcome_locked(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                        uint64_t incarnation, std::shared_ptr<Guest>* guest, std::shared_ptr<Connection>* old,
                        std::shared_ptr<Crowd>* changed);
  void forget_one();
  bool unused();
  std::shared_ptr<Crowd> crowd_locked(const std::string& app);
  TablePools& pools_of(const ObjectSpec& spec);
  Status make(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<ServedObject>* out);

  const uint64_t incarnation_ = os::random_u64();
  const bool may_spin_ = os::cores() > 1;
  const uint64_t arena_bytes_max_;
  std::atomic<uint64_t> cluster_{0};
  Server server_;
  Budget parked_{limits::kParkedBytesMax};
  std::mutex overdue_mutex_;
  std::map<std::pair<std::string, uint32_t>, int64_t> told_;  // when somebody's wait was last spoken of

  std::mutex mutex_;  // of what follows
  Catalogue catalogue_;
  uint32_t index_ = 0;  // of this server in the list
  std::map<std::string, std::shared_ptr<Guest>> guests_;
  std::vector<uint32_t> free_numbers_;
  uint32_t numbers_ = 0;
  std::vector<std::string> apps_;
  std::map<std::string, std::shared_ptr<Crowd>> crowds_;
  std::map<Connection*, std::shared_ptr<Connection>> connections_;
  bool closed_ = false;

  Traffic past_;  // of connections that have ended

  std::mutex shares_mutex_;  // of what follows
  struct Share {
    Share(uint64_t bytes_max, Budget* above) : budget(bytes_max, above), pools(&budget) {}
    Budget budget;
    TablePools pools;
  };
  std::map<std::string, std::unique_ptr<Share>> shares_;  // of apps that have a quota

  std::atomic<uint32_t> running_{0};
  std::atomic<bool> spinning_{false};
  std::atomic<uint64_t> staged_bytes_{0};
  std::atomic<uint64_t> huge_bytes_{0};
  std::atomic<uint32_t> staged_releases_{0};
};

}  // namespace windlass
