#include "table/bags.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "base/limits.h"
#include "rule/kernels.h"

namespace windlass {
namespace {

constexpr uint64_t kBlock = 512;  // rows that a kernel gets at once

// Gradients on their way to their rows, in the order in which they came.
class Adding {
 public:
  Adding(float* rows, uint32_t dim, bool* begun) : rows_(rows), dim_(dim), begun_(begun) {}

  void add(uint64_t row, const float* grad) {
    grad_[n_] = grad;
    into_[n_] = rows_ + row * dim_;
    first_[n_] = !begun_[row];
    begun_[row] = true;
    if (++n_ == kBlock) end();
  }
  void end() {
    kernels().add_rows(grad_, into_, first_, n_, dim_);
    n_ = 0;
  }

 private:
  float* const rows_;
  const uint32_t dim_;
  bool* const begun_;
  uint64_t n_ = 0;
  const float* grad_[kBlock];
  float* into_[kBlock];
  bool first_[kBlock];
};

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
  const auto place = [&](uint64_t id) { return static_cast<uint64_t>(bags.row[id]); };
  Adding adding(rows, dim, begun.get());
  const auto first = [&](uint64_t b) {
    return b == bags.bags ? bags.ids : bags.begin == nullptr ? b : static_cast<uint64_t>(bags.begin[b]);
  };
  if (bags.order == nullptr) {
    for (uint64_t b = 0; b < bags.bags; ++b) {
      for (uint64_t id = first(b), end = first(b + 1); id < end; ++id) adding.add(place(id), grads + b * stride);
    }
  } else {
    const auto bag_of = std::unique_ptr<uint32_t[]>(new (std::nothrow) uint32_t[bags.ids + 1]);
    if (bag_of == nullptr || bags.bags > UINT32_MAX) return false;
    for (uint64_t b = 0; b < bags.bags; ++b)
      std::fill(bag_of.get() + first(b), bag_of.get() + first(b + 1), static_cast<uint32_t>(b));
    for (uint64_t i = 0; i < bags.ids; ++i) {
      const auto id = static_cast<uint64_t>(bags.order[i]);
      adding.add(place(id), grads + bag_of[id] * stride);
    }
  }
  adding.end();
  for (uint64_t row = 0; row < n; ++row) {
    if (!begun[row]) std::memset(rows + row * dim, 0, dim * sizeof(float));
  }
  return true;
}

void gather_rows(const int64_t* row, uint64_t ids, uint32_t dim, const float* rows, float* to) {
  const bool past_cache = ids * dim * sizeof(float) >= limits::kStreamPullBytesMin;
  const float* from[kBlock];
  float* into[kBlock];
  for (uint64_t at = 0; at < ids; at += kBlock) {
    const uint64_t n = std::min(kBlock, ids - at);
    for (uint64_t i = 0; i < n; ++i) {
      from[i] = rows + static_cast<uint64_t>(row[at + i]) * dim;
      into[i] = to + (at + i) * dim;
    }
    kernels().copy_rows(from, into, n, dim, past_cache);
  }
  if (past_cache) kernels().fence();
}

}  // namespace windlass
