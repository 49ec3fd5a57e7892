#include "wire/frame.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace windlass::wire {
namespace {

constexpr size_t kSummedBytes = limits::kSectionBytes - sizeof(uint32_t);

Status broken(const std::string& what) { return Status(Code::kProtocolError, what); }

Status expected(const char* field, uint64_t want, uint64_t saw) {
  return broken(std::string(field) + " " + std::to_string(saw) + ", expected " + std::to_string(want));
}

Status at_most(const char* field, uint64_t most, uint64_t saw) {
  return broken(std::string(field) + " " + std::to_string(saw) + ", at most " + std::to_string(most));
}

template <class T>
void encode_section(T section, std::byte* to) {
  section.crc = crc32c(&section, kSummedBytes);
  std::memcpy(to, &section, sizeof section);
}

}  // namespace

const char* name_of(Op op) {
  switch (op) {
    case Op::kHello: return "hello";
    case Op::kGoodbye: return "goodbye";
    case Op::kAsk: return "ask";
    case Op::kOpen: return "open";
    case Op::kAttach: return "attach";
    case Op::kList: return "list";
    case Op::kPush: return "push";
    case Op::kPull: return "pull";
    case Op::kPushPull: return "push_pull";
    case Op::kErase: return "delete";
    case Op::kRows: return "len";
    case Op::kFingerprint: return "fingerprint";
    case Op::kScan: return "export";
    case Op::kDetach: return "detach";
    case Op::kArena: return "arena";
    case Op::kStep: return "step";
    case Op::kClose: return "close";
    case Op::kTick: return "tick";
    case Op::kEnter: return "enter";
    case Op::kPut: return "put";
    case Op::kSnapshot: return "snapshot";
    case Op::kCall: return "call";
    case Op::kQuery: return "query";
    case Op::kVector: return "vector";
    case Op::kDot: return "dot";
    case Op::kSettle: return "settle";
    case Op::kDelete: return "delete";
  }
  return "?";
}

void encode(const Header& header, std::byte* to) { encode_section(header, to); }
void encode(const Block& block, std::byte* to) { encode_section(block, to); }

Status decode(const std::byte* from, Header* out) {
  Header h;
  std::memcpy(&h, from, sizeof h);
  if (h.magic != kMagic) return expected("frame: magic", kMagic, h.magic);
  if (const uint32_t crc = crc32c(&h, kSummedBytes); crc != h.crc)
    return expected("frame: header checksum", crc, h.crc);
  if (h.version != kVersion) return expected("frame: version", kVersion, h.version);
  const uint8_t op = h.op & static_cast<uint8_t>(~kAnswer);
  if (op == 0 || op > kOpMax) return at_most("frame: operation", kOpMax, op);
  if (h.length > limits::kFrameBytesMax) return at_most("frame: length", limits::kFrameBytesMax, h.length);
  if (h.length % limits::kSectionBytes != 0)
    return broken("frame: length " + std::to_string(h.length) + " is no multiple of 64");
  if (h.blocks > limits::kBlocksMax) return at_most("frame: blocks", limits::kBlocksMax, h.blocks);
  if (h.length < uint64_t{h.blocks} * limits::kSectionBytes)
    return broken("frame: length " + std::to_string(h.length) + " is too short for its blocks");
  *out = h;
  return {};
}

Status decode(const std::byte* from, Block* out) {
  Block b;
  std::memcpy(&b, from, sizeof b);
  if (const uint32_t crc = crc32c(&b, kSummedBytes); crc != b.crc) return expected("block: checksum", crc, b.crc);
  if (b.body_bytes > limits::kItemsBytesMax) return at_most("block: body bytes", limits::kItemsBytesMax, b.body_bytes);
  if (b.numbers_bytes > limits::kNumbersBytesMax)
    return at_most("block: numbers bytes", limits::kNumbersBytesMax, b.numbers_bytes);
  *out = b;
  return {};
}

Status read(const Block& block, const std::byte* bytes, Body* body) {
  constexpr auto kLastDtype = static_cast<uint8_t>(Dtype::kFloat16);
  const auto wrong = [](const std::string& what) { return Status(Code::kInvalidArgument, "block: " + what); };
  if (block.op == 0 || block.op > kOpMax) return wrong("operation " + std::to_string(block.op));
  if (block.dtype_in > kLastDtype || block.dtype_out > kLastDtype) return wrong("an unknown dtype");
  if (block.hypers > limits::kPushNumbersMax)
    return wrong(std::to_string(block.hypers) + " hyperparameters, at most " + std::to_string(limits::kPushNumbersMax));
  if (block.entries > limits::kBlockEntriesMax)
    return wrong(std::to_string(block.entries) + " entries, at most " + std::to_string(limits::kBlockEntriesMax));
  const uint32_t head = head_bytes(block.flags, block.hypers, block.entries);
  if (head > block.body_bytes && !windlass::broken(Break::kBounds))
    return wrong("a body of " + std::to_string(block.body_bytes) + " bytes, too few for its " +
                 std::to_string(block.entries) + " entries");
  const auto take = [&](void* to, size_t n) {
    std::memcpy(to, bytes, n);
    bytes += n;
  };
  if (block.has(kHasValue)) take(&body->value, sizeof body->value);
  body->head = bytes;
  bytes += (block.has(kHasPlaces) ? sizeof(Places) : 0) + block.hypers * sizeof(double);
  body->entries = bytes;
  const size_t each = block.has(kRun) ? sizeof(uint64_t) : sizeof(EntryItem);
  body->rest = bytes + (block.entries > 1 ? (block.entries - 1u) * each : 0);
  body->rest_bytes = block.body_bytes - head;
  return {};
}

Places Body::places(const Block& block) const {
  Places places;
  if (block.has(kHasPlaces)) std::memcpy(&places, head, sizeof places);
  return places;
}

void Body::hyper(const Block& block, double* to) const {
  std::fill_n(to, limits::kPushNumbersMax, 0.0);
  if (block.hypers == 0) return;
  std::memcpy(to, head + (block.has(kHasPlaces) ? sizeof(Places) : 0), block.hypers * sizeof(double));
}

EntryItem Body::at(const Block& block, uint32_t i) const {
  EntryItem item{block.shard, block.items, block.sequence};
  if (i == 0) return item;
  if (block.has(kRun)) {
    item.shard = block.shard + i;
    std::memcpy(&item.sequence, entries + (i - 1) * sizeof item.sequence, sizeof item.sequence);
  } else {
    std::memcpy(&item, entries + (i - 1) * sizeof item, sizeof item);
  }
  return item;
}

std::string encode(const CallItem& item) {
  Writer w;
  w.put(static_cast<uint16_t>(item.name.size()));
  w.put_bytes(item.name);
  w.put_bytes(item.arguments);
  return w.take();
}

Status decode(const std::byte* items, uint32_t bytes, CallItem* item) {
  Reader r(items, bytes);
  const size_t name = r.get<uint16_t>();
  if (name > limits::kForeignNameBytesMax || bytes > limits::kCallBytesMax)
    return Status(Code::kInvalidArgument, "call: a name of at most " + std::to_string(limits::kForeignNameBytesMax) +
                                              " bytes and " + std::to_string(limits::kCallBytesMax) + " in all, not " +
                                              std::to_string(name) + " and " + std::to_string(bytes));
  item->name = printable(r.get_bytes(name));
  item->arguments = r.get_bytes(r.left());
  return r.ok() && !item->name.empty() ? Status() : Status(Code::kInvalidArgument, "call: malformed");
}

Status decode(const std::byte* items, uint32_t bytes, size_t arrays, PutItem* out) {
  PutItem item;
  if (bytes != sizeof item)
    return Status(Code::kInvalidArgument,
                  "put: expected " + std::to_string(sizeof item) + " bytes of items, saw " + std::to_string(bytes));
  std::memcpy(&item, items, sizeof item);
  if (item.planes >> arrays != 0)
    return Status(Code::kInvalidArgument, "put: expected some of " + std::to_string(arrays) + " arrays, saw bits " +
                                              std::to_string(item.planes));
  if (item.sets_count > 1 || item.count > (item.sets_count != 0 ? limits::kUpdatesMax : 0))
    return Status(Code::kInvalidArgument, "put: a count of " + std::to_string(item.count) + " updates, at most " +
                                              std::to_string(limits::kUpdatesMax) + " and only where it is set");
  *out = item;
  return {};
}

Status decode(const std::byte* items, uint32_t bytes, VectorItem* out) {
  VectorItem item;
  if (bytes != sizeof item)
    return Status(Code::kInvalidArgument,
                  "vector: expected " + std::to_string(sizeof item) + " bytes of items, saw " + std::to_string(bytes));
  std::memcpy(&item, items, sizeof item);
  if (item.operation == 0 || item.operation > kVectorOpMax)
    return Status(Code::kInvalidArgument, "vector: operation " + std::to_string(item.operation) + ", expected 1 to " +
                                              std::to_string(kVectorOpMax));
  const bool other = has_other(item.op());
  if (item.zero[0] != 0 || item.zero[1] != 0 || item.zero[2] != 0 || item.zero_too != 0 ||
      (!has_number(item.op()) && item.a != 0) || (item.object != 0) != other ||
      (!other && (item.term != 0 || item.sequence != 0)))
    return Status(Code::kInvalidArgument, std::string("vector: ") + name_of(item.op()) +
                                              (other ? " needs another tensor" : " has no other tensor") +
                                              ", and fields that it does not use are zeros");
  *out = item;
  return {};
}

std::string printable(const std::string& text) {
  std::string out = text.substr(0, limits::kMessageBytesMax);
  for (size_t i = 0; i < out.size();) {
    const auto lead = static_cast<unsigned char>(out[i]);
    if (lead < 0x80) {
      if ((lead < 0x20 && lead != '\n') || lead == 0x7F) out[i] = '?';
      ++i;
      continue;
    }
    // A UTF-8 character: two to four bytes, in its shortest form, and a valid code point.
    const size_t n = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    uint32_t point = lead & (0xFFu >> (n + 1));
    bool fits = lead >= 0xC2 && lead <= 0xF4 && i + n <= out.size();
    for (size_t k = 1; fits && k < n; ++k) {
      const auto next = static_cast<unsigned char>(out[i + k]);
      fits = (next & 0xC0) == 0x80;
      point = point << 6 | (next & 0x3Fu);
    }
    constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    fits = fits && point >= kLeast[n] && point <= 0x10FFFF && (point < 0xD800 || point > 0xDFFF);
    if (!fits) out[i] = '?';
    i += fits ? n : 1;
  }
  return out;
}

}  // namespace windlass::wire
