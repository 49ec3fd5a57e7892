// Bags: rows that a worker summed in bags, on the way back. The gradient of a row is the sum of the gradients of the
// bags that it was in, in the order of the ids, or in one that is given: of one sum it decides about the last bits.
#pragma once

#include <cstdint>

namespace windlass {

struct Bags {
  const int64_t* row;    // of each id
  uint64_t ids;          // how many there are
  const int64_t* begin;  // of each bag, among the ids; the first begins at 0, and the last ends with the ids. Null:
                         // every id is a bag
  uint64_t bags;
  const int64_t* order;  // of the ids, as their places; null: as they are
};

// Whether every bag begins where the one before it begins or later, every row is one of `rows`, and the order names
// ids.
bool check_bags(const Bags& bags, uint64_t rows);

// Into each of `n` rows, of `dim` numbers, the gradients of its bags; zeros into rows that are in none. Bags that were
// checked. Returns false if there was no memory; then nothing has changed.
// `stride`: numbers from one bag's gradient to the next one's.
bool sum_bags(const Bags& bags, uint32_t dim, const float* grads, uint64_t stride, float* rows, uint64_t n);

// to[i] = rows[row[i]], of `dim` numbers each; every one of `row` was checked.
void gather_rows(const int64_t* row, uint64_t ids, uint32_t dim, const float* rows, float* to);

}  // namespace windlass
