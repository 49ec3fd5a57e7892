#include "client/engine.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "client/close.h"
#include "client/links.h"
#include "client/remote.h"
#include "client/table.h"
#include "client/tensor.h"
#include "server/object/ticket.h"

namespace windlass {

Engine::Engine(int threads, uint64_t memory_bytes_max)
    : server_(std::make_unique<Server>(threads, memory_bytes_max)), arena_(std::make_shared<Arena>()) {}

Engine::Engine(std::shared_ptr<Links> links, const std::shared_ptr<Engine>& arena_of)
    : links_(std::move(links)),
      arena_(arena_of != nullptr ? arena_of->arena_ : std::make_shared<Arena>(links_->may_share(), links_->rank())) {
  arena_->add_teller([links = std::weak_ptr<Links>(links_)](const Arena::Segments& segments) {
    if (const std::shared_ptr<Links> alive = links.lock(); alive != nullptr) alive->break_if_told(segments);
  });
  links_->set_renew([arena = arena_](const auto& segments) { arena->renew(segments); });
  links_->start();
}

Engine::~Engine() {
  if (forked()) {
    // The threads are not here and a lock may have been held when the process was copied: leave everything as it is.
    (void)server_.release();
    new std::shared_ptr<Links>(std::move(links_));
    new std::shared_ptr<Arena>(std::move(arena_));
  } else if (links_ != nullptr) {
    links_->stop();
  }
}

Status Engine::usable() const {
  if (forked()) {
    return Status(Code::kForkedProcess,
                  "this cluster was opened before the process forked; call windlass.connect() in the child");
  }
  if (closed()) return Status(Code::kClosed, "the cluster has been closed");
  return {};
}

Status Engine::enter() {
  WL_RETURN_IF_ERROR(usable());
  under_way_.fetch_add(1, std::memory_order_seq_cst);
  if (closed()) {
    leave();
    return usable();
  }
  return {};
}

void Engine::leave() {
  if (under_way_.fetch_sub(1, std::memory_order_seq_cst) == 1 && closed()) os::wake_all(under_way_);
}

bool Engine::reserve_kept(uint64_t bytes, int64_t deadline_ns) {
  for (;;) {
    const uint32_t releases = kept_releases_.load(std::memory_order_seq_cst);
    uint64_t used = kept_bytes_.load(std::memory_order_seq_cst);
    while (used == 0 || used + bytes <= limits::kKeptBytesMax) {  // one alone may be larger
      if (kept_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_seq_cst)) return true;
    }
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    kept_waiters_.fetch_add(1, std::memory_order_seq_cst);
    os::wait(kept_releases_, releases, left);
    kept_waiters_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Engine::release_kept(uint64_t bytes) {
  kept_bytes_.fetch_sub(bytes, std::memory_order_seq_cst);
  kept_releases_.fetch_add(1, std::memory_order_seq_cst);
  if (kept_waiters_.load(std::memory_order_seq_cst) != 0) os::wake_all(kept_releases_);
}

Status Engine::close(int64_t deadline_ns) {
  if (forked()) return {};
  const bool again = closed_.exchange(true, std::memory_order_seq_cst);
  // Nobody comes any more whom somebody inside the process could be waiting for.
  if (server_ != nullptr) server_->end_waits(Status(Code::kClosed, "the cluster has been closed"));
  Status status = wait_for_all(deadline_ns);
  if (links_ != nullptr && !again) {
    if (status.ok()) links_->say_goodbye();
    links_->stop();
    (void)links_->ended(os::now_ns() + int64_t{1'000'000'000});
    if (!status.ok()) status = Status(Code::kTimeout, status.message() + "; they are given up");
  } else if (!status.ok()) {
    status = Status(Code::kTimeout, status.message() + "; they will finish");
  }
  return status;
}

Status Engine::wait_for_all(int64_t deadline_ns) {
  for (;;) {
    const uint32_t left = under_way_.load(std::memory_order_seq_cst);
    if (left == 0) return {};
    const int64_t time_left = deadline_ns - os::now_ns();
    if (time_left <= 0) {
      return Status(Code::kTimeout, "close: " + std::to_string(left) + " requests are still under way");
    }
    os::wait(under_way_, left, time_left);
  }
}

Status Session::open(std::shared_ptr<Engine> engine, uint32_t rank, uint32_t world_size,
                     std::shared_ptr<Session>* out) {
  WL_RETURN_IF_ERROR(engine->usable());
  if (rank >= std::max(world_size, 1u) || (world_size == 0 && engine->links() == nullptr)) {
    return Status(Code::kInvalidArgument,
                  "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(world_size));
  }
  uint32_t number = 0;
  if (engine->links() == nullptr) WL_RETURN_IF_ERROR(engine->server().new_session(&number));
  out->reset(new Session(std::move(engine), number, rank, world_size));
  Session& made = **out;
  if (made.engine_->links() != nullptr) return {};
  uint64_t clock = 0;
  made.engine_->server().join(rank, world_size, made.incarnation_, &clock);
  made.clock_ = clock;
  return {};
}

Session::Session(std::shared_ptr<Engine> engine, uint32_t number, uint32_t rank, uint32_t world_size)
    : engine_(std::move(engine)),
      number_(number),
      rank_(rank),
      world_size_(world_size),
      incarnation_(engine_->links() != nullptr ? engine_->links()->incarnation() : os::random_u64()) {}

// The scheduler's answers, or those of the first server, which keeps the catalogue where there is no scheduler.
static Status ask_catalogue(const std::shared_ptr<Links>& links, wire::Op op, const std::string& body,
                            const std::string& what, int64_t deadline_ns, std::vector<std::string>* answers) {
  if (const Links::Catalogue catalogue = links->catalogue()) {
    const Status status = catalogue(op, body, deadline_ns, answers);
    return status.ok() ? status : Status(status.code(), what + ": " + status.message());
  }
  const Ref<Exchange> exchange(new Exchange(links));
  WL_RETURN_IF_ERROR(exchange->ask(op, 0, body, what, deadline_ns));
  for (const Exchange::Answer& answer : exchange->answers) answers->push_back(answer.items);
  return {};
}

Status Session::place(ObjectSpec spec, int64_t deadline_ns, Placed* out) {
  const std::shared_ptr<Links>& links = engine_->links();
  if (spec.sync().gated()) WL_RETURN_IF_ERROR(tell_clock(deadline_ns));
  const char* const kind = spec.is_table ? "table" : "tensor";
  if (const size_t slash = spec.name.find('/'); slash == std::string::npos) {
    WL_RETURN_IF_ERROR(check_name(kind, spec.name));
    spec.name = links->app() + "/" + spec.name;
  } else {
    WL_RETURN_IF_ERROR(check_name("app", spec.name.substr(0, slash)));
    WL_RETURN_IF_ERROR(check_name(kind, spec.own_name()));
  }
  uint32_t shards = 0;
  WL_RETURN_IF_ERROR(spec.shards(&shards));  // what can never be need not travel
  const std::string what = What{"open", kind, spec.own_name()}.text();
  wire::Writer body;
  encode(spec, &body);
  const std::string asked = body.take();
  Map before;
  for (Status lost;;) {
    std::vector<std::string> answers;
    WL_RETURN_IF_ERROR(ask_catalogue(links, wire::Op::kOpen, asked, what, deadline_ns, &answers));
    Map map;
    if (answers.empty()) answers.emplace_back();
    wire::Reader reader(answers[0]);
    WL_RETURN_IF_ERROR(decode(&reader, &map));
    WL_RETURN_IF_ERROR(map.check(shards, static_cast<uint32_t>(links->servers().size())));
    if (map == before) return lost;
    lost = attach(spec, map, what, deadline_ns);
    if (lost.code() != Code::kServerLost) {
      *out = {std::move(spec), std::move(map)};
      return lost;
    }
    before = std::move(map);  // its shards may have left that server meanwhile
  }
}

// Tells every server that has shards of an object what it is.
Status Session::attach(const ObjectSpec& spec, const Map& map, const std::string& what, int64_t deadline_ns) {
  const std::shared_ptr<Links>& links = engine_->links();
  wire::Writer writer;
  encode(map, &writer);
  encode(spec, &writer);
  const std::string both = writer.take();
  for (const Map::Owned& run : map.runs) {
    const Ref<Exchange> attach(new Exchange(links));
    const Status status = attach->ask(wire::Op::kAttach, run.server, both, what, deadline_ns);
    if (status.ok()) continue;
    // Nothing stays behind of an object that cannot be everywhere: neither memory nor its name.
    const bool refused = status.code() == Code::kAccessDenied || status.code() == Code::kInvalidArgument ||
                         status.code() == Code::kFunctionFailed;  // a rule of the user's that is not known there
    if (refused || status.code() == Code::kResourceExhausted) {
      for (uint32_t server = 0; server < links->servers().size(); ++server) {
        const Ref<Exchange> detach(new Exchange(links));
        (void)detach->ask(wire::Op::kDetach, server, both, what, deadline_ns);
      }
      std::vector<std::string> answers;
      if (const Links::Catalogue catalogue = links->catalogue())
        (void)catalogue(wire::Op::kDetach, both, deadline_ns, &answers);
    }
    return status;
  }
  return {};
}

Status Session::list(int64_t deadline_ns, std::vector<Placed>* out) {
  std::vector<std::string> answers;
  WL_RETURN_IF_ERROR(ask_catalogue(engine_->links(), wire::Op::kList, "", "list", deadline_ns, &answers));
  for (const std::string& answer : answers) {
    if (answer.empty()) continue;  // there are none
    Placed placed;
    wire::Reader reader(answer);
    WL_RETURN_IF_ERROR(decode(&reader, &placed.map));
    WL_RETURN_IF_ERROR(decode(&reader, &placed.spec));
    uint32_t shards = 0;
    WL_RETURN_IF_ERROR(placed.spec.shards(&shards));
    WL_RETURN_IF_ERROR(placed.map.check(shards, static_cast<uint32_t>(engine_->links()->servers().size())));
    out->push_back(std::move(placed));
  }
  return {};
}

std::shared_ptr<Progress> Session::progress(const std::string& name, uint32_t shards) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Progress>& p = progress_[name];
  if (p == nullptr) p = std::make_shared<Progress>(shards, clock());
  return p;
}

uint32_t Session::rank_at_gates() const { return engine_->server().crowd()->rank_of(rank_, world_size_); }

void Session::catch_up(uint64_t clock) {
  uint64_t before = catch_up_.load(std::memory_order_relaxed);
  while (before < clock && !catch_up_.compare_exchange_weak(before, clock, std::memory_order_acq_rel)) {
  }
}

Status Session::tick(int64_t deadline_ns, bool push_follows) {
  WL_RETURN_IF_ERROR(engine_->usable());
  std::vector<ClosingShards> closing;
  std::vector<uint32_t> open;  // objects
  uint64_t clock = 0;
  {
    std::scoped_lock lock(mutex_, clock_mutex_);
    const uint64_t now = clock_.load(std::memory_order_relaxed);
    clock = std::max(now + 1, catch_up_.load(std::memory_order_acquire));
    for (const auto& [name, p] : progress_) {
      if (!p->sync.gated()) continue;
      if (p->owners != nullptr || p->object != nullptr)
        open.push_back(p->owners != nullptr ? p->owners->object() : p->object->map().object);
      if (p->weight != 0) std::fill(p->weights.begin(), p->weights.end(), 0.0);
      // Where the clock jumps, shards that this worker has closed already are closed up to there, too.
      ClosingShards open_shards{p, {}, {}, std::exchange(p->weight, 0.0)}, skipping{p, {}, {}, 0};
      for (uint32_t s = 0; s < p->closed.size(); ++s) {
        if (p->closed[s] >= clock) continue;
        ClosingShards& c = p->closed[s] <= now ? open_shards : skipping;
        c.follows.push_back(std::exchange(p->closed[s], clock));
        c.shards.push_back(s);
      }
      if (!open_shards.shards.empty()) closing.push_back(std::move(open_shards));
      if (!skipping.shards.empty()) closing.push_back(std::move(skipping));
    }
    clock_.store(clock, std::memory_order_release);
    if (push_follows && has_listeners() && closing.empty() && open == told_open_) {
      untold_.assign(engine_->links()->servers().size(), 1);
      any_untold_.store(true, std::memory_order_release);
      return {};
    }
    any_untold_.store(false, std::memory_order_release);
  }
  if (engine_->links() == nullptr) {
    close_here(closing, clock, std::move(open));
    return {};
  }
  return close_away(shared_from_this(), closing, clock, std::move(open), deadline_ns);
}

// A reader has no clock; a worker that is alone, where no scheduler lets others in, has nobody to tell it to.
bool Session::has_listeners() const {
  return world_size_ > 1 || (world_size_ == 1 && engine_->links() != nullptr && engine_->links()->may_grow());
}

bool Session::tells(uint32_t server, uint64_t clock) {
  if (!any_untold_.load(std::memory_order_acquire)) return false;
  std::lock_guard lock(clock_mutex_);
  if (!any_untold_ || clock != clock_.load(std::memory_order_relaxed)) return false;
  return std::exchange(untold_[server], 0) != 0;
}

Status Session::tell_rest(int64_t deadline_ns) {
  if (!any_untold_.load(std::memory_order_acquire)) return {};
  std::vector<uint32_t> servers, open;
  uint64_t clock = 0;
  {
    std::lock_guard lock(clock_mutex_);
    if (!any_untold_.exchange(false)) return {};
    for (uint32_t server = 0; server < untold_.size(); ++server) {
      if (untold_[server] != 0) servers.push_back(server);
    }
    open = told_open_;
    clock = clock_.load(std::memory_order_relaxed);
  }
  if (servers.empty()) return {};
  return tick_away(shared_from_this(), servers, clock, std::move(open), deadline_ns);
}

Status Session::tell_clock(int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(tell_rest(deadline_ns));
  if (world_size_ == 0 || clock() == 0) return {};
  if (world_size_ == 1 && !engine_->links()->may_grow()) {  // nobody wanted to know until now
    std::vector<uint32_t> open, servers(engine_->links()->servers().size());
    std::iota(servers.begin(), servers.end(), 0);
    {
      std::scoped_lock lock(mutex_, clock_mutex_);
      for (const auto& [name, p] : progress_) {
        if (p->sync.gated() && p->owners != nullptr) open.push_back(p->owners->object());
      }
    }
    WL_RETURN_IF_ERROR(tick_away(shared_from_this(), servers, clock(), std::move(open), deadline_ns));
  }
  return await_closes(deadline_ns) ? Status() : Status(Code::kTimeout, "open: servers do not hear of our clock");
}

void Session::close_here(const std::vector<ClosingShards>& closing, uint64_t clock, std::vector<uint32_t> open) {
  Batch batch;
  batch.op = traits_of(wire::Op::kClose);
  batch.caller = {number_, incarnation_, rank_at_gates()};
  if (batch.caller.rank == Gate::kOutsider) return;
  Freed freed;
  for (const ClosingShards& c : closing) {
    ServedObject& object = *c.progress->object;
    for (const uint32_t s : c.shards) {
      Shard& shard = *object.find(s);
      Entry entry;
      entry.shard = s;
      entry.clock = clock;
      entry.flags = wire::kCloses;
      entry.value = std::bit_cast<uint64_t>(c.weight);
      Outcome outcome;
      with_turn(shard.turn, [&] {
        entry.term = shard.home.term;
        (void)object.run(batch, entry, shard, Status(), &outcome);
        if (!shard.parked.empty()) shard.parked.free(shard, &freed);
      });
      if (c.progress->sync.may_drop()) catch_up(outcome.clock);
    }
  }
  deliver(&freed);
  std::sort(open.begin(), open.end());
  engine_->server().tick(engine_->server().crowd(), batch.caller.rank, clock, std::move(open));
}

bool Session::has_open_pushes() {
  std::scoped_lock lock(mutex_, clock_mutex_);
  return std::any_of(progress_.begin(), progress_.end(), [&](const auto& entry) {
    const Progress& p = *entry.second;
    const auto open = [&](uint64_t closed) { return closed <= clock(); };
    return p.sync.rounds() && p.weight != 0 && std::any_of(p.closed.begin(), p.closed.end(), open);
  });
}

Status Session::leave(int64_t deadline_ns) {
  if (left_.exchange(true) || engine_->forked() || engine_->closed()) return {};
  if (engine_->links() == nullptr) {
    engine_->server().leave(rank_, world_size_, incarnation_);
    return {};
  }
  const auto has_gates = [this] {
    std::scoped_lock lock(mutex_, clock_mutex_);
    return std::any_of(progress_.begin(), progress_.end(), [](const auto& p) { return p.second->sync.gated(); });
  };
  if (world_size_ == 0 || !has_gates()) return {};
  // After leaving, pushes are ignored, so settle first.
  const Status settled = settle(true, deadline_ns);
  Standing standing;
  const Status left = ask_standing(Gate::kOver, deadline_ns, &standing);
  return settled.ok() ? left : settled;
}

Status Session::settle(int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(engine_->usable());
  const Status status = settle(false, deadline_ns);
  return status.ok() ? take_unseen() : Status(status.code(), "settle: " + status.message());
}

Status Session::settle(bool gated_only, int64_t deadline_ns) {
  std::vector<ClosingShards> all;
  {
    std::scoped_lock lock(mutex_, clock_mutex_);
    for (const auto& [name, p] : progress_) {
      if (!p->opened || (gated_only && !p->sync.gated())) continue;
      std::vector<uint32_t> shards(p->closed.size());
      std::iota(shards.begin(), shards.end(), 0);
      all.push_back({p, std::move(shards), std::vector<uint64_t>(p->closed.size()), 0});
    }
  }
  if (engine_->links() != nullptr) {
    WL_RETURN_IF_ERROR(tell_rest(deadline_ns));
    return all.empty() ? Status() : settle_away(shared_from_this(), all, deadline_ns);
  }
  for (const ClosingShards& c : all) WL_RETURN_IF_ERROR(settle_near(shared_from_this(), c.progress, deadline_ns));
  return {};
}

bool Session::await_closes(int64_t deadline_ns) {
  for (uint32_t n; (n = closes_under_way_.load(std::memory_order_acquire)) != 0;) {
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    os::wait(closes_under_way_, n, left);
  }
  return true;
}

Status Session::ask_standing(uint64_t clock, int64_t deadline_ns, Standing* all) {
  *all = {};
  wire::Writer body;
  body.put(clock);
  const std::string bytes = body.take();
  const std::shared_ptr<Links>& links = engine_->links();
  for (uint32_t server = 0; server < links->servers().size(); ++server) {
    Standing one;
    do {  // until its view is there
      const Ref<Exchange> exchange(new Exchange(links));
      WL_RETURN_IF_ERROR(exchange->ask(wire::Op::kEnter, server, bytes, "enter", deadline_ns));
      WL_RETURN_IF_ERROR(decode(exchange->answers[0].items, &one));
    } while (!one.known && clock != Gate::kOver);
    all->own = std::min(all->own, one.own);
    all->own_highest = std::max(all->own_highest, one.own_highest);
    all->starts = all->starts || one.starts;
    all->lowest = std::min(all->lowest, one.lowest);
    all->highest = std::max(all->highest, one.highest);
    all->waited = all->waited || one.waited;
    all->rounds = all->rounds || one.rounds;
  }
  return {};
}

// Where it left off, if all start together; in somebody's place, where that one had got to. Else at the slowest clock;
// under BSP at one that no update has reached, so that nothing this worker pushes comes too late.
Status Session::enter(int64_t deadline_ns) {
  if (engine_->links() == nullptr || world_size_ == 0) return {};
  Standing standing;
  WL_RETURN_IF_ERROR(ask_standing(Gate::kNone, deadline_ns, &standing));
  uint64_t margin = 1;
  for (;;) {
    uint64_t clock = 0;
    if (standing.waited) {
      clock = standing.starts ? standing.own_highest : standing.own == Gate::kNone ? 0 : standing.own;
    } else if (standing.rounds) {
      clock = standing.highest + margin;
    } else {
      clock = standing.lowest == Gate::kNone ? standing.highest : standing.lowest;
    }
    const bool in_place = standing.waited;
    if (in_place && clock == 0) return {};  // it begins with the others
    WL_RETURN_IF_ERROR(ask_standing(clock, deadline_ns, &standing));
    clock_.store(clock, std::memory_order_release);
    // Others went on meanwhile, and may have passed.
    if (in_place || !standing.rounds || standing.highest <= clock) return {};
    standing.waited = false;
    margin *= 2;
  }
}

Status Session::take_unseen() {
  WL_RETURN_IF_ERROR(unseen_.take());
  std::lock_guard lock(mutex_);
  for (auto& [name, p] : progress_) WL_RETURN_IF_ERROR(p->unseen.take());
  return {};
}

Status Session::fingerprint(int64_t deadline_ns, uint64_t* out) {
  WL_RETURN_IF_ERROR(engine_->usable());
  WL_RETURN_IF_ERROR(take_unseen());
  uint64_t sum = 0;
  if (engine_->links() != nullptr) {
    std::vector<Placed> all;
    WL_RETURN_IF_ERROR(list(deadline_ns, &all));
    for (const Placed& placed : all) {
      uint64_t one = 0;
      const Status status = placed.spec.is_table
                                ? TableClient::attach(shared_from_this(), placed)->fingerprint(deadline_ns, &one)
                                : TensorClient::attach(shared_from_this(), placed)->fingerprint(deadline_ns, &one);
      if (status.code() == Code::kNotFound) continue;  // it is being made at this moment
      WL_RETURN_IF_ERROR(status);
      sum += one;
    }
    *out = sum;
    return {};
  }
  for (const std::shared_ptr<ServedObject>& object : engine_->server().objects()) {
    uint64_t one = 0;
    WL_RETURN_IF_ERROR(object->spec().is_table
                           ? TableClient::attach(shared_from_this(), object)->fingerprint(deadline_ns, &one)
                           : TensorClient::attach(shared_from_this(), object)->fingerprint(deadline_ns, &one));
    sum += one;
  }
  *out = sum;
  return {};
}

void Unseen::add(const Status& status) {
  std::lock_guard lock(mutex_);
  if (count_.fetch_add(1, std::memory_order_release) == 0) first_ = status;
}

Status Unseen::take() {
  if (count_.load(std::memory_order_acquire) == 0) return {};
  std::lock_guard lock(mutex_);
  const uint32_t n = count_.exchange(0, std::memory_order_acq_rel);
  if (n == 0) return {};
  Status first = std::exchange(first_, Status());
  return Status(first.code(),
                first.message() + " (from " +
                    (n == 1 ? "an earlier request" : std::to_string(n) + " earlier requests, the first of them") +
                    " whose future was dropped)");
}

}  // namespace windlass
