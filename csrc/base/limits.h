// Every limit of the core, in one place. Units are last in the names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace windlass::limits {

inline constexpr size_t kCacheLineBytes = 64;
inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Objects.
inline constexpr size_t kNameBytesMax = 256;
inline constexpr size_t kTensorDimsMax = 8;
inline constexpr uint64_t kTensorElementsMax = uint64_t{1} << 40;
inline constexpr uint32_t kTableDimMax = 1u << 20;
inline constexpr uint32_t kTableShards = 256;
inline constexpr uint32_t kShardRowsMax = 0xFFFFFFF0u;
inline constexpr uint64_t kRequestKeysMax = uint64_t{1} << 31;

// How a tensor is cut: bytes/64, but never outside these two.
inline constexpr uint64_t kTensorPieces = 64;
inline constexpr uint64_t kShardBytesMin = uint64_t{64} << 10;
inline constexpr uint64_t kShardBytesMax = uint64_t{4} << 20;

// Rules.
inline constexpr int kRuleVectorsMax = 2;  // per-element state arrays
inline constexpr int kRuleHyperMax = 8;    // numbers that travel with a push

// Work.
inline constexpr size_t kCrewBytesMin = size_t{2} << 20;       // below this the caller works alone
inline constexpr size_t kAsyncBytesMin = size_t{1} << 20;      // below this an async call is done at once
inline constexpr size_t kGilBytesMax = size_t{32} << 10;       // below this a call keeps the GIL
inline constexpr size_t kStreamBytesMin = size_t{1} << 20;     // from here on outputs bypass the cache
inline constexpr uint64_t kKeptBytesMax = uint64_t{64} << 20;  // asynchronous pushes of ordinary arrays, together
inline constexpr int64_t kNoDeadline = INT64_MAX;
inline constexpr int64_t kSpinNs = 20'000;  // how long a waiter spins before it blocks
inline constexpr uint32_t kSessionsMax = 1u << 20;

// The arena keeps this much freed memory for the next allocation.
inline constexpr size_t kArenaCacheBytesMax = size_t{1} << 30;

}  // namespace windlass::limits
