#include "server/net/request.h"

#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "server/host.h"
#include "server/net/waiting_block.h"
#include "server/object/vector.h"

namespace windlass {

using wire::Op;

namespace {

constexpr int64_t kRoomWaitNs = 100'000'000;  // then checks whether the client is still there
constexpr size_t kKeptListBytes = size_t{4} << 20;

thread_local Buffer t_list;   // of the present block
thread_local Buffer t_other;  // of a vector operation: its item, and the other shard's numbers

uint32_t item_bytes(const ServedObject& object, uint16_t flags) {
  const bool placed = (flags & wire::kPlaced) != 0;
  return static_cast<uint32_t>((object.spec().is_table ? (placed ? 2 : 1) : (placed ? 3 : 2)) * sizeof(uint64_t));
}

}  // namespace

// ---- what a block is about ----------------------------------------------------------------------------------------

void Request::take(Taken* taken) {
  const wire::Block& block = taken->block;
  taken->is_first = !has_begun_;
  has_begun_ = true;
  if (block.body_bytes != 0 && crc32c(taken->bytes, block.body_bytes) != block.body_crc && !broken(Break::kChecksums))
    taken->wrong =
        Status(Code::kCorrupt, "the checksum of the body of block " + std::to_string(block.label) + " is wrong");
  if (taken->wrong.ok()) taken->wrong = wire::read(block, taken->bytes, &taken->body);
  const bool as_before = block.has(wire::kAsBefore);
  if (taken->wrong.ok() && as_before && last_ == nullptr)
    taken->wrong = Status(Code::kInvalidArgument, "block: as before, but there is none before it");
  if (!as_before || last_ == nullptr) {
    last_ = last_ == nullptr ? &first_ : others_.emplace_back(std::make_unique<About>()).get();
    last_->wrong = taken->wrong;
    if (taken->wrong.ok()) begin(*taken, last_);
  }
  About& about = *last_;
  taken->about = &about;
  if (taken->wrong.ok()) taken->wrong = about.wrong;
  if (!taken->wrong.ok() || about.batch.op == nullptr) {  // a tick
    taken->argument = taken->body.rest;
    taken->argument_bytes = taken->body.rest_bytes;
    return;
  }
  const uint64_t bytes = !has_items(about)          ? 0
                         : block.has(wire::kListed) ? sizeof(wire::ListedItems)
                                                    : items_in(*taken) * item_bytes(*about.object, block.flags);
  if (block.has(wire::kListed) && bytes > taken->body.rest_bytes) {
    taken->wrong = Status(Code::kInvalidArgument, "block: no list of items in an arena was expected here");
    return;
  }
  if (bytes > taken->body.rest_bytes && !broken(Break::kBounds)) {
    taken->misfit = about.object->refused(Code::kShapeMismatch, "expected " + std::to_string(bytes) + " bytes of " +
                                                                    (about.object->spec().is_table ? "keys" : "spans") +
                                                                    ", saw " + std::to_string(taken->body.rest_bytes));
    return;
  }
  taken->items_bytes = static_cast<uint32_t>(bytes);
  taken->argument = taken->body.rest + bytes;
  taken->argument_bytes = taken->body.rest_bytes - taken->items_bytes;
  if (as_before && taken->argument_bytes == 0) {
    taken->argument = reinterpret_cast<const std::byte*>(about.argument.data());
    taken->argument_bytes = static_cast<uint32_t>(about.argument.size());
  } else if (!as_before && taken->argument_bytes != 0 && header_.blocks > 1) {
    about.argument.assign(reinterpret_cast<const char*>(taken->argument), taken->argument_bytes);
  }
}

void Request::begin(const Taken& taken, About* about) const {
  const wire::Block& block = taken.block;
  Batch& b = about->batch;
  b.op = traits_of(block.operation());
  if (b.op == nullptr) {
    if (block.operation() != Op::kTick)
      about->wrong = Status(Code::kInvalidArgument, std::string(name_of(block.operation())) + " is not about shards");
    return;
  }
  about->object = from_->host().find(block.object);
  if (about->object == nullptr) {
    about->wrong = from_->host().absent(block.object);
    return;
  }
  b.in_dtype = static_cast<Dtype>(block.dtype_in);
  b.out_dtype = static_cast<Dtype>(block.dtype_out);
  b.deadline_ms = header_.deadline_ms;
  b.caller.number = from_->client()->number;
  b.caller.incarnation = header_.session;
  b.caller.rank = from_->client()->rank_in(*about->object->workers());
  b.caller.reads = from_->client()->reads;
  b.hypers = block.hypers;
  double numbers[limits::kPushNumbersMax];
  taken.body.hyper(block, numbers);
  b.read_numbers(numbers);
  b.in_place = in_place() && block.has(wire::kHasPlaces);
  if (b.in_place) find_arrays(taken.body.places(block), about);
}

void Request::find_arrays(const wire::Places& p, About* about) const {
  const Arenas& arenas = from_->client()->arenas;
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
  if (in == nullptr || out == nullptr || in == out) {  // usually both are in one arena
    arrays.memory = in != nullptr ? std::move(in) : std::move(out);
  } else {
    arrays.memory = std::make_shared<std::pair<std::shared_ptr<const Mapping>, std::shared_ptr<const Mapping>>>(
        std::move(in), std::move(out));
  }
  about->batch.streams = streams(*about->batch.op, header_.work_bytes, arrays.out_bytes);
}

Status Request::check_numbers(const Taken& taken) const {
  const wire::Block& b = taken.block;
  if (b.numbers_bytes == 0 || (header_.flags & wire::kChecksummed) == 0 || broken(Break::kChecksums)) return {};
  if (crc32c(taken.bytes + wire::padded(b.body_bytes), b.numbers_bytes) == b.numbers_crc) return {};
  return Status(Code::kCorrupt, "the checksum of the numbers of block " + std::to_string(b.label) + " is wrong");
}

// Copies the items of a block from an arena before looking at them: the client may change them at any time.
Status Request::read_list(Taken* taken, const std::byte** items) const {
  wire::ListedItems list;
  const ServedObject& object = *taken->about->object;
  if (!taken->about->batch.in_place)
    return Status(Code::kInvalidArgument, "block: no list of items in an arena was expected here");
  std::memcpy(&list, taken->body.rest, sizeof list);
  if (list.bytes > limits::kItemsBytesMax)
    return Status(Code::kInvalidArgument, "block: a list of " + std::to_string(list.bytes) + " bytes, at most " +
                                              std::to_string(limits::kItemsBytesMax));
  std::shared_ptr<const Mapping> mapping;
  WL_RETURN_IF_ERROR(from_->client()->arenas.find(list.arena, list.offset, list.bytes, &mapping));
  if (const uint64_t expected = items_in(*taken) * item_bytes(object, taken->block.flags); list.bytes != expected) {
    taken->misfit = object.refused(Code::kShapeMismatch, "expected a list of " + std::to_string(expected) +
                                                             " bytes, saw " + std::to_string(list.bytes));
    return {};
  }
  std::byte* const copy = t_list.room(list.bytes + 1);
  if (copy == nullptr) return Status(Code::kResourceExhausted, "block: no memory for its list of items");
  std::memcpy(copy, mapping->data() + list.offset, list.bytes);
  if (crc32c(copy, list.bytes) != list.crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt,
                  "the checksum of the list of block " + std::to_string(taken->block.label) + " is wrong");
  *items = copy;
  return {};
}

// The worker has closed everything before a clock, except shards of the objects it has open.
Status Request::tick(const Taken& taken) const {
  if (taken.argument_bytes % sizeof(uint32_t) != 0) return Status(Code::kInvalidArgument, "tick: malformed");
  if (from_->client()->reads) return no_clock("tick");
  std::vector<uint32_t> open(taken.argument_bytes / sizeof(uint32_t));
  if (!open.empty()) std::memcpy(open.data(), taken.argument, taken.argument_bytes);
  std::sort(open.begin(), open.end());
  from_->host().tick(*from_->client(), taken.block.clock, std::move(open));
  return {};
}

bool Request::answer_directly(const Taken& taken, DirectAnswer* direct) const {
  const wire::Block& block = taken.block;
  const About& about = *taken.about;
  if (!taken.wrong.ok() || about.batch.op == nullptr || about.batch.op->op != Op::kPull || block.entries != 1 ||
      about.batch.in_place || block.bytes() != 0 || (block.flags & ~wire::kAsBefore) != wire::kWhole ||
      (header_.flags & wire::kTicks) != 0)
    return false;
  Shard* const shard = about.object->find(block.shard);
  if (shard == nullptr) return false;
  Entry entry;
  entry.shard = block.shard;
  entry.term = block.term;
  entry.sequence = block.sequence;
  entry.clock = block.clock;
  entry.flags = wire::kWhole;
  return direct->add(about.batch, entry, block.label, *about.object, *shard);
}

// ---- how it is served ---------------------------------------------------------------------------------------------

// A block that is being served; its vectors are thread-local.
struct Request::Serving {
  const Taken* taken = nullptr;
  const About* about = nullptr;
  std::vector<Entry> entries;
  std::vector<Status> checked;
  std::vector<Outcome> outcomes;
  std::vector<uint64_t> out_at;  // where each entry's numbers begin in the answer, and the end
  VectorStep vector;
  std::byte* out = nullptr;               // where the answer's numbers are gathered
  AnswerQuota::Room room, result_room;    // for them, and for the result of a function
  std::shared_ptr<WaitingBlock> waiting;  // once an entry waits
  std::vector<bool> parked;

  uint64_t out_bytes() const { return out_at.back(); }
  bool calls() const { return about->batch.op->op == Op::kCall; }
  // What the answer takes.
  uint64_t answer_bytes() const { return out_bytes() + (calls() ? 0 : entries[0].length); }
  void give_back() {
    room.give_back();
    result_room.give_back();
  }
  // Moves what the entries before `i` have gathered into memory of its own, so that others' answers can leave. False if
  // there is no memory, or no room among requests that wait.
  bool move_out(uint32_t i, const std::shared_ptr<Connection>& from, const wire::Header& header, bool force) {
    if (waiting != nullptr) return true;
    waiting = WaitingBlock::make(from, header, taken->block.label, about->object, about->batch, entries, out_at, force);
    if (waiting == nullptr || out_at[i] == 0) return waiting != nullptr;
    std::byte* const to = waiting->out(0);
    if (to == nullptr) {
      waiting = nullptr;
      return false;
    }
    std::memcpy(to, out, out_at[i]);
    return true;
  }
};

void Request::serve(Taken* taken, size_t n, Answers* answers, Freed* freed) const {
  // Each block may be about another object that is in no cache: prefetch them all before the first is served.
  for (size_t i = 0; n > 1 && i < n; ++i) {
    const About& about = *taken[i].about;
    if (about.object == nullptr) continue;
    if (const Shard* const shard = about.object->find(taken[i].block.shard); shard != nullptr)
      __builtin_prefetch(shard, 1);
  }
  for (size_t i = 0; i < n; ++i) serve(&taken[i], answers, freed);
  t_list.shrink(kKeptListBytes);
}

// An answer may take all the room that there is for answers. A whole shard may be larger than that.
uint64_t Request::largest_answer(const Serving& s) const {
  const uint64_t room = from_->host().answers().bytes_max();
  const ServedObject& object = *s.about->object;
  if (!s.about->batch.op->returns) return ~uint64_t{0};  // those have limits of their own
  if (object.spec().is_table) return room;
  const Cut& cut = object.tensor().cut();
  const uint32_t shard = s.entries[0].shard;
  if (shard >= object.shards()) return room;
  return std::max(room, (cut.end_of(shard) - cut.first_of(shard)) * sizeof(double));
}

void Request::serve(Taken* taken, Answers* answers, Freed* freed) const {
  thread_local Serving serving;
  const wire::Block& block = taken->block;
  const Answers::Of of{block.label, block.op};
  Status wrong = taken->wrong.ok() ? check_numbers(*taken) : taken->wrong;
  if (wrong.ok() && !await_turn(*taken, answers, freed)) return;
  if (wrong.ok() && taken->is_first && (header_.flags & wire::kTicks) != 0) {
    if (from_->client()->reads) {
      wrong = no_clock("tick");
    } else {
      from_->host().tick(*from_->client(), block.clock);
    }
  }
  if (wrong.ok() && taken->about->batch.op == nullptr) {
    wrong = tick(*taken);
    return answers->add_all(of, 0, wrong);
  }
  if (wrong.ok()) wrong = prepare(taken, &serving);
  if (!wrong.ok()) return answers->add_all(of, block.entries, wrong);
  // Entries are refused by running: one that is numbered uses up its sequence.
  const auto refuse_all = [&](const Status& why) {
    for (uint32_t i = 0; i < block.entries; ++i) {
      if (serving.checked[i].ok()) serving.checked[i] = why;
      serving.out_at[i + 1] = 0;
    }
  };
  const ServedObject& object = *taken->about->object;
  if (object.spec().sync().gated() && !from_->has_sender())
    refuse_all(object.refused(Code::kResourceExhausted, "no thread to be had for answers to requests that wait"));
  if (const uint64_t most = largest_answer(serving); serving.out_bytes() > most)
    refuse_all(object.refused(Code::kResourceExhausted,
                              "shard " + std::to_string(block.shard) + " would answer with " +
                                  std::to_string(serving.out_bytes()) + " bytes, at most " + std::to_string(most) +
                                  " at once; ask for less in one request, or give servers more staging_bytes_max"));
  if (!await_room(from_->host().answers(), serving.answer_bytes(), answers, freed, &serving.room)) return;
  if (serving.calls() && serving.checked[0].ok() &&
      !await_room(from_->host().results(), serving.entries[0].length, answers, freed, &serving.result_room))
    return serving.room.give_back();
  serving.out = answers->open(serving.out_bytes());
  if (serving.out == nullptr) {
    refuse_all(Status(Code::kResourceExhausted,
                      "no memory for an answer of " + std::to_string(serving.out_bytes()) + " bytes"));
    serving.out = answers->open(0);
    if (serving.out == nullptr) return serving.give_back();
  }
  uint32_t ran = 0;
  while (ran < block.entries && run(ran, &serving, answers, freed)) ++ran;
  // The client is gone, or there is no memory: the block is to be sent again, and what was applied is a repeat then.
  for (; ran < block.entries; ++ran)
    serving.outcomes[ran].refuse(Status(Code::kOutOfSequence, "not all entries of its block could be served"));
  const std::shared_ptr<WaitingBlock> waiting = std::move(serving.waiting);
  if (waiting == nullptr) {
    answers->add(of, serving.outcomes.data(), block.entries, serving.out_at.data(),
                 WaitingBlock::has_values(*taken->about->object, *taken->about->batch.op));
  } else {
    for (uint32_t i = 0; i < block.entries; ++i) {
      if (!serving.parked[i]) waiting->ended(i, std::move(serving.outcomes[i]));
    }
    if (waiting->ended_serving()) from_->post(waiting);
  }
  if (taken->about->batch.op->answers_at_length) serving.outcomes.clear();  // results of functions may be large
  serving.give_back();
}

// Decodes the block's entries and checks them.
Status Request::prepare(Taken* taken, Serving* s) const {
  const wire::Block& block = taken->block;
  const About& about = *taken->about;
  const OpTraits& op = *about.batch.op;
  if (block.entries == 0 || (block.entries > 1 && op.answers_at_length))
    return Status(Code::kInvalidArgument,
                  std::string(name_of(op.op)) + " of " + std::to_string(block.entries) + " shards at once");
  if (!about.misplaced.ok() && !op.numbered) return about.misplaced;
  const std::byte* items = taken->body.rest;
  if (block.has(wire::kListed) && taken->misfit.ok()) WL_RETURN_IF_ERROR(read_list(taken, &items));
  uint64_t follows = 0;
  if (op.closes) {
    if (taken->argument_bytes != sizeof follows)
      return Status(Code::kInvalidArgument, "close: it must say what it follows");
    std::memcpy(&follows, taken->argument, sizeof follows);
  }
  s->taken = taken;
  s->about = &about;
  s->waiting = nullptr;
  s->entries.resize(block.entries);
  s->checked.assign(block.entries, taken->misfit);
  s->outcomes.resize(block.entries);
  s->out_at.assign(block.entries + 1, 0);
  s->parked.assign(block.entries, false);
  const uint32_t each = item_bytes(*about.object, block.flags);
  const std::byte* in = taken->bytes + wire::padded(block.body_bytes);
  uint64_t numbers_left = block.numbers_bytes;
  const bool counts = taken->misfit.ok() && has_items(about);  // of items, that were compared with the body
  about.object->begin_checks(counts ? items_in(*taken) : 0);
  for (uint32_t i = 0; i < block.entries; ++i) {
    const wire::EntryItem item = taken->body.at(block, i);
    Entry& e = s->entries[i] = Entry();
    s->outcomes[i] = Outcome();
    s->outcomes[i].term = block.term;
    e.shard = item.shard;
    e.term = block.term;
    e.sequence = item.sequence;
    e.clock = block.clock;
    e.value = taken->body.value;
    e.follows = follows;
    e.flags = block.flags;
    e.items = counts ? item.items : 0;
    e.encoded = items;
    items += uint64_t{e.items} * each;
    e.body = taken->argument;
    e.body_bytes = taken->argument_bytes;
    e.in = about.batch.in_place ? about.batch.arrays.in : in;
    if (about.batch.in_place) e.out = about.batch.arrays.out;
    e.numbers_bytes = block.entries == 1 ? numbers_left : about.object->numbers_bytes(about.batch, e);
    if (e.numbers_bytes > numbers_left)
      s->checked[i] =
          about.object->refused(Code::kShapeMismatch, "too few numbers for shard " + std::to_string(e.shard));
    e.numbers_bytes = std::min(e.numbers_bytes, numbers_left);
    numbers_left -= e.numbers_bytes;
    in += e.numbers_bytes;
  }
  if (numbers_left != 0)
    s->checked[0] =
        about.object->refused(Code::kShapeMismatch, std::to_string(numbers_left) + " bytes of numbers too many");
  const bool vector = op.op == Op::kVector || op.op == Op::kDot;
  for (uint32_t i = 0; i < block.entries; ++i) {
    Entry& e = s->entries[i];
    Status& checked = s->checked[i];
    if (about.object->find(e.shard) == nullptr) continue;  // run() answers where it is
    Status other;
    if (vector && checked.ok()) {
      WL_RETURN_IF_ERROR(wire::decode(e.body, e.body_bytes, &s->vector.item));
      const std::shared_ptr<ServedObject> x = from_->host().find(s->vector.item.object);
      other = read_other(about.batch, *about.object, x.get(), &e, &s->vector, &t_other);
    }
    uint64_t out_bytes = 0;
    if (checked.ok())
      checked = about.misplaced.ok() ? about.object->check(about.batch, &e, &out_bytes) : about.misplaced;
    if (checked.ok()) checked = other;
    s->out_at[i + 1] = out_bytes;
  }
  for (uint32_t i = 0; i < block.entries; ++i) s->out_at[i + 1] += s->out_at[i];
  return {};
}

uint64_t Request::items_in(const Taken& taken) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < taken.block.entries; ++i) n += taken.body.at(taken.block, i).items;
  return n;
}

// An operation that its object does not have is refused later, and may use up sequences.
bool Request::has_items(const About& about) {
  const OpTraits& op = *about.batch.op;
  return about.object->spec().is_table ? op.of_tables : op.of_tensors;
}

bool Request::is_next(const wire::Block& block) const {
  const std::shared_ptr<ServedObject> object =
      block.has(wire::kAsBefore) ? (last_ != nullptr ? last_->object : nullptr) : from_->host().find(block.object);
  Shard* const shard = object != nullptr ? object->find(block.shard) : nullptr;
  const uint32_t rank = object != nullptr ? from_->client()->rank_in(*object->workers()) : Gate::kOutsider;
  bool next = false;
  if (shard == nullptr || rank == Gate::kOutsider || !object->spec().sync().rounds()) return false;
  with_turn(shard->turn, [&] { next = BspUpdates::is_next(rank, block.clock, *shard->gate); });
  return next;
}

// Back-pressure: this client waits while `full`. Answers that are ready leave first, since their receivers may make
// room. False if the client is gone.
template <class Full, class Wait>
bool Request::wait_while(Full full, Wait wait, Answers* answers, Freed* freed) const {
  for (bool first = true; full(); first = false) {
    if (first) {
      answers->flush_and_shrink();
      deliver(freed);
    }
    if (from_->channel().gone()) return false;
    wait();
  }
  return true;
}

// Before a block is served. What waits is limited; and under BSP a worker does not go on to the next update while
// answers that show the one before have yet to be made for it. False if the client is gone.
bool Request::await_turn(const Taken& taken, Answers* answers, Freed* freed) const {
  const OpTraits* const op = taken.about->batch.op;
  ClientSession& client = *from_->client();
  const bool reads = op != nullptr && !op->numbered && !op->closes;
  uint32_t due = 0;
  const auto too_soon = [&] {
    due = client.updates_due.load(std::memory_order_acquire);
    const uint64_t asked = client.updates_asked.load(std::memory_order_relaxed);
    return due != 0 && (op != nullptr && op->numbered ? taken.block.clock >= asked : taken.block.clock > asked);
  };
  const auto for_them = [&] { os::wait(client.updates_due, due, kRoomWaitNs); };
  if (!reads && !wait_while(too_soon, for_them, answers, freed)) return false;
  uint32_t seen = 0;
  StagingQuota& waiting = from_->host().waiting();
  const auto too_many = [&] {
    seen = waiting.changes();
    return op != nullptr && from_->is_window_full(reads);
  };
  return wait_while(too_many, [&] { waiting.wait(seen, kRoomWaitNs); }, answers, freed);
}

// Waits for room for an answer. False if the client is gone.
bool Request::await_room(AnswerQuota& quota, uint64_t bytes, Answers* answers, Freed* freed,
                         AnswerQuota::Room* room) const {
  if (bytes <= limits::kBulkBytesMin) return true;
  bytes = Answers::memory_for(bytes);
  if (quota.take(bytes, room)) return true;
  answers->flush_and_shrink();
  deliver(freed);
  return quota.await(bytes, from_->client()->whose(), [this] { return from_->channel().gone(); }, room);
}

// Runs entry i. False: the client is gone.
bool Request::run(uint32_t i, Serving* s, Answers* answers, Freed* freed) const {
  const About& about = *s->about;
  Entry& entry = s->entries[i];
  Outcome& outcome = s->outcomes[i];
  Shard* const shard = about.object->find(entry.shard);
  if (shard == nullptr) {
    about.object->turn_away(entry, &outcome);
    return true;
  }
  const auto place = [&] {
    if (about.batch.in_place) return true;
    entry.out = s->waiting != nullptr ? s->waiting->out(i) : s->out + s->out_at[i];
    return entry.out != nullptr;
  };
  if (!place()) {
    outcome.refuse(Status(Code::kResourceExhausted, "no memory for an answer"));
    return true;
  }
  // The user's rule may take seconds: nobody else should wait for it.
  if (about.object->rule().kind == RuleKind::kForeign) deliver(freed);
  for (;;) {
    Verdict verdict = Verdict::kDone;
    const uint32_t seen = about.object->staging().changes();
    with_turn(shard->turn, [&] {
      verdict = about.object->run(about.batch, entry, *shard, s->checked[i], &outcome);
      if (verdict == Verdict::kFull) return;
      if (verdict != Verdict::kDone) s->parked[i] = park(i, verdict, *shard, s);
      if (!shard->parked.empty()) shard->parked.free(*shard, freed);
    });
    if (verdict != Verdict::kFull) break;
    // Back-pressure: this client waits, and holds no room meanwhile. Answers that are ready leave first, since their
    // receivers may make room.
    const bool moves = s->out_at[i] != 0 || s->waiting != nullptr;  // what was gathered needs another place
    if (moves && !s->move_out(i, from_, header_, true)) return false;
    answers->flush_and_shrink();
    deliver(freed);
    s->room.give_back();
    if (from_->channel().gone()) return false;
    about.object->staging().wait(seen, kRoomWaitNs);
    if (!moves && !await_room(from_->host().answers(), s->out_bytes(), answers, freed, &s->room)) return false;
    if (!moves) s->out = answers->open(s->out_bytes());
    if (!moves && s->out == nullptr) return false;
    if (!place()) return false;
  }
  if (s->parked[i]) return true;
  if (outcome.call != nullptr) deliver(freed);  // the user's function may take seconds
  outcome.finish(about.object->user_code());
  s->result_room.shrink(3 * outcome.body.size());
  return true;
}

// With the turn: leaves entry i in its shard. False: its outcome tells the client to send it again. Who waits at a gate
// needs no room: what it pushed has been taken, and nothing behind it may wait for room with it. Nor does who closes:
// others wait for that.
bool Request::park(uint32_t i, Verdict why, Shard& shard, Serving* s) const {
  const Batch& batch = s->about->batch;
  const Entry& entry = s->entries[i];
  const bool gated = why == Verdict::kGated;
  if (!from_->has_sender()) {
    // Nothing has happened yet, or it could not have come to its gate.
  } else if (s->move_out(i, from_, header_, batch.op->closes || gated)) {
    std::unique_ptr<Waiting> waiting = WaitingBlock::ticket(s->waiting, i, s->checked[i], why, shard);
    if (waiting != nullptr && shard.parked.park(&waiting, gated)) return true;
  }
  const Record& record = shard.records.of(batch.caller.number, batch.caller.incarnation);
  Outcome& outcome = s->outcomes[i];
  outcome.sequence = outcome.value = record.sequence;
  outcome.refuse(Status(Code::kOutOfSequence, "shard " + std::to_string(entry.shard) + " expected sequence " +
                                                  std::to_string(record.sequence + 1) + ", saw " +
                                                  std::to_string(entry.sequence)));
  return false;
}

}  // namespace windlass
