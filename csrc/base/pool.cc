#include "base/pool.h"

#include <algorithm>
#include <cstring>

#include "base/limits.h"
#include "base/os.h"

namespace windlass {
namespace {
constexpr size_t kChunkBytesMax = size_t{64} << 20;
}

bool Budget::charge(uint64_t bytes) {
  uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > bytes_max_ || used > bytes_max_ - bytes) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  if (above_ == nullptr || above_->charge(bytes)) return true;
  used_.fetch_sub(bytes, std::memory_order_relaxed);
  return false;
}

Status Budget::exhausted(uint64_t wanted, const std::string& what) const {
  if (above_ != nullptr && wanted <= bytes_max_ && used() <= bytes_max_ - wanted)
    return above_->exhausted(wanted, what);
  std::string limit = bytes_max_ == ~uint64_t{0} ? "what this machine gives" : std::to_string(bytes_max_);
  const char* const whose = above_ == nullptr ? " of memory_bytes_max=" : " of its app's share of this server, ";
  return Status(Code::kResourceExhausted, what + ": wanted " + std::to_string(wanted) + " bytes more, has " +
                                              std::to_string(used()) + whose + limit);
}

Pool::~Pool() {
  for (const Mapping& m : mappings_) {
    os::unmap(m.base, m.bytes);
    budget_->refund(m.bytes);
  }
}

std::byte* Pool::map_charged(size_t bytes) {
  if (!budget_->charge(bytes)) return nullptr;
  std::byte* p = os::map(bytes);
  if (p == nullptr) {
    budget_->refund(bytes);
    return nullptr;
  }
  mappings_.push_back({p, bytes, bytes});
  mapped_ += bytes;
  return p;
}

void Pool::note_carved() {
  for (Mapping& m : mappings_) {
    if (m.base == chunk_) m.carved = m.bytes - left_;
  }
}

std::byte* Pool::take(size_t bytes) {
  bytes = (bytes + limits::kCacheLineBytes - 1) & ~(limits::kCacheLineBytes - 1);
  std::lock_guard lock(mutex_);
  if (auto it = free_.find(bytes); it != free_.end() && !it->second.empty()) {
    std::byte* block = it->second.back();
    it->second.pop_back();
    std::memset(block, 0, bytes);
    return block;
  }
  if (bytes > left_) {
    if (bytes >= limits::kHugePageBytes / 4) return map_charged(bytes);
    // Chunks grow with the pool, so that a pool of many gigabytes is few mappings; pages are backed when touched.
    size_t chunk_bytes = limits::kHugePageBytes;
    while (chunk_bytes < kChunkBytesMax && chunk_bytes * 32 < mapped_) chunk_bytes *= 2;
    std::byte* chunk = map_charged(chunk_bytes);
    if (chunk == nullptr && chunk_bytes > limits::kHugePageBytes) {
      chunk = map_charged(chunk_bytes = limits::kHugePageBytes);
    }
    if (chunk == nullptr) return nullptr;
    note_carved();  // what is left of it never will be
    next_ = chunk_ = chunk;
    left_ = chunk_bytes;
  }
  std::byte* block = next_;
  next_ += bytes;
  left_ -= bytes;
  return block;
}

void Pool::give(std::byte* block, size_t bytes) {
  if (block == nullptr) return;
  bytes = (bytes + limits::kCacheLineBytes - 1) & ~(limits::kCacheLineBytes - 1);
  std::lock_guard lock(mutex_);
  free_[bytes].push_back(block);
}

void Pool::trim() {
  std::lock_guard lock(mutex_);
  note_carved();
  std::sort(mappings_.begin(), mappings_.end(), [](const Mapping& a, const Mapping& b) { return a.base < b.base; });
  std::vector<size_t> free_bytes(mappings_.size());
  const auto mapping_of = [&](const std::byte* block) {
    const auto above = std::upper_bound(mappings_.begin(), mappings_.end(), block,
                                        [](const std::byte* b, const Mapping& m) { return b < m.base; });
    return static_cast<size_t>(above - mappings_.begin()) - 1;
  };
  for (const auto& [bytes, blocks] : free_) {
    for (const std::byte* block : blocks) free_bytes[mapping_of(block)] += bytes;
  }
  const auto is_free = [&](size_t i) { return free_bytes[i] == mappings_[i].carved; };
  for (auto& [bytes, blocks] : free_) std::erase_if(blocks, [&](const std::byte* b) { return is_free(mapping_of(b)); });
  std::vector<Mapping> kept;
  for (size_t i = 0; i < mappings_.size(); ++i) {
    const Mapping& m = mappings_[i];
    if (!is_free(i)) {
      kept.push_back(m);
      continue;
    }
    if (m.base == chunk_) {
      next_ = chunk_ = nullptr;
      left_ = 0;
    }
    os::unmap(m.base, m.bytes);
    budget_->refund(m.bytes);
    mapped_ -= m.bytes;
  }
  mappings_ = std::move(kept);
}

}  // namespace windlass
