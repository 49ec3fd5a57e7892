// Index: from a key's hash to its row number, for one shard of a table.
//
// Open addressing over buckets of one cache line, five entries each, in the order of the hash:
//
//     bucket(h) = h * buckets >> 64            so a larger hash never has a smaller bucket
//
//     | hash hash hash hash hash | row row row row row | passed used |      64 bytes
//
// An entry whose bucket is full goes into the next one with room; `passed` counts, in every bucket it went past, how
// many did so. A search stops at a bucket nobody passed, and removal counts down again: no tombstones.
//
// The index grows by a quarter, without a second copy and without a pause. Because buckets are in hash order, an
// entry's new bucket is never before its old one, so entries can move from the top down within the same array:
//
//     0            old(f)   new(f)                          hashes >= f have moved to the new geometry,
//     |--- old -----|  free  |------------ new ------------| hashes <  f are still in the old one
//
// Each insertion moves the frontier f down by a few buckets, so that the move ends long before the new room is full.
// The hash order also makes a hash a cursor: scan() continues where it stopped, even if the index grew in between.
//
// The array is a directory of pages from the server's pool. `hash` here is place_of(): the shard's bits, which
// are the same for all, shifted out.
//
// Thread safety: none; the holder of the shard's turn.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/hash.h"
#include "base/pool.h"
#include "table/group.h"

namespace windlass {

class Index {
 public:
  static constexpr uint32_t kAbsent = 0xFFFFFFFFu;

  struct Entry {
    uint64_t hash;
    uint32_t row;
  };

  Index() = default;
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  // rows[i] becomes the row of keyed[i], or kAbsent; found(row) is called for each as soon as it is known. The
  // searches of a request overlap: while one waits for its bucket to come from memory, others go on.
  template <class Found>
  void find_all(const Keyed* keyed, size_t n, uint32_t* rows, Found found) const;
  void find_all(const Keyed* keyed, size_t n, uint32_t* rows) const {
    find_all(keyed, n, rows, [](uint32_t) {});
  }

  // The row of a hash, or kAbsent.
  uint32_t find(uint64_t hash) const {
    if (pages_.empty()) return kAbsent;
    for (uint64_t b = home(hash);; ++b) {
      const Bucket& bucket = at(b);
      const int slot = bucket.slot_of(hash);
      if (slot >= 0) return bucket.row[slot];
      if (bucket.passed == 0) return kAbsent;
    }
  }

  // Adds a hash that is absent. False when the pool has no memory left; no entry has changed then.
  [[nodiscard]] bool insert(Pool& pool, uint64_t hash, uint32_t row);

  // Makes room for so many entries, if there are none yet: they may then come in the order of their hashes. Without it
  // the smallest hashes of many would crowd together in the first buckets of a small array. False when the pool has no
  // memory left.
  [[nodiscard]] bool expect(Pool& pool, uint64_t entries);

  // Removes a hash and returns its row, or kAbsent.
  uint32_t remove(uint64_t hash);

  // Appends up to `most` entries with hash >= from to `out`, smallest first. Returns false when those were the last.
  bool scan(uint64_t from, size_t most, std::vector<Entry>* out) const;

  // Calls f(hash, row) for every entry, in no particular order.
  template <class F>
  void each(F f) const {
    for (const Bucket* page : pages_) {
      for (uint64_t b = 0; b < kPageBuckets; ++b) {
        for (unsigned left = page[b].used; left != 0; left &= left - 1) {
          const int i = __builtin_ctz(left);
          f(page[b].hash[i], page[b].row[i]);
        }
      }
    }
  }

  uint64_t size() const { return size_; }
  uint64_t bytes() const { return pages_.size() * kPageBuckets * sizeof(Bucket); }
  void clear(Pool& pool);  // gives the pages back

 private:
  static constexpr int kSlots = 5;
  static constexpr uint64_t kPageBuckets = 64;
  static constexpr uint64_t kSpare = 8;           // buckets past the last home bucket, for entries that overflow
  static constexpr uint64_t kMovesPerInsert = 2;  // old buckets; a growth lasts for half as many insertions

  // Moves bit i of a number to bit 2 i.
  static constexpr std::array<uint16_t, 1 << kSlots> kSpread = [] {
    std::array<uint16_t, 1 << kSlots> spread{};
    for (unsigned bits = 0; bits < spread.size(); ++bits) {
      for (int i = 0; i < kSlots; ++i) spread[bits] |= (bits >> i & 1) << (2 * i);
    }
    return spread;
  }();

  struct alignas(64) Bucket {
    uint64_t hash[kSlots];
    uint32_t row[kSlots];
    uint16_t passed;
    uint8_t used;  // one bit per slot
    uint8_t unused;

    int slot_of(uint64_t h) const {
#ifdef __SSE2__
      // Compares halves of 32 bits, since all processors can; a hash matches if both of its halves do.
      const __m128i wanted = _mm_set1_epi64x(static_cast<long long>(h));
      const auto* const halves = reinterpret_cast<const __m128i*>(hash);
      const __m128i a = _mm_cmpeq_epi32(_mm_load_si128(halves), wanted);
      const __m128i b = _mm_cmpeq_epi32(_mm_load_si128(halves + 1), wanted);
      const __m128i c = _mm_cmpeq_epi32(_mm_load_si128(halves + 2), wanted);  // and two rows, which `used` masks out
      const unsigned hits =
          static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, c))));
      const unsigned hit = hits & hits >> 1 & kSpread[used];
      return hit != 0 ? __builtin_ctz(hit) / 2 : -1;
#else
      unsigned hit = 0;
      for (int i = 0; i < kSlots; ++i) hit |= static_cast<unsigned>(hash[i] == h) << i;
      hit &= used;
      return hit != 0 ? __builtin_ctz(hit) : -1;
#endif
    }
  };
  static_assert(sizeof(Bucket) == 64);

  struct Search {
    uint64_t bucket;
    uint32_t entry;
  };

  Bucket& at(uint64_t b) const { return pages_[b / kPageBuckets][b % kPageBuckets]; }
  uint64_t home(uint64_t hash) const { return scale(hash, hash >= frontier_ ? buckets_ : old_buckets_); }
  bool moving() const { return frontier_ != 0; }

  bool reserve(Pool& pool, uint64_t buckets);
  bool place(Pool& pool, uint64_t hash, uint32_t row);
  bool start_growth(Pool& pool);
  bool move_one(Pool& pool);

  std::vector<Bucket*> pages_;
  uint64_t size_ = 0;
  uint64_t buckets_ = 0;      // of the new geometry
  uint64_t old_buckets_ = 0;  // of the old one, for hashes below the frontier
  uint64_t frontier_ = 0;     // 0: everything is in the new geometry
};

// Searches in waves: the first looks into every key's home bucket, the next into the bucket after it for the few that
// went past theirs, and so on. A bucket is prefetched twice before it is read: into the second-level cache, which can
// have many more requests under way than the first, and then into the first.
template <class Found>
void Index::find_all(const Keyed* keyed, size_t n, uint32_t* rows, Found found) const {
  if (pages_.empty()) {
    std::fill_n(rows, n, kAbsent);
    return;
  }
  constexpr size_t kFar = 64, kNear = 8;
  static thread_local std::vector<Search> wave, next;
  next.clear();
  const auto look = [&](uint64_t b, uint32_t i) {
    const Bucket& bucket = at(b);
    const int slot = bucket.slot_of(place_of(keyed[i].hash));
    if (slot >= 0) {
      rows[i] = bucket.row[slot];
      found(rows[i]);
    } else if (bucket.passed == 0) {
      rows[i] = kAbsent;
    } else {
      __builtin_prefetch(&at(b + 1));
      next.push_back({b + 1, i});
    }
  };
  uint64_t homes[kFar];
  const auto ask = [&](size_t i) {
    homes[i % kFar] = home(place_of(keyed[i].hash));
    __builtin_prefetch(&at(homes[i % kFar]), 0, 2);
  };
  for (size_t i = 0; i < std::min(kFar, n); ++i) ask(i);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t b = homes[i % kFar];
    if (i + kFar < n) ask(i + kFar);
    if (i + kNear < n) __builtin_prefetch(&at(homes[(i + kNear) % kFar]));
    look(b, static_cast<uint32_t>(i));
  }
  while (!next.empty()) {
    std::swap(wave, next);
    next.clear();
    for (const Search& s : wave) look(s.bucket, s.entry);
  }
}

}  // namespace windlass
