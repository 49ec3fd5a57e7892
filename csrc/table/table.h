// Table: what a server holds of a named map from 64-bit keys to rows, in 256 shards by a hash of the key.
//
// A shard is an Index (hash -> row number) and slabs, each with the same number of rows and three parts:
//
//     slab:  | weights, `weight_stride` bytes a row | state, `state_stride` | heads: count, touched, row scalars |
//
// Slabs are added, never moved, so growth copies nothing. The initialiser makes a row from (seed, table name, key) and
// nothing else. An empty shard holds no memory beyond itself.
//
// A request passes over its shard twice, once through the index and once through the rows, and prefetches what it will
// need some keys later, so that it waits for no single row.
//
// Thread safety: shard operations belong to the holder of that shard's turn; size() from any thread; the rest is fixed
// after create().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/pool.h"
#include "query/program.h"
#include "rule/kernels.h"
#include "session/shard.h"
#include "table/changes.h"
#include "table/group.h"
#include "table/index.h"
#include "table/row_capture.h"
#include "tensor/tensor.h"

namespace windlass {

struct TableSpec {
  uint32_t dim = 0;
  RuleSpec rule;
  Init init;
  uint64_t seed = 0;
  bool reject_nonfinite = false;
  Sync sync = {};
  friend bool operator==(const TableSpec&, const TableSpec&) = default;
};

std::string describe(const TableSpec& spec);
Status check_spec(const std::string& name, const TableSpec& spec);  // ok when the spec is valid

// How rows lie one behind the other, as a put brings them and an export returns them with their state:
//
//     weights | each state array | the rule's numbers of the row | count of updates, u32
//
// all float32 but the count. A put may leave out everything but the weights.
struct RowForm {
  uint32_t parts = 1;  // bit i: part i, in the order of tensor/planes.h
  bool counted = false;

  static std::vector<uint32_t> parts_of(const TableSpec& spec);  // how many numbers each part has
  static RowForm all(const TableSpec& spec);
  bool has(size_t part) const { return (parts >> part & 1) != 0; }
  size_t numbers(const TableSpec& spec) const;  // of a row, the count included
  size_t bytes(const TableSpec& spec) const { return numbers(spec) * sizeof(float); }
};

// Where tables take their memory. Index pages have a pool of their own: a search touches only those, and the fewer huge
// pages they lie on, the fewer of its steps miss the TLB.
struct TablePools {
  explicit TablePools(Budget* b) : budget(b), index(b), slabs(b) {}
  void trim() {
    index.trim();
    slabs.trim();
  }
  const Budget* budget;
  Pool index;
  Pool slabs;
};

struct TableShard : Shard {
  Index index;
  std::vector<std::byte*> slabs;
  std::vector<uint32_t> free_rows;   // given up by erase()
  uint32_t rows = 0;                 // row numbers handed out so far
  std::unique_ptr<Changes> changes;  // while it is being copied
  RowCapture* capture = nullptr;     // while a checkpoint takes it; somebody else's
  uint64_t told_rows = 0;            // that Table::size() has counted, and their bytes
  uint64_t told_bytes = 0;
};

// How much there is of a table here, for people to read.
struct TableSize {
  uint64_t rows = 0;
  uint64_t bytes = 0;  // of rows and index, with room for more rows
};

class Table {
 public:
  static Status create(const std::string& name, const TableSpec& spec, TablePools* pools, std::unique_ptr<Table>* out);
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table();

  const std::string& name() const { return name_; }
  const TableSpec& spec() const { return spec_; }
  TableShard& shard(uint32_t i) { return shards_[i]; }

  // Row `keyed[i].at` of arrays.out becomes the row of that key. Missing rows are made; with create=false only their
  // values are written. Fails when memory is used up.
  Status read(uint32_t shard, const Keyed* keyed, size_t n, const Arrays& arrays, bool create);
  // One update of the rows of those keys from arrays.in; several gradients for one key are combined first. All rows
  // exist before the first is changed, so a failure changes no weight. Where arrays.out is given, the new rows go
  // there.
  Status apply(uint32_t shard, const Hyper& hyper, const Keyed* keyed, size_t n, const Arrays& arrays);
  // Deletes rows, or those of them that satisfy a predicate now; returns how many it deleted.
  uint64_t erase(uint32_t shard, const Keyed* keyed, size_t n, const Program* where = nullptr);
  // Sets the rows of those keys, makes missing ones, and starts anew what the form leaves out. Row `keyed[i].at` of
  // `rows` is that of key i; of a repeated key the last counts. All rows exist before the first is changed.
  Status put(uint32_t shard, const RowForm& form, const Keyed* keyed, size_t n, const std::byte* rows);
  // Up to `most` rows with (hash << 8) >= from, in that order: keys, and weights of dim floats each. *from becomes
  // where to continue. False when those were the last.
  bool scan(uint32_t shard, uint64_t* from, size_t most, std::vector<uint64_t>* keys,
            std::vector<float>* weights) const;

  // For queries (table/walk.cc).
  RowType row_type() const { return {Dtype::kFloat32, spec_.dim, true, true}; }
  // Visits all rows, in the order in which they lie.
  void walk(uint32_t shard, const std::function<void(const Block&)>& visit) const;
  // Like scan(), for rows that satisfy a predicate, if there is one. One call looks at a limited number of rows, so
  // there may be more even if it returned none. `rows` may be null. with_state: rows in the form RowForm::all(),
  // without those that have only what the initialiser gave them.
  bool scan(uint32_t shard, uint64_t* from, size_t most, const Program& where, std::vector<uint64_t>* keys,
            std::vector<float>* rows, bool with_state = false) const;
  uint64_t rows(uint32_t shard) const { return shards_[shard].index.size(); }
  // Of all shards, without their turns: whoever makes or deletes rows counts them.
  TableSize size() const { return {rows_.load(std::memory_order_relaxed), bytes_.load(std::memory_order_relaxed)}; }
  // Of the rows that were ever updated; rows that were only read have the initialiser's values and do not count.
  uint64_t fingerprint(uint32_t shard) const;

  // Rows as bytes, for a shard that moves (table/copy.cc): the size of each.
  size_t copy_bytes() const;
  // How far a copy has got. An index that is filled in hash order has all entries in one place, so a copy visits hashes
  // in many short ranges, which it takes in bit-reversed order.
  struct CopyCursor {
    uint32_t bits = 0;   // of the number of a range
    uint64_t range = 0;  // the next, before its bits are reversed
    uint64_t from = 0;   // within it
  };
  CopyCursor begin_copy(uint32_t shard) const;
  // Copies up to `most` rows from the cursor on. A row that is there from start to end is copied once; false when those
  // were the last.
  bool copy(uint32_t shard, CopyCursor* cursor, size_t most, std::byte* to, size_t* n) const;
  // Copies the rows of those keys, by their hashes; *gone gets the keys that have none.
  void copy(uint32_t shard, const uint64_t* hashes, size_t n, std::byte* to, size_t* rows,
            std::vector<uint64_t>* gone) const;
  // Looks at about `most` rows from capture->from on, and captures those that are not captured yet.
  void capture(uint32_t shard, size_t most);
  // The fingerprint of copied rows; with that of the shard's own numbers it adds up to fingerprint().
  uint64_t fingerprint_of_rows(const std::byte* rows, size_t n) const;
  uint64_t fingerprint_of_count(uint32_t shard, uint64_t count) const;
  // Stores copied rows, in place of those with the same keys. Fails when memory is used up, or a key does not belong
  // here; some rows may have been stored then.
  Status put(uint32_t shard, const std::byte* rows, size_t n);
  // Makes room for so many rows in an empty shard: they may then come in the order of their hashes.
  Status expect(uint32_t shard, uint64_t rows);
  // Deletes all rows and gives their memory back.
  void clear(uint32_t shard);
  TablePools& pools() const { return *pools_; }

  // The rule, where it is the user's own.
  void set_foreign(std::shared_ptr<ForeignRule> rule) { foreign_ = std::move(rule); }

 private:
  Table(std::string name, TableSpec spec, TablePools* pools);
  std::byte* slab(const TableShard& s, uint32_t row) const { return s.slabs[row >> slab_shift_]; }
  float* weights(const TableShard& s, uint32_t row) const {
    return reinterpret_cast<float*>(slab(s, row) + (row & slab_mask_) * weight_stride_);
  }
  float* state(const TableShard& s, uint32_t row) const {
    return reinterpret_cast<float*>(slab(s, row) + state_at_ + (row & slab_mask_) * state_stride_);
  }
  RowHead* head(const TableShard& s, uint32_t row) const {
    return reinterpret_cast<RowHead*>(slab(s, row) + head_at_ + (row & slab_mask_) * head_stride_);
  }
  // gradient(entry, to) writes the gradient of an entry of `rows`.
  // gradient: copies the one of an entry; false if it may not be used.
  Status apply_foreign(uint32_t shard, const Hyper& hyper, const std::vector<uint32_t>& rows,
                       const std::vector<uint32_t>& entries, const std::function<bool(uint32_t, float*)>& gradient);
  Status found_nonfinite(uint32_t shard, bool any) const {
    return changed_on_loan("table '" + name_ + "': the gradients", shard, any);
  }
  class Gathering;
  class Places;
  Status make_missing(TableShard& s, const Keyed* keyed, size_t n, uint32_t* rows);
  void write_out(const TableShard& s, const Keyed* keyed, size_t n, const uint32_t* rows, const Arrays& arrays) const;
  uint32_t make_row(TableShard& s, uint64_t hash);
  uint32_t new_row(TableShard& s, uint64_t hash);
  void copy_row(const TableShard& s, uint64_t key, uint32_t row, std::byte* to) const;
  // Before a row changes or goes: captures it, if a checkpoint has yet to.
  void keep(TableShard& s, uint64_t hash, uint32_t row) const {
    if (s.capture != nullptr && s.capture->wants(row)) capture_row(s, hash, row);
  }
  void capture_row(TableShard& s, uint64_t hash, uint32_t row) const;
  uint64_t fingerprint_of_row(uint64_t salt, uint64_t key, const RowHead& head, const float* scalars,
                              const float* weights, const float* state) const;
  void start_state(const TableShard& s, uint32_t row) const;
  void append_row(const TableShard& s, uint32_t row, std::vector<float>* to) const;
  void initial(uint64_t hash, float* out) const;
  Status out_of_memory() const;
  Status put_rows(TableShard& s, uint32_t shard, const std::byte* rows, size_t n);
  uint64_t erase_rows(TableShard& s, const Keyed* keyed, size_t n, const Program* where);
  void tell_size(TableShard& s);

  const std::string name_;
  const TableSpec spec_;
  TablePools* const pools_;
  const Layout layout_;
  const uint64_t row_seed_;
  size_t weight_stride_ = 0, state_stride_ = 0, head_stride_ = 0;
  size_t state_at_ = 0, head_at_ = 0, slab_bytes_ = 0;
  uint32_t slab_shift_ = 0, slab_mask_ = 0;
  std::unique_ptr<TableShard[]> shards_;
  std::shared_ptr<ForeignRule> foreign_;
  std::atomic<uint64_t> rows_{0}, bytes_{0};
};

}  // namespace windlass
