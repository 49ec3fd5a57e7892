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
  }
  return "?";
}

void encode(const Header& header, std::byte* to) { encode_section(header, to); }
void encode(const Part& part, std::byte* to) { encode_section(part, to); }

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
  if (h.extension_bytes > limits::kExtensionBytesMax)
    return at_most("frame: extension bytes", limits::kExtensionBytesMax, h.extension_bytes);
  if (h.extension_bytes % limits::kSectionBytes != 0)
    return broken("frame: extension bytes " + std::to_string(h.extension_bytes) + " are no multiple of 64");
  if (h.parts > limits::kPartsMax) return at_most("frame: parts", limits::kPartsMax, h.parts);
  const uint64_t least = h.extension_bytes + uint64_t{h.parts} * limits::kSectionBytes;
  if (h.length < least) return broken("frame: length " + std::to_string(h.length) + " is too short for its parts");
  if (h.dtype_in > static_cast<uint8_t>(Dtype::kFloat16) || h.dtype_out > static_cast<uint8_t>(Dtype::kFloat16))
    return at_most("frame: dtype", static_cast<uint8_t>(Dtype::kFloat16), std::max(h.dtype_in, h.dtype_out));
  *out = h;
  return {};
}

Status decode(const std::byte* from, Part* out) {
  Part p;
  std::memcpy(&p, from, sizeof p);
  if (const uint32_t crc = crc32c(&p, kSummedBytes); crc != p.crc) return expected("part: checksum", crc, p.crc);
  if (p.items_bytes > limits::kItemsBytesMax)
    return at_most("part: items bytes", limits::kItemsBytesMax, p.items_bytes);
  if (p.numbers_bytes > limits::kNumbersBytesMax)
    return at_most("part: numbers bytes", limits::kNumbersBytesMax, p.numbers_bytes);
  *out = p;
  return {};
}

Status decode(const std::byte* items, uint32_t bytes, StepItem* out) {
  StepItem item;
  if (bytes < sizeof item) return Status(Code::kInvalidArgument, "step: a part without its first item");
  std::memcpy(&item, items, sizeof item);
  const auto op = static_cast<Op>(item.op);
  if (op != Op::kPush && op != Op::kPull && op != Op::kPushPull && op != Op::kClose && op != Op::kTick &&
      op != Op::kSettle)
    return Status(Code::kInvalidArgument, "step: operation " + std::to_string(item.op) + " is no push and no pull");
  if (item.hypers > limits::kPushNumbersMax || item.bytes() > bytes)
    return Status(Code::kInvalidArgument,
                  "step: " + std::to_string(item.hypers) + " hyperparameters do not fit its items");
  const auto most = static_cast<uint8_t>(Dtype::kFloat16);
  if (item.dtype_in > most || item.dtype_out > most) return Status(Code::kInvalidArgument, "step: an unknown dtype");
  *out = item;
  return {};
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

void write_hyper(const double* values, size_t n, std::vector<std::byte>* to) {
  const uint16_t head[2] = {kHyperExtension, static_cast<uint16_t>(n * sizeof(double))};
  to->assign(padded(8 + n * sizeof(double)), std::byte{0});
  std::memcpy(to->data(), head, sizeof head);
  std::memcpy(to->data() + 8, values, n * sizeof(double));
}

void write_extensions(const Places& places, const double* hyper, size_t n, std::vector<std::byte>* to) {
  constexpr size_t kBehind = 8 + sizeof(Places);
  const uint16_t head[2] = {kPlacesExtension, sizeof(Places)};
  const uint16_t next[2] = {kHyperExtension, static_cast<uint16_t>(n * sizeof(double))};
  to->assign(padded(kBehind + (n != 0 ? 8 + n * sizeof(double) : 0)), std::byte{0});
  std::memcpy(to->data(), head, sizeof head);
  std::memcpy(to->data() + 8, &places, sizeof places);
  if (n == 0) return;
  std::memcpy(to->data() + kBehind, next, sizeof next);
  std::memcpy(to->data() + kBehind + 8, hyper, n * sizeof(double));
}

Status read_extensions(const std::byte* from, size_t bytes, double* hyper, size_t* n, Places* places) {
  *n = 0;
  for (size_t at = 0; at + 8 <= bytes;) {
    uint16_t head[2];
    std::memcpy(head, from + at, sizeof head);
    const auto [type, length] = head;
    if (type == 0) return {};
    at += 8;
    if (length > bytes - at) return broken("extension " + std::to_string(type) + ": longer than the list");
    if (type == kHyperExtension) {
      if (length % sizeof(double) != 0 || length > limits::kPushNumbersMax * sizeof(double))
        return at_most("extension 1: bytes of hyperparameters", limits::kPushNumbersMax * sizeof(double), length);
      std::memcpy(hyper, from + at, length);
      *n = length / sizeof(double);
    } else if (type == kPlacesExtension) {
      if (length != sizeof(Places)) return expected("extension 0x8002: bytes", sizeof(Places), length);
      std::memcpy(places, from + at, length);
    } else if ((type & kMustUnderstand) != 0) {
      return broken("extension " + std::to_string(type) + " must be understood and is not");
    }
    at += (length + size_t{7}) & ~size_t{7};
  }
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
    // A letter of UTF-8: two to four bytes, written no longer than it must be, and a code point that exists.
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
