#include "messages/chunk.h"

#include <cstring>

#include "base/crc32c.h"
#include "base/test.h"

namespace windlass::chunk_test {

TEST(a_chunks_header_is_checked_before_anything_is_believed) {
  Chunk chunk;
  chunk.kind = Chunk::kRows;
  chunk.bytes = 1000;
  std::byte bytes[64];
  Chunk got;
  encode(chunk, bytes);
  CHECK_OK(decode(bytes, &got));
  CHECK_EQ(got.bytes, 1000u);
  CHECK(std::memcmp(bytes, "WLS1\x01\x03", 6) == 0);
  for (int bit = 0; bit < 512; ++bit) {  // a flipped bit never goes unnoticed
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK_CODE(decode(bytes, &got), Code::kCorrupt);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  for (const uint64_t wrong : {uint64_t{limits::kShardChunkBytesMax} + 1, ~uint64_t{0}}) {
    chunk.bytes = wrong;
    encode(chunk, bytes);
    CHECK_CODE(decode(bytes, &got), Code::kCorrupt);
  }
  chunk.bytes = 0;
  for (const int kind : {0, 10, 255}) {
    chunk.kind = static_cast<uint8_t>(kind);
    encode(chunk, bytes);
    CHECK_CODE(decode(bytes, &got), Code::kCorrupt);
  }
}

TEST(records_come_back_as_they_were_sent) {
  Record record;
  record.incarnation = 1;
  record.sequence = 300;
  record.clock = 3;
  for (uint64_t i = 0; i < limits::kKeptAnswersMax; ++i)
    record.keep(i, i % 2 == 0 ? Status() : Status(Code::kNonFinite, "number " + std::to_string(i)), 7 * i);
  wire::Writer writer;
  encode(record, &writer);
  const std::string bytes = writer.take();
  wire::Reader reader(bytes);
  Record got;
  CHECK_OK(decode(&reader, &got));
  CHECK(reader.at_end());
  CHECK_EQ(got.incarnation, 1u);
  CHECK_EQ(got.sequence, 300u);
  CHECK_EQ(got.clock, 3u);
  CHECK_EQ(got.kept->size(), record.kept->size());
  for (uint64_t i = 0; i < limits::kKeptAnswersMax; ++i) {
    CHECK_EQ(got.find(i)->value, 7 * i);
    CHECK(got.find(i)->status.code() == record.find(i)->status.code());
    CHECK(got.find(i)->status.message() == record.find(i)->status.message());
  }
  for (size_t n = 0; n < bytes.size(); n += 7) {
    wire::Reader cut(bytes.data(), n);
    CHECK_CODE(decode(&cut, &got), Code::kCorrupt);
  }
}

TEST(a_crowd_comes_back_as_it_was_sent_and_a_damaged_one_is_refused) {
  const std::vector<Workers::Heard> crowd = {{0, 0, 0, 9, {1, 4}}, {3, 101, 7, 8, {}}};
  uint32_t items = 0;
  const std::string bytes = encode(crowd, &items);
  CHECK_EQ(items, 2u);
  const auto read = [&](size_t n, uint32_t of, std::vector<Workers::Heard>* got) {
    got->clear();
    return decode(reinterpret_cast<const std::byte*>(bytes.data()), n, of, got);
  };
  std::vector<Workers::Heard> got;
  CHECK_OK(read(bytes.size(), 2, &got));
  CHECK(got.size() == 2 && got[0].open == crowd[0].open && got[1].entered == 101 && got[1].entered_at == 7);
  CHECK(got[0].ticked == 9 && got[1].rank == 3);
  for (size_t n = 0; n < bytes.size(); ++n) CHECK_CODE(read(n, 2, &got), Code::kCorrupt);
  CHECK_CODE(read(bytes.size(), 1, &got), Code::kCorrupt);
  CHECK_CODE(read(bytes.size(), 3, &got), Code::kCorrupt);
}

}  // namespace windlass::chunk_test
