#include "server/request.h"

#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "server/host.h"
#include "server/object/vector.h"
#include "server/remote_ticket.h"

namespace windlass {

using wire::Op;

namespace {

constexpr size_t kStepAtOnce = 8;
constexpr int64_t kRoomWaitNs = 100'000'000;  // then it is seen whether the client is still there
constexpr size_t kKeptListBytes = size_t{4} << 20;

thread_local Buffer t_list;   // of the part at hand
thread_local Buffer t_other;  // of a vector operation: its item, and the other shard's numbers

}  // namespace

Request::Request(std::shared_ptr<Connection> from, const wire::Header& header) : from_(std::move(from)) {
  about_.header = header;
  if (is_step()) return;
  about_.object = from_->host().find(header.object);
  set_operation(&about_, header.operation());
}

// With the object found: what the batch has from the header and the session.
void Request::set_operation(About* about, Op op) const {
  Batch& b = about->batch;
  b.op = traits_of(op);
  b.in_dtype = static_cast<Dtype>(about->header.dtype_in);
  b.out_dtype = static_cast<Dtype>(about->header.dtype_out);
  b.deadline_ms = header().deadline_ms;
  b.in_place = in_place();
  b.caller.number = from_->guest()->number;
  b.caller.incarnation = header().session;
  if (about->object != nullptr) b.caller.rank = from_->guest()->rank_in(*about->object->crowd());
}

Status Request::read_extensions(const std::byte* bytes) {
  if (crc32c(bytes, header().extension_bytes) != header().extension_crc)
    return Status(Code::kProtocolError, "frame: the checksum of the extensions is wrong");
  wire::Places places;
  double numbers[limits::kPushNumbersMax] = {};
  WL_RETURN_IF_ERROR(wire::read_extensions(bytes, header().extension_bytes, numbers, &about_.batch.hypers, &places));
  about_.take_numbers(numbers);
  about_.streamed = places.out_bytes;
  if (is_step()) {  // every part has places of its own; these are the sums
    about_.batch.arrays.in_bytes = places.in_bytes;
    about_.batch.arrays.out_bytes = places.out_bytes;
  } else if (in_place()) {
    find_arrays(places, &about_);
  }
  return {};
}

void Request::find_arrays(const wire::Places& p, About* about) const {
  const Arenas& arenas = from_->guest()->arenas;
  InPlace& arrays = about->batch.arrays;
  std::shared_ptr<const Mapping> in, out;
  if (p.in_arena != 0) about->misplaced = arenas.find(p.in_arena, p.in_offset, p.in_bytes, &in);
  if (p.out_arena != 0 && about->misplaced.ok())
    about->misplaced = arenas.find(p.out_arena, p.out_offset, p.out_bytes, &out);
  if (!about->misplaced.ok()) return;
  if (in != nullptr) {
    arrays.in = in->data() + p.in_offset;
    arrays.in_bytes = p.in_bytes;
  }
  if (out != nullptr) {
    arrays.out = out->data() + p.out_offset;
    arrays.out_bytes = p.out_bytes;
  }
  arrays.base = p.base;
  if (in == nullptr || out == nullptr || in == out) {  // mostly both are in one arena
    arrays.memory = in != nullptr ? std::move(in) : std::move(out);
  } else {
    arrays.memory = std::make_shared<std::pair<std::shared_ptr<const Mapping>, std::shared_ptr<const Mapping>>>(
        std::move(in), std::move(out));
  }
  if (about->batch.op != nullptr) about->batch.streams = streams(*about->batch.op, about->streamed, arrays.out_bytes);
}

bool Request::is_large() const {
  const Op op = header().operation();
  if (about_.batch.op != nullptr && about_.batch.op->walks) return true;
  // A rule of the user's runs on one thread: others would only wait for it.
  if (about_.object != nullptr && about_.object->rule().kind == RuleKind::kForeign && op != Op::kPull) return false;
  uint64_t bytes = header().length;
  if (in_place()) {
    bytes = std::max(about_.batch.arrays.in_bytes, about_.batch.arrays.out_bytes);
  } else if (about_.object != nullptr && about_.object->spec().is_table && op == Op::kPull) {
    bytes = bytes / sizeof(uint64_t) * about_.object->spec().table.dim * sizeof(float);
  } else if (about_.object != nullptr && !about_.object->spec().is_table &&
             (about_.is(Op::kVector) || about_.is(Op::kDot))) {
    const TensorSpec& spec = about_.object->spec().tensor;
    const Cut cut = cut_of(spec);
    bytes = header().parts * cut.per_shard * size_of(spec.dtype);
  }
  return bytes >= (is_step() ? limits::kBulkBytesMin : limits::kCrewBytesMin);
}

static Entry entry_of(const wire::Part& part, const std::byte* bytes) {
  Entry e;
  e.shard = part.shard;
  e.term = part.term;
  e.sequence = part.sequence;
  e.clock = part.clock;
  e.value = part.value;
  e.flags = part.flags;
  e.items = part.items;
  e.body = bytes;
  e.body_bytes = part.items_bytes;
  e.in = bytes + wire::padded(part.items_bytes);
  e.numbers_bytes = part.numbers_bytes;
  return e;
}

Status Request::check_sums(const wire::Part& p, const std::byte* bytes) const {
  if (p.items_bytes != 0 && crc32c(bytes, p.items_bytes) != p.items_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the items of part " + std::to_string(p.shard) + " is wrong");
  if (p.numbers_bytes != 0 && (header().flags & wire::kChecksummed) != 0 &&
      crc32c(bytes + wire::padded(p.items_bytes), p.numbers_bytes) != p.numbers_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the numbers of part " + std::to_string(p.shard) + " is wrong");
  return {};
}

// What a part of a step is about: its first item, which makes it an entry like any other.
Status Request::read_item(Entry* entry, About* about) const {
  wire::StepItem item;
  WL_RETURN_IF_ERROR(wire::decode(entry->body, entry->body_bytes, &item));
  about->header = header();
  about->header.op = item.op;
  about->header.object = item.object;
  about->header.dtype_in = item.dtype_in;
  about->header.dtype_out = item.dtype_out;
  about->object = from_->host().find(item.object);
  about->batch.hypers = item.hypers;
  double numbers[limits::kPushNumbersMax] = {};
  std::memcpy(numbers, entry->body + sizeof item, item.hypers * sizeof(double));
  about->take_numbers(numbers);
  about->streamed = about_.streamed;
  set_operation(about, static_cast<Op>(item.op));
  if (in_place()) find_arrays(item.places, about);
  entry->shard = item.shard;
  entry->body_bytes -= item.bytes();
  entry->body += item.bytes();
  return {};
}

// The items of a part that are in an arena: copied, and only then looked at.
Status Request::read_list(Entry* entry) const {
  wire::ListedItems list;
  if (is_step() || entry->body_bytes != sizeof list)
    return Status(Code::kInvalidArgument, "part: no list of items in an arena was expected here");
  std::memcpy(&list, entry->body, sizeof list);
  if (list.bytes > limits::kItemsBytesMax)
    return Status(Code::kInvalidArgument, "part: a list of " + std::to_string(list.bytes) + " bytes, at most " +
                                              std::to_string(limits::kItemsBytesMax));
  std::shared_ptr<const Mapping> mapping;
  WL_RETURN_IF_ERROR(from_->guest()->arenas.find(list.arena, list.offset, list.bytes, &mapping));
  std::byte* const copy = t_list.room(list.bytes + 1);
  if (copy == nullptr) return Status(Code::kResourceExhausted, "part: no memory for its list of items");
  std::memcpy(copy, mapping->data() + list.offset, list.bytes);
  if (crc32c(copy, list.bytes) != list.crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the list of part " + std::to_string(entry->shard) + " is wrong");
  entry->body = copy;
  entry->body_bytes = static_cast<uint32_t>(list.bytes);
  return {};
}

// The worker has closed everything before a clock, except at shards of the objects it has open.
Status Request::tick(const Entry& entry) const {
  if (entry.body_bytes % sizeof(uint32_t) != 0) return Status(Code::kInvalidArgument, "tick: malformed");
  std::vector<uint32_t> open(entry.body_bytes / sizeof(uint32_t));
  if (!open.empty()) std::memcpy(open.data(), entry.body, entry.body_bytes);
  std::sort(open.begin(), open.end());
  from_->host().tick(*from_->guest(), entry.clock, std::move(open));
  return {};
}

bool Request::answer_directly(const wire::Part& part, DirectAnswer* direct) const {
  if (in_place() || !about_.is(Op::kPull) || part.bytes() != 0 || part.flags != wire::kWhole) return false;
  Shard* const shard = about_.object != nullptr ? about_.object->find(part.shard) : nullptr;
  if (shard == nullptr) return false;
  return direct->add(about_.batch, entry_of(part, nullptr), *about_.object, *shard);
}

void Request::prepare(const Taken& taken, Ready* ready) const {
  Entry& entry = ready->entry;
  entry = entry_of(taken.part, taken.bytes);
  ready->label = taken.part.shard;
  Status& wrong = ready->wrong;
  wrong = check_sums(taken.part, taken.bytes);
  if (wrong.ok() && (entry.flags & wire::kTicks) != 0) from_->host().tick(*from_->guest(), entry.clock);
  if (is_step() && wrong.ok()) wrong = read_item(&entry, &ready->own);
  const About& about = is_step() ? ready->own : about_;
  ready->ticks = wrong.ok() && about.header.operation() == Op::kTick;
  if (ready->ticks) return;
  if (wrong.ok() && about.batch.op == nullptr)
    wrong = Status(Code::kInvalidArgument, std::string(name_of(about.header.operation())) + " is not about shards");
  if ((entry.flags & wire::kListed) != 0 && wrong.ok()) wrong = read_list(&entry);
  if (in_place()) {
    entry.in = about.batch.arrays.in;
    entry.out = about.batch.arrays.out;
  }
  if (wrong.ok() && about.object == nullptr)
    wrong = Status(Code::kNotFound, "object " + std::to_string(about.header.object) + " is not on this server");
  if (wrong.ok() && about.batch.op->closes) {
    if (entry.body_bytes != sizeof entry.follows)
      wrong = Status(Code::kInvalidArgument, "close: it must say what it follows");
    else
      std::memcpy(&entry.follows, entry.body, sizeof entry.follows);
  }
  if (wrong.ok()) {
    ready->shard = about.object->find(entry.shard);
    ready->absent = ready->shard == nullptr;
  }
  if (wrong.ok() && (about.is(Op::kVector) || about.is(Op::kDot)) && !ready->absent) {
    wrong = wire::decode(entry.body, entry.body_bytes, &ready->vector.item);
    if (wrong.ok()) {
      const std::shared_ptr<ServedObject> other = from_->host().find(ready->vector.item.object);
      ready->other = read_other(about.batch, *about.object, other.get(), &entry, &ready->vector, &t_other);
    }
  }
  if (wrong.ok() && !about.misplaced.ok() && !about.batch.op->numbered) wrong = about.misplaced;
}

void Request::serve(const Taken* parts, size_t n, Answers* answers, Freed* freed) const {
  // Parts of a step are about one object each, none of which is in a cache: they are asked for before the first is
  // served.
  Ready ready[kStepAtOnce];
  for (size_t i = 0; i < n;) {
    const size_t some = std::min(is_step() ? kStepAtOnce : 1, n - i);
    for (size_t k = 0; k < some; ++k) {
      prepare(parts[i + k], &ready[k]);
      if (ready[k].shard != nullptr) __builtin_prefetch(ready[k].shard, 1);
    }
    for (size_t k = 0; k < some; ++k) serve(&ready[k], answers, freed);
    t_list.shrink(kKeptListBytes);
    i += some;
    for (size_t k = 0; k < some && i < n; ++k) ready[k] = Ready();
  }
}

void Request::serve(Ready* ready, Answers* answers, Freed* freed) const {
  Entry& entry = ready->entry;
  const About& about = is_step() ? ready->own : about_;
  Outcome outcome;
  outcome.term = entry.term;
  if (ready->ticks) {
    if (ready->wrong.ok()) ready->wrong = tick(entry);
    outcome.status = ready->wrong;
    if (answers->open(0) != nullptr) answers->add(ready->label, outcome);
    return;
  }
  if (!ready->wrong.ok() || ready->absent) {
    if (answers->open(0) == nullptr) return;
    ready->absent ? about.object->turn_away(entry, &outcome) : outcome.refuse(ready->wrong);
    answers->add(ready->label, outcome);
    return;
  }
  Shard& shard = *ready->shard;
  uint64_t out_bytes = 0;
  Status checked = about.misplaced.ok() ? about.object->check(about.batch, &entry, &out_bytes) : about.misplaced;
  if (checked.ok()) checked = ready->other;
  std::byte* out = answers->open(out_bytes);
  if (out == nullptr) {
    checked = Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes) + " bytes");
    out = answers->open(0);
    if (out == nullptr) return;
  }
  if (!in_place()) entry.out = out;
  // The user's rule may take seconds: nobody else waits for it.
  if (about.object->rule().kind == RuleKind::kForeign) deliver(freed);
  bool parked = false;
  Verdict verdict = Verdict::kDone;
  for (;;) {
    const uint32_t seen = about.object->staging().changes();
    with_turn(shard.turn, [&] {
      verdict = about.object->run(about.batch, entry, shard, checked, &outcome);
      if (verdict == Verdict::kFull) return;
      if (verdict != Verdict::kDone) parked = park(about, *ready, checked, out_bytes, verdict, &outcome);
      if (!shard.parked.empty()) shard.parked.free(shard, freed);
    });
    if (verdict != Verdict::kFull) break;
    // Back-pressure: this client waits. Answers that are ready leave first, since whoever gets one may make room.
    answers->flush();
    deliver(freed);
    if (from_->channel().broken()) return;
    about.object->staging().wait(seen, kRoomWaitNs);
    if (in_place()) continue;
    entry.out = answers->open(out_bytes);
    if (entry.out == nullptr) return;
  }
  if (parked) return;
  if (outcome.call != nullptr) deliver(freed);  // the user's function may take seconds
  outcome.finish(about.object->user_code());
  answers->add(ready->label, outcome);
}

// With the turn. False: the client is told what is missing, and sends it again.
bool Request::park(const About& about, const Ready& ready, const Status& checked, uint64_t out_bytes, Verdict why,
                   Outcome* outcome) const {
  Shard& shard = *ready.shard;
  const Entry& entry = ready.entry;
  std::unique_ptr<Waiting> waiting = RemoteTicket::make(from_, header(), ready.label, about.object, about.batch, entry,
                                                        checked, out_bytes, why, shard);
  if (waiting != nullptr && shard.parked.park(&waiting, why == Verdict::kGated)) return true;
  const Record& record = shard.records.of(about.batch.caller.number, about.batch.caller.incarnation);
  outcome->sequence = record.sequence;
  outcome->refuse(Status(Code::kOutOfSequence, "shard " + std::to_string(entry.shard) + " expected sequence " +
                                                   std::to_string(record.sequence + 1) + ", saw " +
                                                   std::to_string(entry.sequence)));
  return false;
}

}  // namespace windlass
