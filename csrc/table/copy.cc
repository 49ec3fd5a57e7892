// Rows of a table as bytes. For a shard that moves, docs/formats/shard.md: key u64, count u32, touched u32, numbers of
// the row, weights, state. For clients that put or export them, docs/formats/wire.md: RowForm.
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

Status Table::expect(uint32_t shard, uint64_t rows) {
  TableShard& s = shards_[shard];
  const bool there = s.index.expect(pools_->index, std::min<uint64_t>(rows, limits::kShardRowsMax));
  tell_size(s);
  return there ? Status() : out_of_memory();
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
  if (head(s, row)->is_changed()) copy_row(s, unmix(hash), row, s.capture->add(copy_bytes()));
}

void Table::capture(uint32_t shard, size_t most) {
  constexpr size_t kAhead = 8, kPrefetchedBytes = 512;  // the processor finds the rest of a long row by itself
  TableShard& s = shards_[shard];
  std::vector<Index::Entry> found;
  const bool more = s.index.scan(s.capture->from, most, &found);
  for (size_t i = 0; i < found.size(); ++i) {
    if (i + kAhead < found.size()) {
      const uint32_t next = found[i + kAhead].row;
      const auto* const from = reinterpret_cast<const std::byte*>(weights(s, next));
      __builtin_prefetch(head(s, next));
      if (layout_.vectors != 0) __builtin_prefetch(state(s, next));
      for (size_t at = 0; at < std::min<size_t>(spec_.dim * sizeof(float), kPrefetchedBytes); at += 64)
        __builtin_prefetch(from + at);
    }
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

// ---- as clients bring and take them -------------------------------------------------------------------------------

std::vector<uint32_t> RowForm::parts_of(const TableSpec& spec) {
  const Layout layout = layout_of(spec.rule);
  std::vector<uint32_t> parts(1 + size_t{layout.vectors}, spec.dim);
  if (layout.row_scalars != 0) parts.push_back(layout.row_scalars);
  return parts;
}

RowForm RowForm::all(const TableSpec& spec) { return {.parts = (1u << parts_of(spec).size()) - 1, .counted = true}; }

size_t RowForm::numbers(const TableSpec& spec) const {
  const std::vector<uint32_t> all = parts_of(spec);
  size_t n = counted ? 1 : 0;
  for (size_t part = 0; part < all.size(); ++part) n += has(part) ? all[part] : 0;
  return n;
}

Status Table::put(uint32_t shard, const RowForm& form, const Keyed* keyed, size_t n, const std::byte* in) {
  TableShard& s = shards_[shard];
  static thread_local std::vector<uint32_t> rows;
  rows.resize(n);
  s.index.find_all(keyed, n, rows.data());
  WL_RETURN_IF_ERROR(make_missing(s, keyed, n, rows.data()));
  if (s.changes != nullptr) s.changes->add(keyed, n);
  for (size_t i = 0; s.capture != nullptr && i < n; ++i) keep(s, keyed[i].hash, rows[i]);
  const size_t bytes = form.bytes(spec_), vectors = layout_.vectors;
  const uint32_t version = std::max<uint32_t>(1, static_cast<uint32_t>(s.version));
  for (size_t i = 0; i < n; ++i) {
    const std::byte* from = in + keyed[i].at * bytes;
    const auto get = [&from](void* to, size_t size) {
      std::memcpy(to, from, size);
      from += size;
    };
    RowHead* const h = head(s, rows[i]);
    start_state(s, rows[i]);
    get(weights(s, rows[i]), spec_.dim * sizeof(float));
    for (size_t v = 0; v < vectors; ++v) {
      if (form.has(1 + v)) get(state(s, rows[i]) + v * spec_.dim, spec_.dim * sizeof(float));
    }
    if (layout_.row_scalars != 0 && form.has(1 + vectors)) get(h->scalars(), layout_.row_scalars * sizeof(float));
    h->count = 0;
    if (form.counted) get(&h->count, sizeof h->count);
    h->touched = version;
  }
  return {};
}

void Table::append_row(const TableShard& s, uint32_t row, std::vector<float>* to) const {
  const RowHead* const h = head(s, row);
  const auto add = [to](const float* from, size_t n) { to->insert(to->end(), from, from + n); };
  add(weights(s, row), spec_.dim);
  if (layout_.vectors != 0) add(state(s, row), layout_.vectors * spec_.dim);
  add(h->scalars(), layout_.row_scalars);
  to->emplace_back();
  std::memcpy(&to->back(), &h->count, sizeof h->count);
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
