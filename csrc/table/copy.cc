// Rows of a table as bytes, docs/formats/shard.md: key u64, count u32, touched u32, numbers of the row, weights, state.
#include <algorithm>
#include <cstring>

#include "base/hash.h"
#include "table/table.h"

namespace windlass {

size_t Table::copy_bytes() const {
  return sizeof(uint64_t) + sizeof(RowHead) +
         sizeof(float) * (layout_.row_scalars + size_t{spec_.dim} * (1 + static_cast<size_t>(layout_.vectors)));
}

void Table::copy_row(const TableShard& s, uint64_t key, uint32_t row, std::byte* to) const {
  const auto put = [&to](const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  };
  put(&key, sizeof key);
  put(head(s, row), sizeof(RowHead) + layout_.row_scalars * sizeof(float));
  put(weights(s, row), spec_.dim * sizeof(float));
  if (layout_.vectors != 0) put(state(s, row), layout_.vectors * spec_.dim * sizeof(float));
}

Table::CopyCursor Table::begin_copy(uint32_t shard) const {
  constexpr uint64_t kRangeRows = 64;
  CopyCursor cursor;
  while (cursor.bits < 24 && (kRangeRows << cursor.bits) < rows(shard)) ++cursor.bits;
  return cursor;
}

bool Table::copy(uint32_t shard, CopyCursor* cursor, size_t most, std::byte* to, size_t* n) const {
  constexpr size_t kAtOnce = 128;
  const TableShard& s = shards_[shard];
  std::vector<Index::Entry> found;
  *n = 0;
  while (*n < most && cursor->range < (uint64_t{1} << cursor->bits)) {
    uint64_t range = 0;
    for (uint32_t bit = 0; bit < cursor->bits; ++bit) range = range << 1 | (cursor->range >> bit & 1);
    const uint64_t length_less_one = ~uint64_t{0} >> cursor->bits;
    const uint64_t begin = cursor->bits != 0 ? range << (64 - cursor->bits) : 0, last = begin + length_less_one;
    const size_t wanted = std::min(kAtOnce, most - *n);
    found.clear();
    const bool more = s.index.scan(begin + cursor->from, wanted, &found);
    while (!found.empty() && found.back().hash > last) found.pop_back();
    for (size_t i = 0; i < found.size(); ++i) {
      if (i + 8 < found.size()) __builtin_prefetch(weights(s, found[i + 8].row));
      copy_row(s, key_of(shard, found[i].hash), found[i].row, to + (*n)++ * copy_bytes());
    }
    if (more && found.size() == wanted && found.back().hash != last) {
      cursor->from = found.back().hash + 1 - begin;
    } else {
      ++cursor->range;
      cursor->from = 0;
    }
  }
  return cursor->range < (uint64_t{1} << cursor->bits);
}

void Table::copy(uint32_t shard, const uint64_t* hashes, size_t n, std::byte* to, size_t* rows,
                 std::vector<uint64_t>* gone) const {
  const TableShard& s = shards_[shard];
  *rows = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t row = s.index.find(place_of(hashes[i]));
    if (row == Index::kAbsent) {
      gone->push_back(unmix(hashes[i]));
    } else {
      copy_row(s, unmix(hashes[i]), row, to + (*rows)++ * copy_bytes());
    }
  }
}

Status Table::put(uint32_t shard, const std::byte* rows, size_t n) {
  TableShard& s = shards_[shard];
  Status status = put_rows(s, shard, rows, n);
  tell_size(s);
  return status;
}

Status Table::put_rows(TableShard& s, uint32_t shard, const std::byte* rows, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const std::byte* from = rows + i * copy_bytes();
    uint64_t key = 0;
    std::memcpy(&key, from, sizeof key);
    const uint64_t hash = mix(key);
    if (shard_of_hash(hash) != shard) {
      return Status(Code::kCorrupt, "table '" + name_ + "': key " + std::to_string(key) + " among the rows of shard " +
                                        std::to_string(shard) + ", expected in shard " +
                                        std::to_string(shard_of_hash(hash)));
    }
    uint32_t row = s.index.find(place_of(hash));
    if (row == Index::kAbsent) {
      row = new_row(s, hash);
    } else {
      keep(s, hash, row);
    }
    if (row == Index::kAbsent) return out_of_memory();
    from += sizeof key;
    const auto get = [&from](void* to, size_t bytes) {
      std::memcpy(to, from, bytes);
      from += bytes;
    };
    get(head(s, row), sizeof(RowHead) + layout_.row_scalars * sizeof(float));
    get(weights(s, row), spec_.dim * sizeof(float));
    if (layout_.vectors != 0) get(state(s, row), layout_.vectors * spec_.dim * sizeof(float));
  }
  return {};
}

void Table::capture_row(TableShard& s, uint64_t hash, uint32_t row) const {
  s.capture->mark(row);
  if (head(s, row)->count != 0) copy_row(s, unmix(hash), row, s.capture->add(copy_bytes()));
}

void Table::capture(uint32_t shard, size_t most) {
  TableShard& s = shards_[shard];
  std::vector<Index::Entry> found;
  const bool more = s.index.scan(s.capture->from, most, &found);
  for (size_t i = 0; i < found.size(); ++i) {
    if (i + 8 < found.size()) __builtin_prefetch(weights(s, found[i + 8].row));
    keep(s, found[i].hash >> 8 | uint64_t{shard} << 56, found[i].row);
  }
  if (!found.empty()) s.capture->from = found.back().hash + 1;
  s.capture->scanned = !more;
}

uint64_t Table::fingerprint_of_rows(const std::byte* rows, size_t n) const {
  const uint64_t salt = mix_text(name_);
  std::vector<float> numbers(copy_bytes() / sizeof(float));
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const std::byte* from = rows + i * copy_bytes();
    uint64_t key = 0;
    RowHead head;
    std::memcpy(&key, from, sizeof key);
    std::memcpy(&head, from + sizeof key, sizeof head);
    from += sizeof key + sizeof head;
    std::memcpy(numbers.data(), from, copy_bytes() - sizeof key - sizeof head);
    const float* const weights = numbers.data() + layout_.row_scalars;
    sum += fingerprint_of_row(salt, key, head, numbers.data(), weights, weights + spec_.dim);
  }
  return sum;
}

void Table::clear(uint32_t shard) {
  TableShard& s = shards_[shard];
  s.index.clear(pools_->index);
  for (std::byte* slab : s.slabs) pools_->slabs.give(slab, slab_bytes_);
  s.slabs = {};
  s.free_rows = {};
  s.rows = 0;
  tell_size(s);
}

}  // namespace windlass
