#include "server/incoming.h"

#include <algorithm>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "server/crew.h"
#include "server/host.h"
#include "server/parked_order.h"

namespace windlass {

using wire::Op;

namespace {

constexpr size_t kSection = limits::kSectionBytes;
constexpr uint64_t kLargeBytes = uint64_t{1} << 20;     // parts from here on count against the staging limit
constexpr size_t kKeptBufferBytes = size_t{16} << 20;   // a thread keeps no more between requests
constexpr size_t kStreamHelpers = 2;                    // one reads while two work; more would wait for the stream
constexpr uint64_t kTwoBytesMax = uint64_t{128} << 10;  // parts up to this are read in pairs

thread_local Buffer t_in, t_out;      // of the part at hand, and of its answer
thread_local Buffer t_heads, t_rest;  // of answers that are sent from where they lie

Status ended(const char* where) { return Status(Code::kServerLost, std::string("the connection ended ") + where); }

}  // namespace

Incoming::Incoming(std::shared_ptr<Connection> from, const wire::Header& header)
    : from_(std::move(from)),
      channel_(from_->channel()),
      header_(header),
      object_(from_->host().find(header.object)),
      left_parts_(header.parts),
      left_bytes_(header.length - header.extension_bytes) {}

Status Incoming::read_extensions(const std::byte* bytes) {
  if (crc32c(bytes, header_.extension_bytes) != header_.extension_crc)
    return Status(Code::kProtocolError, "frame: the checksum of the extensions is wrong");
  wire::Places places;
  WL_RETURN_IF_ERROR(wire::read_extensions(bytes, header_.extension_bytes, hyper_.v, &hypers_, &places));
  if (lies()) find_arrays(places);
  return {};
}

void Incoming::find_arrays(const wire::Places& p) {
  const Arenas& arenas = from_->guest()->arenas;
  if (p.in_arena != 0) misplaced_ = arenas.find(p.in_arena, p.in_offset, p.in_bytes, &lying_.in_mapping);
  if (p.out_arena != 0 && misplaced_.ok())
    misplaced_ = arenas.find(p.out_arena, p.out_offset, p.out_bytes, &lying_.out_mapping);
  if (!misplaced_.ok()) return;
  if (p.in_arena != 0) {
    lying_.in = lying_.in_mapping->data() + p.in_offset;
    lying_.in_bytes = p.in_bytes;
  }
  if (p.out_arena != 0) {
    lying_.out = lying_.out_mapping->data() + p.out_offset;
    lying_.out_bytes = p.out_bytes;
  }
  lying_.base = p.base;
}

// About how much there is to do.
uint64_t Incoming::work_bytes() const {
  if (lies()) return std::max(lying_.in_bytes, lying_.out_bytes);
  const bool rows = object_ != nullptr && object_->spec().is_table && header_.operation() == Op::kPull;
  return rows ? header_.length / sizeof(uint64_t) * object_->spec().table.dim * sizeof(float) : header_.length;
}

void Incoming::call_help(Server& server) {
  shared_ = header_.parts > 1 && server.threads() > 1 && work_bytes() >= limits::kCrewBytesMin;
  if (!shared_) return;
  const auto threads = static_cast<size_t>(server.threads());
  if (lies()) at_once_ = std::clamp<size_t>(header_.parts / (4 * threads), 1, kAtOnceMax);
  server.crew().post(Ref<Helped>(this), lies() ? threads - 1 : kStreamHelpers);
}

void Incoming::help() {
  helpers_.fetch_add(1, std::memory_order_acq_rel);
  {
    Answers answers(channel_, header_, &t_out);
    Lent lent(channel_, header_, &t_heads, &t_rest);
    Batch batch;
    for (;;) {
      if (!shared_ && !channel_.has_ahead(kSection)) lent.flush();  // whoever waits for the peer has no turn
      if (!next(&batch)) break;
      for (size_t i = 0; i < batch.n; ++i) {
        if (lend(batch.parts[i], &lent)) continue;
        lent.flush();
        serve(batch.parts[i], batch.bytes, &answers);
      }
      if (batch.staged != 0) from_->host().release(batch.staged);
    }
    lent.flush();
    answers.flush();
    t_in.shrink(kKeptBufferBytes);
    t_out.shrink(kKeptBufferBytes);
  }
  if (helpers_.fetch_sub(1, std::memory_order_acq_rel) == 1 && shared_) os::wake_all(helpers_);
}

Status Incoming::finish() {
  for (uint32_t n; (n = helpers_.load(std::memory_order_acquire)) != 0;) os::wait(helpers_, n, 10'000'000);
  std::lock_guard lock(reading_);
  if (status_.ok() && left_bytes_ != 0) {
    return Status(Code::kProtocolError, "frame: " + std::to_string(left_bytes_) + " bytes more than its parts have");
  }
  return status_;
}

bool Incoming::next(Batch* batch) {
  std::lock_guard lock(reading_);
  batch->n = 0;
  while (batch->n < at_once_ && left_parts_ != 0 && status_.ok()) {
    status_ = read_part(&batch->parts[batch->n], &batch->bytes, &batch->staged);
    --left_parts_;
    if (!status_.ok() || batch->parts[batch->n++].bytes() != 0) break;
  }
  return batch->n != 0;
}

Status Incoming::read_part(wire::Part* part, std::byte** at, uint64_t* staged) {
  *staged = 0;
  std::byte head[kSection];
  if (!channel_.read(head, kSection)) return ended("within a frame");
  WL_RETURN_IF_ERROR(wire::decode(head, part));
  const uint64_t after = uint64_t{left_parts_ - 1} * kSection;
  if (left_bytes_ < kSection + after || part->bytes() > left_bytes_ - kSection - after) {
    return Status(Code::kProtocolError, "part: " + std::to_string(part->bytes()) + " bytes, more than its frame has");
  }
  left_bytes_ -= kSection + part->bytes();
  const uint64_t bytes = part->bytes();
  if (!shared_ && (*at = channel_.in_place(bytes)) != nullptr) return {};
  // Neighbours tend to be of one size: two at a time halve the system calls.
  const uint64_t two = bytes <= kTwoBytesMax && !shared_ ? std::min(left_bytes_, kSection + bytes) : 0;
  if (bytes >= kLargeBytes) {
    if (!from_->host().reserve(bytes, os::now_ns() + int64_t{limits::kStallMs} * 1'000'000))
      return Status(Code::kResourceExhausted, "no room for " + std::to_string(bytes) + " bytes of a request");
    *staged = bytes;
  }
  Status status;
  channel_.hurry(*staged != 0);
  if (bytes >= kLargeBytes && broken(Break::kLengths)) std::memset(t_in.room(bytes), 0, bytes);
  if (bytes != 0 && t_in.room(bytes) == nullptr) {
    status = Status(Code::kResourceExhausted, "no memory for " + std::to_string(bytes) + " bytes of a request");
  } else if (bytes != 0 && !channel_.read(t_in.data(), bytes, two)) {
    status = ended("within a part");
  }
  channel_.hurry(false);
  *at = t_in.data();
  if (!status.ok() && *staged != 0) from_->host().release(*staged);
  return status;
}

Status Incoming::check_sums(const Order& o) const {
  if (o.part.items_bytes != 0 && crc32c(o.items, o.part.items_bytes) != o.part.items_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the items of shard " + std::to_string(o.part.shard) + " is wrong");
  if (o.part.numbers_bytes != 0 && (header_.flags & wire::kChecksummed) != 0 &&
      crc32c(o.numbers, o.part.numbers_bytes) != o.part.numbers_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the numbers of shard " + std::to_string(o.part.shard) + " is wrong");
  return {};
}

// Whether the object and the shard are here, under the term that the client thinks.
Status Incoming::locate(const Order& o, Shard** shard) const {
  if (object_ == nullptr) {
    return Status(Code::kNotFound, "object " + std::to_string(header_.object) + " is not on this server");
  }
  *shard = object_->find(o.part.shard);
  const std::string what = "'" + object_->spec().own_name() + "', shard " + std::to_string(o.part.shard);
  if (*shard == nullptr) return Status(Code::kStaleMap, what + ": not on this server");
  if (const uint32_t term = object_->map().run_of(o.part.shard).term; term != o.part.term && !broken(Break::kTerms)) {
    return Status(Code::kStaleMap,
                  what + ": expected term " + std::to_string(term) + ", saw " + std::to_string(o.part.term));
  }
  return {};
}

bool Incoming::lend(const wire::Part& part, Lent* lent) {
  if (shared_ || lies() || header_.operation() != Op::kPull || part.bytes() != 0 || part.flags != wire::kWhole)
    return false;
  const Order order{header_, part, hyper_, hypers_, from_->guest()->number, nullptr, nullptr};
  Shard* shard = nullptr;
  return locate(order, &shard).ok() && lent->add(order, *object_, *shard);
}

void Incoming::serve(const wire::Part& part, std::byte* bytes, Answers* answers) {
  Order order{header_, part, hyper_, hypers_, from_->guest()->number, bytes, bytes + wire::padded(part.items_bytes)};
  Reply reply;
  reply.part.shard = part.shard;
  reply.part.term = part.term;
  Shard* shard = nullptr;
  Status wrong = check_sums(order);
  if (lies()) {
    order.numbers = lying_.in;
    order.lying = &lying_;
  }
  if (wrong.ok()) wrong = locate(order, &shard);
  if (wrong.ok() && !misplaced_.ok() && !order.pushes()) wrong = misplaced_;
  if (!wrong.ok()) {
    if (answers->open(0) != nullptr) {
      reply.refuse(wrong);
      answers->add(reply);
    }
    return;
  }
  uint64_t out_bytes = 0;
  Status checked = misplaced_.ok() ? object_->check(order, &out_bytes) : misplaced_;
  std::byte* out = answers->open(out_bytes);
  if (out == nullptr) {
    checked = Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes) + " bytes");
    out = answers->open(0);
    if (out == nullptr) return;
  }
  if (lies()) out = lying_.out;
  bool parked = false;
  std::vector<std::unique_ptr<ParkedOrder>> freed;
  with_turn(shard->turn, [&] {
    if (!object_->run(order, *shard, checked, out, &reply)) {
      parked = park(order, checked, out_bytes, *shard, &reply);
      return;
    }
    while (!shard->parked.empty()) {
      const Record& record = shard->records.of(order.session, order.header.session);
      std::unique_ptr<Waiting> waiting = shard->parked.take(order.session, record.sequence);
      if (waiting == nullptr) break;
      freed.emplace_back(static_cast<ParkedOrder*>(waiting.release()));
      freed.back()->run(*shard);
    }
  });
  if (!parked) answers->add(reply);
  for (const auto& f : freed) f->answer();
}

bool Incoming::park(const Order& order, const Status& checked, uint64_t out_bytes, Shard& shard, Reply* reply) {
  std::unique_ptr<Waiting> waiting = ParkedOrder::make(from_, object_, order, checked, out_bytes);
  if (waiting != nullptr && shard.parked.park(&waiting)) return true;
  const Record& record = shard.records.of(order.session, order.header.session);
  reply->part.sequence = record.sequence;
  reply->refuse(Status(Code::kOutOfSequence, "shard " + std::to_string(order.part.shard) + " expected sequence " +
                                                 std::to_string(record.sequence + 1) + ", saw " +
                                                 std::to_string(order.part.sequence)));
  return false;
}

}  // namespace windlass
