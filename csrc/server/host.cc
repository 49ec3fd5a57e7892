#include "server/host.h"

#include <algorithm>
#include <thread>

#include "server/connection.h"
#include "server/remote_ticket.h"

namespace windlass {

constexpr int64_t kViewWaitNs = 1'000'000'000;  // then who waits is asked whether it still does

Host::Host(int threads, uint64_t memory_bytes_max, uint64_t arena_bytes_max, uint64_t staging_bytes_max)
    : arena_bytes_max_(arena_bytes_max), server_(threads, memory_bytes_max, staging_bytes_max) {}

Host::~Host() { (void)close(limits::kNoDeadline); }

Status Host::adopt(int fd, const std::string& peer, const std::string& session_key) {
  auto connection = std::make_shared<Connection>(*this, fd, peer, session_key);
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Status(Code::kClosed, "the server is closed");
    if (connections_.size() >= limits::kConnectionsMax) {
      return Status(Code::kResourceExhausted, "at most " + std::to_string(limits::kConnectionsMax) + " connections");
    }
    connections_[connection.get()] = connection;
    running_.fetch_add(1, std::memory_order_relaxed);
  }
  std::thread([this, connection = std::move(connection)]() mutable {
    connection->run();
    Connection* const gone = connection.get();
    connection.reset();
    ended(gone);
  }).detach();
  return {};
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
  std::lock_guard lock(mutex_);  // so that close() does not end before this thread has let go
  running_.fetch_sub(1, std::memory_order_release);
  os::wake_all(running_);
}

Status Host::close(int64_t deadline_ns) {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
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

size_t Host::guests() {
  std::lock_guard lock(mutex_);
  return guests_.size();
}

Status Host::welcome(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                     uint64_t incarnation, std::shared_ptr<Guest>* out) {
  std::shared_ptr<Connection> old;
  std::shared_ptr<Crowd> changed;
  const Status welcomed = welcome_locked(connection, hello, key, incarnation, out, &old, &changed);
  if (changed != nullptr) server_.tell_gates(changed);
  WL_RETURN_IF_ERROR(welcomed);
  // What the old one has begun may write into the client's memory: it ends before the client may send anything again.
  if (old == nullptr || (*out)->arenas.empty() || old->wait_ended(os::now_ns() + int64_t{limits::kStallMs} * 1'000'000))
    return {};
  leave(*out);
  // The one refusal of a hello after which a client tries again.
  return Status(Code::kCorrupt, "the connection before this one is still at work");
}

Status Host::welcome_locked(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                            uint64_t incarnation, std::shared_ptr<Guest>* out, std::shared_ptr<Connection>* old,
                            std::shared_ptr<Crowd>* changed) {
  if (hello.cluster != cluster_.load(std::memory_order_relaxed)) {
    return Status(Code::kAccessDenied, "hello: this server is of another cluster than the client, or of none");
  }
  if (hello.cluster == 0 && hello.world_size > limits::kGuestsMax) {
    return Status(Code::kInvalidArgument, "hello: world_size " + std::to_string(hello.world_size) + ", at most " +
                                              std::to_string(limits::kGuestsMax) + " without a scheduler");
  }
  std::lock_guard lock(mutex_);
  const auto known = guests_.find(key);
  if (known == guests_.end() && hello.known == incarnation_) {
    return Status(Code::kServerLost, "the session was away for long and has been forgotten; connect() again");
  }
  // A list that was mistyped must not bind a server for good.
  if (known == guests_.end() && unused()) catalogue_ = Catalogue();
  const bool first = catalogue_.servers() == 0;
  WL_RETURN_IF_ERROR(catalogue_.join(hello.servers));
  if (first) index_ = hello.index;
  if (hello.index != index_) {
    return Status(Code::kSpecMismatch, "servers: this one is number " + std::to_string(index_) +
                                           " of the list, not number " + std::to_string(hello.index));
  }
  if (guests_.size() >= limits::kGuestsMax && known == guests_.end()) forget_one();
  std::shared_ptr<Guest>& guest = guests_[key];
  if (guest == nullptr) {
    auto made = std::make_shared<Guest>();
    made->key = key;
    made->incarnation = incarnation;
    if (!free_numbers_.empty()) {
      made->number = free_numbers_.back();
      free_numbers_.pop_back();
    } else if (numbers_ < limits::kSessionsMax) {
      made->number = numbers_++;
    } else {
      guests_.erase(key);
      return Status(Code::kResourceExhausted, "at most " + std::to_string(limits::kSessionsMax) + " sessions");
    }
    auto app = std::find(apps_.begin(), apps_.end(), hello.app);
    if (app == apps_.end()) app = apps_.insert(app, hello.app);
    made->app = static_cast<uint32_t>(app - apps_.begin()) + 1;
    made->crowd = crowd_locked(hello.app);
    made->rank = hello.reads() ? Gate::kOutsider : hello.rank;
    made->world_size = hello.world_size;
    // Where there is no scheduler, clients say themselves how many they are.
    if (!hello.reads() && hello.cluster == 0 && made->crowd->assume(hello.world_size)) *changed = made->crowd;
    if (made->rank_at_home() != Gate::kOutsider) made->crowd->came(made->rank, incarnation);
    guest = std::move(made);
  }
  if (guest->incarnation != incarnation || guest->over || apps_[guest->app - 1] != hello.app) {
    return Status(Code::kAccessDenied, "hello: the session key belongs to another session");
  }
  // A connection that is re-made replaces the one before, which may not have noticed yet that it is dead.
  *old = guest->lanes[hello.lane].lock();
  if (*old == connection) *old = nullptr;
  if (*old != nullptr) (*old)->shut_down();
  guest->lanes[hello.lane] = connection;
  ++guest->connections;
  *out = guest;
  return {};
}

// Whether nothing is kept here and nobody is there who could want anything.
bool Host::unused() {
  if (!catalogue_.empty()) return false;
  for (const auto& [key, guest] : guests_) {
    if (guest->connections != 0) return false;
  }
  return server_.objects().empty();
}

// Clients that are killed say no goodbye. The one that has been away for longest is not waited for any more.
void Host::forget_one() {
  auto oldest = guests_.end();
  for (auto it = guests_.begin(); it != guests_.end(); ++it) {
    if (it->second->connections == 0 && (oldest == guests_.end() || it->second->left_ns < oldest->second->left_ns))
      oldest = it;
  }
  if (oldest == guests_.end()) return;
  free_numbers_.push_back(oldest->second->number);
  guests_.erase(oldest);
}

std::shared_ptr<Crowd> Host::crowd_locked(const std::string& app) {
  std::shared_ptr<Crowd>& crowd = crowds_[app];
  if (crowd == nullptr) crowd = std::make_shared<Crowd>(app);
  return crowd;
}

void Host::set_view(const std::string& app, uint64_t number, const std::vector<Crowd::Member>& workers,
                    const std::vector<uint32_t>& waited) {
  std::shared_ptr<Crowd> crowd;
  {
    std::lock_guard lock(mutex_);
    crowd = crowd_locked(app);
  }
  if (crowd->set_view(number, workers, waited)) server_.tell_gates(crowd);
}

void Host::tick(const Guest& guest, uint64_t clock, std::vector<uint32_t> open) {
  if (guest.rank_at_home() != Gate::kOutsider) server_.tick(guest.crowd, guest.rank, clock, std::move(open));
}

void Host::tick(const Guest& guest, uint64_t clock) {
  if (guest.rank_at_home() != Gate::kOutsider) server_.tick(guest.crowd, guest.rank, clock);
}

Status Host::enter(const Guest& guest, uint64_t clock, Standing* standing) {
  if (guest.rank_at_home() == Gate::kOutsider) {  // of another world: nobody waits for it, and it for nobody
    *standing = {.own = 0, .known = true, .waited = true, .starts = true};
    return {};
  }
  if (clock == Gate::kOver) {
    if (guest.crowd->left(guest.rank, guest.incarnation)) server_.tell_gates(guest.crowd);
    return {};
  }
  // Its view may still be on the way: until then nobody here would wait for it, while others do elsewhere.
  standing->known = guest.crowd->await_view(guest.rank, guest.incarnation, kViewWaitNs);
  if (!standing->known) return {};
  if (clock != Gate::kNone && guest.crowd->enter(guest.rank, guest.incarnation, clock)) server_.tell_gates(guest.crowd);
  standing->waited = guest.crowd->waits_for(guest.rank);
  standing->starts = guest.crowd->starts(guest.rank);
  const auto visit = [&](const Gate& gate) {
    const uint64_t own = std::max(gate.clock_of(guest.rank), gate.made());
    standing->own = std::min(standing->own, own);
    standing->own_highest = std::max(standing->own_highest, own);
    standing->lowest = std::min(standing->lowest, gate.lowest());
    standing->highest = std::max(standing->highest, gate.highest());
  };
  guest.crowd->visit_pace(visit);
  server_.each_gate(guest.crowd, [&](ServedObject& object, Shard& shard) {
    standing->rounds = standing->rounds || object.spec().sync().rounds();
    if (shard.home.state == Residence::kHere || shard.home.state == Residence::kFrozen) visit(*shard.gate);
  });
  return {};
}

std::vector<std::pair<std::string, SyncStats>> Host::sync_stats() {
  std::vector<std::pair<std::string, SyncStats>> all;
  std::lock_guard lock(mutex_);
  for (const auto& [app, crowd] : crowds_) all.emplace_back(app, crowd->stats());
  return all;
}

std::vector<std::string> Host::overdue(int64_t ns) {
  std::lock_guard lock(overdue_mutex_);
  const int64_t now = os::now_ns();
  std::vector<std::string> lines;
  for (const auto& object : server_.objects()) {
    if (!object->spec().sync().gated()) continue;
    const std::string& app = object->crowd()->app();
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

void Host::goodbye(const std::shared_ptr<Guest>& guest) {
  if (guest->rank_at_home() != Gate::kOutsider && guest->crowd->left(guest->rank, guest->incarnation))
    server_.tell_gates(guest->crowd);
  std::lock_guard lock(mutex_);
  guest->over = true;
  for (const auto& lane : guest->lanes) {
    if (const auto connection = lane.lock(); connection != nullptr) connection->shut_down();
  }
}

void Host::leave(const std::shared_ptr<Guest>& guest) {
  std::lock_guard lock(mutex_);
  guest->left_ns = os::now_ns();
  if (--guest->connections != 0) return;
  guest->arenas.clear();  // who comes back brings them again
  if (!guest->over) return;
  free_numbers_.push_back(guest->number);
  guests_.erase(guest->key);
}

Status Host::open(const ObjectSpec& spec, Map* map) {
  std::lock_guard lock(mutex_);
  if (index_ != 0) return Status(Code::kInvalidArgument, "open: the first server of the list keeps the catalogue");
  return catalogue_.open(spec, map);
}

Status Host::list(std::vector<Catalogue::Entry>* out) {
  std::lock_guard lock(mutex_);
  if (index_ != 0) return Status(Code::kInvalidArgument, "list: the first server of the list keeps the catalogue");
  *out = catalogue_.entries();
  return {};
}

Status Host::attach(const ObjectSpec& spec, const Map& map) {
  uint32_t shards = 0, servers = 0, index = 0;
  {
    std::lock_guard lock(mutex_);
    servers = catalogue_.servers();
    index = index_;
  }
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  WL_RETURN_IF_ERROR(map.check(shards, servers));
  if (map.object == 0 || map.object > limits::kObjectsMax) {
    return Status(Code::kInvalidArgument, "attach: object " + std::to_string(map.object) + " of at most " +
                                              std::to_string(limits::kObjectsMax));
  }
  // What has moved here came with its object. Without it, a server would begin anew with what it does not have.
  const auto came = [&](const Map::Owned& run) { return run.server == index && run.term != Map::kFirstTerm; };
  if (find(map.object) == nullptr && std::any_of(map.runs.begin(), map.runs.end(), came)) {
    return Status(Code::kServerLost, "'" + spec.own_name() + "': shards that moved to this server are not here");
  }
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

Traffic Host::traffic() {
  std::lock_guard lock(mutex_);
  Traffic all = past_;
  for (const auto& [p, connection] : connections_) all += connection->traffic();
  return all;
}

Status Host::make(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<ServedObject>* out) {
  std::shared_ptr<Crowd> crowd;
  {
    std::lock_guard lock(mutex_);
    crowd = crowd_locked(spec.app());
  }
  return server_.make(spec, map, index, &pools_of(spec), crowd, out);
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
    if (catalogue_.servers() != 0 && index != index_)
      return Status(Code::kInvalidArgument, "'" + spec.own_name() + "': this server is number " +
                                                std::to_string(index_) + " of the list, not number " +
                                                std::to_string(index));
  }
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  WL_RETURN_IF_ERROR(map.check(shards, limits::kServersMax));
  if (map.object == 0 || map.object > limits::kObjectsMax)
    return Status(Code::kInvalidArgument,
                  "object " + std::to_string(map.object) + " of at most " + std::to_string(limits::kObjectsMax));
  // Under a scheduler a server keeps its number for one life only: what has been here since the object was made, and is
  // not known, is what no client has told it of yet.
  const bool told_late = cluster_.load(std::memory_order_relaxed) != 0;
  const auto missing = [&](const Map::Owned& run) {
    return run.server == index && !(told_late && run.term == Map::kFirstTerm);
  };
  if (find(map.object) == nullptr && std::any_of(map.runs.begin(), map.runs.end(), missing))
    return Status(Code::kNotFound, "'" + spec.own_name() + "': some of it should be here, but it is not known");
  return make(spec, map, index, out);
}

Status Host::detach(const ObjectSpec& spec, const Map& map) {
  WL_RETURN_IF_ERROR(server_.forget(spec, map));
  std::lock_guard lock(mutex_);
  if (index_ == 0) catalogue_.forget(spec, map.object);
  return {};
}

bool Host::reserve(uint64_t bytes, int64_t deadline_ns) {
  const bool huge = bytes > limits::kHugePartBytes;
  std::atomic<uint64_t>& place = huge ? huge_bytes_ : staged_bytes_;
  for (;;) {
    const uint32_t releases = staged_releases_.load(std::memory_order_seq_cst);
    uint64_t used = place.load(std::memory_order_seq_cst);
    while (used == 0 || (!huge && used + bytes <= limits::kStagingBytesMax)) {
      if (place.compare_exchange_weak(used, used + bytes, std::memory_order_seq_cst)) return true;
    }
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    os::wait(staged_releases_, releases, left);
  }
}

void Host::release(uint64_t bytes) {
  (bytes > limits::kHugePartBytes ? huge_bytes_ : staged_bytes_).fetch_sub(bytes, std::memory_order_seq_cst);
  staged_releases_.fetch_add(1, std::memory_order_seq_cst);
  os::wake_all(staged_releases_);
}

}  // namespace windlass
