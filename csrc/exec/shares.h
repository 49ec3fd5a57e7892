// Shares: which of several threads works on which parts of a request.
//
// Each thread has a range of its own, the same one for every request with as many parts, and so finds in its cache what
// it left there last time. (Two threads that take parts in order, whichever is free, copy 16 MB within the third-level
// cache at two thirds of the speed.) A thread that has finished its range takes from the end of the others' ranges.
//
//     |0 1 2 3 4 5 6 7|8 9 10 11 12 13 14 15|
//      A -->     <-- B B -->           <-- A
//
// Thread safety: take() from any thread, after divide().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace windlass {

class Shares {
 public:
  // Divides n parts among at most `threads` threads.
  void divide(uint32_t n, size_t threads) {
    ranges_ = std::clamp<size_t>(std::min<size_t>(threads, n), 1, kRangesMax);
    for (size_t i = 0; i < ranges_; ++i) {
      range_[i].store(packed(static_cast<uint32_t>(n * i / ranges_), static_cast<uint32_t>(n * (i + 1) / ranges_)),
                      std::memory_order_relaxed);
    }
  }

  // Takes up to `most` parts, from *first on; returns how many, 0 when all have been taken. It takes fewer towards the
  // end of a range, so that the threads finish together. A thread that finds nothing left sees what the others did
  // before they took it.
  uint32_t take(size_t thread, uint32_t most, uint32_t* first) {
    for (size_t i = 0; i < ranges_; ++i) {
      std::atomic<uint64_t>& range = range_[(thread + i) % ranges_];
      uint64_t now = range.load(std::memory_order_acquire);
      for (;;) {
        const auto begin = static_cast<uint32_t>(now >> 32), end = static_cast<uint32_t>(now);
        if (begin == end) break;
        const uint32_t n = std::clamp((end - begin) / 2, 1u, most);
        const bool own = i == 0;
        const uint64_t left = own ? packed(begin + n, end) : packed(begin, end - n);
        if (!range.compare_exchange_weak(now, left, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        *first = own ? begin : end - n;
        return n;
      }
    }
    return 0;
  }

 private:
  static constexpr size_t kRangesMax = 16;  // further threads share them
  static uint64_t packed(uint32_t begin, uint32_t end) { return uint64_t{begin} << 32 | end; }

  size_t ranges_ = 0;
  std::atomic<uint64_t> range_[kRangesMax];  // its first part, and the one past its last
};

}  // namespace windlass
