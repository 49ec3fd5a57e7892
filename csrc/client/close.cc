#include "client/close.h"

#include <cstring>
#include <numeric>

#include "client/remote.h"

namespace windlass {

class CloseCall final : public Future, public Remote {
 public:
  // told: the servers that get a tick. Without any it closes nothing, and its answers say that what came before it has
  // arrived.
  CloseCall(std::shared_ptr<Session> session, const std::vector<ClosingShards>& closing, uint64_t clock,
            std::vector<uint32_t> open, std::vector<uint32_t> told)
      : Remote(session->engine().links()),
        session_(std::move(session)),
        closing_(closing),
        clock_(clock),
        open_(std::move(open)),
        told_(std::move(told)) {}

  Status start(int64_t deadline_ns);

  // Future.
  bool wait_until(int64_t deadline_ns) override { return done() || wait_away(*this, deadline_ns); }

  // Cargo.
  void describe(uint32_t part, bool, wire::Part* to) override {
    to->items_bytes = sizeof(wire::StepItem);
    if (is_tick(part)) {
      to->items_bytes += static_cast<uint32_t>(open_.size() * sizeof(uint32_t));
      return;
    }
    if (told_.empty()) return;
    to->items_bytes += sizeof(uint64_t);
    const double weight = closing_[parts_[part].object].weight;
    std::memcpy(&to->value, &weight, sizeof weight);
  }
  void write_items(uint32_t part, bool, std::byte* to) override {
    wire::StepItem item;
    item.op = static_cast<uint8_t>(is_tick(part)   ? wire::Op::kTick
                                   : told_.empty() ? wire::Op::kSettle
                                                   : wire::Op::kClose);
    if (!is_tick(part)) {
      item.object = closing_[parts_[part].object].progress->owners->object();
      item.shard = parts_[part].shard;
    }
    std::memcpy(to, &item, sizeof item);
    if (!is_tick(part) && !told_.empty()) std::memcpy(to + sizeof item, &parts_[part].follows, sizeof(uint64_t));
    if (is_tick(part) && !open_.empty()) std::memcpy(to + sizeof item, open_.data(), open_.size() * sizeof(uint32_t));
  }
  const std::byte* numbers(uint32_t) override { return nullptr; }
  void gather(uint32_t, std::byte*) override {}
  std::byte* landing(uint32_t, uint64_t) override { return nullptr; }
  Status land(uint32_t part, bool, const wire::Part& answer, const std::string&, const std::byte*) override {
    if (!is_tick(part) && closing_[parts_[part].object].progress->sync.may_drop()) session_->catch_up(answer.clock);
    return {};
  }
  void over(const Status& status) override { end(status); }
  Owners* owners(uint32_t part, uint32_t* shard) override {
    if (is_tick(part)) return nullptr;
    *shard = parts_[part].shard;
    return closing_[parts_[part].object].progress->owners.get();
  }

 protected:
  void finished() override {
    if (const Status s = status(); !s.ok()) return session_->unseen_.add(Status(s.code(), "tick: " + s.message()));
    if (told_.size() < links_->servers().size()) return;
    std::lock_guard lock(session_->clock_mutex());
    if (open_.size() > session_->told_open_.size()) session_->told_open_ = open_;
  }
  void over() override {
    if (!told_.empty() && session_->closes_under_way_.fetch_sub(1, std::memory_order_acq_rel) == 1)
      os::wake_all(session_->closes_under_way_);
    session_->engine().leave();
  }

 private:
  struct Part {
    uint32_t object, shard;  // the first is its place in closing_
    uint64_t follows;
  };
  // One per server comes behind the others.
  bool is_tick(uint32_t part) const { return part >= parts_.size(); }

  const std::shared_ptr<Session> session_;
  const std::vector<ClosingShards> closing_;
  const uint64_t clock_;
  const std::vector<uint32_t> open_;
  const std::vector<uint32_t> told_;
  std::vector<Part> parts_;
};

Status CloseCall::start(int64_t deadline_ns) {
  Engine& engine = session_->engine();
  WL_RETURN_IF_ERROR(engine.enter());
  const Plan plan{.op = wire::Op::kStep};
  for (uint32_t object = 0; object < closing_.size(); ++object) {
    for (size_t i = 0; i < closing_[object].shards.size(); ++i) {
      const uint32_t shard = closing_[object].shards[i];
      const Owners::At at = closing_[object].progress->owners->of(shard);
      add_part(plan, at.server,
               {.part = static_cast<uint32_t>(parts_.size()),
                .term = at.term,
                .flags = told_.empty() ? uint16_t{0} : uint16_t{wire::kCloses}});
      parts_.push_back({object, shard, closing_[object].follows[i]});
    }
  }
  for (const uint32_t server : told_) add_part(plan, server, {.part = static_cast<uint32_t>(parts_.size()) + server});
  if (const Status status = reserve("tick", deadline_ns); !status.ok()) {
    engine.leave();
    return status;
  }
  if (!told_.empty()) session_->closes_under_way_.fetch_add(1, std::memory_order_relaxed);
  expect(trips());
  const Ref<Future> self(this);
  {
    std::lock_guard lock(session_->order_mutex());
    number([&](uint32_t, Trip::Part* p) {
      p->clock = clock_;
      if (is_tick(p->part)) return;
      const Part& part = parts_[p->part];
      p->sequence = closing_[part.object].progress->sent[part.shard];
    });
    submit(this);
  }
  set_off(How::kFuture);
  return {};
}

Status close_away(std::shared_ptr<Session> session, const std::vector<ClosingShards>& closing, uint64_t clock,
                  std::vector<uint32_t> open, int64_t deadline_ns) {
  if (session->world_size() == 0 || (!session->has_listeners() && closing.empty())) return {};
  std::vector<uint32_t> all(session->engine().links()->servers().size());
  std::iota(all.begin(), all.end(), 0);
  const Ref<CloseCall> call(new CloseCall(std::move(session), closing, clock, std::move(open), std::move(all)));
  return call->start(deadline_ns);
}

Status tick_away(std::shared_ptr<Session> session, const std::vector<uint32_t>& servers, uint64_t clock,
                 std::vector<uint32_t> open, int64_t deadline_ns) {
  const Ref<CloseCall> call(new CloseCall(std::move(session), {}, clock, std::move(open), servers));
  return call->start(deadline_ns);
}

Status settle_away(std::shared_ptr<Session> session, const std::vector<ClosingShards>& shards, int64_t deadline_ns) {
  const Status late(Code::kTimeout, "not everything that was pushed and closed has arrived in time");
  WL_RETURN_IF_ERROR(session->await_closes(deadline_ns) ? Status() : late);
  const uint64_t clock = session->clock();
  const Ref<CloseCall> call(new CloseCall(std::move(session), shards, clock, {}, {}));
  WL_RETURN_IF_ERROR(call->start(deadline_ns));
  return call->wait_until(deadline_ns) ? call->status() : late;
}

}  // namespace windlass
