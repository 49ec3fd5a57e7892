#include "client/net/links.h"

#include <algorithm>
#include <chrono>

#include "base/breaks.h"
#include "base/thread.h"
#include "client/net/remote_route.h"

namespace windlass {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kNotYetNs = 100 * kMs;  // then a server that had no room for a connection is asked again
constexpr int64_t kIdleNs = 1000 * kMs;   // how often the thread wakes up when nothing is under way

}  // namespace

Links::Links(std::vector<std::string> servers, std::string app, uint32_t rank, uint32_t world_size, int checksums,
             bool shares, uint64_t cluster, uint64_t incarnation)
    : app_(std::move(app)),
      rank_(rank),
      world_size_(world_size),
      checksums_(checksums),
      shares_(shares),
      cluster_(cluster),
      servers_max_(cluster != 0 ? std::max(limits::kServersMax, static_cast<uint32_t>(servers.size()))
                                : static_cast<uint32_t>(servers.size())),
      incarnation_(incarnation != 0 ? incarnation : os::random_u64()),
      peers_(std::make_unique<std::unique_ptr<Peer>[]>(servers_max_)),
      lanes_(std::make_unique<std::unique_ptr<Lane>[]>(size_t{servers_max_} * limits::kLanes)) {
  for (const std::string& server : servers) add(count_, server);
}

void Links::add(uint32_t server, const std::string& address) {
  peers_[server] = std::make_unique<Peer>();
  peers_[server]->address = address;
  for (uint8_t n = 0; n < limits::kLanes; ++n)
    lanes_[server * limits::kLanes + n] = std::make_unique<Lane>(*this, server, n);
  count_.store(server + 1, std::memory_order_release);
  std::lock_guard lock(dial_mutex_);
  for (uint8_t n = 0; n < limits::kLanes; ++n) wanted_.push_back({server, n});
}

Status Links::grow(const std::vector<std::string>& servers) {
  {
    std::lock_guard lock(growing_);
    if (stopped_) return {};
    if (servers.size() > servers_max_)
      return Status(Code::kResourceExhausted, "servers: at most " + std::to_string(servers_max_));
    for (uint32_t s = this->servers(); s < servers.size(); ++s) add(s, servers[s]);
  }
  dial_wanted_.notify_all();
  changed();
  return {};
}

Links::~Links() = default;

void Links::start() {
  running_ = 1;
  const auto run_until_stopped = [self = shared_from_this()] {
    self->run();
    std::vector<uint32_t> all;
    {
      std::lock_guard lock(self->growing_);  // none comes from now on
      for (uint32_t i = 0; i < self->servers(); ++i) all.push_back(i);
    }
    self->give_up(all, Status(Code::kClosed, "the cluster has been closed"));
    (void)self->wake_rested(0, true);
    self->running_.store(0, std::memory_order_release);
    os::wake_all(self->running_);
  };
  if (start_detached(run_until_stopped)) return;
  running_ = 0;
  for (uint32_t i = 0; i < servers(); ++i)
    lost(i, Status(Code::kResourceExhausted, "connect: no thread to be had for the connections"));
}

void Links::stop() {
  {
    std::lock_guard lock(dial_mutex_);
    stopped_ = true;
  }
  dial_wanted_.notify_all();
  watch_.wake();
}

bool Links::ended(int64_t deadline_ns) {
  while (running_.load(std::memory_order_acquire) != 0) {
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    os::wait(running_, 1, left);
  }
  return true;
}

// Receives what nobody waits for, and asks servers on lanes that have been silent for long.
void Links::run() {
  constexpr size_t kMany = 64;
  uint64_t tags[kMany];
  bool busy = false;
  int64_t rested_ns = kIdleNs;  // until the next trip has rested
  while (!stopped_) {
    const size_t n = watch_.wait(tags, kMany, std::min(rested_ns, busy ? limits::kAskMs * kMs : kIdleNs));
    for (size_t i = 0; i < n; ++i) {
      Lane& lane = *lanes_[tags[i]];
      if (lane.try_lead(true)) {
        lane.pump_receive();
        lane.pump_send();
        lane.unlead();
      } else if (lane.watched()) {  // another thread leads it and receives; only send here
        lane.pump_send();
        lane.attend();
      }
    }
    busy = false;
    const int64_t now = os::now_ns();
    each_lane([&](Lane& lane) {
      if (lane.idle() && !lane.has_freed()) return;
      busy = true;
      if (!lane.try_lead(true)) return;
      lane.maintain(now);
      lane.pump_send();
      lane.unlead();
    });
    rested_ns = wake_rested(now, false);
  }
}

// ---- shards that have moved ---------------------------------------------------------------------------------------

std::shared_ptr<Owners> Links::owners(const Map& map, uint32_t shards) {
  std::lock_guard lock(owners_mutex_);
  std::shared_ptr<Owners>& known = owners_[map.object];
  if (known != nullptr && known->shards() == shards) {
    known->learn(map);
    return known;
  }
  known = std::make_shared<Owners>(map, shards);
  for (auto it = told_.lower_bound({map.object, 0}); it != told_.end() && it->first.first == map.object;) {
    if (it->first.second < shards) known->learn(it->first.second, it->second);
    it = told_.erase(it);
  }
  return known;
}

Status Links::moved(uint32_t object, uint32_t shard, uint32_t server, uint32_t term) {
  const std::string what = "moved: object " + std::to_string(object) + ", shard " + std::to_string(shard);
  if (server >= servers())
    return Status(Code::kInvalidArgument,
                  what + ": server " + std::to_string(server) + " of " + std::to_string(servers()));
  {
    std::lock_guard lock(owners_mutex_);
    if (const auto it = owners_.find(object); it == owners_.end()) {
      Owners::At& told = told_.try_emplace({object, shard}, Owners::At{server, term}).first->second;
      if (told.term < term) told = {server, term};
      return {};
    } else if (shard >= it->second->shards()) {
      return Status(Code::kInvalidArgument, what + " of " + std::to_string(it->second->shards()));
    } else {
      it->second->learn(shard, {server, term});
    }
  }
  each_lane([&](Lane& lane) {
    if (lane.server() != server) lane.release_moved();
  });
  return {};
}

Lane& Links::submit_redirected(const Ref<Trip>& trip, uint32_t server) {
  (trip->patient ? peers_[server]->patient : peers_[server]->under_way).fetch_add(1, std::memory_order_seq_cst);
  return submit(trip, server);
}

bool Links::rest(const Ref<Trip>& trip) {
  constexpr int64_t kRestNs = 2 * kMs;
  constexpr uint32_t kDoublings = 5;
  return rest(trip, kRestNs << std::min(trip->detours, kDoublings));
}

bool Links::rest(const Ref<Trip>& trip, int64_t ns) {
  const int64_t due_ns = os::now_ns() + ns;
  {
    std::lock_guard lock(resting_mutex_);
    if (!rests_) return false;
    resting_.push_back({trip, due_ns});
  }
  watch_.wake();
  return true;
}

// Sends on the trips that have rested; returns how long until the next.
int64_t Links::wake_rested(int64_t now_ns, bool all) {
  std::vector<Ref<Trip>> rested;
  int64_t next_ns = kIdleNs;
  {
    std::lock_guard lock(resting_mutex_);
    if (all) rests_ = false;
    std::erase_if(resting_, [&](const Resting& r) {
      if (all || r.due_ns <= now_ns) {
        rested.push_back(r.trip);
        return true;
      }
      next_ns = std::min(next_ns, r.due_ns - now_ns);
      return false;
    });
  }
  RemoteRoute::go_on(rested);
  return next_ns;
}

void Links::want_dial(const Lane& lane, const std::string& why) {
  {
    Peer& peer = *peers_[lane.server()];
    std::lock_guard lock(peer.mutex);
    peer.trouble = why;
  }
  {
    std::lock_guard lock(dial_mutex_);
    wanted_.push_back({lane.server(), lane.number()});
  }
  dial_wanted_.notify_all();
}

void Links::rest_before_dial(uint32_t server) {
  std::lock_guard lock(dial_mutex_);
  peers_[server]->dial_after_ns = os::now_ns() + kNotYetNs;
}

bool Links::need_dial(Wanted* wanted) {
  for (;;) {
    {
      std::unique_lock lock(dial_mutex_);
      for (;;) {
        if (stopped_) return false;
        const int64_t now = os::now_ns();
        int64_t next = limits::kNoDeadline;
        const auto due = std::find_if(wanted_.begin(), wanted_.end(), [&](const Wanted& w) {
          next = std::min(next, peers_[w.server]->dial_after_ns);
          return peers_[w.server]->dial_after_ns <= now;
        });
        if (due != wanted_.end()) {
          *wanted = *due;
          wanted_.erase(due);
          break;
        }
        wanted_.empty() ? dial_wanted_.wait(lock)
                        : void(dial_wanted_.wait_for(lock, std::chrono::nanoseconds(next - now)));
      }
    }
    const Status refusal = lane(wanted->server, wanted->lane).refusal();
    if (refusal.ok() || may_come_back(refusal)) return true;
    lost(wanted->server, refusal);
  }
}

void Links::lost(uint32_t server, const Status& status) {
  {
    std::lock_guard lock(peers_[server]->mutex);
    if (peers_[server]->lost.ok()) peers_[server]->lost = status;
  }
  give_up({server}, status);
  changed();
}

// No term stops a server that is only slow from finishing a write it began. So the arrays get fresh pages before the
// requests to it, and with them the loans of those arrays, end. Servers that know the old pages are told of the new
// ones.
void Links::give_up(const std::vector<uint32_t>& servers, const Status& status) {
  std::lock_guard lock(giving_up_);
  std::vector<std::shared_ptr<const Segment>> segments;
  const auto each = [&](auto visit) {
    for (const uint32_t server : servers) {
      for (uint8_t n = 0; n < limits::kLanes; ++n) visit(lane(server, n));
    }
  };
  each([&](Lane& lane) { lane.cut_off(status, &segments); });
  std::sort(segments.begin(), segments.end());
  segments.erase(std::unique(segments.begin(), segments.end()), segments.end());
  if (!segments.empty() && renew_ && !broken(Break::kFence)) renew_(segments);
  each([](Lane& lane) { lane.fail(); });
}

Status Links::welcomed(uint32_t server, const Welcome& welcome) {
  Peer& peer = *peers_[server];
  uint64_t before = 0;
  if (!peer.incarnation.compare_exchange_strong(before, welcome.incarnation) && before != welcome.incarnation) {
    return Status(Code::kServerLost, address(server) + " was started again and has lost what it held; connect() again");
  }
  peer.app = welcome.app;
  return {};
}

void Links::changed() {
  changes_.fetch_add(1, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) != 0) os::wake_all(changes_);
}

void Links::became_ready() { changed(); }

void Links::trip_over(uint32_t server, bool patient) {
  if (patient) {
    peers_[server]->patient.fetch_sub(1, std::memory_order_seq_cst);
    return;
  }
  if (peers_[server]->under_way.fetch_sub(1, std::memory_order_seq_cst) == limits::kWindowMax) changed();
}

bool Links::all_lost() {
  for (uint32_t server = 0; server < servers(); ++server) {
    if (lost(server).ok()) return false;
  }
  return true;
}

Status Links::wait_ready(int64_t deadline_ns) {
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  Status status;
  for (;;) {
    const uint32_t seen = changes_.load(std::memory_order_seq_cst);
    const Lane* missing = nullptr;
    each_lane([&](const Lane& lane) {
      const Status gone = lost(lane.server());
      if (gone.code() == Code::kServerLost && cluster_ != 0 && !all_lost()) return;
      if (!lane.ready()) missing = &lane;
      if (status.ok()) status = gone;
    });
    if (missing == nullptr || !status.ok()) break;
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) {
      status = Status(Code::kTimeout, "connect: " + phase(missing->server()));
      break;
    }
    os::wait(changes_, seen, left);
  }
  waiters_.fetch_sub(1, std::memory_order_seq_cst);
  return status;
}

Status Links::reserve(std::vector<uint32_t> servers, const std::string& what, int64_t deadline_ns, bool patient,
                      const std::function<bool(uint32_t server)>& without) {
  std::sort(servers.begin(), servers.end());  // in a fixed order, or two callers could deadlock
  Status status;
  size_t done = 0;
  for (; done < servers.size() && status.ok(); ++done) {
    Peer& peer = *peers_[servers[done]];
    for (;;) {
      const uint32_t seen = changes_.load(std::memory_order_seq_cst);
      status = lost(servers[done]);
      if (status.code() == Code::kServerLost && without(servers[done]) && !all_lost()) status = Status();
      if (status.ok() && stopped_) status = Status(Code::kClosed, "the cluster has been closed");
      if (!status.ok()) break;
      if (patient) {
        if (peer.patient.fetch_add(1, std::memory_order_seq_cst) < limits::kPatientMax) break;
        peer.patient.fetch_sub(1, std::memory_order_seq_cst);
        status = Status(Code::kWouldDeadlock, std::to_string(limits::kPatientMax) +
                                                  " pushes wait for their iteration to be closed; call tick() first");
        break;
      }
      uint32_t used = peer.under_way.load(std::memory_order_seq_cst);
      while (used < limits::kWindowMax && !peer.under_way.compare_exchange_weak(used, used + 1)) {
      }
      if (used < limits::kWindowMax) break;
      const int64_t left = deadline_ns - os::now_ns();
      if (left <= 0) {
        status = Status(Code::kTimeout, "not begun; " + std::to_string(limits::kWindowMax) +
                                            " requests are without an answer; " + phase(servers[done]));
        break;
      }
      // Those who fill the window may be waiting for a place themselves, and receive nothing meanwhile.
      for (uint8_t n = 0; n < limits::kLanes; ++n) lane(servers[done], n).attend();
      waiters_.fetch_add(1, std::memory_order_seq_cst);
      os::wait(changes_, seen, left);
      waiters_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (!status.ok()) break;
  }
  if (status.ok()) return {};
  for (size_t i = 0; i < done; ++i) trip_over(servers[i], patient);
  return Status(status.code(), what + ": " + status.message());
}

Lane& Links::submit(const Ref<Trip>& trip, uint32_t server) {
  trip->header.request = next_request();
  Lane& to = lane(server, trip->bytes >= limits::kBulkBytesMin ? 1 : 0);
  to.submit(trip);
  return to;
}

// Receives until the work is done, a connection is down, or the deadline.
void Links::lead(Future& work, const std::vector<Lane*>& lanes, int64_t deadline_ns,
                 const std::atomic<uint32_t>& sent_on, uint32_t seen, bool patient) {
  static const bool has_cores = os::cores() > 1;
  constexpr size_t kFew = 8;
  const size_t n = lanes.size();
  os::Polled few[kFew];
  std::vector<os::Polled> many(n > kFew ? n : 0);
  os::Polled* const sockets = n > kFew ? many.data() : few;
  // Spin only if requests follow each other quickly. After a pause the server sleeps, too, and the two wake each other
  // fastest on one core, which a spinning caller would keep.
  int64_t now = os::now_ns();
  // Other workers may take long, and need the core.
  const bool may_spin = has_cores && !patient && !lanes[0]->sent_to_all(now);
  int64_t spin_end = may_spin && lanes[0]->hot(now) ? now + lanes[0]->spin_ns() : 0;
  bool rest = false;  // the answer has begun to arrive, or will at any moment
  if (may_spin && lanes[0]->sent_large(now)) {
    spin_end = now + 2 * limits::kSpinNs;
    rest = true;
  }
  for (const Lane* lane : lanes) {
    if (!lane->connected()) return;
  }
  // If the kernel ran the server first on this core, the answer is here already.
  if (spin_end == 0) {
    for (Lane* lane : lanes) rest = lane->pump_receive() || rest;
    if (work.done()) return;
  }
  for (;;) {
    const bool awake = now < spin_end;
    if (!awake || rest) {
      for (size_t i = 0; i < n; ++i) {
        if (!awake) lanes[i]->maintain(now);
        sockets[i] = {lanes[i]->fd(), lanes[i]->unsent(), false};
      }
      // Spins for the rest of an answer by polling: receiving takes a lock that the sender needs, too.
      os::poll(sockets, n, awake ? 0 : std::min(deadline_ns - now, limits::kAskMs * kMs));
    }
    bool arrived = false, up = true;
    for (size_t i = 0; i < n; ++i) {
      if ((awake && !rest) || sockets[i].ready) arrived = lanes[i]->pump_receive() || arrived;
      if ((awake && !rest) || sockets[i].ready || !awake) lanes[i]->pump_send();
      up = up && lanes[i]->connected();
    }
    if (work.done() || !up || sent_on.load(std::memory_order_relaxed) != seen) return;
    now = os::now_ns();
    if (now >= deadline_ns) return;
    // More is on its way, and being woken for every piece costs both sides more than the piece.
    if (arrived && may_spin) spin_end = now + limits::kSpinNs;
    rest = rest || arrived;
  }
}

bool Links::wait(Future& work, const std::vector<Lane*>& lanes, int64_t deadline_ns,
                 const std::atomic<uint32_t>& sent_on, uint32_t seen, bool patient) {
  size_t led = 0;
  while (led < lanes.size() && lanes[led]->try_lead()) ++led;
  if (led == lanes.size() && led != 0) lead(work, lanes, deadline_ns, sent_on, seen, patient);
  for (size_t i = 0; i < led; ++i) lanes[i]->unlead();
  if (sent_on.load(std::memory_order_acquire) != seen) return work.done();
  return work.done() || work.sleep_until(deadline_ns);
}

std::string Links::phase(uint32_t server) {
  Peer& peer = *peers_[server];
  bool ready = true, known = peer.incarnation != 0;
  for (uint8_t n = 0; n < limits::kLanes; ++n) ready = ready && lane(server, n).ready();
  if (ready) return "waiting for " + address(server);
  std::lock_guard lock(peer.mutex);
  return (known ? "connecting again to " : "connecting to ") + address(server) +
         (peer.trouble.empty() ? "" : " (" + peer.trouble + ")");
}

void Links::trouble(uint32_t server, const std::string& why) {
  std::lock_guard lock(peers_[server]->mutex);
  peers_[server]->trouble = why;
}

void Links::say_goodbye() {
  each_lane([](Lane& lane) {
    if (lane.number() == 0) lane.say_goodbye();
  });
}

Hello Links::hello(const Lane& lane) const {
  std::vector<std::string> list;  // in a cluster the scheduler says who belongs to it
  for (uint32_t s = 0; cluster_ == 0 && s < servers(); ++s) list.push_back(address(s));
  return {.rank = rank_,
          .world_size = world_size_,
          .lane = lane.number(),
          .index = lane.server(),
          .known = peers_[lane.server()]->incarnation,
          .cluster = cluster_,
          .app = app_,
          .servers = std::move(list)};
}

}  // namespace windlass
