// Frame: what travels between a client and a server, byte for byte as in docs/formats/wire.md.
//
// Everything here is pure: bytes in, a checked value or a Status out. decode() checks a private copy of the bytes, so
// that a peer that changes them meanwhile has no effect, and allocates nothing.
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
  kClose,
  kTick,
  kEnter,
  kPut,
  kSnapshot,
  kQuery,
  kVector,  // one that writes; a dot is an operation of its own
  kCall,
  kDot,
  kSettle,
  kDelete,
};
inline constexpr uint64_t kHelloRequest = 1;  // of the first request of every connection
inline constexpr uint8_t kOpMax = static_cast<uint8_t>(Op::kDelete);
// Operations that are about no shard: one block with a body.
constexpr bool is_control(Op op) {
  return op < Op::kPush || op == Op::kDetach || op == Op::kArena || op == Op::kEnter || op == Op::kDelete;
}
const char* name_of(Op op);

inline constexpr uint32_t kMagic = 0x31464C57;
inline constexpr uint8_t kVersion = 2;
inline constexpr uint8_t kAnswer = 0x80;  // in `op`

enum FrameFlag : uint16_t {
  kChecksummed = 1,  // numbers have checksums
  kInArenas = 2,     // blocks may have arrays in arenas
  kTicks = 4,        // also a tick, at the first block's clock, with the objects that the last tick named
  kManyObjects = 8,  // blocks are about several objects: little work each, and worth sharing early
};

// Opens every frame. A frame about shards is a step of blocks; others have one block with a body.
struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t op = 0;
  uint16_t flags = 0;  // FrameFlag
  uint64_t length = 0;
  uint64_t request = 0;
  uint64_t session = 0;
  uint32_t app = 0;
  uint32_t deadline_ms = 0;
  uint64_t work_bytes = 0;  // that the server reads or writes for it: decides whether several threads share it
  uint32_t blocks = 0;
  uint8_t lane = 0;
  uint8_t priority = 0;  // higher ones go first
  uint16_t zero = 0;
  uint32_t zero_too = 0;
  uint32_t crc = 0;

  Op operation() const { return static_cast<Op>(op & ~kAnswer); }
  bool answer() const { return (op & kAnswer) != 0; }
};
static_assert(sizeof(Header) == limits::kSectionBytes);

enum BlockFlag : uint16_t {
  kCloses = 1,       // closes the iteration at these shards
  kEmpty = 2,        // a push that only uses up its sequence
  kCreates = 4,      // makes missing rows
  kWhole = 8,        // whole shards, no spans
  kUnchanged = 16,   // of an answer: nothing newer, no numbers
  kMore = 32,        // of an answer: the scan is not at its end
  kPlaced = 64,      // every span or key says where its numbers are
  kListed = 128,     // the items are in an arena
  kAsBefore = 256,   // object, operation, dtypes, hyperparameters, places and argument are those of the block before
  kApart = 512,      // of an answer to a vector operation: nothing was done, the other shard is not here or not ready
  kHasValue = 1024,  // the body begins with a value
  kHasPlaces = 2048,
  kRun = 4096,        // consecutive shards: a further entry is only its sequence
  kHasValues = 8192,  // of an answer: a value per entry
  kWaited = 16384,    // of an answer: how long it waited at a gate, and for whom
};

// Says once what several shards of one object have in common, and has an entry for each. The header has the first.
struct Block {
  uint32_t object = 0;  // 0: it is about none
  uint8_t op = 0;
  uint8_t dtype_in = 0;
  uint8_t dtype_out = 0;
  uint8_t hypers = 0;     // float64 numbers in the body
  uint16_t flags = 0;     // BlockFlag
  uint16_t entries = 0;   // 0: it is about no shard
  uint32_t label = 0;     // the client's number for it; the answer repeats it
  uint64_t clock = 0;     // of an answer: the lowest that an entry saw
  uint32_t term = 0;      // of all entries
  uint32_t shard = 0;     // of the first
  uint64_t sequence = 0;  // of the first
  uint32_t items = 0;     // of the first; of an answer: exceptions
  uint32_t body_bytes = 0;
  uint32_t numbers_bytes = 0;
  uint32_t body_crc = 0;
  uint32_t numbers_crc = 0;
  uint32_t crc = 0;

  Op operation() const { return static_cast<Op>(op); }
  bool has(BlockFlag flag) const { return (flags & flag) != 0; }
  // Of an answer: the first entry's value, where term and shard are in a request.
  uint64_t value() const { return uint64_t{shard} << 32 | term; }
  void set_value(uint64_t value) {
    term = static_cast<uint32_t>(value);
    shard = static_cast<uint32_t>(value >> 32);
  }
  uint64_t bytes() const;  // that follow the header
};
static_assert(sizeof(Block) == limits::kSectionBytes);
inline constexpr size_t kSection = limits::kSectionBytes;  // of a header, and of a block's

// A further entry of a block.
struct EntryItem {
  uint32_t shard = 0;
  uint32_t items = 0;
  uint64_t sequence = 0;
};
static_assert(sizeof(EntryItem) == 16);

// An entry whose answer differs from the others': refused, elsewhere, or with flags. Its message follows, padded to 8.
struct Exception {
  static constexpr uint32_t kAll = ~0u;
  uint32_t entry = 0;  // kAll: all of them
  uint8_t status = 0;
  uint8_t zero = 0;
  uint16_t flags = 0;
  uint32_t term = 0;
  uint32_t message_bytes = 0;
  uint64_t value = 0;
};
static_assert(sizeof(Exception) == 24);

// How long an entry waited at a gate, and for whom.
struct Waited {
  uint64_t ns = 0;
  uint32_t rank = 0;
  uint32_t zero = 0;
};
static_assert(sizeof(Waited) == 16);

constexpr uint64_t padded(uint64_t bytes) {
  return (bytes + limits::kSectionBytes - 1) & ~uint64_t{limits::kSectionBytes - 1};
}
inline uint64_t Block::bytes() const { return padded(body_bytes) + padded(numbers_bytes); }

// Writes 64 bytes, checksum included.
void encode(const Header& header, std::byte* to);
void encode(const Block& block, std::byte* to);
// Reads 64 bytes; anything that breaks the rules is kProtocolError.
Status decode(const std::byte* from, Header* header);
Status decode(const std::byte* from, Block* block);

// Where the arrays of a request lie when they are in arenas.
struct Places {
  uint32_t in_arena = 0, out_arena = 0;  // 0: there is no such array
  uint64_t in_offset = 0, in_bytes = 0;
  uint64_t out_offset = 0, out_bytes = 0;
  uint64_t base = 0;  // element e of a tensor is at e - base
};
static_assert(sizeof(Places) == 48);

// Where the items of a block are, with flag kListed.
struct ListedItems {
  uint32_t arena = 0;
  uint32_t crc = 0;
  uint64_t offset = 0, bytes = 0;
};
static_assert(sizeof(ListedItems) == 24);

// The body of a block in a request, up to its items and argument, which the object reads.
//
//     | value | places | hyperparameters | further entries | items | argument |
struct Body {
  uint64_t value = 0;
  const std::byte* head = nullptr;     // places and hyperparameters, whichever the block has
  const std::byte* entries = nullptr;  // from the second on; at() reads them
  const std::byte* rest = nullptr;     // items and argument
  uint32_t rest_bytes = 0;

  Places places(const Block& block) const;
  // `to` has room for limits::kPushNumbersMax; those that the block does not have become zeros.
  void hyper(const Block& block, double* to) const;
  // Entry i of the block.
  EntryItem at(const Block& block, uint32_t i) const;
};
// Bytes of a body before its items.
inline uint32_t head_bytes(uint16_t flags, uint8_t hypers, uint32_t entries) {
  const uint32_t each = (flags & kRun) != 0 ? sizeof(uint64_t) : sizeof(EntryItem);
  return static_cast<uint32_t>(((flags & kHasValue) != 0 ? sizeof(uint64_t) : 0) +
                               ((flags & kHasPlaces) != 0 ? sizeof(Places) : 0) + hypers * sizeof(double) +
                               (entries > 1 ? (entries - 1) * each : 0));
}
// `bytes` has block.body_bytes; kInvalidArgument when they are malformed.
Status read(const Block& block, const std::byte* bytes, Body* body);

// The argument of a call: the name of a user's function, and its arguments. Encoded as name bytes u16, name, arguments.
struct CallItem {
  std::string name;
  std::string arguments;
};
std::string encode(const CallItem& item);
Status decode(const std::byte* items, uint32_t bytes, CallItem* item);

// The argument of a put; the shard's arrays that it names are the numbers of its block (tensor/planes.h).
struct PutItem {
  uint32_t planes = 0;      // bit i: array i is among the numbers
  uint32_t sets_count = 0;  // 1: the rule's count of updates becomes `count`
  uint64_t count = 0;
};
static_assert(sizeof(PutItem) == 16);
// kInvalidArgument when it is malformed. arrays: how many the tensor has.
Status decode(const std::byte* items, uint32_t bytes, size_t arrays, PutItem* item);

// The value of a snapshot that asks for the rule's count of updates alone: its answer has no numbers.
constexpr uint64_t kCountAlone = 1;

// The argument of a vector operation. Its block has no numbers: those of the other tensor are on the server.
struct VectorItem {
  uint8_t operation = 0;  // VectorOp
  uint8_t zero[3] = {};
  uint32_t object = 0;  // the other tensor; 0 where there is none
  uint32_t term = 0;    // of its shard, as the client knows it
  uint32_t zero_too = 0;
  uint64_t sequence = 0;  // the push to that shard that must have been applied
  uint64_t a = 0;         // the bits of a float64, or of an int64 where the tensors are int64; 0 where there is none

  VectorOp op() const { return static_cast<VectorOp>(operation); }
};
static_assert(sizeof(VectorItem) == 32);
// kInvalidArgument when it is malformed.
Status decode(const std::byte* items, uint32_t bytes, VectorItem* item);

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

// Text from a peer, made safe to show.
std::string printable(const std::string& text);

}  // namespace windlass::wire
