#include "server/move/arrival.h"

#include <cstring>

#include "server/host.h"

namespace windlass {

void Arrival::close() {
  Shard* const shard = complete_ ? nullptr : std::exchange(shard_, nullptr);
  closed_ = true;
  if (shard == nullptr) return;
  object_->give_memory(first_.shard);
  with_turn(shard->turn, [&] { shard->home.become(Residence::kElsewhere); });
}

Status Arrival::wrong(const std::string& what, uint64_t expected, uint64_t seen) const {
  const std::string of = object_ != nullptr ? "'" + object_->spec().own_name() + "', shard " : "shard ";
  return Status(Code::kCorrupt, of + std::to_string(first_.shard) + ": " + what + ": expected " +
                                    std::to_string(expected) + ", saw " + std::to_string(seen));
}

Status Arrival::take(const Chunk& chunk, const std::byte* body) {
  if (complete_ || closed_) return wrong("chunks behind the end", 0, 1);
  if (chunk.number != next_++) return wrong("number of a chunk", next_ - 1, chunk.number);
  WL_RETURN_IF_ERROR(check_body(chunk, body));
  if (chunk.number == 0) {
    first_ = chunk;
    return begin(chunk, body);
  }
  if (object_ == nullptr) return wrong("begin", 1, 0);
  if (chunk.object != first_.object || chunk.shard != first_.shard || chunk.term != first_.term ||
      chunk.server != first_.server)
    return wrong("one shard; its number", first_.shard, chunk.shard);
  if (known_) {
    complete_ = chunk.kind == Chunk::kEnd;
    return {};
  }
  switch (chunk.kind) {
    case Chunk::kArray: return take_array(chunk, body);
    case Chunk::kRows: return take_rows(chunk, body);
    case Chunk::kErased: return take_erased(chunk, body);
    case Chunk::kRecords: return take_records(chunk, body);
    case Chunk::kGate: return take_gate(chunk, body);
    case Chunk::kPush: return take_push(chunk, body);
    case Chunk::kCrowd: return take_crowd(chunk, body);
    case Chunk::kEnd: return end(chunk, body);
    default: return wrong("one begin; another at chunk", 0, chunk.number);
  }
}

Status Arrival::begin(const Chunk& chunk, const std::byte* body) {
  if (chunk.kind != Chunk::kBegin) return wrong("kind of the first chunk", Chunk::kBegin, chunk.kind);
  Map map;
  ObjectSpec spec;
  WL_RETURN_IF_ERROR(decode_begin(body, chunk.bytes, &map, &spec));
  if (map.object != chunk.object) return wrong("object", chunk.object, map.object);
  WL_RETURN_IF_ERROR(host_.receive(spec, map, chunk.server, &object_));
  const std::string what = "'" + spec.own_name() + "', shard " + std::to_string(chunk.shard);
  if (chunk.shard >= object_->shards()) return wrong("shards at most", object_->shards(), chunk.shard);
  Shard& shard = object_->make_place(chunk.shard);
  Status status;
  bool ours = false;
  with_turn(shard.turn, [&] {
    Residence& home = shard.home;
    known_ = home.state == Residence::kHere && home.term == chunk.term;
    if (known_) return;
    if (home.deleted()) {
      status = object_->gone();
    } else if (home.state == Residence::kHere || home.state == Residence::kFrozen) {
      status = Status(Code::kInvalidArgument,
                      what + ": it is here, under term " + std::to_string(home.term) + ", and cannot come");
    } else if (home.state == Residence::kArriving || home.leaving) {
      status = Status(Code::kInvalidArgument, what + ": another copy is arriving");
    } else if (chunk.term <= home.term || (home.state == Residence::kArrived && chunk.term < home.next_term)) {
      status = Status(Code::kStaleMap, what + ": expected a term above " + std::to_string(home.term) + ", saw " +
                                           std::to_string(chunk.term));
    } else {
      ours = true;
      home.state = Residence::kArriving;
    }
  });
  if (known_) return {};
  if (!ours) return status;
  shard_ = &shard;
  object_->set_used();
  if (object_->table() != nullptr) {
    object_->table()->clear(chunk.shard);  // drops an earlier copy that never counted
    return {};
  }
  WL_RETURN_IF_ERROR(object_->take_memory(chunk.shard));
  arrays_ = object_->tensor_of(chunk.shard).pieces_of(chunk.shard);
  return {};
}

Status Arrival::take_array(const Chunk& chunk, const std::byte* body) {
  if (chunk.items != next_array_ || next_array_ >= arrays_.size())
    return wrong("array number, of " + std::to_string(arrays_.size()), next_array_, chunk.items);
  const Tensor::Piece& array = arrays_[next_array_];
  const uint64_t expected = std::min<uint64_t>(array.bytes - array_at_, limits::kShardChunkBytesMax);
  if (chunk.bytes != expected) return wrong("bytes of array " + std::to_string(next_array_), expected, chunk.bytes);
  if (expected != 0) std::memcpy(array.data + array_at_, body, expected);
  array_at_ += expected;
  if (array_at_ == array.bytes) {
    array_at_ = 0;
    ++next_array_;
  }
  return {};
}

Status Arrival::take_rows(const Chunk& chunk, const std::byte* body) {
  Table* const table = object_->table();
  if (table == nullptr) return wrong("rows in a tensor", 0, chunk.items);
  if (chunk.bytes != uint64_t{chunk.items} * table->copy_bytes())
    return wrong("bytes of rows", uint64_t{chunk.items} * table->copy_bytes(), chunk.bytes);
  return table->put(chunk.shard, body, chunk.items);
}

Status Arrival::take_erased(const Chunk& chunk, const std::byte* body) {
  Table* const table = object_->table();
  if (table == nullptr) return wrong("keys in a tensor", 0, chunk.items);
  if (chunk.bytes != uint64_t{chunk.items} * sizeof(uint64_t))
    return wrong("bytes of keys", uint64_t{chunk.items} * sizeof(uint64_t), chunk.bytes);
  std::vector<Keyed> keyed(chunk.items);
  for (uint32_t i = 0; i < chunk.items; ++i) {
    uint64_t key = 0;
    std::memcpy(&key, body + i * sizeof key, sizeof key);
    keyed[i] = {mix(key), 0};
    if (shard_of_hash(keyed[i].hash) != chunk.shard)
      return wrong("shard of a key", chunk.shard, shard_of_hash(keyed[i].hash));
  }
  (void)table->erase(chunk.shard, keyed.data(), keyed.size());
  return {};
}

Status Arrival::take_records(const Chunk& chunk, const std::byte* body) {
  if (chunk.items > limits::kShardRecordsMax - records_.size())
    return wrong("records at most", limits::kShardRecordsMax, records_.size() + chunk.items);
  wire::Reader reader(body, chunk.bytes);
  for (uint32_t i = 0; i < chunk.items; ++i) {
    Record record;
    WL_RETURN_IF_ERROR(decode(&reader, &record));
    records_.push_back(std::move(record));
  }
  return reader.at_end() ? Status() : wrong("bytes behind the records", 0, reader.left());
}

Status Arrival::take_gate(const Chunk& chunk, const std::byte* body) {
  if (!object_->spec().sync().gated() || gate_ != nullptr) return wrong("gates", gate_ != nullptr ? 1 : 0, 1);
  gate_ = std::make_unique<Gate>(object_->spec().sync());
  return decode(body, chunk.bytes, os::now_ns(), gate_.get());
}

Status Arrival::take_crowd(const Chunk& chunk, const std::byte* body) {
  if (!crowd_.empty() || gate_ != nullptr) return wrong("crowds", 1, 2);
  return decode(body, chunk.bytes, chunk.items, &crowd_);
}

Status Arrival::take_push(const Chunk& chunk, const std::byte* body) {
  if (gate_ == nullptr || !object_->spec().sync().rounds()) return wrong("pushes that wait", 0, 1);
  if (rounds_ == nullptr) rounds_ = std::make_unique<BspUpdates>(&object_->staging());
  return rounds_->put(body, chunk.bytes, *gate_, object_->target(chunk.shard));
}

Status Arrival::end(const Chunk& chunk, const std::byte* body) {
  ShardEnd end;
  if (chunk.bytes != sizeof end) return wrong("bytes of the end", sizeof end, chunk.bytes);
  std::memcpy(&end, body, sizeof end);
  if (end.records != records_.size()) return wrong("records", end.records, records_.size());
  if (next_array_ != arrays_.size()) return wrong("arrays", arrays_.size(), next_array_);
  const uint64_t rows = object_->table() != nullptr ? object_->table()->rows(chunk.shard) : 0;
  if (end.rows != rows) return wrong("rows", end.rows, rows);
  if (object_->spec().sync().gated() && gate_ == nullptr) return wrong("gates", 1, 0);
  // This server may have joined after workers had come and ticked: it waits for whom the source waited for.
  const bool heard = object_->workers()->hear(crowd_);
  with_turn(shard_->turn, [&] {
    shard_->version = end.version;
    shard_->count = end.count;
    shard_->records.clear();
    for (Record& record : records_) shard_->records.add(std::move(record));
    shard_->home.become(Residence::kArrived);
    shard_->home.next_term = chunk.term;
    if (gate_ == nullptr) return;
    shard_->gate = std::move(gate_);
    shard_->staged = std::move(rounds_);
    object_->set_view(*shard_, chunk.shard, object_->workers()->view(object_->map().object));
  });
  complete_ = true;
  if (heard) host_.server().tell_gates(object_->workers());
  return {};
}

}  // namespace windlass
