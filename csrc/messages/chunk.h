// Chunk: a piece of a shard as bytes, byte for byte as in docs/formats/shard.md.
//
//     begin | array array ... | rows rows erased ... | records | gate | push ... | end      each a header and a body
//
// Pure: bytes in, a checked value or a Status out. Lengths are compared with limits before memory is allocated for
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "messages/messages.h"
#include "session/record.h"
#include "sync/gate.h"
#include "sync/workers.h"
#include "wire/frame.h"

namespace windlass {

struct Chunk {
  enum Kind : uint8_t { kBegin = 1, kArray, kRows, kErased, kRecords, kEnd, kGate, kPush, kCrowd };
  static constexpr uint32_t kMagic = 0x31534C57;  // the bytes WLS1
  static constexpr uint8_t kVersion = 1;

  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t kind = 0;
  uint16_t zero = 0;
  uint64_t bytes = 0;  // of the body
  uint32_t object = 0;
  uint32_t shard = 0;
  uint32_t term = 0;    // of the shard on its new server
  uint32_t server = 0;  // that server's index
  uint32_t number = 0;  // of the chunk: 0, 1, 2, ...
  uint32_t items = 0;   // which array; how many rows, keys or records
  uint32_t body_crc = 0;
  uint32_t zeros[4] = {};
  uint32_t crc = 0;
};
static_assert(sizeof(Chunk) == limits::kSectionBytes);

void encode(const Chunk& chunk, std::byte* to);      // checksum included
Status decode(const std::byte* from, Chunk* chunk);  // kCorrupt if anything is wrong with the header
Status check_body(const Chunk& chunk, const std::byte* body);

// The body of the first chunk: which object it is, and where its shards were when it was made.
std::string encode_begin(const Map& map, const ObjectSpec& spec);
Status decode_begin(const std::byte* body, size_t bytes, Map* map, ObjectSpec* spec);

// The body of the last chunk.
struct ShardEnd {
  uint64_t version = 0, count = 0;
  uint64_t rows = 0;     // of a table's shard
  uint64_t records = 0;  // sent before
};
static_assert(sizeof(ShardEnd) == 32);

// Who has closed what at a shard.
std::string encode(const Gate& gate, int64_t now_ns);
Status decode(const std::byte* body, size_t bytes, int64_t now_ns, Gate* gate);

// What the source knows of the workers of the object's app. Only as many as fit a chunk.
std::string encode(const std::vector<Workers::Heard>& crowd, uint32_t* items);
Status decode(const std::byte* body, size_t bytes, uint32_t items, std::vector<Workers::Heard>* crowd);

void encode(const Record& record, wire::Writer* to);
Status decode(wire::Reader* from, Record* record);

}  // namespace windlass
