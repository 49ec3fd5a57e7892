#include "table/group.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
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

// From the lowest byte of the keys to the highest; bytes that are the same in all of them, as in small ids, cost
// nothing.
bool sort_unique(uint64_t* unique, uint64_t n, int64_t* inverse, uint64_t places) {
  if (n > UINT32_MAX) return false;
  struct Ranked {
    uint64_t key;
    uint32_t was;  // its place in the order that is there
  };
  constexpr uint64_t kSign = uint64_t{1} << 63;
  const auto memory = std::unique_ptr<Ranked[]>(new (std::nothrow) Ranked[2 * n + 1]);
  const auto rank = std::unique_ptr<uint32_t[]>(new (std::nothrow) uint32_t[n + 1]);
  if (memory == nullptr || rank == nullptr) return false;
  Ranked *from = memory.get(), *to = from + n;
  uint64_t differing = 0;
  for (uint64_t i = 0; i < n; ++i) {
    differing |= unique[i] ^ unique[0];
    from[i] = {unique[i] ^ kSign, static_cast<uint32_t>(i)};
  }
  for (int shift = 0; shift < 64; shift += 8) {
    if ((differing >> shift & 255) == 0) continue;
    uint32_t next[256] = {};
    for (uint64_t i = 0; i < n; ++i) ++next[from[i].key >> shift & 255];
    uint32_t sum = 0;
    for (uint32_t& at : next) sum += std::exchange(at, sum);
    for (uint64_t i = 0; i < n; ++i) to[next[from[i].key >> shift & 255]++] = from[i];
    std::swap(from, to);
  }
  for (uint64_t i = 0; i < n; ++i) {
    unique[i] = from[i].key ^ kSign;
    rank[from[i].was] = static_cast<uint32_t>(i);
  }
  for (uint64_t i = 0; i < places; ++i) inverse[i] = rank[static_cast<size_t>(inverse[i])];
  return true;
}

}  // namespace windlass
