#include "table/group.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/os.h"

namespace windlass {
namespace {

constexpr uint64_t kSmallKeys = 4096;
constexpr uint64_t kSpareKeysMax = uint64_t{1} << 20;

// The caller's keys are read once: another thread may be changing them.
template <class Get>
void count_shards(uint64_t n, Get get, uint64_t* hashes, uint32_t (*count)[limits::kTableShards]) {
  uint64_t i = 0;
  // Four counters each, so that equal shards in a row do not wait for each other's store.
  for (; i + 4 <= n; i += 4) {
    for (uint64_t j = 0; j < 4; ++j) ++count[j][shard_of_hash(hashes[i + j] = mix(get(i + j)))];
  }
  for (; i < n; ++i) ++count[0][shard_of_hash(hashes[i] = mix(get(i)))];
}

// Writes to as many places as there are shards, more than the processor prefetches by itself, so the next line of each
// is prefetched here.
void place(uint64_t n, const uint64_t* hashes, uint32_t* next, Keyed* out) {
  constexpr size_t kLine = 64 / sizeof(Keyed);
  for (uint64_t i = 0; i < n; ++i) {
    Keyed* const to = out + next[shard_of_hash(hashes[i])]++;
    __builtin_prefetch(to + kLine, 1);
    *to = {hashes[i], static_cast<uint32_t>(i)};
  }
}

// Fresh memory costs a page fault per 4 KiB, more than the sorting; so each thread keeps its last buffer.
struct Spare {
  Keyed* buffer = nullptr;
  uint64_t room = 0;
  ~Spare() { os::unmap(reinterpret_cast<std::byte*>(buffer), room * sizeof(Keyed)); }
};
thread_local Spare t_spare;
thread_local Buffer t_hashes;

}  // namespace

Groups::~Groups() {
  if (room_ > t_spare.room && room_ <= kSpareKeysMax) {
    std::swap(room_, t_spare.room);
    std::swap(keyed_, t_spare.buffer);
  }
  os::unmap(reinterpret_cast<std::byte*>(keyed_), room_ * sizeof(Keyed));
}

Groups::Groups(const Keys& keys) : ok_(true) {
  std::fill_n(start_, limits::kTableShards + 1, 0);
  if (keys.n == 0) return;
  if (t_spare.room >= keys.n) {
    std::swap(room_, t_spare.room);
    std::swap(keyed_, t_spare.buffer);
  } else {
    // Large buffers are on huge pages: 256 places are written at once, more small pages than the TLB holds.
    room_ = keys.n <= kSmallKeys ? kSmallKeys : std::max<uint64_t>(keys.n, limits::kHugePageBytes / sizeof(Keyed));
    keyed_ = reinterpret_cast<Keyed*>(os::map(room_ * sizeof(Keyed)));
    if (keyed_ == nullptr) {
      room_ = 0;
      ok_ = false;
      return;
    }
  }
  auto* const hashes = reinterpret_cast<uint64_t*>(t_hashes.room(keys.n * sizeof(uint64_t)));
  if (hashes == nullptr) {
    ok_ = false;
    return;
  }
  uint32_t count[4][limits::kTableShards] = {};
  const auto* wide = static_cast<const uint64_t*>(keys.data);
  const auto* narrow = static_cast<const int32_t*>(keys.data);
  const auto get_wide = [wide](uint64_t i) { return __atomic_load_n(wide + i, __ATOMIC_RELAXED); };
  const auto get_narrow = [narrow](uint64_t i) {
    return static_cast<uint64_t>(static_cast<int64_t>(__atomic_load_n(narrow + i, __ATOMIC_RELAXED)));
  };
  const bool is_narrow = keys.type == KeyType::kInt32;
  is_narrow ? count_shards(keys.n, get_narrow, hashes, count) : count_shards(keys.n, get_wide, hashes, count);
  uint32_t next[limits::kTableShards];
  uint32_t sum = 0;
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    start_[s] = next[s] = sum;
    sum += count[0][s] + count[1][s] + count[2][s] + count[3][s];
  }
  start_[limits::kTableShards] = sum;
  place(keys.n, hashes, next, keyed_);
  t_hashes.shrink(kSpareKeysMax * sizeof(uint64_t));
}

uint64_t unique(const Keys& keys, uint64_t* unique, int64_t* inverse) {
  const Groups groups(keys);
  if (!groups.ok()) return kNoMemory;
  std::vector<uint32_t> slots;  // place in `hashes` + 1; 0: empty
  std::vector<uint64_t> hashes;
  uint64_t total = 0;
  for (uint32_t s = 0; s < limits::kTableShards; ++s) {
    const size_t n = groups.size(s);
    if (n == 0) continue;
    size_t size = 16;
    int bits = 4;
    while (size < n * 2) size *= 2, ++bits;
    slots.assign(size, 0);
    if (hashes.size() < n) hashes.resize(n);
    const Keyed* keyed = groups.begin(s);
    uint32_t found = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint64_t h = keyed[i].hash;
      size_t slot = (h << 8) >> (64 - bits);
      while (slots[slot] != 0 && hashes[slots[slot] - 1] != h) slot = (slot + 1) & (size - 1);
      if (slots[slot] == 0) {
        hashes[found] = h;
        slots[slot] = ++found;
      }
      inverse[keyed[i].at] = static_cast<int64_t>(total + slots[slot] - 1);
    }
    for (uint32_t i = 0; i < found; ++i) unique[total + i] = unmix(hashes[i]);
    total += found;
  }
  return total;
}

}  // namespace windlass
