#include "messages/chunk.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace windlass {
namespace {

constexpr size_t kSummedBytes = sizeof(Chunk) - sizeof(uint32_t);

Status wrong(const std::string& what, uint64_t expected, uint64_t seen) {
  return Status(Code::kCorrupt,
                "shard: " + what + ": expected " + std::to_string(expected) + ", saw " + std::to_string(seen));
}

}  // namespace

void encode(const Chunk& chunk, std::byte* to) {
  Chunk c = chunk;
  c.crc = crc32c(&c, kSummedBytes);
  std::memcpy(to, &c, sizeof c);
}

Status decode(const std::byte* from, Chunk* out) {
  Chunk c;
  std::memcpy(&c, from, sizeof c);
  if (c.magic != Chunk::kMagic) return wrong("magic", Chunk::kMagic, c.magic);
  if (c.version != Chunk::kVersion) return wrong("version", Chunk::kVersion, c.version);
  if (const uint32_t crc = crc32c(&c, kSummedBytes); crc != c.crc) return wrong("checksum of a header", crc, c.crc);
  if (c.kind < Chunk::kBegin || c.kind > Chunk::kCrowd) return wrong("kind of a chunk at most", Chunk::kCrowd, c.kind);
  if (c.bytes > limits::kShardChunkBytesMax) return wrong("bytes at most", limits::kShardChunkBytesMax, c.bytes);
  *out = c;
  return {};
}

Status check_body(const Chunk& chunk, const std::byte* body) {
  const uint32_t crc = crc32c(body, chunk.bytes);
  return crc == chunk.body_crc ? Status() : wrong("checksum of a body", chunk.body_crc, crc);
}

std::string encode_begin(const Map& map, const ObjectSpec& spec) {
  wire::Writer writer;
  encode(map, &writer);
  encode(spec, &writer);
  return writer.take();
}

Status decode_begin(const std::byte* body, size_t bytes, Map* map, ObjectSpec* spec) {
  wire::Reader reader(body, bytes);
  WL_RETURN_IF_ERROR(decode(&reader, map));
  WL_RETURN_IF_ERROR(decode(&reader, spec));
  return reader.at_end() ? Status() : wrong("bytes behind the spec", 0, reader.left());
}

std::string encode(const Gate& gate, int64_t now_ns) {
  wire::Writer w;
  w.put(gate.made());
  w.put(static_cast<uint32_t>(gate.workers().size()));
  w.put(uint32_t{0});
  for (const Gate::Worker& worker : gate.workers()) {
    w.put(worker.rank);
    w.put(static_cast<uint32_t>(worker.closed.size()));
    w.put(worker.clock);
    w.put(now_ns - worker.opened_ns);
    w.put(uint64_t{worker.skipped.size()});
    for (const Gate::Closed& closed : worker.closed) {
      w.put(closed.iteration);
      w.put(closed.weight);
    }
    for (const Gate::Skipped& skipped : worker.skipped) {
      w.put(skipped.first);
      w.put(skipped.end);
    }
  }
  return w.take();
}

Status decode(const std::byte* body, size_t bytes, int64_t now_ns, Gate* gate) {
  wire::Reader r(body, bytes);
  const auto made = r.get<uint64_t>();
  const auto workers = r.get<uint32_t>();
  r.get<uint32_t>();
  std::vector<Gate::Worker> all;
  for (uint32_t i = 0; i < workers && r.ok(); ++i) {
    Gate::Worker worker;
    worker.rank = r.get<uint32_t>();
    const auto closed = r.get<uint32_t>();
    worker.clock = r.get<uint64_t>();
    worker.opened_ns = now_ns - r.get<int64_t>();
    const auto skips = r.get<uint64_t>();
    for (uint32_t k = 0; k < closed && r.ok(); ++k) {
      const auto iteration = r.get<uint64_t>();
      worker.closed.push_back({iteration, r.get<double>()});
    }
    for (uint64_t k = 0; k < skips && r.ok(); ++k) {
      const auto first = r.get<uint64_t>();
      worker.skipped.push_back({first, r.get<uint64_t>()});
    }
    if (!all.empty() && worker.rank <= all.back().rank)
      return wrong("ranks that ascend from", all.back().rank, worker.rank);
    all.push_back(std::move(worker));
  }
  if (!r.at_end()) return Status(Code::kCorrupt, "shard: its gate is cut short, or longer than it says");
  gate->restore(made, std::move(all));
  return {};
}

std::string encode(const std::vector<Workers::Heard>& crowd, uint32_t* items) {
  wire::Writer w;
  *items = 0;
  size_t bytes = 0;
  for (const Workers::Heard& h : crowd) {
    bytes += 32 + h.open.size() * sizeof(uint32_t);
    if (bytes > limits::kShardChunkBytesMax) break;
    w.put(h.rank);
    w.put(static_cast<uint32_t>(h.open.size()));
    w.put(h.entered);
    w.put(h.entered_at);
    w.put(h.ticked);
    for (const uint32_t object : h.open) w.put(object);
    ++*items;
  }
  return w.take();
}

Status decode(const std::byte* body, size_t bytes, uint32_t items, std::vector<Workers::Heard>* crowd) {
  const auto wrong = [](const char* what) { return Status(Code::kCorrupt, std::string("crowd: ") + what); };
  wire::Reader r(body, bytes);
  for (uint32_t i = 0; i < items && r.ok(); ++i) {
    Workers::Heard h;
    h.rank = r.get<uint32_t>();
    const auto open = r.get<uint32_t>();
    h.entered = r.get<uint64_t>();
    h.entered_at = r.get<uint64_t>();
    h.ticked = r.get<uint64_t>();
    if (!r.ok() || open > r.left() / sizeof(uint32_t)) return wrong("more objects than bytes");
    for (uint32_t j = 0; j < open; ++j) h.open.push_back(r.get<uint32_t>());
    if (!std::is_sorted(h.open.begin(), h.open.end())) return wrong("objects are not in order");
    if (!crowd->empty() && crowd->back().rank >= h.rank) return wrong("ranks do not ascend");
    crowd->push_back(std::move(h));
  }
  return r.at_end() ? Status() : wrong("its length is not that of its workers");
}

void encode(const Record& record, wire::Writer* w) {
  const size_t kept = record.kept != nullptr ? record.kept->size() : 0;
  w->put(record.incarnation);
  w->put(record.sequence);
  w->put(record.clock);
  w->put(record.seen);
  w->put(static_cast<uint32_t>(kept));
  w->put(record.rank);
  for (size_t i = 0; i < kept; ++i) {
    const Record::Kept& k = (*record.kept)[i];
    const std::string message = k.status.message().substr(0, limits::kMessageBytesMax);
    w->put(k.sequence);
    w->put(k.value);
    w->put(static_cast<uint32_t>(k.status.code()));
    w->put(static_cast<uint32_t>(message.size()));
    w->put_bytes(message);
  }
}

Status decode(wire::Reader* r, Record* out) {
  Record record;
  record.incarnation = r->get<uint64_t>();
  record.sequence = r->get<uint64_t>();
  record.clock = r->get<uint64_t>();
  record.seen = r->get<uint64_t>();
  const auto kept = r->get<uint32_t>();
  record.rank = r->get<uint32_t>();
  if (kept > limits::kKeptAnswersMax) return wrong("kept answers at most", limits::kKeptAnswersMax, kept);
  for (uint32_t i = 0; i < kept && r->ok(); ++i) {
    const auto sequence = r->get<uint64_t>(), value = r->get<uint64_t>();
    const auto code = r->get<uint32_t>(), bytes = r->get<uint32_t>();
    if (code > kLastCode) return wrong("code at most", kLastCode, code);
    const std::string message = wire::printable(r->get_bytes(bytes));
    if (r->ok()) record.keep(sequence, code == 0 ? Status() : Status(static_cast<Code>(code), message), value);
  }
  if (!r->ok()) return Status(Code::kCorrupt, "shard: a record is cut short");
  *out = std::move(record);
  return {};
}

}  // namespace windlass
