#include "server/host.h"

#include <algorithm>
#include <thread>

#include "server/connection.h"

namespace windlass {

Host::Host(int threads, uint64_t memory_bytes_max, uint64_t arena_bytes_max)
    : arena_bytes_max_(arena_bytes_max), server_(threads, memory_bytes_max) {}

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
  WL_RETURN_IF_ERROR(welcome_locked(connection, hello, key, incarnation, out, &old));
  // What the old one has begun may write into the client's memory: it ends before the client may send anything again.
  if (old == nullptr || (*out)->arenas.empty() || old->wait_ended(os::now_ns() + int64_t{limits::kStallMs} * 1'000'000))
    return {};
  leave(*out);
  // The one refusal of a hello after which a client tries again.
  return Status(Code::kCorrupt, "the connection before this one is still at work");
}

Status Host::welcome_locked(const std::shared_ptr<Connection>& connection, const Hello& hello, const std::string& key,
                            uint64_t incarnation, std::shared_ptr<Guest>* out, std::shared_ptr<Connection>* old) {
  if (hello.cluster != cluster_.load(std::memory_order_relaxed)) {
    return Status(Code::kAccessDenied, "hello: this server is of another cluster than the client, or of none");
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
  std::shared_lock lock(objects_mutex_);
  return std::all_of(objects_.begin(), objects_.end(), [](const auto& object) { return object == nullptr; });
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

void Host::goodbye(const std::shared_ptr<Guest>& guest) {
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
  std::shared_ptr<Hosted> made;
  return make(spec, map, index, &made);
}

void Host::set_quota(const std::string& app, uint64_t table_bytes_max) {
  std::lock_guard lock(making_);
  auto& share = shares_[app];
  if (share == nullptr) share = std::make_unique<Share>(table_bytes_max, &server_.budget());
}

TablePools& Host::pools_of(const ObjectSpec& spec) {
  const auto share = shares_.find(spec.name.substr(0, spec.name.find('/')));
  return share == shares_.end() ? server_.pools() : share->second->pools;
}

std::map<std::string, uint64_t> Host::quotas_used() {
  std::lock_guard lock(making_);
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

// The object, made if it is not there.
Status Host::make(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<Hosted>* out) {
  std::lock_guard lock(making_);
  *out = find(map.object);
  if (const auto& there = *out; there != nullptr) {
    uint32_t shards = 0;
    WL_RETURN_IF_ERROR(spec.shards(&shards));
    if (there->spec() == spec && there->map().agrees(map, shards)) return {};
    return Status(Code::kSpecMismatch, "object " + std::to_string(map.object) + " is '" + there->spec().name +
                                           "' here, not '" + spec.name + "', or is placed otherwise");
  }
  WL_RETURN_IF_ERROR(Hosted::make(spec, map, index, server_, &pools_of(spec), out));
  std::unique_lock objects(objects_mutex_);
  if (objects_.size() <= map.object) objects_.resize(map.object + 1);
  objects_[map.object] = *out;
  return {};
}

Status Host::depart(uint32_t object, uint32_t shard, uint32_t server, uint32_t term, std::unique_ptr<Departure>* out) {
  const std::shared_ptr<Hosted> there = find(object);
  if (there == nullptr) return Status(Code::kNotFound, "move: object " + std::to_string(object) + " is not here");
  return Departure::begin(there, shard, server, term, out);
}

Status Host::receive(const ObjectSpec& spec, const Map& map, uint32_t index, std::shared_ptr<Hosted>* out) {
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
  if (find(map.object) == nullptr &&
      std::any_of(map.runs.begin(), map.runs.end(), [&](const Map::Owned& run) { return run.server == index; }))
    return Status(Code::kNotFound, "'" + spec.own_name() + "': some of it should be here, but it is not known");
  return make(spec, map, index, out);
}

Status Host::detach(const ObjectSpec& spec, const Map& map) {
  std::lock_guard making(making_);
  if (const auto there = find(map.object); there != nullptr) {
    if (!(there->spec() == spec) || !(there->map() == map) || there->used()) {
      return Status(Code::kInvalidArgument, "detach: '" + spec.own_name() + "' is in use, or another");
    }
    std::unique_lock objects(objects_mutex_);
    objects_[map.object] = nullptr;
  }
  std::lock_guard lock(mutex_);
  if (index_ == 0) catalogue_.forget(spec, map.object);
  return {};
}

std::shared_ptr<Hosted> Host::find(uint32_t object) {
  std::shared_lock lock(objects_mutex_);
  return object < objects_.size() ? objects_[object] : nullptr;
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
