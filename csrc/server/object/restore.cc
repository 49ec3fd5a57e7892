#include "server/object/restore.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/strided.h"
#include "server/object/capture.h"

namespace windlass {
namespace {

Status wrong(const ServedObject& object, uint32_t shard, const std::string& what, uint64_t expected, uint64_t seen) {
  return Status(Code::kCorrupt, "checkpoint of '" + object.spec().own_name() + "', shard " + std::to_string(shard) +
                                    ": " + what + ": expected " + std::to_string(expected) + ", saw " +
                                    std::to_string(seen));
}

// Runs f(shard) with the turn, if the shard is here.
template <class F>
Status at_home(ServedObject& object, uint32_t index, F f) {
  Shard* const shard = index < object.shards() ? object.find(index) : nullptr;
  Status status(Code::kStaleMap, "checkpoint of '" + object.spec().own_name() + "', shard " + std::to_string(index) +
                                     ": it is not on this server");
  if (shard == nullptr) return status;
  with_turn(shard->turn, [&] {
    if (shard->home.state == Residence::kHere) status = f(*shard);
  });
  return status;
}

}  // namespace

Status restore_piece(ServedObject& object, uint32_t index, size_t piece, uint64_t at, const std::byte* from,
                     uint64_t bytes) {
  if (object.table() != nullptr) return wrong(object, index, "pieces of a tensor", 0, 1);
  return at_home(object, index, [&](Shard&) -> Status {
    const std::vector<Tensor::Piece> pieces = object.tensor_of(index).pieces_of(index);
    if (piece >= pieces.size()) return wrong(object, index, "arrays", pieces.size(), piece + 1);
    if (at > pieces[piece].bytes || bytes > pieces[piece].bytes - at)
      return wrong(object, index, "bytes of an array", pieces[piece].bytes, at + bytes);
    if (bytes != 0) std::memcpy(pieces[piece].data + at, from, bytes);
    return {};
  });
}

Status restore_rows(ServedObject& object, uint32_t index, uint64_t rows,
                    const std::vector<std::span<const std::byte>>& arrays, uint64_t in_all) {
  if (object.table() == nullptr) return wrong(object, index, "rows of a table", 0, rows);
  Table& table = *object.table();
  const uint64_t row_bytes = table.copy_bytes();
  const std::vector<uint64_t> begins = Capture::arrays_of(table.spec(), 1);  // within a row
  if (arrays.size() + 1 != begins.size())
    return wrong(object, index, "arrays of rows", begins.size() - 1, arrays.size());
  for (size_t a = 0; a < arrays.size(); ++a) {
    const uint64_t one = begins[a + 1] - begins[a], bytes = arrays[a].size();
    if (rows > bytes / one || rows * one != bytes)
      return wrong(object, index, "bytes of rows", rows > bytes ? one : rows * one, bytes);
  }
  WL_RETURN_IF_ERROR(at_home(object, index, [&](Shard&) { return table.expect(index, in_all); }));
  const uint64_t most = std::max<uint64_t>(1, limits::kShardChunkBytes / row_bytes);  // at a turn
  std::vector<std::byte> some(std::min(most, rows) * row_bytes);
  for (uint64_t done = 0; done < rows; done += most) {
    const uint64_t n = std::min(most, rows - done);
    for (size_t a = 0; a < arrays.size(); ++a) {
      const uint64_t one = begins[a + 1] - begins[a];
      copy_strided(some.data() + begins[a], row_bytes, arrays[a].data() + done * one, one, one, n);
    }
    WL_RETURN_IF_ERROR(at_home(object, index, [&](Shard&) { return table.put(index, some.data(), n); }));
  }
  return {};
}

Status restore_counts(ServedObject& object, uint32_t index, uint64_t version, uint64_t count, uint64_t made,
                      uint64_t* fingerprint) {
  object.set_used();
  return at_home(object, index, [&](Shard& shard) -> Status {
    shard.version = version;
    shard.count = count;
    if (shard.gate != nullptr && object.spec().sync().rounds()) {
      shard.gate->restore(made, {});
      object.set_view(shard, index, object.workers()->view(object.map().object));
    }
    *fingerprint =
        object.table() != nullptr ? object.table()->fingerprint(index) : object.tensor_of(index).fingerprint(index);
    return {};
  });
}

}  // namespace windlass
