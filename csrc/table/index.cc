#include "table/index.h"

#include <algorithm>

namespace windlass {
namespace {

constexpr uint16_t kPassedMax = 0xFFFF;  // a count that reached this is never counted down again

// The smallest hash whose bucket, of `buckets`, is at least `b`.
uint64_t lowest_hash(uint64_t b, uint64_t buckets) {
  if (b == 0) return 0;
  const unsigned __int128 top = static_cast<unsigned __int128>(b) << 64;
  return static_cast<uint64_t>((top + buckets - 1) / buckets);
}

}  // namespace

bool Index::reserve(Pool& pool, uint64_t buckets) {
  const uint64_t pages = (buckets + kPageBuckets - 1) / kPageBuckets;
  const size_t before = pages_.size();
  while (pages_.size() < pages) {
    std::byte* page = pool.take(kPageBuckets * sizeof(Bucket));
    if (page == nullptr) {
      for (; pages_.size() > before; pages_.pop_back()) {
        pool.give(reinterpret_cast<std::byte*>(pages_.back()), kPageBuckets * sizeof(Bucket));
      }
      return false;
    }
    pages_.push_back(reinterpret_cast<Bucket*>(page));
  }
  return true;
}

bool Index::insert(Pool& pool, uint64_t hash, uint32_t row) {
  if (pages_.empty()) {
    if (!reserve(pool, kPageBuckets)) return false;
    buckets_ = old_buckets_ = kPageBuckets - kSpare;
  }
  if (moving()) {
    for (uint64_t i = 0; i < kMovesPerInsert && moving(); ++i) {
      if (!move_one(pool)) return false;
    }
  } else if (size_ * 10 >= buckets_ * kSlots * 7) {  // seven tenths full
    if (!start_growth(pool)) return false;
  }
  if (!place(pool, hash, row)) return false;
  ++size_;
  return true;
}

bool Index::expect(Pool& pool, uint64_t entries) {
  const uint64_t buckets = std::max(kPageBuckets - kSpare, entries * 10 / (kSlots * 7) + 1);
  if (size_ != 0 || moving() || buckets <= buckets_) return true;
  if (!reserve(pool, buckets + kSpare)) return false;
  buckets_ = old_buckets_ = buckets;
  return true;
}

bool Index::place(Pool& pool, uint64_t hash, uint32_t row) {
  const uint64_t first = home(hash);
  uint64_t b = first;
  for (;; ++b) {
    if (b >= pages_.size() * kPageBuckets && !reserve(pool, b + 1)) return false;
    if (at(b).used != (1u << kSlots) - 1) break;
  }
  for (uint64_t p = first; p < b; ++p) {
    if (at(p).passed != kPassedMax) ++at(p).passed;
  }
  Bucket& bucket = at(b);
  const int slot = __builtin_ctz(~static_cast<unsigned>(bucket.used));
  bucket.hash[slot] = hash;
  bucket.row[slot] = row;
  bucket.used = static_cast<uint8_t>(bucket.used | (1u << slot));
  return true;
}

uint32_t Index::remove(uint64_t hash) {
  if (pages_.empty()) return kAbsent;
  const uint64_t first = home(hash);
  for (uint64_t b = first;; ++b) {
    Bucket& bucket = at(b);
    const int slot = bucket.slot_of(hash);
    if (slot < 0) {
      if (bucket.passed == 0) return kAbsent;
      continue;
    }
    bucket.used = static_cast<uint8_t>(bucket.used & ~(1u << slot));
    for (uint64_t p = first; p < b; ++p) {
      if (at(p).passed != kPassedMax) --at(p).passed;
    }
    --size_;
    return bucket.row[slot];
  }
}

bool Index::start_growth(Pool& pool) {
  const uint64_t grown = buckets_ + buckets_ / 4;
  if (!reserve(pool, grown + kSpare)) return false;
  old_buckets_ = buckets_;
  buckets_ = grown;
  frontier_ = ~uint64_t{0};
  return true;
}

// Moves the entries of the topmost old bucket to the new geometry.
bool Index::move_one(Pool& pool) {
  static thread_local std::vector<Entry> moved;
  moved.clear();
  const uint64_t bucket = scale(frontier_ - 1, old_buckets_);
  const uint64_t from = lowest_hash(bucket, old_buckets_);
  // Entries in their home bucket need no search; those that went past it are removed one by one below.
  size_t at_home = 0;
  for (uint64_t b = bucket;; ++b) {
    const Bucket& here = at(b);
    for (unsigned left = here.used; left != 0; left &= left - 1) {
      const int i = __builtin_ctz(left);
      if (here.hash[i] >= from && here.hash[i] < frontier_) moved.push_back({here.hash[i], here.row[i]});
    }
    if (b == bucket) at_home = moved.size();
    if (here.passed == 0) break;
  }
  // Make room for all of them at the very end, so that each finds a place once they are removed.
  const uint64_t physical = pages_.size() * kPageBuckets;
  for (uint64_t b = physical - 1 - moved.size() / kSlots; b < physical; ++b) {
    if (at(b).used != 0 && !reserve(pool, physical + 1 + moved.size() / kSlots)) return false;
  }
  for (size_t i = at_home; i < moved.size(); ++i) {
    (void)remove(moved[i].hash);
    ++size_;
  }
  Bucket& old = at(bucket);
  for (unsigned left = old.used; left != 0; left &= left - 1) {
    const int i = __builtin_ctz(left);
    if (old.hash[i] >= from) old.used = static_cast<uint8_t>(old.used & ~(1u << i));
  }
  frontier_ = from;
  for (const Entry& e : moved) {
    if (!place(pool, e.hash, e.row)) __builtin_trap();  // room was made above
  }
  return true;
}

bool Index::scan(uint64_t from, size_t most, std::vector<Entry>* out) const {
  if (pages_.empty() || most == 0) return false;
  const size_t start = out->size();
  const uint64_t physical = pages_.size() * kPageBuckets;
  bool more = false;
  for (uint64_t b = home(from); b < physical; ++b) {
    const Bucket& here = at(b);
    for (int i = 0; i < kSlots; ++i) {
      if ((here.used >> i & 1) && here.hash[i] >= from) out->push_back({here.hash[i], here.row[i]});
    }
    // After a bucket that nobody passed, all entries of this and earlier buckets have been seen.
    if (out->size() - start >= most && here.passed == 0) {
      more = true;
      break;
    }
  }
  std::sort(out->begin() + static_cast<ptrdiff_t>(start), out->end(),
            [](const Entry& x, const Entry& y) { return x.hash < y.hash; });
  if (out->size() - start > most) {
    out->resize(start + most);
    more = true;
  }
  return more;
}

void Index::clear(Pool& pool) {
  for (Bucket* page : pages_) pool.give(reinterpret_cast<std::byte*>(page), kPageBuckets * sizeof(Bucket));
  pages_.clear();
  size_ = buckets_ = old_buckets_ = frontier_ = 0;
}

}  // namespace windlass
