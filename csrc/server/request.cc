#include "server/request.h"

#include "base/breaks.h"
#include "base/crc32c.h"
#include "server/host.h"
#include "server/parked_order.h"

namespace windlass {

using wire::Op;

Request::Request(std::shared_ptr<Connection> from, const wire::Header& header)
    : from_(std::move(from)), header_(header), object_(from_->host().find(header.object)) {}

Status Request::read_extensions(const std::byte* bytes) {
  if (crc32c(bytes, header_.extension_bytes) != header_.extension_crc)
    return Status(Code::kProtocolError, "frame: the checksum of the extensions is wrong");
  wire::Places places;
  WL_RETURN_IF_ERROR(wire::read_extensions(bytes, header_.extension_bytes, hyper_.v, &hypers_, &places));
  if (lies()) find_arrays(places);
  return {};
}

void Request::find_arrays(const wire::Places& p) {
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

uint64_t Request::work_bytes() const {
  if (lies()) return std::max(lying_.in_bytes, lying_.out_bytes);
  const bool rows = object_ != nullptr && object_->spec().is_table && header_.operation() == Op::kPull;
  return rows ? header_.length / sizeof(uint64_t) * object_->spec().table.dim * sizeof(float) : header_.length;
}

Status Request::check_sums(const Order& o) const {
  if (o.part.items_bytes != 0 && crc32c(o.items, o.part.items_bytes) != o.part.items_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the items of shard " + std::to_string(o.part.shard) + " is wrong");
  if (o.part.numbers_bytes != 0 && (header_.flags & wire::kChecksummed) != 0 &&
      crc32c(o.numbers, o.part.numbers_bytes) != o.part.numbers_crc && !broken(Break::kChecksums))
    return Status(Code::kCorrupt, "the checksum of the numbers of shard " + std::to_string(o.part.shard) + " is wrong");
  return {};
}

// Whether the object and the shard are here, under the term that the client thinks.
Status Request::locate(const Order& o, Shard** shard) const {
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

bool Request::lend(const wire::Part& part, Lent* lent) const {
  if (lies() || header_.operation() != Op::kPull || part.bytes() != 0 || part.flags != wire::kWhole)
    return false;
  const Order order{header_, part, hyper_, hypers_, from_->guest()->number, nullptr, nullptr};
  Shard* shard = nullptr;
  return locate(order, &shard).ok() && lent->add(order, *object_, *shard);
}

void Request::serve(const wire::Part& part, std::byte* bytes, Answers* answers) {
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

bool Request::park(const Order& order, const Status& checked, uint64_t out_bytes, Shard& shard, Reply* reply) {
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
