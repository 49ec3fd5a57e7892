// Rows of a table as queries see them: all of a shard, some at a time, or those that satisfy a predicate.
#include <algorithm>

#include "table/table.h"

namespace windlass {

// Gathers rows into a block.
class Table::Gathering {
 public:
  Gathering(const Table& table, const TableShard& shard) : table_(table), shard_(shard) {}

  void add(uint64_t key, uint32_t row) { add(key, table_.weights(shard_, row), table_.head(shard_, row)); }
  void add(uint64_t key, const void* weights, const RowHead* head) {
    keys_[n_] = key;
    rows_[n_] = weights;
    heads_[n_++] = head;
  }
  bool full() const { return n_ == Block::kRowsMax; }
  Block block() const { return {keys_, rows_, heads_, n_}; }
  void clear() { n_ = 0; }

 private:
  const Table& table_;
  const TableShard& shard_;
  size_t n_ = 0;
  uint64_t keys_[Block::kRowsMax];
  const void* rows_[Block::kRowsMax];
  const RowHead* heads_[Block::kRowsMax];
};

// The index maps keys to rows. Its inverse, which fits into a cache, lets the rows be read in the order in which they
// lie.
void Table::walk(uint32_t shard, const std::function<void(const Block&)>& visit) const {
  const TableShard& s = shards_[shard];
  static thread_local std::vector<uint64_t> places;  // of each row
  constexpr uint64_t kNobody = 1;                    // the low bits of a place are zeros
  places.assign(s.rows, kNobody);
  s.index.each([](uint64_t place, uint32_t row) { places[row] = place; });
  Gathering some(*this, s);
  // Rows are prefetched while their keys are gathered.
  const size_t ahead = std::min<size_t>(weight_stride_, 256);
  for (uint32_t first = 0; first < s.rows; first += slab_mask_ + 1) {
    const std::byte* const slab = this->slab(s, first);
    const uint32_t n = std::min(slab_mask_ + 1, s.rows - first);
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t place = places[first + i];
      if (place == kNobody) continue;
      const auto* const head = reinterpret_cast<const RowHead*>(slab + head_at_ + i * head_stride_);
      const std::byte* const row = slab + i * weight_stride_;
      for (size_t at = 0; at < ahead; at += 64) __builtin_prefetch(row + at, 0, 2);
      some.add(key_of(shard, place), row, head);
      if (!some.full()) continue;
      visit(some.block());
      some.clear();
    }
  }
  if (some.block().n != 0) visit(some.block());
  if (places.capacity() * sizeof(uint64_t) > limits::kWalkKeptBytes) places = {};
}

bool Table::scan(uint32_t shard, uint64_t* from, size_t most, const Program& where, std::vector<uint64_t>* keys,
                 std::vector<float>* rows, bool with_state) const {
  const TableShard& s = shards_[shard];
  std::vector<Index::Entry> found;
  bool more = s.index.scan(*from, limits::kScanRowsMax, &found);
  Gathering some(*this, s);
  bool holds[Block::kRowsMax];
  size_t got = 0;
  for (size_t at = 0; at < found.size() && got < most; at += Block::kRowsMax) {
    const size_t end = std::min(at + Block::kRowsMax, found.size());
    for (size_t i = at; i < end; ++i) {
      if (i + 16 < found.size()) __builtin_prefetch(this->weights(s, found[i + 16].row));
      some.add(key_of(shard, found[i].hash), found[i].row);
    }
    const Block block = some.block();
    std::fill_n(holds, block.n, true);
    if (!where.empty()) where.run(block, holds);
    some.clear();
    for (size_t i = 0; i < block.n && got < most; ++i) {
      *from = found[at + i].hash + 1;
      if (!holds[i] || (with_state && !block.heads[i]->is_changed())) continue;
      const auto* const row = static_cast<const float*>(block.rows[i]);
      keys->push_back(block.keys[i]);
      if (with_state) {
        append_row(s, found[at + i].row, rows);
      } else if (rows != nullptr) {
        rows->insert(rows->end(), row, row + spec_.dim);
      }
      ++got;
    }
  }
  if (!found.empty() && *from <= found.back().hash) more = true;
  return more;
}

uint64_t Table::erase(uint32_t shard, const Keyed* keyed, size_t n, const Program* where) {
  TableShard& s = shards_[shard];
  const uint64_t erased = erase_rows(s, keyed, n, where);
  tell_size(s);
  return erased;
}

uint64_t Table::erase_rows(TableShard& s, const Keyed* keyed, size_t n, const Program* where) {
  uint64_t erased = 0;
  const auto erase_one = [&](const Keyed& k) {
    const uint32_t row = s.index.remove(place_of(k.hash));
    if (row == Index::kAbsent) return;
    keep(s, k.hash, row);
    s.free_rows.push_back(row);
    if (s.changes != nullptr) s.changes->add(&k, 1);
    ++erased;
  };
  if (where == nullptr) {
    for (size_t i = 0; i < n; ++i) erase_one(keyed[i]);
    return erased;
  }
  static thread_local std::vector<uint32_t> rows;
  rows.resize(n);
  s.index.find_all(keyed, n, rows.data());
  Gathering some(*this, s);
  size_t which[Block::kRowsMax];
  bool holds[Block::kRowsMax];
  for (size_t i = 0; i < n;) {
    for (; i < n && !some.full(); ++i) {
      if (rows[i] == Index::kAbsent) continue;
      which[some.block().n] = i;
      some.add(unmix(keyed[i].hash), rows[i]);
    }
    const Block block = some.block();
    where->run(block, holds);
    for (size_t b = 0; b < block.n; ++b) {
      if (holds[b]) erase_one(keyed[which[b]]);
    }
    some.clear();
  }
  return erased;
}

}  // namespace windlass
