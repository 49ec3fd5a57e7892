// Frame: what travels between a client and a server, byte for byte as in docs/formats/wire.md.
//
// Everything here is pure: bytes in, a checked value or a Status out. decode() looks at a private copy of the bytes, so
// that a peer that changes them meanwhile changes nothing, and takes no memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/breaks.h"
#include "base/dtype.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/vector_op.h"

namespace windlass::wire {

static_assert(std::endian::native == std::endian::little, "numbers travel as they lie in memory");

enum class Op : uint8_t {
  kHello = 1,
  kGoodbye,
  kAsk,
  kOpen,
  kAttach,
  kList,
  kPush,
  kPull,
  kPushPull,
  kErase,
  kRows,
  kFingerprint,
  kScan,
  kDetach,
  kArena,
  kStep,
  kClose,  // only within a step, as is the next
  kTick,
  kEnter,
  kPut,
  kSnapshot,
  kQuery,
  kVector,  // that writes; a dot is an operation of its own
  kCall,
  kDot,
  kSettle,
};
inline constexpr uint8_t kOpMax = static_cast<uint8_t>(Op::kSettle);
// Operations that are about no shard: one part with a body.
constexpr bool is_control(Op op) { return op < Op::kPush || op == Op::kDetach || op == Op::kArena || op == Op::kEnter; }
const char* name_of(Op op);

inline constexpr uint32_t kMagic = 0x31464C57;
inline constexpr uint8_t kVersion = 1;
inline constexpr uint8_t kAnswer = 0x80;     // in `op`
inline constexpr uint16_t kChecksummed = 1;  // in Header::flags
inline constexpr uint16_t kInArenas = 2;     // likewise: numbers lie in arenas, not in the frame

struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t op = 0;
  uint16_t flags = 0;
  uint64_t length = 0;
  uint64_t request = 0;
  uint64_t session = 0;
  uint32_t app = 0;
  uint32_t object = 0;
  uint32_t deadline_ms = 0;
  uint8_t lane = 0;
  uint8_t dtype_in = 0;
  uint8_t dtype_out = 0;
  uint8_t priority = 0;  // higher ones go first
  uint32_t parts = 0;
  uint32_t extension_bytes = 0;
  uint32_t extension_crc = 0;
  uint32_t crc = 0;

  Op operation() const { return static_cast<Op>(op & ~kAnswer); }
  bool answer() const { return (op & kAnswer) != 0; }
};
static_assert(sizeof(Header) == limits::kSectionBytes);

enum PartFlag : uint16_t {
  kCloses = 1,      // the iteration, at this shard
  kEmpty = 2,       // a push that only uses up its sequence
  kCreates = 4,     // missing rows
  kWhole = 8,       // the whole shard, no spans
  kUnchanged = 16,  // nothing newer, no numbers
  kMore = 32,       // a scan that is not at its end
  kPlaced = 64,     // every span or key says where its numbers are
  kListed = 128,    // the items are elsewhere: in an arena
  kTicks = 256,     // all before its clock is closed, but at the objects that the worker's last tick named
  kApart = 512,     // of a vector operation: nothing was done, since the other shard is not here or not ready
};

struct Part {
  uint32_t shard = 0;
  uint32_t term = 0;
  uint64_t sequence = 0;
  uint64_t clock = 0;
  uint32_t items = 0;
  uint32_t items_bytes = 0;
  uint64_t numbers_bytes = 0;
  uint32_t items_crc = 0;
  uint32_t numbers_crc = 0;
  uint64_t value = 0;
  uint16_t flags = 0;
  uint8_t status = 0;
  uint8_t zero = 0;
  uint32_t crc = 0;

  // What follows the part's header.
  uint64_t bytes() const;
};
static_assert(sizeof(Part) == limits::kSectionBytes);

constexpr uint64_t padded(uint64_t bytes) {
  return (bytes + limits::kSectionBytes - 1) & ~uint64_t{limits::kSectionBytes - 1};
}
inline uint64_t Part::bytes() const { return padded(items_bytes) + padded(numbers_bytes); }

// Writes 64 bytes, checksum included.
void encode(const Header& header, std::byte* to);
void encode(const Part& part, std::byte* to);
// Reads 64 bytes; anything that breaks the rules is kProtocolError.
Status decode(const std::byte* from, Header* header);
Status decode(const std::byte* from, Part* part);

// Extensions: a list of (type, length, bytes).
inline constexpr uint16_t kHyperExtension = 1;
inline constexpr uint16_t kMustUnderstand = 0x8000;
inline constexpr uint16_t kPlacesExtension = 2 | kMustUnderstand;

// Where the arrays of a request lie when they are in arenas.
struct Places {
  uint32_t in_arena = 0, out_arena = 0;  // 0: there is no such array
  uint64_t in_offset = 0, in_bytes = 0;
  uint64_t out_offset = 0, out_bytes = 0;
  uint64_t base = 0;  // element e of a tensor is at e - base
};
static_assert(sizeof(Places) == 48);

// Where the items of a part are, with flag kListed.
struct ListedItems {
  uint32_t arena = 0;
  uint32_t crc = 0;
  uint64_t offset = 0, bytes = 0;
};
static_assert(sizeof(ListedItems) == 24);

// What a part of a step is about: the first of its items, before hyperparameters (float64 each, padded) and the items
// that it would have on its own.
struct StepItem {
  uint32_t object = 0;
  uint32_t shard = 0;
  uint8_t op = 0;  // push, pull, push_pull, close or tick
  uint8_t dtype_in = 0, dtype_out = 0;
  uint8_t hypers = 0;  // how many follow
  uint32_t zero = 0;
  Places places;

  uint32_t bytes() const;  // with the hyperparameters
};
static_assert(sizeof(StepItem) == limits::kSectionBytes);

inline uint32_t StepItem::bytes() const {
  return static_cast<uint32_t>(sizeof(StepItem) + padded(hypers * sizeof(double)));
}
// Reads the first item of a part of a step; whatever is wrong with it is kInvalidArgument.
Status decode(const std::byte* items, uint32_t bytes, StepItem* item);

// What a part of a call asks for: a function of the user's, and its arguments. The items: name bytes u16, name,
// arguments.
struct CallItem {
  std::string name;
  std::string arguments;
};
std::string encode(const CallItem& item);
Status decode(const std::byte* items, uint32_t bytes, CallItem* item);

// What a part of a put brings: the items; the arrays of the shard that it names follow as its numbers
// (tensor/planes.h).
struct PutItem {
  uint32_t planes = 0;      // bit i: array i is among the numbers
  uint32_t sets_count = 0;  // 1: the rule's count of updates becomes `count`
  uint64_t count = 0;
};
static_assert(sizeof(PutItem) == 16);
// Whatever is wrong with it is kInvalidArgument. arrays: how many the tensor has.
Status decode(const std::byte* items, uint32_t bytes, size_t arrays, PutItem* item);

// What a part of a vector operation does: the items. There are no numbers: those of the other tensor are on the server.
struct VectorItem {
  uint8_t operation = 0;  // VectorOp
  uint8_t zero[3] = {};
  uint32_t object = 0;  // the other tensor; 0 where there is none
  uint32_t term = 0;    // of its shard, as the client knows it
  uint32_t zero_too = 0;
  uint64_t sequence = 0;  // the push to that shard that must be seen
  uint64_t a = 0;         // the bits of a float64, or of an int64 where the tensors are int64; 0 where there is none

  VectorOp op() const { return static_cast<VectorOp>(operation); }
};
static_assert(sizeof(VectorItem) == 32);
// Whatever is wrong with it is kInvalidArgument.
Status decode(const std::byte* items, uint32_t bytes, VectorItem* item);

void write_hyper(const double* values, size_t n, std::vector<std::byte>* to);  // padded
void write_extensions(const Places& places, const double* hyper, size_t n, std::vector<std::byte>* to);
// Reads the list; `hyper` has room for limits::kPushNumbersMax, *n becomes how many there were.
Status read_extensions(const std::byte* from, size_t bytes, double* hyper, size_t* n, Places* places);

// Bodies are written and read number by number.
class Writer {
 public:
  template <class T>
  void put(T value) {
    const auto* p = reinterpret_cast<const char*>(&value);
    bytes_.append(p, sizeof value);
  }
  void put_bytes(const std::string& text) { bytes_ += text; }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// A read beyond the end gives zeros and makes ok() false.
class Reader {
 public:
  Reader(const void* data, size_t bytes) : at_(static_cast<const char*>(data)), left_(bytes) {}
  explicit Reader(const std::string& bytes) : Reader(bytes.data(), bytes.size()) {}

  template <class T>
  T get() {
    T value{};
    if (left_ < sizeof value && !windlass::broken(Break::kBounds)) {
      fail();
      return value;
    }
    __builtin_memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    left_ -= sizeof value;
    return value;
  }
  std::string get_bytes(size_t n) {
    if (left_ < n) {
      fail();
      return {};
    }
    std::string text(at_, n);
    at_ += n;
    left_ -= n;
    return text;
  }
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && left_ == 0; }
  size_t left() const { return left_; }

 private:
  void fail() {
    ok_ = false;
    left_ = 0;
  }
  const char* at_;
  size_t left_;
  bool ok_ = true;
};

// Text that came from a peer, made fit to be shown.
std::string printable(const std::string& text);

}  // namespace windlass::wire
