#include "server/object/served_object.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/breaks.h"
#include "server/object/shard_capture.h"
#include "server/server.h"

namespace windlass {

Status ServedObject::make(const ObjectSpec& spec, const Map& map, uint32_t index, Server& server, TablePools* pools,
                          const ObjectContext& context, std::shared_ptr<ServedObject>* out) {
  uint32_t shards = 0;
  WL_RETURN_IF_ERROR(spec.shards(&shards));
  std::shared_ptr<ServedObject> made(new ServedObject(spec, map, index, shards, &server.budget(), context));
  made->run_ = map.run_of_server(index, shards);
  made->user_code_ = server.user_code();
  WL_RETURN_IF_ERROR(server.find_rule(made->what(), made->rule(), &made->foreign_));
  if (spec.is_table) {
    std::unique_ptr<Table> table;
    WL_RETURN_IF_ERROR(Table::create(spec.own_name(), spec.table, pools, &table));
    made->table_ = std::move(table);
    made->table_->set_foreign(made->foreign_);
  } else {
    std::unique_ptr<Tensor> tensor;
    WL_RETURN_IF_ERROR(Tensor::create(spec.own_name(), spec.tensor, &server.budget(), &tensor, made->run_));
    made->tensor_ = std::move(tensor);
    made->tensor_->set_foreign(made->foreign_);
  }
  for (uint32_t shard = 0; shard < shards; ++shard) {
    const Map::Owned& owned = map.run_of(shard);
    const bool here = owned.server == index;
    if (here && !spec.is_table && !made->inside(shard)) {
      std::unique_ptr<Tensor> tensor;
      const Run run{shard, shard + 1};
      WL_RETURN_IF_ERROR(Tensor::create(spec.own_name(), spec.tensor, &server.budget(), &tensor, run));
      made->add_place(std::move(tensor));
    }
    if (!here && !spec.is_table) continue;
    made->add_gate(*made->find(shard));
    Residence& home = made->find(shard)->home;
    home.state = here ? Residence::kHere : Residence::kElsewhere;
    home.server = owned.server;
    home.term = owned.term;
  }
  *out = std::move(made);
  return {};
}

// ---- shards that come and go --------------------------------------------------------------------------------------

void ServedObject::add_place(std::unique_ptr<Tensor> tensor) {
  if (all_places_ == nullptr) {
    all_places_ = std::make_unique<std::atomic<Tensor*>[]>(shards_);
    places_.store(all_places_.get(), std::memory_order_release);
  }
  tensor->set_foreign(foreign_);
  all_places_[tensor->run().first].store(tensor.get(), std::memory_order_release);
  came_.push_back(std::move(tensor));
}

Shard& ServedObject::make_place(uint32_t shard) {
  std::lock_guard lock(coming_);
  if (Shard* const there = find(shard); there != nullptr) return *there;
  const Run run{shard, shard + 1};
  std::unique_ptr<Tensor> tensor = Tensor::make_empty(spec_.own_name(), spec_.tensor, tensor_->cut(), budget_, run);
  const Map::Owned& owned = map_.run_of(shard);
  Shard& place = tensor->shard(shard);
  place.home.state = Residence::kElsewhere;
  place.home.server = owned.server;
  place.home.term = owned.term;
  add_gate(place);
  add_place(std::move(tensor));
  return place;
}

Status ServedObject::take_memory(uint32_t shard) {
  if (table_ != nullptr || inside(shard) || came(shard)->bytes() != 0) return {};
  return came(shard)->take_memory();
}

void ServedObject::give_memory(uint32_t shard) {
  if (table_ != nullptr) return table_->clear(shard);
  if (!inside(shard)) came(shard)->give_memory();
}

void ServedObject::remove(std::vector<std::unique_ptr<Waiting>>* freed) {
  bool used = false;  // a move reads or writes memory without the turn, and a checkpoint has yet to take what it holds
  for (uint32_t i = 0; i < shards_; ++i) {
    Shard* const shard = find(i);
    if (shard == nullptr) continue;
    with_turn(shard->turn, [&] {
      const bool holds = shard->home.state == Residence::kArriving || shard->capture != nullptr;
      used = used || holds || shard->home.leaving;
      shard->home.state = Residence::kDeleted;
      shard->staged.reset();
      shard->parked.free(*shard, freed);
      if (table_ != nullptr && !holds) table_->clear(i);
    });
  }
  context_.staging->changed();
  if (table_ != nullptr) return table_->pools().trim();
  if (used) return;
  std::lock_guard lock(coming_);
  tensor_->give_memory();
  for (const std::unique_ptr<Tensor>& tensor : came_) tensor->give_memory();
}

std::pair<uint32_t, uint32_t> ServedObject::whereabouts(uint32_t index) {
  Shard* const shard = find(index);
  if (shard == nullptr) return {map_.run_of(index).server, map_.run_of(index).term};
  std::pair<uint32_t, uint32_t> at;
  with_turn(shard->turn, [&] {
    const Residence& home = shard->home;
    const bool here = home.state == Residence::kHere || home.state == Residence::kFrozen;
    at = {here ? index_ : home.server, home.term};
  });
  return at;
}

bool ServedObject::lets_in(const Entry& e, Shard& shard) const {
  Residence& home = shard.home;
  return home.serves(e.term) || home.opens(e.term) || (home.state == Residence::kHere && broken(Break::kTerms));
}

void ServedObject::turn_away(const Entry& e, const Residence& home, Outcome* out) const {
  if (home.deleted()) return out->refuse(gone());
  const bool here = home.state == Residence::kHere;
  const std::string what = "shard " + std::to_string(e.shard) + ": ";
  const std::string term = std::to_string(home.term), asked = std::to_string(e.term);
  out->refuse(refused(Code::kStaleMap, here ? what + "expected term " + term + ", saw " + asked
                                            : what + "not on this server; since term " + term + " it is on number " +
                                                  std::to_string(home.server)));
  out->term = home.term;
  out->value = here ? index_ : home.server;
}

void ServedObject::turn_away(const Entry& e, Outcome* out) const {
  Residence home{.state = Residence::kElsewhere};
  if (e.shard < shards_) {
    const Map::Owned& owned = map_.run_of(e.shard);
    home.server = owned.server;
    home.term = owned.term;
  }
  turn_away(e, home, out);
}

Status ServedObject::refused(Code code, const std::string& why) const { return Status(code, what() + ": " + why); }

std::string ServedObject::what() const {
  return std::string(spec_.is_table ? "table '" : "tensor '") + spec_.own_name() + "'";
}

RowType ServedObject::row_type() const {
  return table_ != nullptr ? table_->row_type() : row_type_of(spec_.tensor, tensor_->cut());
}

void ServedObject::add_gate(Shard& shard) {
  if (!spec_.sync().gated()) return;
  shard.gate = std::make_unique<Gate>(spec_.sync());
  shard.gate->set_view(context_.workers->view(map_.object), os::now_ns());
  shard.gate->begin();
}

void ServedObject::set_view(Shard& shard, uint32_t index, const View& view) {
  if (shard.gate == nullptr || shard.home.deleted()) return;
  shard.gate->set_view(view, os::now_ns());
  if (spec_.sync().rounds()) make_updates(shard, target(index));
  context_.staging->changed();
}

uint64_t ServedObject::clock_asked(const Batch& b, const Entry& e) const {
  switch (b.op->looks) {
    case OpTraits::Looks::kUngated: return 0;
    case OpTraits::Looks::kNow: return e.clock;
    case OpTraits::Looks::kNext: return e.empty() ? 0 : e.clock + 1;
    case OpTraits::Looks::kUpdate: return e.empty() || !spec_.sync().rounds() ? 0 : e.clock + 1;
  }
  return 0;
}

bool ServedObject::begin_capture(uint32_t index, ShardCapture* capture) {
  Shard* const shard = find(index);
  bool here = false;
  if (shard == nullptr) return false;
  with_turn(shard->turn, [&] {
    if (shard->home.state == Residence::kArrived) shard->home.settle();  // the scheduler knows that it arrived
    here = shard->home.state == Residence::kHere && !shard->home.leaving && shard->capture == nullptr;
    if (!here) return;
    shard->capture = capture;
    capture->look(*shard);
  });
  return here;
}

void ServedObject::end_capture(uint32_t index) {
  Shard* const shard = find(index);
  with_turn(shard->turn, [&] {
    shard->capture = nullptr;
    if (table_ != nullptr) table_->shard(index).capture = nullptr;
  });
}

// Pushes of a session are numbered per shard. Closes are not, and may come over another connection or as redirects; but
// under BSP each has a weight, which would be lost if a later one came first. So a close says what it follows, and a
// push follows everything before its clock.
bool ServedObject::is_early(const Batch& b, const Entry& e, Shard& shard) const {
  const Record& record = shard.records.of(b.caller.number, b.caller.incarnation);
  if (e.sequence > record.sequence + (b.op->numbered ? 1 : 0)) return true;
  const Gate* const gate = shard.gate.get();
  if (gate == nullptr || !gate->sync().rounds() || !e.closes() || b.caller.rank == Gate::kOutsider) return false;
  if (b.op->numbered && e.sequence <= record.sequence) return false;  // a repeat
  return gate->clock_of(b.caller.rank) < (b.op->closes ? e.follows : e.clock) &&
         !context_.workers->given_up(b.caller.incarnation);
}

bool ServedObject::is_whole(const Entry& e) const {
  const Cut& cut = tensor_->cut();
  return e.items == 1 && e.spans[0].n == cut.end_of(e.shard) - cut.first_of(e.shard);
}

Waiting::Wants ServedObject::wants(const Batch& b, const Entry& e) const {
  if (tensor_ == nullptr || !b.in_place || !b.op->returns || e.out == nullptr || e.value != 0 || e.spans == nullptr ||
      b.out_dtype != Dtype::kFloat32 || spec_.tensor.dtype != Dtype::kFloat32 || !is_whole(e))
    return {};
  return {reinterpret_cast<float*>(e.out) + e.spans[0].at, b.streams};
}

// The entry at hand, as one of those that wait for the update.
class Present final : public Waiting {
 public:
  Present(const Batch& batch, const Entry& entry, const ServedObject& object)
      : batch_(batch), entry_(entry), object_(object) {}
  bool ready(Shard&) override { return true; }
  bool run(Shard&) override { return true; }
  Wants wants(uint64_t clock) override {
    return batch_.op->contributes && clock == entry_.clock + 1 ? object_.wants(batch_, entry_) : Wants();
  }
  void served() override { served_ = true; }
  bool is_served() const { return served_; }

 private:
  const Batch& batch_;
  const Entry& entry_;
  const ServedObject& object_;
  bool served_ = false;
};

// With the turn: the entry closes its iteration at this shard, or reports that earlier ones are closed.
void ServedObject::close(const Batch& b, const Entry& e, Shard& shard, bool refused, bool* has_read) {
  Gate& gate = *shard.gate;
  const int64_t now = time_for(gate);
  bool moved = false;
  if (e.closes()) {
    if (shard.staged != nullptr)
      static_cast<BspUpdates&>(*shard.staged).drop_lost(b.caller.rank, b.caller.incarnation, gate);
    const bool nothing = refused || (b.op->numbered && !brings_gradient(b, e));  // or taken back
    const double weight = b.op->closes ? std::bit_cast<double>(e.value) : nothing ? b.other_weight : b.object_weight;
    moved = gate.close(b.caller.rank, b.op->closes ? e.clock : e.clock + 1, weight, now);
  } else if (!gate.sync().rounds()) {
    moved = gate.close(b.caller.rank, e.clock, 0, now);
  }
  if (!moved || !gate.sync().rounds()) return;
  if (shard.staged != nullptr) static_cast<BspUpdates&>(*shard.staged).fold(gate, target(e.shard));
  Present own(b, e, *this);
  make_updates(shard, target(e.shard), refused ? nullptr : &own);
  if (own.is_served()) *has_read = true;
  context_.staging->changed();
}

// Under BSP a push waits for its update. kFull if the staging quota has no room for it; a push that others wait for is
// refused instead if the server has no memory for it at all.
Verdict ServedObject::contribute(const Batch& b, const Entry& e, Shard& shard, Stage stage, Status* status) {
  const Gate& gate = *shard.gate;
  BspUpdates::Push push;
  push.rank = b.caller.rank;
  push.incarnation = b.caller.incarnation;
  push.iteration = e.clock;
  push.weight = b.weight;
  push.hyper = b.hyper;
  push.dtype = b.in_dtype;
  push.numbers = e.in;
  push.lent = b.in_place;
  if (table_ != nullptr) {
    push.keyed.assign(e.keyed, e.keyed + e.items);
  } else {
    push.spans.assign(e.spans, e.spans + e.items);
  }
  if (shard.staged == nullptr) shard.staged = std::make_unique<BspUpdates>(context_.staging);
  auto& updates = static_cast<BspUpdates&>(*shard.staged);
  const bool next = BspUpdates::is_next(push.rank, push.iteration, gate);
  if (b.in_place && b.arrays.memory != nullptr) {
    push.memory = b.arrays.memory;
  } else if (push.iteration >= gate.made() && !(next && e.closes() && updates.make_room(push, gate, target(e.shard)))) {
    const uint64_t row = size_of(b.in_dtype) * (table_ != nullptr ? spec_.table.dim : 1);
    const uint64_t bytes = push.items() * row;
    StagingQuota::Room room;
    if (!b.staged && !context_.staging->take(bytes, &room)) {
      if (!next && stage == Stage::kFresh) return Verdict::kFull;
      if (!context_.staging->take_beyond(bytes, &room)) {
        *status = refused(
            Code::kResourceExhausted,
            "no memory for " + std::to_string(bytes) +
                " bytes of a push that waits for its update: " + std::to_string(context_.staging->used()) + " of " +
                std::to_string(context_.staging->bytes_max()) + " bytes are taken by others, and " +
                std::to_string(budget_->used()) + " of memory_bytes_max=" + std::to_string(budget_->bytes_max()));
        return Verdict::kDone;
      }
    }
    push.copy_numbers(row, bytes, std::move(room));
  }
  if (!updates.add(std::move(push), gate)) context_.workers->count_late();
  return Verdict::kDone;
}

// Whether a replacement repeats an iteration that the worker before it has closed here.
static bool is_redone(const Batch& b, const Entry& e, const Gate* gate) {
  return gate != nullptr && brings_gradient(b, e) && e.clock < gate->clock_of(b.caller.rank);
}

// Applies a numbered entry whose sequence is next.
Verdict ServedObject::push(const Batch& b, const Entry& e, Shard& shard, Record& record, Status* status, Outcome* out,
                           Stage stage, bool* has_read) {
  Gate* const gate = shard.gate.get();
  const bool rounds = gate != nullptr && gate->sync().rounds() && brings_gradient(b, e);
  const bool redone = is_redone(b, e, gate);
  if (rounds && b.caller.rank == Gate::kOutsider && status->ok())
    *status = refused(Code::kInvalidArgument, "under BSP only workers of app '" + spec_.app() + "' push");
  const bool given_up = gate != nullptr && context_.workers->given_up(b.caller.incarnation);
  if (given_up && status->ok())
    *status = refused(Code::kClosed,
                      "rank " + std::to_string(b.caller.rank) + " was given up, and others went on without it");
  if (rounds && !redone && status->ok() && contribute(b, e, shard, stage, status) == Verdict::kFull)
    return Verdict::kFull;
  // A refused entry uses up its sequence, too.
  record.sequence = e.sequence == Entry::kNextSequence ? record.sequence + 1 : e.sequence;
  record.rank = b.caller.rank;
  record.close(e.closes() ? e.clock + 1 : e.clock);
  if (!rounds && !redone && status->ok()) {
    // An entry that will wait at the gate reads the weights when it opens.
    const uint64_t asked = gate != nullptr ? clock_asked(b, e) : 0;
    out->reads_later = asked != 0 && !gate->opens(b.caller.rank, asked, time_for(*gate));
    if (!e.empty()) {
      const Hyper hyper = b.hyper.corrected(shard.version - record.seen);
      out->hyper = &hyper;
      if (shard.capture != nullptr) shard.capture->before_write(shard);
      *status = (this->*b.op->change)(b, e, out);
      if (shard.capture != nullptr) shard.capture->after_write();
      // A part of it may have been applied, if its numbers were changed meanwhile.
      if (status->ok() || status->code() == Code::kBufferInUse) ++shard.version;
    }
    // A caller that puts weights or gets them back has seen this version.
    if (b.op->returns || b.op->op == wire::Op::kPut) record.seen = shard.version;
    *has_read = gate == nullptr || !gate->sync().rounds();
  }
  // Who was given up closes nothing: somebody else may have its rank by now.
  if (gate != nullptr && !given_up && !b.op->sets()) close(b, e, shard, !status->ok(), has_read);
  if (!used() && !b.caller.reads) used_.store(true, std::memory_order_relaxed);
  if (status->code() == Code::kStaleMap && e.vector != nullptr) out->value = e.vector->other_at;
  if ((!status->ok() || b.op->keeps_value) && e.sequence != Entry::kNextSequence)
    record.keep(record.sequence, *status, out->value);
  return out->reads_later ? Verdict::kGated : Verdict::kDone;
}

Verdict ServedObject::run(const Batch& b, const Entry& e, Shard& shard, const Status& checked, Outcome* out,
                          Stage stage) {
  if (!lets_in(e, shard)) [[unlikely]] {
    if (shard.home.state == Residence::kFrozen) return Verdict::kEarly;
    turn_away(e, shard.home, out);
    return Verdict::kDone;
  }
  const bool near = e.sequence == Entry::kNextSequence;
  if (shard.capture != nullptr && !near && stage == Stage::kFresh && (b.op->numbered || b.op->closes) &&
      shard.capture->holds_up(shard)) [[unlikely]]
    return Verdict::kFull;
  Record& record = shard.records.of(b.caller.number, b.caller.incarnation);
  Gate* const gate = shard.gate.get();
  const bool forbidden = b.caller.reads && b.op->changes() && !broken(Break::kReaders);
  Status status = forbidden ? refused(Code::kAccessDenied, std::string(wire::name_of(b.op->op)) + kOnlyReads) : checked;
  bool has_read = stage == Stage::kServed;
  if (!near && stage < Stage::kTaken && is_early(b, e, shard) && !(b.op->numbered && broken(Break::kSequence)))
    return Verdict::kEarly;
  if (!b.op->numbered) {
    if (b.op->closes && status.ok() && gate != nullptr && !context_.workers->given_up(b.caller.incarnation))
      close(b, e, shard, false, &has_read);
  } else {
    Admission admission = stage >= Stage::kTaken ? Admission::kRepeat
                          : near                 ? Admission::kApply
                                                 : record.admit(e.sequence);
    if (admission != Admission::kApply && stage < Stage::kTaken && broken(Break::kSequence))
      admission = Admission::kApply;
    switch (admission) {
      case Admission::kGap: break;  // returned as early above
      case Admission::kRepeat:
        record.close(e.clock);
        if (near) break;  // back from the gate
        // A repeat that is not what was done under its number may not be read: nothing of it was decoded.
        if (const Record::Kept* kept = record.find(e.sequence);
            kept != nullptr && (checked.ok() || !kept->status.ok())) {
          status = kept->status;
          out->value = kept->value;
        } else if (b.op->op == wire::Op::kVector) {
          status = {};  // it was applied: the other tensor's present state does not matter
        }
        break;
      case Admission::kApply: {
        const Verdict verdict = push(b, e, shard, record, &status, out, stage, &has_read);
        if (verdict != Verdict::kDone) return verdict;
        break;
      }
    }
  }
  if (gate != nullptr && status.ok()) {
    const uint64_t asked = clock_asked(b, e);
    if (asked != 0 && !gate->opens(b.caller.rank, asked, time_for(*gate))) return Verdict::kGated;
    if (gate->sync().rounds() && b.op->contributes && shard.staged != nullptr)
      status = static_cast<BspUpdates&>(*shard.staged).error(e.clock, b.caller.rank);
  }
  if (status.ok() && !has_read && b.op->read != nullptr && !(b.op->numbered && e.empty()))
    status = (this->*b.op->read)(b, e, out);
  if (b.op->returns) record.seen = shard.version;
  out->sequence = record.sequence;
  out->clock = seen(b, e, shard);
  if (status.code() == Code::kStaleMap && e.vector != nullptr) {  // of the other shard
    if (!b.op->numbered) out->value = e.vector->other_at;
    out->flags |= wire::kApart;
    out->body = status.message();
  } else if (!status.ok()) {
    out->refuse(std::move(status));
  } else if (b.op->versioned) {
    out->value = shard.version + 1;
  }
  return Verdict::kDone;
}

// The clock up to which the entry saw everybody's pushes; its own worker's clock if there is nobody else. A worker
// whose pushes may be dropped learns it from every answer, else it would never catch up.
uint64_t ServedObject::seen(const Batch& b, const Entry& e, const Shard& shard) const {
  const uint64_t asked = b.op->returns && b.op->numbered ? e.clock + 1 : e.clock;
  const bool looks = b.op->returns;
  if (b.caller.rank == Gate::kOutsider || context_.workers->alone()) return asked;
  if (!looks && (shard.gate == nullptr || !shard.gate->sync().may_drop())) return asked;
  const uint64_t others =
      shard.gate != nullptr ? shard.gate->seen(b.caller.rank) : context_.workers->slowest(b.caller.rank);
  const uint64_t seen = others == Gate::kNone ? asked : others;
  if (looks) context_.workers->count_pull(asked, seen);
  return seen;
}

const std::byte* ServedObject::peek(const Batch& b, const Entry& e, Shard& shard, Outcome* out) const {
  if (tensor_ == nullptr || b.in_place || b.op->op != wire::Op::kPull || e.flags != wire::kWhole || e.value != 0 ||
      b.out_dtype != spec_.tensor.dtype)
    return nullptr;
  if (!lets_in(e, shard)) return nullptr;
  Record& record = shard.records.of(b.caller.number, b.caller.incarnation);
  if (e.sequence > record.sequence) return nullptr;
  if (shard.gate != nullptr && !shard.gate->opens(b.caller.rank, e.clock, time_for(*shard.gate))) return nullptr;
  const Cut& cut = tensor_->cut();
  out->sequence = record.sequence;
  out->clock = seen(b, e, shard);
  record.seen = shard.version;
  out->value = shard.version + 1;
  out->numbers_bytes = (cut.end_of(e.shard) - cut.first_of(e.shard)) * size_of(spec_.tensor.dtype);
  return tensor_of(e.shard).weights_of(e.shard);
}

}  // namespace windlass
