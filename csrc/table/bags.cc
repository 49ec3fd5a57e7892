#include "table/bags.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "rule/kernels.h"

namespace windlass {
namespace {

constexpr uint64_t kAhead = 16;  // ids whose rows are asked for before their use
constexpr uint32_t kLine = 16;   // numbers

template <bool kWrite>
void ask(const float* row, uint32_t dim) {
  for (uint32_t at = 0; at < dim; at += kLine) __builtin_prefetch(row + at, kWrite ? 1 : 0);
}

}  // namespace

bool check_bags(const Bags& bags, uint64_t rows) {
  uint64_t worst = 0;
  for (uint64_t i = 0; i < bags.ids; ++i) worst |= static_cast<uint64_t>(static_cast<uint64_t>(bags.row[i]) >= rows);
  for (uint64_t i = 0; bags.order != nullptr && i < bags.ids; ++i)
    worst |= static_cast<uint64_t>(static_cast<uint64_t>(bags.order[i]) >= bags.ids);
  if (worst != 0) return false;
  if (bags.begin == nullptr) return bags.bags == bags.ids;
  int64_t last = 0;
  for (uint64_t b = 0; b < bags.bags; ++b) {
    if (bags.begin[b] < last || static_cast<uint64_t>(bags.begin[b]) > bags.ids) return false;
    last = bags.begin[b];
  }
  return bags.bags == 0 ? bags.ids == 0 : bags.begin[0] == 0;
}

bool sum_bags(const Bags& bags, uint32_t dim, const float* grads, uint64_t stride, float* rows, uint64_t n) {
  const auto begun = std::unique_ptr<bool[]>(new (std::nothrow) bool[n + 1]());
  if (begun == nullptr) return false;
  const auto add = kernels().combine;
  const auto place = [&](uint64_t id) { return static_cast<uint64_t>(bags.row[id]); };
  const auto take = [&](uint64_t id, const float* grad) {
    const uint64_t row = place(id);
    float* const to = rows + row * dim;
    begun[row] ? add(Combine::kAdd, to, grad, dim) : static_cast<void>(std::memcpy(to, grad, dim * sizeof(float)));
    begun[row] = true;
  };
  const auto first = [&](uint64_t b) {
    return b == bags.bags ? bags.ids : bags.begin == nullptr ? b : static_cast<uint64_t>(bags.begin[b]);
  };
  if (bags.order == nullptr) {
    for (uint64_t b = 0; b < bags.bags; ++b) {
      for (uint64_t id = first(b), end = first(b + 1); id < end; ++id) {
        if (id + kAhead < bags.ids) ask<true>(rows + place(id + kAhead) * dim, dim);
        take(id, grads + b * stride);
      }
    }
  } else {
    const auto bag_of = std::unique_ptr<uint32_t[]>(new (std::nothrow) uint32_t[bags.ids + 1]);
    if (bag_of == nullptr || bags.bags > UINT32_MAX) return false;
    for (uint64_t b = 0; b < bags.bags; ++b)
      std::fill(bag_of.get() + first(b), bag_of.get() + first(b + 1), static_cast<uint32_t>(b));
    const auto grad = [&](uint64_t id) { return grads + bag_of[id] * stride; };
    for (uint64_t i = 0; i < bags.ids; ++i) {
      if (i + kAhead < bags.ids) {
        const auto next = static_cast<uint64_t>(bags.order[i + kAhead]);
        ask<true>(rows + place(next) * dim, dim);
        ask<false>(grad(next), dim);
      }
      const auto id = static_cast<uint64_t>(bags.order[i]);
      take(id, grad(id));
    }
  }
  for (uint64_t row = 0; row < n; ++row) {
    if (!begun[row]) std::memset(rows + row * dim, 0, dim * sizeof(float));
  }
  return true;
}

void gather_rows(const int64_t* row, uint64_t ids, uint32_t dim, const float* rows, float* to) {
  for (uint64_t i = 0; i < ids; ++i) {
    if (i + kAhead < ids) ask<false>(rows + static_cast<uint64_t>(row[i + kAhead]) * dim, dim);
    std::memcpy(to + i * dim, rows + static_cast<uint64_t>(row[i]) * dim, dim * sizeof(float));
  }
}

}  // namespace windlass
