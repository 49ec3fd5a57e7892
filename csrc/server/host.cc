#include "server/host.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>

#include "base/thread.h"
#include "server/net/connection.h"

namespace windlass {

constexpr int kHeapBlockBytesMax = 512 << 10;
constexpr std::chrono::seconds kSchedulerWait{1};  // for its word; then the client asks again
constexpr std::chrono::seconds kLeavingWait{1};    // for clients that have gone and were not noticed yet

Host::Host(int threads, uint64_t memory_bytes_max, uint64_t arena_bytes_max, uint64_t staging_bytes_max)
    : arena_bytes_max_(arena_bytes_max),
      server_(threads, memory_bytes_max, staging_bytes_max / limits::kStagedShare),
      received_bytes_max_(staging_bytes_max / limits::kReceivedShare),
      waiting_(staging_bytes_max / limits::kWaitingShare),
      answers_(staging_bytes_max / limits::kAnswersShare) {
  // Large blocks of the heap go back to the system when they are freed. Else every thread would keep some of its own.
  mallopt(M_MMAP_THRESHOLD, kHeapBlockBytesMax);
}

Host::~Host() { (void)close(limits::kNoDeadline); }

Status Host::adopt(int fd, const std::string& peer, const std::string& session_key) {
  const auto connection = std::make_shared<Connection>(*this, fd, peer, session_key);
  Status status;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Status(Code::kClosed, "the server is closed");
    if (connections_.size() >= limits::kConnectionsMax) {
      status = Status(Code::kResourceExhausted, "at most " + std::to_string(limits::kConnectionsMax) + " connections");
    } else {
      connections_[connection.get()] = connection;
      running_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (status.ok()) {
    const auto run = [this, connection = connection]() mutable {
      connection->run();
      Connection* const gone = connection.get();
      connection.reset();
      ended(gone);
    };
    if (start_detached(run)) return {};
    ended(connection.get());
    status = Status(Code::kResourceExhausted, "no thread to be had for another connection");
  }
  connection->refuse(status);
  return status;
}

void Host::ended(Connection* connection) {
  std::shared_ptr<Connection> last;
  {
    std::lock_guard lock(mutex_);
    last = std::move(connections_[connection]);
    past_ += last->traffic();
    connections_.erase(connection);
  }
  last.reset();
  stopped_running();
}

void Host::stopped_running() {
  std::lock_guard lock(mutex_);  // so that close() does not return before this thread is done
  running_.fetch_sub(1, std::memory_order_release);
  os::wake_all(running_);
}

Status Host::close(int64_t deadline_ns) {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    for (const auto& [p, connection] : connections_) connection->shut_down();
  }
  for (;;) {
    const uint32_t left = running_.load(std::memory_order_acquire);
    if (left == 0) break;
    const int64_t time_left = deadline_ns - os::now_ns();
    if (time_left <= 0) return Status(Code::kTimeout, "close: " + std::to_string(left) + " connections are still busy");
    os::wait(running_, left, std::min<int64_t>(time_left, 100'000'000));
  }
  std::lock_guard lock(mutex_);
  return {};
}

size_t Host::connections() {
  std::lock_guard lock(mutex_);
  return connections_.size();
}

size_t Host::clients() {
  std::lock_guard lock(mutex_);
  return clients_.size();
}

Status Host::welcome(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                     uint64_t incarnation, std::shared_ptr<ClientSession>* out) {
  if (hello.cluster != cluster_.load(std::memory_order_relaxed))
    return Status(Code::kAccessDenied, "hello: this server is of another cluster than the client, or of none");
  if (hello.cluster != 0 && !hello.reads() && !broken(Break::kIdentity))
    WL_RETURN_IF_ERROR(await_view(hello, incarnation));
  std::shared_ptr<Connection> old;
  std::shared_ptr<Workers> changed;
  const Status welcomed = welcome_locked(connection, hello, key, incarnation, out, &old, &changed);
  if (changed != nullptr) server_.tell_gates(changed);
  WL_RETURN_IF_ERROR(welcomed);
  // The old connection's requests may still write into the client's memory: they must end before the client sends
  // again.
  if (old == nullptr || (*out)->arenas.empty() || old->wait_ended(os::now_ns() + int64_t{limits::kStallMs} * 1'000'000))
    return {};
  leave(*out);
  // A client retries its hello after this refusal only.
  return Status(Code::kCorrupt, "the connection before this one is still at work");
}

// The scheduler alone says who has which rank. It tells workers and servers at the same time, so a hello may be first.
Status Host::await_view(const Hello& hello, uint64_t incarnation) {
  std::unique_lock lock(mutex_);
  bool given_up = false, known = false;
  changed_.wait_for(lock, kSchedulerWait, [&] {
    const auto app = app_workers_.find(hello.app);
    given_up = app != app_workers_.end() && app->second->given_up(incarnation);
    known = app != app_workers_.end() && app->second->knows(hello.rank, incarnation);
    return known || given_up || closed_;
  });
  if (known) return {};
  const std::string who = "hello: rank " + std::to_string(hello.rank) + " of app '" + hello.app + "'";
  if (given_up) return Status(Code::kClosed, who + " was given up, and others went on without it");
  return Status(Code::kTimeout, who + " is not, or not as this process, in the view that the scheduler has told us");
}

Status Host::welcome_locked(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                            uint64_t incarnation, std::shared_ptr<ClientSession>* out, std::shared_ptr<Connection>* old,
                            std::shared_ptr<Workers>* changed) {
  if (hello.cluster == 0 && hello.world_size > limits::kClientsMax) {
    return Status(Code::kInvalidArgument, "hello: world_size " + std::to_string(hello.world_size) + ", at most " +
                                              std::to_string(limits::kClientsMax) + " without a scheduler");
  }
  std::unique_lock lock(mutex_);
  // Who binds the server to another list may have gone, and its goodbye be still on the way.
  if (hello.cluster == 0 && !catalogue_.agrees(hello.servers) && server_.objects().empty() && catalogue_.empty())
    changed_.wait_for(lock, kLeavingWait, [&] { return unused() || closed_; });
  const auto known = clients_.find(key);
  if (known == clients_.end() && hello.known == incarnation_) {
    return Status(Code::kServerLost, "the session was away for long and has been forgotten; connect() again");
  }
  // A mistyped list must not bind a server for good.
  if (known == clients_.end() && unused()) catalogue_.disband(server_.highest_deleted());
  if (hello.cluster == 0) {
    const bool first = catalogue_.servers() == 0;
    WL_RETURN_IF_ERROR(catalogue_.join(hello.servers));
    if (first) index_ = hello.index;
  }
  if (hello.index != index_) {
    return Status(Code::kSpecMismatch, "servers: this one is number " + std::to_string(index_) +
                                           " of the list, not number " + std::to_string(hello.index));
  }
  const auto same = [&](const auto& other) { return other.second->incarnation == incarnation && other.first != key; };
  if (hello.cluster != 0 && std::any_of(clients_.begin(), clients_.end(), same))
    return Status(Code::kAccessDenied, "hello: another session has this incarnation");
  if (clients_.size() >= limits::kClientsMax && known == clients_.end()) forget_one();
  std::shared_ptr<ClientSession>& client = clients_[key];
  if (client == nullptr) {
    auto made = std::make_shared<ClientSession>();
    made->key = key;
    made->incarnation = incarnation;
    if (!free_numbers_.empty()) {
      made->number = free_numbers_.back();
      free_numbers_.pop_back();
    } else if (numbers_ < limits::kSessionsMax) {
      made->number = numbers_++;
    } else {
      clients_.erase(key);
      return Status(Code::kResourceExhausted, "at most " + std::to_string(limits::kSessionsMax) + " sessions");
    }
    made->workers = workers_locked(hello.app);
    auto app = std::find(apps_.begin(), apps_.end(), hello.app);
    if (app == apps_.end()) app = std::find(apps_.begin(), apps_.end(), "");
    if (app == apps_.end()) app = apps_.insert(app, "");
    *app = hello.app;
    made->app = static_cast<uint32_t>(app - apps_.begin()) + 1;
    made->rank = hello.reads() ? Gate::kOutsider : hello.rank;
    made->reads = hello.reads();
    made->world_size = hello.world_size;
    // Without a scheduler, clients say themselves how many they are.
    if (!hello.reads() && hello.cluster == 0 && made->workers->assume(hello.world_size)) *changed = made->workers;
    if (made->rank_at_home() != Gate::kOutsider) made->workers->came(made->rank, incarnation);
    client = std::move(made);
  }
  if (client->incarnation != incarnation || client->over || apps_[client->app - 1] != hello.app) {
    return Status(Code::kAccessDenied, "hello: the session key belongs to another session");
  }
  // A new connection replaces the one before, which may not have noticed yet that it is dead.
  *old = client->lanes[hello.lane].lock();
  if (*old == connection) *old = nullptr;
  if (*old != nullptr) (*old)->shut_down();
  client->lanes[hello.lane] = connection;
  ++client->connections;
  *out = client;
  return {};
}

// Whether there are no objects here and no clients connected.
bool Host::unused() {
  if (!catalogue_.empty()) return false;
  for (const auto& [key, client] : clients_) {
    if (client->connections != 0) return false;
  }
  return server_.objects().empty();
}

// Killed clients say no goodbye: forgets the one that has been away longest.
void Host::forget_one() {
  auto oldest = clients_.end();
  for (auto it = clients_.begin(); it != clients_.end(); ++it) {
    if (it->second->connections == 0 && (oldest == clients_.end() || it->second->left_ns < oldest->second->left_ns))
      oldest = it;
  }
  if (oldest == clients_.end()) return;
  free_numbers_.push_back(oldest->second->number);
  clients_.erase(oldest);
}

// An app is in use while it has sessions or objects, or somebody is waited for in its view.
void Host::free_apps_locked() {
  for (auto it = app_workers_.begin(); it != app_workers_.end();) {
    if (it->second.use_count() == 1 && it->second->over()) {
      std::replace(apps_.begin(), apps_.end(), it->first, std::string());
      it = app_workers_.erase(it);
    } else {
      ++it;
    }
  }
  free_apps_at_ = std::max(kAppsKept, 2 * app_workers_.size());
}

std::shared_ptr<Workers> Host::workers_locked(const std::string& app) {
  if (app_workers_.size() >= free_apps_at_ && !app_workers_.contains(app)) free_apps_locked();
  std::shared_ptr<Workers>& workers = app_workers_[app];
  if (workers == nullptr) workers = std::make_shared<Workers>(app);
  return workers;
}

void Host::set_view(const std::string& app, uint64_t number, const std::vector<Workers::Member>& members,
                    const std::vector<uint32_t>& waited) {
  std::shared_ptr<Workers> workers;
  {
    std::lock_guard lock(mutex_);
    if (members.empty() && waited.empty() && !app_workers_.contains(app)) return;  // it is over, and was freed
    workers = workers_locked(app);
  }
  const bool changed = workers->set_view(number, members, waited);
  {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  if (changed) server_.tell_gates(workers);
}

// Who was given up closes nothing: somebody else may have its rank by now.
static bool ticks(const ClientSession& client) {
  return client.rank_at_home() != Gate::kOutsider && !client.workers->given_up(client.incarnation);
}

void Host::tick(const ClientSession& client, uint64_t clock, std::vector<uint32_t> open) {
  if (ticks(client)) server_.tick(client.workers, client.rank, clock, std::move(open));
}

void Host::tick(const ClientSession& client, uint64_t clock) {
  if (ticks(client)) server_.tick(client.workers, client.rank, clock);
}

Status Host::enter(const ClientSession& client, uint64_t clock, ClockReport* report) {
  if (client.rank_at_home() == Gate::kOutsider) {  // of another world_size: it waits for nobody, and nobody for it
    *report = {.own = 0, .waited = true, .starts = true};
    return {};
  }
  if (clock == Gate::kOver) {
    if (client.workers->left(client.rank, client.incarnation)) server_.tell_gates(client.workers);
    return {};
  }
  if (!client.workers->knows(client.rank, client.incarnation))
    return Status(Code::kClosed, "enter: rank " + std::to_string(client.rank) + " is in the view no more");
  if (clock != Gate::kNone && client.workers->enter(client.rank, client.incarnation, clock))
    server_.tell_gates(client.workers);
  report->waited = client.workers->waits_for(client.rank);
  report->starts = client.workers->starts(client.rank);
  const auto visit = [&](const Gate& gate) {
    const uint64_t own = std::max(gate.clock_of(client.rank), gate.made());
    report->own = std::min(report->own, own);
    report->own_highest = std::max(report->own_highest, own);
    report->lowest = std::min(report->lowest, gate.lowest());
    report->highest = std::max(report->highest, gate.highest());
  };
  client.workers->visit_pace(visit);
  server_.each_gate(client.workers, [&](ServedObject& object, Shard& shard) {
    report->rounds = report->rounds || object.spec().sync().rounds();
    if (shard.home.state == Residence::kHere || shard.home.state == Residence::kFrozen) visit(*shard.gate);
  });
  return {};
}

std::vector<std::pair<std::string, SyncStats>> Host::sync_stats() {
  std::vector<std::pair<std::string, SyncStats>> all;
  std::lock_guard lock(mutex_);
  for (const auto& [app, workers] : app_workers_) all.emplace_back(app, workers->stats());
  return all;
}

std::vector<std::string> Host::overdue(int64_t ns) {
  std::lock_guard lock(overdue_mutex_);
  const int64_t now = os::now_ns();
  std::vector<std::string> lines;
  for (const auto& object : server_.objects()) {
    if (!object->spec().sync().gated()) continue;
    const std::string& app = object->workers()->app();
    for (uint32_t i = 0; i < object->shards(); ++i) {
      Shard* const shard = object->find(i);
      if (shard == nullptr) continue;
      with_turn(shard->turn, [&] {
        shard->parked.each([&](const Waiting& w) {
          const auto& ticket = static_cast<const Ticket&>(w);
          if (!ticket.gated() || now - ticket.since_ns() < ns) return;
          const uint32_t rank = ticket.batch().caller.rank;
          int64_t& told = told_[{app, rank}];
          if (now - told < ns) return;
          told = now;
          const View::Worker who = shard->gate->blocker(rank, ticket.asked(), now);
          lines.push_back("app '" + app + "': rank " + std::to_string(rank) + " has waited for " +
                          std::to_string((now - ticket.since_ns()) / 1'000'000'000) + " s at '" +
                          object->spec().own_name() + "', at clock " + std::to_string(ticket.asked()) + ", " +
                          waits_for(who));
        });
      });
    }
  }
  return lines;
}

void Host::goodbye(const std::shared_ptr<ClientSession>& client) {
  if (client->rank_at_home() != Gate::kOutsider && client->workers->left(client->rank, client->incarnation))
    server_.tell_gates(client->workers);
  std::lock_guard lock(mutex_);
  client->over = true;
  for (const auto& lane : client->lanes) {
    if (const auto connection = lane.lock(); connection != nullptr) connection->shut_down();
  }
}

void Host::leave(const std::shared_ptr<ClientSession>& client) {
  std::lock_guard lock(mutex_);
  client->left_ns = os::now_ns();
  if (--client->connections != 0) return;
  changed_.notify_all();
  client->arenas.clear();  // a client that comes back brings them again
  if (!client->over) return;
  free_numbers_.push_back(client->number);
  clients_.erase(client->key);
}

Status Host::open(const ObjectSpec& spec, bool makes, Map* map) {
  if (scheduled()) return Status(Code::kInvalidArgument, "open: the scheduler keeps the catalogue");
  std::lock_guard lock(mutex_);
  if (index_ != 0) return Status(Code::kInvalidArgument, "open: the first server of the list keeps the catalogue");
  if (!makes && !catalogue_.has(spec.name)) return not_there("open", spec);
  return catalogue_.open(spec, map);
}

Status Host::list(std::vector<Catalogue::Entry>* out) {
  if (scheduled()) return Status(Code::kInvalidArgument, "list: the scheduler keeps the catalogue");
  std::lock_guard lock(mutex_);
  if (index_ != 0) return Status(Code::kInvalidArgument, "list: the first server of the list keeps the catalogue");
  *out = catalogue_.entries();
  return {};
}

void Host::know_object(const ObjectSpec& spec, const Map& map) {
  std::lock_guard lock(mutex_);
  told_of_[map.object] = {spec, map};
  newest_ = std::max(newest_, map.object);
  changed_.notify_all();
}

void Host::forget_object(uint32_t object) {
  Catalogue::Entry gone;
  {
    std::lock_guard lock(mutex_);
    const auto it = told_of_.find(object);
    if (it == told_of_.end()) return;
    gone = std::move(it->second);
    told_of_.erase(it);
  }
  server_.remove(gone.spec, object);
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

// Numbers are the scheduler's to give, in ascending order. It tells the servers before the client that asked for the
// object, but on other connections.
Status Host::await_object(const ObjectSpec& spec, Map* map) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kSchedulerWait, [&] { return newest_ >= map->object || closed_; });
  const auto it = told_of_.find(map->object);
  const std::string what = "'" + spec.own_name() + "': object " + std::to_string(map->object);
  if (it == told_of_.end() && newest_ < map->object)
    return Status(Code::kTimeout, what + " is none that the scheduler has told us of");
  if (it == told_of_.end()) return Status(Code::kDeleted, what + " was deleted");
  if (!(it->second.spec == spec))
    return Status(Code::kSpecMismatch, what + " is '" + it->second.spec.name + "', or has another spec");
  *map = it->second.map;
  return {};
}

Status Host::attach(const ObjectSpec& spec, const Map& asked, bool makes) {
  Map map = asked;
  if (scheduled() && !broken(Break::kIdentity))
    WL_RETURN_IF_ERROR(await_object(spec, &map));  // so it exists, whoever asks
  if (!scheduled() && !makes && find(map.object) == nullptr) return not_there("attach", spec);
  uint32_t shards = 0, servers = 0, index = 0;
  {
    std::lock_guard lock(mutex_);
    servers = scheduled() ? limits::kServersMax : catalogue_.servers();
    index = index_;
  }
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  WL_RETURN_IF_ERROR(map.check(shards, servers));
  if (map.object == 0 || map.object > limits::kObjectsMax) {
    return Status(Code::kInvalidArgument, "attach: object " + std::to_string(map.object) + " of at most " +
                                              std::to_string(limits::kObjectsMax));
  }
  // A shard that moved here brought its object along. If the object is unknown, the shard is lost: do not start it
  // anew.
  const auto came = [&](const Map::Owned& run) { return run.server == index && run.term != Map::kFirstTerm; };
  if (find(map.object) == nullptr && std::any_of(map.runs.begin(), map.runs.end(), came)) {
    return Status(Code::kServerLost, "'" + spec.own_name() + "': shards that moved to this server are not here");
  }
  std::shared_ptr<ServedObject> made;
  return make(spec, map, index, &made);
}

Status Host::hold(const ObjectSpec& spec, const Map& map, uint32_t index) {
  if (find(map.object) != nullptr) return {};
  uint32_t shards = 0;
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  WL_RETURN_IF_ERROR(map.check(shards, limits::kServersMax));
  std::shared_ptr<ServedObject> made;
  return make(spec, map, index, &made);
}

void Host::set_quota(const std::string& app, uint64_t table_bytes_max) {
  std::lock_guard lock(shares_mutex_);
  auto& share = shares_[app];
  if (share == nullptr) share = std::make_unique<Share>(table_bytes_max, &server_.budget());
}

TablePools& Host::pools_of(const ObjectSpec& spec) {
  std::lock_guard lock(shares_mutex_);
  const auto share = shares_.find(spec.name.substr(0, spec.name.find('/')));
  return share == shares_.end() ? server_.pools() : share->second->pools;
}

std::map<std::string, uint64_t> Host::quotas_used() {
  std::lock_guard lock(shares_mutex_);
  std::map<std::string, uint64_t> used;
  for (const auto& [app, share] : shares_) used[app] = share->budget.used();
  return used;
}

std::map<uint32_t, TableSize> Host::table_sizes() {
  std::map<uint32_t, TableSize> sizes;
  for (const auto& object : server_.objects()) {
    if (object->table() != nullptr) sizes[object->map().object] = object->table()->size();
  }
  return sizes;
}

Traffic Host::traffic() {
  std::lock_guard lock(mutex_);
  Traffic all = past_;
  for (const auto& [p, connection] : connections_) all += connection->traffic();
  return all;
}

Status Host::make(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<ServedObject>* out) {
  std::shared_ptr<Workers> workers;
  {
    std::lock_guard lock(mutex_);
    workers = workers_locked(spec.app());
  }
  return server_.make(spec, map, index, &pools_of(spec), workers, out);
}

Status Host::depart(uint32_t object, uint32_t shard, uint32_t server, uint32_t term, std::unique_ptr<Departure>* out) {
  const std::shared_ptr<ServedObject> there = find(object);
  if (there == nullptr) return Status(Code::kNotFound, "move: object " + std::to_string(object) + " is not here");
  return Departure::begin(there, shard, server, term, out);
}

Status Host::receive(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<ServedObject>* out) {
  uint32_t shards = 0;
  {
    std::lock_guard lock(mutex_);
    if ((scheduled() || catalogue_.servers() != 0) && index != index_)
      return Status(Code::kInvalidArgument, "'" + spec.own_name() + "': this server is number " +
                                                std::to_string(index_) + " of the list, not number " +
                                                std::to_string(index));
  }
  Map known = map;
  if (scheduled()) WL_RETURN_IF_ERROR(await_object(spec, &known));
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  WL_RETURN_IF_ERROR(map.check(shards, limits::kServersMax));
  if (!known.agrees(map, shards))
    return Status(Code::kSpecMismatch, "'" + spec.own_name() + "': its map is not the scheduler's");
  if (map.object == 0 || map.object > limits::kObjectsMax)
    return Status(Code::kInvalidArgument,
                  "object " + std::to_string(map.object) + " of at most " + std::to_string(limits::kObjectsMax));
  // Under a scheduler a server's number is used for one life only. So if shards are here since the object was made and
  // the object is unknown, no client has told this server of it yet.
  const bool told_late = scheduled();
  const auto missing = [&](const Map::Owned& run) {
    return run.server == index && !(told_late && run.term == Map::kFirstTerm);
  };
  if (find(map.object) == nullptr && std::any_of(map.runs.begin(), map.runs.end(), missing))
    return Status(Code::kNotFound, "'" + spec.own_name() + "': some of it should be here, but it is not known");
  return make(spec, map, index, out);
}

Status Host::detach(const ObjectSpec& spec, const Map& map) {
  if (scheduled()) return Status(Code::kInvalidArgument, "detach: the scheduler says what is forgotten");
  WL_RETURN_IF_ERROR(server_.forget(spec, map));
  std::lock_guard lock(mutex_);
  if (index_ == 0) catalogue_.forget(spec, map.object);
  return {};
}

Status Host::remove(const ClientSession& client, const ObjectSpec& spec, uint32_t object) {
  if (client.world_size == 0) return Status(Code::kAccessDenied, "a reader deletes nothing");
  if (client.workers->app() != spec.app())
    return Status(Code::kAccessDenied, "only app '" + spec.app() + "' may delete its objects");
  if (const auto there = find(object); there != nullptr && !(there->spec() == spec))
    return Status(Code::kSpecMismatch, "object " + std::to_string(object) + " is '" + there->spec().name + "' here");
  if (object == 0 || object > limits::kObjectsMax)
    return Status(Code::kInvalidArgument, "object " + std::to_string(object));
  {
    std::unique_lock lock(mutex_);
    if (scheduled()) {
      const auto told = [&] { return closed_ || (newest_ >= object && !told_of_.contains(object)); };
      if (!changed_.wait_for(lock, kSchedulerWait, told))
        return Status(Code::kTimeout, "the scheduler has not told us that it is deleted");
    } else if (index_ == 0) {
      WL_RETURN_IF_ERROR(catalogue_.remove(spec, object));
    }
  }
  server_.remove(spec, object);
  return {};
}

bool Host::reserve(uint64_t bytes, bool force, int64_t deadline_ns) {
  const bool huge = bytes > limits::kHugePartBytes;
  std::atomic<uint64_t>& place = huge ? huge_bytes_ : staged_bytes_;
  for (;;) {
    const uint32_t releases = staged_releases_.load(std::memory_order_seq_cst);
    uint64_t used = place.load(std::memory_order_seq_cst);
    while (used == 0 || force || (!huge && used + bytes <= received_bytes_max_)) {
      if (place.compare_exchange_weak(used, used + bytes, std::memory_order_seq_cst)) return true;
    }
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    staged_waiters_.fetch_add(1, std::memory_order_seq_cst);
    os::wait(staged_releases_, releases, left);
    staged_waiters_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Host::release(uint64_t bytes) {
  (bytes > limits::kHugePartBytes ? huge_bytes_ : staged_bytes_).fetch_sub(bytes, std::memory_order_seq_cst);
  staged_releases_.fetch_add(1, std::memory_order_seq_cst);
  if (staged_waiters_.load(std::memory_order_seq_cst) != 0) os::wake_all(staged_releases_);
}

}  // namespace windlass
