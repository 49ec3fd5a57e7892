// RowCapture: the rows of a table's shard as they were at a cut, while the shard goes on being used.
//
// Whoever is about to change or erase a row that is not captured yet copies it here first; somebody else goes through
// the rest in the order of hashes (Table::capture). A bit per row number says which rows are captured, so each row is
// captured once, whatever happens to it later, also if its number is used again. Rows that were made after the cut and
// rows that were never updated are left out: the initialiser makes them again.
//
//     rows at the cut   0 1 2 3 4 5 6 7 | 8 9 ...      later rows
//     captured          x     x   x             row 3 is about to change: it is copied, and gets its x
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace windlass {

class RowCapture {
 public:
  // The numbers of rows that are free.
  void begin(uint32_t rows, const std::vector<uint32_t>& free_rows) {
    rows_ = rows;
    captured_.assign((rows + 63) / 64, 0);
    for (const uint32_t row : free_rows) mark(row);
  }
  bool wants(uint32_t row) const { return row < rows_ && (captured_[row / 64] >> (row % 64) & 1) == 0; }
  void mark(uint32_t row) {
    if (row < rows_) captured_[row / 64] |= uint64_t{1} << (row % 64);
  }

  // Makes room for so many bytes in all, so that rows that follow do not move those that are there.
  void expect(size_t bytes) { copied_.reserve(bytes); }
  // Makes room for one more row, of so many bytes.
  std::byte* add(size_t bytes) {
    copied_.resize(copied_.size() + bytes);
    return copied_.data() + copied_.size() - bytes;
  }
  size_t bytes() const { return copied_.size(); }
  // How many the shard had, free ones among them.
  uint32_t rows_at_cut() const { return rows_; }
  // Returns the rows that were copied, and forgets them.
  std::vector<std::byte> take() { return std::exchange(copied_, {}); }

  uint64_t from = 0;     // the next hash to look at
  bool scanned = false;  // all have been looked at

 private:
  uint32_t rows_ = 0;
  std::vector<uint64_t> captured_;
  std::vector<std::byte> copied_;  // as Table::copy_row writes them
};

}  // namespace windlass
