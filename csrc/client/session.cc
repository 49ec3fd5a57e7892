#include "client/session.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "client/net/control_call.h"
#include "client/net/links.h"
#include "client/op/close.h"
#include "client/op/question.h"
#include "client/op/step.h"
#include "client/op/table.h"
#include "client/op/tensor.h"
#include "server/object/ticket.h"

namespace windlass {

Status Session::open(std::shared_ptr<Engine> engine, uint32_t rank, uint32_t world_size,
                     std::shared_ptr<Session>* out) {
  WL_RETURN_IF_ERROR(engine->usable());
  if (rank >= std::max(world_size, 1u)) {
    return Status(Code::kInvalidArgument,
                  "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(world_size));
  }
  uint32_t number = 0;
  if (engine->links() == nullptr) WL_RETURN_IF_ERROR(engine->server().new_session(&number));
  out->reset(new Session(std::move(engine), number, rank, world_size));
  Session& made = **out;
  if (made.engine_->links() != nullptr || made.reads()) return {};
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
      incarnation_(engine_->links() != nullptr ? engine_->links()->incarnation() : os::random_u64()),
      told_servers_(engine_->links() != nullptr ? engine_->links()->servers() : 0) {}

// Asks the scheduler or, if there is none, the first server, which then keeps the catalogue.
static Status ask_catalogue(const std::shared_ptr<Links>& links, wire::Op op, const std::string& body,
                            const std::string& what, int64_t deadline_ns, std::vector<std::string>* answers) {
  if (const Links::Catalogue catalogue = links->catalogue()) {
    const Status status = catalogue(op, body, deadline_ns, answers);
    return status.ok() ? status : Status(status.code(), what + ": " + status.message());
  }
  const Ref<ControlCall> call(new ControlCall(links));
  WL_RETURN_IF_ERROR(call->ask(op, 0, body, what, deadline_ns));
  *answers = std::move(call->answers);
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
  WL_RETURN_IF_ERROR(spec.shards(&shards));  // refuse an impossible spec at once
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
    WL_RETURN_IF_ERROR(map.check(shards, links->servers()));
    if (map == before) return lost;
    lost = attach(spec, map, what, deadline_ns);
    if (lost.code() != Code::kServerLost && lost.code() != Code::kDeleted) {
      *out = {std::move(spec), std::move(map)};
      return lost;
    }
    before = std::move(map);  // its shards may have moved meanwhile, or it was deleted
  }
}

// Tells every server that has shards of an object its spec.
Status Session::attach(const ObjectSpec& spec, const Map& map, const std::string& what, int64_t deadline_ns) {
  const std::shared_ptr<Links>& links = engine_->links();
  wire::Writer writer;
  encode(map, &writer);
  encode(spec, &writer);
  const std::string both = writer.take();
  for (const Map::Owned& run : map.runs) {
    Status status;
    do {  // again while the scheduler has not told the server of the object
      const Ref<ControlCall> attach(new ControlCall(links));
      status = attach->ask(wire::Op::kAttach, run.server, both, what, deadline_ns);
    } while (status.code() == Code::kTimeout && os::now_ns() < deadline_ns);
    if (status.ok()) continue;
    // An object that cannot be made everywhere leaves nothing behind, neither memory nor its name.
    const bool refused = status.code() == Code::kAccessDenied || status.code() == Code::kInvalidArgument ||
                         status.code() == Code::kFunctionFailed;  // a user's rule that is unknown there
    if (!reads() && (refused || status.code() == Code::kResourceExhausted)) {
      for (uint32_t server = 0; server < links->servers(); ++server) {
        const Ref<ControlCall> detach(new ControlCall(links));
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
  WL_RETURN_IF_ERROR(engine_->usable());
  if (engine_->links() == nullptr) {
    for (const std::shared_ptr<ServedObject>& object : engine_->server().objects())
      out->push_back({object->spec(), object->map()});
    return {};
  }
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
    WL_RETURN_IF_ERROR(placed.map.check(shards, engine_->links()->servers()));
    out->push_back(std::move(placed));
  }
  return {};
}

Status Session::rows_of(const Placed& table, int64_t deadline_ns, uint64_t* out) {
  if (engine_->links() != nullptr) return TableClient::attach(shared_from_this(), table)->rows(deadline_ns, out);
  const std::shared_ptr<ServedObject> object = engine_->server().find(table.map.object);
  if (object == nullptr) return Status(Code::kNotFound, "'" + table.spec.own_name() + "' is no more");
  return TableClient::attach(shared_from_this(), object)->rows(deadline_ns, out);
}

Status Session::remove(const std::string& name, int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(usable());
  const std::string what = "delete of '" + name + "'";
  const auto named = [&](const Status& s) { return s.ok() ? s : Status(s.code(), what + ": " + s.message()); };
  if (const std::shared_ptr<Links>& links = engine_->links(); links != nullptr) {
    if (world_size_ == 0) return Status(Code::kAccessDenied, what + ": a reader deletes nothing");
    const size_t slash = name.find('/');
    if (slash != std::string::npos && name.substr(0, slash) != links->app())
      return Status(Code::kAccessDenied, what + ": only app '" + name.substr(0, slash) + "' may delete its objects");
    return remove_elsewhere(slash != std::string::npos ? name : links->app() + "/" + name, what, deadline_ns);
  }
  uint32_t number = 0;
  WL_RETURN_IF_ERROR(named(engine_->server().remove(engine_->server().workers()->app() + "/" + name, &number)));
  forget(number);
  return {};
}

// What is left of it, errors that nobody looked at among it, concerns nobody any more.
void Session::forget(uint32_t number) {
  std::lock_guard lock(mutex_);
  std::erase_if(progress_, [&](const auto& entry) { return entry.second->number == number; });
}

// Whoever keeps the catalogue is told first: then nobody finds the object any more. When all servers have answered,
// none has any of it. A server that is lost holds nothing either.
Status Session::remove_elsewhere(const std::string& name, const std::string& what, int64_t deadline_ns) {
  const std::shared_ptr<Links>& links = engine_->links();
  std::vector<Placed> all;
  WL_RETURN_IF_ERROR(list(deadline_ns, &all));
  const auto found = std::find_if(all.begin(), all.end(), [&](const Placed& p) { return p.spec.name == name; });
  if (found == all.end()) return Status(Code::kNotFound, what + ": there is no such object");
  wire::Writer writer;
  encode(found->map, &writer);
  encode(found->spec, &writer);
  const std::string both = writer.take();
  std::vector<std::string> answers;
  if (links->catalogue())
    WL_RETURN_IF_ERROR(ask_catalogue(links, wire::Op::kDelete, both, what, deadline_ns, &answers));
  for (uint32_t server = 0; server < links->servers(); ++server) {
    Status status;
    do {  // again while the scheduler has not told the server
      const Ref<ControlCall> call(new ControlCall(links));
      status = call->ask(wire::Op::kDelete, server, both, what, deadline_ns);
    } while (status.code() == Code::kTimeout && os::now_ns() < deadline_ns);
    const bool keeps_catalogue = server == 0 && !links->catalogue();
    if (!status.ok() && (keeps_catalogue || status.code() != Code::kServerLost)) return status;
  }
  forget(found->map.object);
  return {};
}

std::shared_ptr<Progress> Session::progress(const std::string& name, uint32_t number, uint32_t shards) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Progress>& p = progress_[name];
  if (p == nullptr || p->number != number) p = std::make_shared<Progress>(number, shards, clock());
  return p;
}

uint32_t Session::rank_at_gates() const { return engine_->server().workers()->rank_of(rank_, world_size_); }

void Session::catch_up(uint64_t clock) {
  uint64_t before = catch_up_.load(std::memory_order_relaxed);
  while (before < clock && !catch_up_.compare_exchange_weak(before, clock, std::memory_order_acq_rel)) {
  }
}

// With mutex_ and clock_mutex_.
Session::Ended Session::end_iteration_locked() {
  Ended ended;
  const uint64_t now = clock_.load(std::memory_order_relaxed);
  const uint64_t clock = ended.clock = std::max(now + 1, catch_up_.load(std::memory_order_acquire));
  for (const auto& [name, p] : progress_) {
    if (!p->sync.gated() || p->deleted) continue;
    if (p->owners != nullptr || p->object != nullptr)
      ended.open.push_back(p->owners != nullptr ? p->owners->object() : p->object->map().object);
    if (p->weight != 0) std::fill(p->weights.begin(), p->weights.end(), 0.0);
    p->empty_weight = 0;
    // If the clock jumps, shards that this worker has closed already are closed up to there, too.
    ClosingShards open_shards{p, {}, {}, std::exchange(p->weight, 0.0)}, skipping{p, {}, {}, 0};
    for (uint32_t s = 0; s < p->closed.size(); ++s) {
      if (p->closed[s] >= clock) continue;
      ClosingShards& c = p->closed[s] <= now ? open_shards : skipping;
      c.follows.push_back(std::exchange(p->closed[s], clock));
      c.shards.push_back(s);
    }
    if (!open_shards.shards.empty()) ended.closing.push_back(std::move(open_shards));
    if (!skipping.shards.empty()) ended.closing.push_back(std::move(skipping));
  }
  clock_.store(clock, std::memory_order_release);
  (void)settled_clock();  // keeps up, also where nobody asks
  return ended;
}

Session::Ended Session::end_iteration() {
  std::scoped_lock lock(mutex_, clock_mutex_);
  any_untold_.store(false, std::memory_order_release);
  return end_iteration_locked();
}

Status Session::tick(int64_t deadline_ns, bool push_follows) {
  WL_RETURN_IF_ERROR(usable());
  if (reads()) return no_clock("tick");
  Unsettled unsettled(*this);
  Ended ended;
  {
    std::scoped_lock lock(mutex_, clock_mutex_);
    ended = end_iteration_locked();
    const uint32_t servers = engine_->links() != nullptr ? engine_->links()->servers() : 0;
    const bool known = ended.open == told_open_ && told_servers_ == servers;  // a new one has heard of nothing yet
    const bool rides = push_follows && has_listeners() && ended.closing.empty() && known;
    if (rides) untold_.assign(servers, 1);
    any_untold_.store(rides, std::memory_order_release);
    if (rides) return {};
  }
  if (engine_->links() != nullptr) return tell(std::move(ended), std::move(unsettled), deadline_ns);
  close_here(std::move(ended));
  return {};
}

Status Session::tell(Ended ended, Unsettled unsettled, int64_t deadline_ns) {
  if (!must_tell(ended)) return {};
  const Ref<StepCall> step(new StepCall(shared_from_this(), "tick"));
  step->settles(std::move(unsettled));
  for (ClosingShards& closing : ended.closing)
    step->add(Ref<Call>(new CloseCall(shared_from_this(), std::move(closing), ended.clock)));
  std::vector<uint32_t> all(engine_->links()->servers());
  std::iota(all.begin(), all.end(), 0);
  step->tell(ended.clock, std::move(ended.open), std::move(all));
  return step->start(How::kFuture, deadline_ns);
}

Status Session::tell(std::vector<uint32_t> servers, uint64_t clock, std::vector<uint32_t> open, int64_t deadline_ns) {
  const Ref<StepCall> step(new StepCall(shared_from_this(), "tick"));
  step->tell(clock, std::move(open), std::move(servers));
  return step->start(How::kFuture, deadline_ns);
}

bool Session::must_tell(const Ended& ended) const {
  return world_size_ != 0 && (has_listeners() || !ended.closing.empty());
}

bool Session::may_close() { return world_size_ != 0 && (has_listeners() || has_gates()); }

bool Session::has_gates() {
  std::scoped_lock lock(mutex_, clock_mutex_);
  return std::any_of(progress_.begin(), progress_.end(), [](const auto& p) { return p.second->sync.gated(); });
}

void Session::close_ended() {
  if (closes_under_way_.fetch_sub(1, std::memory_order_acq_rel) == 1) os::wake_all(closes_under_way_);
}

void Session::heard_open(const std::vector<uint32_t>& open, const std::vector<uint32_t>& servers) {
  if (servers.size() < engine_->links()->servers()) return;
  std::lock_guard lock(clock_mutex_);
  told_open_ = open;
  told_servers_ = static_cast<uint32_t>(servers.size());
}

// A reader has no clock; a single worker has nobody to tell it to, unless a scheduler may add others.
bool Session::has_listeners() const {
  return world_size_ > 1 || (world_size_ == 1 && engine_->links() != nullptr && engine_->links()->may_grow());
}

bool Session::tells(uint32_t server, uint64_t clock) {
  if (!any_untold_.load(std::memory_order_acquire)) return false;
  std::lock_guard lock(clock_mutex_);
  if (!any_untold_ || clock != clock_.load(std::memory_order_relaxed)) return false;
  return server < untold_.size() && std::exchange(untold_[server], 0) != 0;
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
  return tell(std::move(servers), clock, std::move(open), deadline_ns);
}

Status Session::tell_clock(int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(tell_rest(deadline_ns));
  if (world_size_ == 0 || clock() == 0) return {};
  if (world_size_ == 1 && !engine_->links()->may_grow()) {  // servers were not told until now
    std::vector<uint32_t> open, servers(engine_->links()->servers());
    std::iota(servers.begin(), servers.end(), 0);
    {
      std::scoped_lock lock(mutex_, clock_mutex_);
      for (const auto& [name, p] : progress_) {
        if (p->sync.gated() && p->owners != nullptr && !p->deleted) open.push_back(p->owners->object());
      }
    }
    WL_RETURN_IF_ERROR(tell(std::move(servers), clock(), std::move(open), deadline_ns));
  }
  return await_closes(deadline_ns) ? Status() : Status(Code::kTimeout, "open: servers do not hear of our clock");
}

void Session::close_here(Ended ended) {
  const uint64_t clock = ended.clock;
  Batch batch;
  batch.op = traits_of(wire::Op::kClose);
  batch.caller = {number_, incarnation_, rank_at_gates()};
  if (batch.caller.rank == Gate::kOutsider) return;
  Freed freed;
  for (const ClosingShards& c : ended.closing) {
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
      if (outcome.status.code() == Code::kDeleted) c.progress->deleted = true;
      if (c.progress->sync.may_drop()) catch_up(outcome.clock);
    }
  }
  deliver(&freed);
  std::sort(ended.open.begin(), ended.open.end());
  engine_->server().tick(engine_->server().workers(), batch.caller.rank, clock, std::move(ended.open));
}

bool Session::has_open_pushes() {
  std::scoped_lock lock(mutex_, clock_mutex_);
  return std::any_of(progress_.begin(), progress_.end(), [&](const auto& entry) {
    const Progress& p = *entry.second;
    const auto open = [&](uint64_t closed) { return closed <= clock(); };
    return p.sync.rounds() && !p.deleted && p.weight != 0 && std::any_of(p.closed.begin(), p.closed.end(), open);
  });
}

Status Session::usable() const {
  WL_RETURN_IF_ERROR(engine_->usable());
  if (closed()) return Status(Code::kClosed, "worker " + std::to_string(rank_) + " has been closed");
  return {};
}

Session::Begun Session::begun() {
  std::scoped_lock lock(mutex_, clock_mutex_);
  bool any = false, all = true;
  for (const auto& [name, p] : progress_) {
    if (!p->sync.rounds()) continue;
    const bool ahead = std::all_of(p->closed.begin(), p->closed.end(), [&](uint64_t c) { return c > clock(); });
    any = any || p->weight != 0 ||
          std::any_of(p->closed.begin(), p->closed.end(), [&](uint64_t c) { return c > clock(); });
    all = all && ahead;
  }
  return !any ? Begun::kNone : all ? Begun::kAll : Begun::kSome;
}

bool Session::only_rounds() {
  std::scoped_lock lock(mutex_, clock_mutex_);
  return std::all_of(progress_.begin(), progress_.end(), [](const auto& one) { return one.second->sync.rounds(); });
}

uint64_t Session::iteration() {
  std::scoped_lock lock(mutex_, clock_mutex_);
  const uint64_t now = clock();
  const bool ahead = std::any_of(progress_.begin(), progress_.end(), [now](const auto& one) {
    const Progress& p = *one.second;
    return p.sync.rounds() && std::any_of(p.closed.begin(), p.closed.end(), [now](uint64_t c) { return c > now; });
  });
  return now + (ahead ? 1 : 0);
}

Status Session::leave(int64_t deadline_ns) {
  if (left_.exchange(true) || engine_->forked() || engine_->closed()) return {};
  if (engine_->links() == nullptr) {
    if (!reads()) engine_->server().leave(rank_, world_size_, incarnation_);
    return {};
  }
  if (world_size_ == 0 || !has_gates()) return {};
  // After leaving, pushes are ignored, so settle first.
  const Status settled = settle(true, deadline_ns);
  ClockReport report;
  const Status left = ask_clocks(Gate::kOver, deadline_ns, &report);
  return settled.ok() ? left : settled;
}

Status Session::settle(int64_t deadline_ns) {
  WL_RETURN_IF_ERROR(usable());
  const Status status = settle(false, deadline_ns);
  return status.ok() ? take_unseen() : Status(status.code(), "settle: " + status.message());
}

Status Session::settle(bool leaves, int64_t deadline_ns) {
  std::vector<std::shared_ptr<Progress>> all;
  {
    std::scoped_lock lock(mutex_, clock_mutex_);
    for (const auto& [name, p] : progress_) {
      if (p->opened && !p->deleted && (!leaves || p->sync.gated())) all.push_back(p);
    }
  }
  const Status late(Code::kTimeout, "not everything that was pushed and closed has arrived in time");
  const bool remote = engine_->links() != nullptr;
  if (remote) {
    WL_RETURN_IF_ERROR(tell_rest(deadline_ns));
    if (!all.empty() && !await_closes(deadline_ns)) return late;
  }
  static const std::string name;
  const Ref<StepCall> step(remote ? new StepCall(shared_from_this(), "settle") : nullptr);
  for (const std::shared_ptr<Progress>& p : all) {
    std::vector<uint32_t> shards(p->closed.size());
    std::iota(shards.begin(), shards.end(), 0);
    if (remote && leaves) {  // a lost server keeps nobody from settling with the others
      std::erase_if(shards, [&](uint32_t s) { return !engine_->links()->lost(p->owners->of(s).server).ok(); });
      if (shards.empty()) continue;
    }
    Ref<Question> question(new Question(shared_from_this(), p, {p->object, p->owners}, {"settle", "object", name},
                                        wire::Op::kSettle, std::move(shards), 0, ""));
    question->accept_deleted();
    if (remote) {
      step->add(std::move(question));
    } else {
      const Status status = question->ask(deadline_ns);
      if (!status.ok() && status.code() != Code::kDeleted) return status;
    }
  }
  if (!remote || all.empty()) return {};
  WL_RETURN_IF_ERROR(step->start(How::kWait, deadline_ns));
  return step->wait_until(deadline_ns) ? step->status() : late;
}

bool Session::await_closes(int64_t deadline_ns) {
  for (uint32_t n; (n = closes_under_way_.load(std::memory_order_acquire)) != 0;) {
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    os::wait(closes_under_way_, n, left);
  }
  return true;
}

Status Session::ask_clocks(uint64_t clock, int64_t deadline_ns, ClockReport* all) {
  *all = {};
  wire::Writer body;
  body.put(clock);
  const std::string bytes = body.take();
  const std::shared_ptr<Links>& links = engine_->links();
  for (uint32_t server = 0; server < links->servers(); ++server) {
    ClockReport one;
    const Ref<ControlCall> call(new ControlCall(links));
    WL_RETURN_IF_ERROR(call->ask(wire::Op::kEnter, server, bytes, "enter", deadline_ns));
    if (call->answers[0].empty()) continue;  // it is lost, and so is what it knew
    WL_RETURN_IF_ERROR(decode(call->answers[0], &one));
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

// Begins where it left off, if all start together; as a replacement, where its predecessor had got to; else at the
// slowest clock, or under BSP at one that no update has reached, so that no push of this worker is too late.
Status Session::enter(int64_t deadline_ns) {
  if (engine_->links() == nullptr || world_size_ == 0) return {};
  ClockReport report;
  WL_RETURN_IF_ERROR(ask_clocks(Gate::kNone, deadline_ns, &report));
  uint64_t margin = 1;
  for (;;) {
    uint64_t clock = 0;
    if (report.waited) {
      clock = report.starts ? report.own_highest : report.own == Gate::kNone ? 0 : report.own;
    } else if (report.rounds) {
      clock = report.highest + margin;
    } else {
      clock = report.lowest == Gate::kNone ? report.highest : report.lowest;
    }
    const bool in_place = report.waited;
    if (in_place && clock == 0) return {};  // begin with the others
    WL_RETURN_IF_ERROR(ask_clocks(clock, deadline_ns, &report));
    clock_.store(clock, std::memory_order_release);
    // Others may have passed this clock meanwhile.
    if (in_place || !report.rounds || report.highest <= clock) return {};
    report.waited = false;
    margin *= 2;
  }
}

void Session::count_pull(int64_t waited_ns) {
  pulls_.fetch_add(1, std::memory_order_relaxed);
  if (waited_ns == 0) return;
  waits_.fetch_add(1, std::memory_order_relaxed);
  waited_ns_.fetch_add(static_cast<uint64_t>(waited_ns), std::memory_order_relaxed);
}

PullStats Session::pull_stats() const { return {pulls_, waits_, static_cast<double>(waited_ns_) * 1e-9}; }

Status Session::take_unseen() {
  WL_RETURN_IF_ERROR(unseen_.take());
  std::lock_guard lock(mutex_);
  for (auto& [name, p] : progress_) WL_RETURN_IF_ERROR(p->unseen.take());
  return {};
}

Status Session::fingerprint(int64_t deadline_ns, uint64_t* out) {
  WL_RETURN_IF_ERROR(usable());
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
      if (status.code() == Code::kNotFound || status.code() == Code::kDeleted)
        continue;  // it is just being made, or was
      WL_RETURN_IF_ERROR(status);
      sum += one;
    }
    *out = sum;
    return {};
  }
  for (const std::shared_ptr<ServedObject>& object : engine_->server().objects()) {
    uint64_t one = 0;
    const Status status = object->spec().is_table
                              ? TableClient::attach(shared_from_this(), object)->fingerprint(deadline_ns, &one)
                              : TensorClient::attach(shared_from_this(), object)->fingerprint(deadline_ns, &one);
    if (status.code() == Code::kDeleted) continue;
    WL_RETURN_IF_ERROR(status);
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
                    " whose future was dropped)",
                first.refused());
}

}  // namespace windlass
