// Host: a server process. It owns the objects, the sessions of the clients, and a thread per connection.
//
// A connection arrives authenticated: Python reads the first bytes of a stranger (windlass/_net/serve.py) and then
// hands the socket over. From then on the connection's own thread reads frames and answers them
// (server/net/connection.h); an idle connection costs a blocked thread and nothing else.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/os.h"
#include "base/thread.h"
#include "server/catalogue.h"
#include "server/move/departure.h"
#include "server/net/arenas.h"
#include "server/net/channel.h"
#include "server/object/function.h"
#include "server/server.h"

namespace windlass {

class Connection;

// A session as the server sees it.
struct ClientSession {
  std::string key;           // what its connections present
  uint64_t incarnation = 0;  // what its frames carry
  uint32_t number = 0;       // shards keep its records under this
  uint32_t app = 0;
  uint32_t rank = Gate::kOutsider;   // kOutsider: a reader
  bool reads = false;                // a reader: it changes nothing, and makes nothing
  std::shared_ptr<Workers> workers;  // of its app

  uint32_t world_size = 0;
  uint32_t rank_in(const Workers& of) const {
    return &of == workers.get() ? of.rank_of(rank, world_size) : Gate::kOutsider;
  }
  uint32_t rank_at_home() const { return rank_in(*workers); }
  AnswerQuota::Whose whose() const { return {rank_at_home(), app}; }
  std::weak_ptr<Connection> lanes[limits::kLanes];
  uint32_t connections = 0;
  int64_t left_ns = 0;  // when its last connection ended
  bool over = false;    // it has said goodbye
  Arenas arenas;        // while it has a connection

  // Answers to it that show an update under BSP and are not made yet, and the clock that the first of them asked for.
  std::atomic<uint32_t> updates_due{0};
  std::atomic<uint64_t> updates_asked{0};
};

class Host {
 public:
  // arena_bytes_max: how much one session may share. staging_bytes_max: for all that is under way between clients and
  // objects (limits::kStagedShare and those beside it).
  Host(int threads, uint64_t memory_bytes_max, uint64_t arena_bytes_max = ~uint64_t{0},
       uint64_t staging_bytes_max = limits::kStagingBytesMax);
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  ~Host();

  // Owns the socket from here on, even on error. `session_key` joins connections to their session.
  Status adopt(int fd, const std::string& peer, const std::string& session_key);
  // Sets who runs the user's functions. Call before the first connection.
  void set_user_code(std::shared_ptr<UserCode> code) { server_.set_user_code(std::move(code)); }
  // Ends all connections and waits for their threads.
  Status close(int64_t deadline_ns);

  // Sets the cluster this server belongs to, and its number there: clients of another are refused. 0, the default: of
  // none.
  void set_cluster(uint64_t cluster, uint32_t index) {
    {
      std::lock_guard lock(mutex_);
      if (cluster != 0) index_ = index;
    }
    cluster_.store(cluster, std::memory_order_relaxed);
  }

  // Sets which workers of an app train together, and for which ranks (`waited`) a place is kept for a replacement.
  void set_view(const std::string& app, uint64_t number, const std::vector<Workers::Member>& members,
                const std::vector<uint32_t>& waited);
  std::vector<std::pair<std::string, SyncStats>> sync_stats();
  // Reports workers that have waited at a gate for `ns`, a line each, and each again only after another `ns`.
  std::vector<std::string> overdue(int64_t ns);
  uint64_t rounds_bytes() { return server_.staging().used(); }

  // The scheduler's word on an object: its number, what it is, and where its shards are by now; and that it is no more.
  void know_object(const ObjectSpec& spec, const Map& map);
  void forget_object(uint32_t object);

  // The scheduler's order to hold an object, before any client attaches it. index: of this server in the cluster.
  Status hold(const ObjectSpec& spec, const Map& map, uint32_t index);

  // Limits the memory of an app's tables here. Call before any of them is made; only the first call counts.
  void set_quota(const std::string& app, uint64_t table_bytes_max);
  std::map<std::string, uint64_t> quotas_used();  // by app
  Traffic traffic();                              // since the start
  std::map<uint32_t, TableSize> table_sizes();    // of tables, as far as they are here, by their numbers

  uint64_t incarnation() const { return incarnation_; }
  size_t connections();
  size_t clients();
  Server& server() { return server_; }

  // Begins to move a shard to another server of the list, under a higher term. *out stays null if it has left already.
  Status depart(uint32_t object, uint32_t shard, uint32_t server, uint32_t term, std::unique_ptr<Departure>* out);
  // For arrivals: finds the object, or makes it. `index`: this server's number, as the sender knows it.
  Status receive(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<ServedObject>* out);

  // For connections.
  // Runs f in a thread of its own, which close() waits for; false if there is none to be had.
  template <class F>
  bool run_beside(F f) {
    running_.fetch_add(1, std::memory_order_relaxed);
    const auto run = [this, f = std::move(f)]() mutable {
      f();
      {
        const F gone = std::move(f);
      }  // free what it holds before close() may return
      stopped_running();
    };
    if (start_detached(run)) return true;
    stopped_running();
    return false;
  }
  void tick(const ClientSession& client, uint64_t clock, std::vector<uint32_t> open);
  void tick(const ClientSession& client, uint64_t clock);  // with the same objects open as last time
  // A worker begins at `clock`; Gate::kNone: it only asks; Gate::kOver: it is done.
  Status enter(const ClientSession& client, uint64_t clock, ClockReport* report);
  Status welcome(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                 uint64_t incarnation, std::shared_ptr<ClientSession>* client);
  void goodbye(const std::shared_ptr<ClientSession>& client);
  void leave(const std::shared_ptr<ClientSession>& client);
  // makes: whether the caller may make objects, or only finds those that are there.
  Status open(const ObjectSpec& spec, bool makes, Map* map);
  // Makes an object here, or finds it. Under a scheduler it must be one that the scheduler has told of.
  Status attach(const ObjectSpec& spec, const Map& map, bool makes = true);
  // Forgets an object that could not be made everywhere, unless somebody has pushed to it. Under a scheduler only that
  // says so.
  Status detach(const ObjectSpec& spec, const Map& map);
  // Deletes an object of the client's own app. Under a scheduler it must have said so, after a second at most.
  Status remove(const ClientSession& client, const ObjectSpec& spec, uint32_t object);
  Status list(std::vector<Catalogue::Entry>* out);
  std::shared_ptr<ServedObject> find(uint32_t object) { return server_.find(object); }
  Status absent(uint32_t object) { return server_.absent(object); }
  uint64_t arena_bytes_max() const { return arena_bytes_max_; }

  // Limits the memory for the bytes of all requests. Back-pressure: a connection beyond the limit waits, and does not
  // read its client meanwhile. Huge blocks have a limit of their own, one at a time, so that others do not wait for
  // them. force: whatever room there is.
  bool reserve(uint64_t bytes, bool force, int64_t deadline_ns);
  void release(uint64_t bytes);
  // Limits the memory of requests that wait, for earlier ones of their session or at a gate.
  StagingQuota& waiting() { return waiting_; }
  // Limits the memory of answers that are made and not sent.
  AnswerQuota& answers() { return answers_; }
  // The same for results of the user's functions, which may take seconds to make: answers do not wait for them.
  AnswerQuota& results() { return results_; }

  // At most one thread spins for the next request.
  bool begin_spin() { return may_spin_ && !spinning_.exchange(true, std::memory_order_acq_rel); }
  void end_spin() { spinning_.store(false, std::memory_order_release); }

 private:
  static constexpr size_t kAppsKept = 64;

  void ended(Connection* connection);
  // Whether the scheduler's view of the app has this worker; waits for a view that is still on the way.
  Status await_view(const Hello& hello, uint64_t incarnation);
  // Whether the scheduler gave this object its number; likewise. *map becomes the scheduler's.
  Status await_object(const ObjectSpec& spec, Map* map);
  bool scheduled() const { return cluster_.load(std::memory_order_relaxed) != 0; }
  void stopped_running();
  Status welcome_locked(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                        uint64_t incarnation, std::shared_ptr<ClientSession>* client, std::shared_ptr<Connection>* old,
                        std::shared_ptr<Workers>* changed);
  void forget_one();
  bool unused();
  std::shared_ptr<Workers> workers_locked(const std::string& app);
  void free_apps_locked();
  TablePools& pools_of(const ObjectSpec& spec);
  Status make(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<ServedObject>* out);

  const uint64_t incarnation_ = os::random_u64();
  const bool may_spin_ = os::cores() > 1;
  const uint64_t arena_bytes_max_;
  std::atomic<uint64_t> cluster_{0};
  Server server_;
  const uint64_t received_bytes_max_;
  StagingQuota waiting_;
  AnswerQuota answers_, results_{kResultMemoryBytes};
  std::mutex overdue_mutex_;
  std::map<std::pair<std::string, uint32_t>, int64_t> told_;  // when a worker's wait was last reported

  std::mutex mutex_;                 // guards what follows
  std::condition_variable changed_;  // by what the scheduler told, or because a client has gone
  Catalogue catalogue_;
  uint32_t index_ = 0;                            // of this server in the list
  std::map<uint32_t, Catalogue::Entry> told_of_;  // objects that the scheduler has told of
  uint32_t newest_ = 0;                           // the highest number that it has given, as far as we were told
  std::map<std::string, std::shared_ptr<ClientSession>> clients_;
  std::vector<uint32_t> free_numbers_;
  uint32_t numbers_ = 0;
  std::vector<std::string> apps_;  // by number, from 1; "": free
  std::map<std::string, std::shared_ptr<Workers>> app_workers_;
  size_t free_apps_at_ = kAppsKept;  // when there are so many, those that nobody uses are freed
  std::map<Connection*, std::shared_ptr<Connection>> connections_;
  bool closed_ = false;

  Traffic past_;  // of connections that have ended

  std::mutex shares_mutex_;  // guards what follows
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
  std::atomic<uint32_t> staged_releases_{0}, staged_waiters_{0};
};

}  // namespace windlass
