#include "server/request.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "server/host.h"
#include "server/parked_order.h"
#include "server/vector.h"

namespace windlass {

using wire::Op;

namespace {

constexpr size_t kStepAtOnce = 8;
constexpr int64_t kRoomWaitNs = 100'000'000;  // then it is seen whether the client is still there
constexpr size_t kKeptListBytes = size_t{4} << 20;

thread_local Buffer t_list;    // of the part at hand
thread_local Buffer t_posted;  // of answers to others
thread_local Buffer t_other;   // of a vector operation: its item, and the other shard's numbers

}  // namespace

Request::Request(std::shared_ptr<Connection> from, const wire::Header& header) : from_(std::move(from)) {
  about_.header = header;
  if (!is_step()) about_.object = from_->host().find(header.object);
}

Status Request::read_extensions(const std::byte* bytes) {
  if (crc32c(bytes, header().extension_bytes) != header().extension_crc)
    return Status(Code::kProtocolError, "frame: the checksum of the extensions is wrong");
  wire::Places places;
  double numbers[limits::kPushNumbersMax] = {};
  WL_RETURN_IF_ERROR(wire::read_extensions(bytes, header().extension_bytes, numbers, &about_.hypers, &places));
  about_.take_numbers(numbers);
  if (lies()) find_arrays(places, &about_);
  if (is_step()) {  // every part has places of its own; these are the sums
    about_.lying.in_bytes = places.in_bytes;
    about_.lying.out_bytes = places.out_bytes;
  }
  about_.lying.streamed = places.out_bytes;
  return {};
}

void Request::find_arrays(const wire::Places& p, About* about) const {
  const Arenas& arenas = from_->guest()->arenas;
  Lying& lying = about->lying;
  if (p.in_arena != 0) about->misplaced = arenas.find(p.in_arena, p.in_offset, p.in_bytes, &lying.in_mapping);
  if (p.out_arena != 0 && about->misplaced.ok())
    about->misplaced = arenas.find(p.out_arena, p.out_offset, p.out_bytes, &lying.out_mapping);
  if (!about->misplaced.ok()) return;
  if (p.in_arena != 0) {
    lying.in = lying.in_mapping->data() + p.in_offset;
    lying.in_bytes = p.in_bytes;
  }
  if (p.out_arena != 0) {
    lying.out = lying.out_mapping->data() + p.out_offset;
    lying.out_bytes = p.out_bytes;
  }
  lying.base = p.base;
}

bool Request::is_large() const {
  const Op op = header().operation();
  if (op == Op::kQuery) return true;  // it looks at all that its shards have
  // A rule of the user's runs on one thread: others would only wait for it.
  if (about_.object != nullptr && about_.object->rule().kind == RuleKind::kForeign && op != Op::kPull) return false;
  uint64_t bytes = header().length;
  if (lies()) {
    bytes = std::max(about_.lying.in_bytes, about_.lying.out_bytes);
  } else if (about_.object != nullptr && about_.object->spec().is_table && header().operation() == Op::kPull) {
    bytes = bytes / sizeof(uint64_t) * about_.object->spec().table.dim * sizeof(float);
  } else if (about_.object != nullptr && !about_.object->spec().is_table && header().operation() == Op::kVector) {
    const TensorSpec& spec = about_.object->spec().tensor;
    const Cut cut = cut_of(spec);
    bytes = header().parts * cut.per_shard * size_of(spec.dtype);
  }
  return bytes >= (is_step() ? limits::kBulkBytesMin : limits::kCrewBytesMin);
}

Order Request::order_of(const About& about, const wire::Part& part, std::byte* bytes) const {
  Order order;
  order.header = about.header;
  order.part = part;
  order.hyper = about.hyper;
  order.hypers = about.hypers;
  order.session = from_->guest()->number;
  order.weight = about.weight;
  order.object_weight = about.object_weight;
  order.other_weight = about.other_weight;
  order.items = bytes;
  order.numbers = bytes + wire::padded(part.items_bytes);
  order.frame_op = header().operation();
  order.label = part.shard;
  return order;
}

Status Request::check_sums(const Order& o) const {
  if (o.part.items_bytes != 0 && crc32c(o.items, o.part.items_bytes) != o.part.items_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the items of part " + std::to_string(o.part.shard) + " is wrong");
  if (o.part.numbers_bytes != 0 && (header().flags & wire::kChecksummed) != 0 &&
      crc32c(o.numbers, o.part.numbers_bytes) != o.part.numbers_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the numbers of part " + std::to_string(o.part.shard) + " is wrong");
  return {};
}

// What a part of a step is about: its first item, which makes it an order like any other.
Status Request::read_item(Order* order, About* about) const {
  wire::StepItem item;
  WL_RETURN_IF_ERROR(wire::decode(order->items, order->part.items_bytes, &item));
  about->header = header();
  about->header.op = item.op;
  about->header.object = item.object;
  about->header.dtype_in = item.dtype_in;
  about->header.dtype_out = item.dtype_out;
  about->object = from_->host().find(item.object);
  about->hypers = item.hypers;
  double numbers[limits::kPushNumbersMax] = {};
  std::memcpy(numbers, order->items + sizeof item, item.hypers * sizeof(double));
  about->take_numbers(numbers);
  if (lies()) find_arrays(item.places, about);
  about->lying.streamed = about_.lying.streamed;
  order->header = about->header;
  order->hyper = about->hyper;
  order->hypers = about->hypers;
  order->weight = about->weight;
  order->object_weight = about->object_weight;
  order->other_weight = about->other_weight;
  order->part.shard = item.shard;
  order->part.items_bytes -= item.bytes();
  order->items += item.bytes();
  return {};
}

// The items of a part that are in an arena: copied, and only then looked at.
Status Request::read_list(Order* order) const {
  wire::ListedItems list;
  if (is_step() || order->part.items_bytes != sizeof list)
    return Status(Code::kInvalidArgument, "part: no list of items in an arena was expected here");
  std::memcpy(&list, order->items, sizeof list);
  if (list.bytes > limits::kItemsBytesMax)
    return Status(Code::kInvalidArgument, "part: a list of " + std::to_string(list.bytes) + " bytes, at most " +
                                              std::to_string(limits::kItemsBytesMax));
  std::shared_ptr<const Mapping> mapping;
  WL_RETURN_IF_ERROR(from_->guest()->arenas.find(list.arena, list.offset, list.bytes, &mapping));
  std::byte* const copy = t_list.room(list.bytes + 1);
  if (copy == nullptr) return Status(Code::kResourceExhausted, "part: no memory for its list of items");
  std::memcpy(copy, mapping->data() + list.offset, list.bytes);
  if (crc32c(copy, list.bytes) != list.crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt,
                  "the checksum of the list of part " + std::to_string(order->part.shard) + " is wrong");
  order->items = copy;
  order->part.items_bytes = static_cast<uint32_t>(list.bytes);
  return {};
}

// The worker has closed everything before a clock, except at shards of the objects it has open.
Status Request::tick(const Order& order) const {
  if (order.part.items_bytes % sizeof(uint32_t) != 0) return Status(Code::kInvalidArgument, "tick: malformed");
  std::vector<uint32_t> open(order.part.items_bytes / sizeof(uint32_t));
  if (!open.empty()) std::memcpy(open.data(), order.items, order.part.items_bytes);
  std::sort(open.begin(), open.end());
  from_->host().tick(*from_->guest(), order.part.clock, std::move(open));
  return {};
}

bool Request::lend(const wire::Part& part, Lent* lent) const {
  if (lies() || header().operation() != Op::kPull || part.bytes() != 0 || part.flags != wire::kWhole) return false;
  Shard* const shard = about_.object != nullptr ? about_.object->find(part.shard) : nullptr;
  if (shard == nullptr) return false;
  Order order = order_of(about_, part, nullptr);
  order.rank = from_->guest()->rank_in(*about_.object->crowd());
  return lent->add(order, *about_.object, *shard);
}

void Request::prepare(const Taken& taken, Ready* ready) const {
  Order& order = ready->order;
  order = order_of(about_, taken.part, taken.bytes);
  Status& wrong = ready->wrong;
  wrong = check_sums(order);
  if (wrong.ok() && (order.part.flags & wire::kTicks) != 0) from_->host().tick(*from_->guest(), order.part.clock);
  if (is_step() && wrong.ok()) wrong = read_item(&order, &ready->own);
  if ((order.part.flags & wire::kListed) != 0 && wrong.ok()) wrong = read_list(&order);
  const About& about = is_step() ? ready->own : about_;
  if (lies()) {
    order.numbers = about.lying.in;
    order.lying = &about.lying;
  }
  if (wrong.ok() && order.op() == Op::kTick) {
    ready->ticks = true;
    return;
  }
  if (wrong.ok() && about.object == nullptr)
    wrong = Status(Code::kNotFound, "object " + std::to_string(about.header.object) + " is not on this server");
  if (wrong.ok()) {
    ready->shard = about.object->find(order.part.shard);
    ready->absent = ready->shard == nullptr;
    order.rank = from_->guest()->rank_in(*about.object->crowd());
    if (order.op() == Op::kClose) std::memcpy(&order.object_weight, &order.part.value, sizeof order.object_weight);
  }
  if (wrong.ok() && order.op() == Op::kVector && !ready->absent) {
    wrong = wire::decode(order.items, order.part.items_bytes, &order.vector);
    if (wrong.ok()) ready->other = read_other(from_->host(), *about.object, &order, &t_other);
  }
  if (wrong.ok() && !about.misplaced.ok() && !order.pushes()) wrong = about.misplaced;
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
    for (size_t k = 0; k < some; ++k) serve(ready[k], answers, freed);
    t_list.shrink(kKeptListBytes);
    i += some;
    for (size_t k = 0; k < some && i < n; ++k) ready[k] = Ready();
  }
}

void Request::serve(const Ready& ready, Answers* answers, Freed* freed) const {
  const Order& order = ready.order;
  const About& about = is_step() ? ready.own : about_;
  Reply reply;
  reply.part.shard = order.label;
  reply.part.term = order.part.term;
  if (ready.ticks) {
    if (const Status status = tick(order); !status.ok()) reply.refuse(status);
    if (answers->open(0) != nullptr) answers->add(reply);
    return;
  }
  if (!ready.wrong.ok() || ready.absent) {
    if (answers->open(0) == nullptr) return;
    ready.absent ? about.object->turn_away(order, &reply) : reply.refuse(ready.wrong);
    answers->add(reply);
    return;
  }
  Shard& shard = *ready.shard;
  uint64_t out_bytes = 0;
  Status checked = about.misplaced.ok() ? about.object->check(order, &out_bytes) : about.misplaced;
  if (checked.ok()) checked = ready.other;
  std::byte* out = answers->open(out_bytes);
  if (out == nullptr) {
    checked = Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes) + " bytes");
    out = answers->open(0);
    if (out == nullptr) return;
  }
  if (lies()) out = about.lying.out;
  // The user's rule may take seconds: nobody else waits for it.
  if (about.object->rule().kind == RuleKind::kForeign) answer_all(freed);
  bool parked = false;
  Ran ran = Ran::kDone;
  for (;;) {
    const uint32_t seen = about.object->room().changes();
    with_turn(shard.turn, [&] {
      ran = about.object->run(order, shard, checked, out, &reply);
      if (ran == Ran::kFull) return;
      if (ran != Ran::kDone) parked = park(about, order, checked, out_bytes, shard, ran, &reply);
      if (!shard.parked.empty()) shard.parked.free(shard, freed);
    });
    if (ran != Ran::kFull) break;
    // Back-pressure: this client waits. Answers that are ready leave first, since whoever gets one may make room.
    answers->flush();
    answer_all(freed);
    if (from_->channel().broken()) return;
    about.object->room().wait(seen, kRoomWaitNs);
    out = lies() ? about.lying.out : answers->open(out_bytes);
    if (out == nullptr && !lies()) return;
  }
  if (parked) return;
  if (reply.call != nullptr) answer_all(freed);  // the user's function may take seconds
  reply.finish(about.object->user_code());
  answers->add(reply);
}

void answer_all(Freed* freed) {
  if (freed->empty()) return;
  const auto of = [](const std::unique_ptr<Waiting>& w) -> ParkedOrder& { return static_cast<ParkedOrder&>(*w); };
  const auto key = [&](const std::unique_ptr<Waiting>& w) {
    return std::tuple(&of(w).from(), -int{of(w).order().header.priority}, of(w).request());
  };
  std::stable_sort(freed->begin(), freed->end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  for (size_t i = 0; i < freed->size();) {
    const ParkedOrder& first = of((*freed)[i]);
    Answers answers(first.from().channel(), first.frame(), &t_posted, &first.from());
    for (const auto same = key((*freed)[i]); i < freed->size() && key((*freed)[i]) == same; ++i) {
      of((*freed)[i]).add_to(&answers);
    }
    answers.flush();
  }
  freed->clear();
  t_posted.shrink(kKeptListBytes);
}

bool Request::park(const About& about, const Order& order, const Status& checked, uint64_t out_bytes, Shard& shard,
                   Ran ran, Reply* reply) const {
  std::unique_ptr<Waiting> waiting = ParkedOrder::make(from_, about.object, order, checked, out_bytes, ran, shard);
  if (waiting != nullptr && shard.parked.park(&waiting, ran == Ran::kGated)) return true;
  const Record& record = shard.records.of(order.session, order.header.session);
  reply->part.sequence = record.sequence;
  reply->refuse(Status(Code::kOutOfSequence, "shard " + std::to_string(order.part.shard) + " expected sequence " +
                                                 std::to_string(record.sequence + 1) + ", saw " +
                                                 std::to_string(order.part.sequence)));
  return false;
}

}  // namespace windlass
