#include "table/bags.h"

#include <memory>
#include <new>

namespace windlass {
namespace {

constexpr uint64_t kAhead = 16;  // ids whose rows are asked for before their use

}  // namespace

bool check_bags(const Bags& bags, uint64_t rows) {
  uint64_t worst = 0;
  for (uint64_t i = 0; i < bags.ids; ++i) worst |= static_cast<uint64_t>(static_cast<uint64_t>(bags.row[i]) >= rows);
  for (uint64_t i = 0; bags.order != nullptr && i < bags.ids; ++i)
    worst |= static_cast<uint64_t>(static_cast<uint64_t>(bags.order[i]) >= bags.ids);
  if (worst != 0) return false;
  int64_t last = 0;
  for (uint64_t b = 0; b < bags.bags; ++b) {
    if (bags.begin[b] < last || static_cast<uint64_t>(bags.begin[b]) > bags.ids) return false;
    last = bags.begin[b];
  }
  return bags.bags == 0 ? bags.ids == 0 : bags.begin[0] == 0;
}

bool add_bags(const Bags& bags, uint32_t dim, const float* grads, float* rows) {
  const auto bag_of = std::unique_ptr<uint32_t[]>(new (std::nothrow) uint32_t[bags.ids + 1]);
  if (bag_of == nullptr || bags.bags > UINT32_MAX) return false;
  for (uint64_t b = 0; b < bags.bags; ++b) {
    const auto end = b + 1 < bags.bags ? static_cast<uint64_t>(bags.begin[b + 1]) : bags.ids;
    for (auto i = static_cast<uint64_t>(bags.begin[b]); i < end; ++i) bag_of[i] = static_cast<uint32_t>(b);
  }
  const auto id = [&](uint64_t i) { return bags.order == nullptr ? i : static_cast<uint64_t>(bags.order[i]); };
  const auto row = [&](uint64_t i) { return rows + static_cast<uint64_t>(bags.row[i]) * dim; };
  for (uint64_t i = 0; i < bags.ids; ++i) {
    if (i + kAhead < bags.ids) {
      const uint64_t next = id(i + kAhead);
      const float *const to = row(next), *const from = grads + uint64_t{bag_of[next]} * dim;
      for (uint32_t at = 0; at < dim; at += 16) {
        __builtin_prefetch(to + at, 1);
        __builtin_prefetch(from + at);
      }
    }
    const uint64_t here = id(i);
    float* const to = row(here);
    const float* const from = grads + uint64_t{bag_of[here]} * dim;
    for (uint32_t at = 0; at < dim; ++at) to[at] += from[at];
  }
  return true;
}

}  // namespace windlass
