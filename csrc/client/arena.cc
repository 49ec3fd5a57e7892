#include "client/arena.h"

#include <algorithm>
#include <string>

#include "base/limits.h"
#include "base/os.h"

namespace windlass {
namespace {

// Successive blocks start at different distances from a huge page, so that no two arrays of a step lie at an exact
// power of two from each other.
constexpr size_t kStagger = 64 * 37;
constexpr uint32_t kStaggers = 8;

bool overlap(Range a, Range b) { return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes; }
bool equal(Range a, Range b) { return a.begin == b.begin && a.bytes == b.bytes; }

}  // namespace

Arena::~Arena() {
  for (auto& [base, block] : blocks_) os::unmap(block.mapping, block.mapped);
  for (auto& [bytes, free] : free_) os::unmap(free.of.mapping, free.of.mapped);
}

std::byte* Arena::take(size_t bytes) {
  if (bytes == 0) bytes = 1;
  if (bytes > (size_t{1} << 46)) return nullptr;
  const size_t unit = bytes >= limits::kHugePageBytes ? limits::kHugePageBytes : 4096;
  const size_t mapped = (bytes + kStagger * kStaggers + unit - 1) / unit * unit;
  std::lock_guard lock(mutex_);
  if (auto it = free_.lower_bound(mapped); it != free_.end() && it->first <= mapped + mapped / 4) {
    Free reused = it->second;
    free_bytes_ -= reused.of.mapped;
    free_.erase(it);
    reused.of.bytes = bytes;
    blocks_.emplace(reused.block, reused.of);
    return reused.block;
  }
  std::byte* mapping = os::map(mapped);
  if (mapping == nullptr) return nullptr;
  std::byte* block = mapping + kStagger * (taken_++ % kStaggers);
  blocks_.emplace(block, Block{bytes, mapping, mapped, 0, false});
  return block;
}

void Arena::free_locked(Blocks::iterator it) {
  const Block block = it->second;
  std::byte* base = const_cast<std::byte*>(it->first);
  blocks_.erase(it);
  if (free_bytes_ + block.mapped > limits::kArenaCacheBytesMax) {
    os::unmap(block.mapping, block.mapped);
    return;
  }
  free_bytes_ += block.mapped;
  free_.emplace(block.mapped, Free{base, Block{0, block.mapping, block.mapped, 0, false}});
}

void Arena::give(std::byte* block) {
  std::lock_guard lock(mutex_);
  const auto it = blocks_.find(block);
  if (it == blocks_.end()) return;
  if (it->second.loans != 0) {
    it->second.given = true;
  } else {
    free_locked(it);
  }
}

Arena::Blocks::const_iterator Arena::find(Range r) const {
  auto it = blocks_.upper_bound(r.begin);
  if (it == blocks_.begin()) return blocks_.end();
  --it;
  const size_t at = static_cast<size_t>(r.begin - it->first);
  return at < it->second.bytes && r.bytes <= it->second.bytes - at ? it : blocks_.end();
}

bool Arena::registered(Range r) const {
  std::lock_guard lock(mutex_);
  return find(r) != blocks_.end();
}

Status Arena::lend(const Range* ranges, size_t n, const char* what, bool* ordinary) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    if (ranges[i].bytes == 0) continue;
    for (size_t j = 0; j < i; ++j) {
      if (overlap(ranges[i], ranges[j]) && !equal(ranges[i], ranges[j])) {
        return Status(Code::kInvalidArgument, std::string(what) + ": its arrays overlap without being the same");
      }
    }
    if (find(ranges[i]) == blocks_.end()) continue;
    for (const Range& loan : loans_) {
      if (overlap(loan, ranges[i])) {
        return Status(
            Code::kBufferInUse,
            std::string(what) +
                ": its registered array is still used by an earlier request; wait for that one's future first");
      }
    }
  }
  for (size_t i = 0; i < n; ++i) {
    const auto it = ranges[i].bytes != 0 ? find(ranges[i]) : blocks_.cend();
    if (it == blocks_.cend()) {
      if (ordinary != nullptr && ranges[i].bytes != 0) *ordinary = true;
      continue;
    }
    loans_.push_back(ranges[i]);
    ++blocks_.find(it->first)->second.loans;
  }
  return {};
}

void Arena::end(const Range* ranges, size_t n) {
  if (n == 0) return;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < n; ++i) {
    const auto loan = std::find_if(loans_.begin(), loans_.end(), [&](Range l) { return equal(l, ranges[i]); });
    if (loan == loans_.end()) continue;
    *loan = loans_.back();
    loans_.pop_back();
    auto it = blocks_.upper_bound(ranges[i].begin);
    --it;
    if (--it->second.loans == 0 && it->second.given) free_locked(it);
  }
}

}  // namespace windlass
