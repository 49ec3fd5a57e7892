#include "client/arena/arena.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/limits.h"
#include "base/os.h"

namespace windlass {
namespace {

// Successive blocks start at different offsets in a huge page, so that the arrays of a step, a server's own arrays and
// another worker's do not lie an exact power of two apart: reading huge pages in the same memory banks at the same
// offsets can take twice as long.
constexpr size_t kStagger = 64 * 37;
constexpr uint32_t kStaggers = 16;
constexpr uint32_t kStaggersOfRank = 3;
constexpr size_t kSmallArrayBytes = size_t{256} << 10;  // blocks up to this share segments
constexpr size_t kSmallSegmentBytes = size_t{2} << 20;

}  // namespace

std::shared_ptr<Segment> Segment::make(uint32_t id, size_t bytes, bool shared, std::string* why) {
  const int file = shared ? os::make_shared_file(bytes, why) : -1;
  if (shared && file < 0) return nullptr;
  std::byte* const data = shared ? os::map_shared(file, bytes) : os::map(bytes);
  if (data == nullptr) {
    *why = "mmap failed";
    os::close_file(file);
    return nullptr;
  }
  if (shared) os::close_after_fork(file, true);
  return std::shared_ptr<Segment>(new Segment(id, data, bytes, file));
}

std::shared_ptr<Segment> Segment::replace(uint32_t id, bool alone) {
  std::string why;
  const int file = alone ? os::make_shared_file(bytes_, &why) : -1;
  std::byte* const copy = file >= 0 ? os::map_shared(file, bytes_) : nullptr;
  std::shared_ptr<Segment> fresh;
  if (copy != nullptr) {
    std::memcpy(copy, data_, bytes_);
    os::unmap_shared(copy, bytes_);
    if (os::map_shared(file, bytes_, data_) != nullptr) {
      os::close_after_fork(file, true);
      fresh.reset(new Segment(id, data_, bytes_, file));
    }
  }
  if (fresh == nullptr) {
    os::close_file(file);
    if (!os::make_private(file_, data_, bytes_)) return nullptr;
    fresh.reset(new Segment(0, data_, bytes_, -1));
    fresh->was_shared_ = true;
  }
  replaced_ = true;
  return fresh;
}

Segment::~Segment() {
  if (!replaced_) file_ >= 0 || was_shared_ ? os::unmap_shared(data_, bytes_) : os::unmap(data_, bytes_);
  if (file_ < 0 || generation_ != os::fork_generation()) return;  // in the child of a fork it is closed
  os::close_after_fork(file_, false);
  os::close_file(file_);
}

Arena::Arena(bool shared, uint32_t rank) : shared_(shared), taken_(shared ? 1 + kStaggersOfRank * rank : 0) {}

// A free block with at least `room` and at most `most` bytes; nullptr if there is none.
std::byte* Arena::reuse(size_t bytes, size_t room, size_t most) {
  const auto it = free_.lower_bound(room);
  if (it == free_.end() || it->first > most) return nullptr;
  std::byte* const block = it->second.block;
  blocks_.emplace(block, Block{bytes, it->first, std::move(it->second.segment), 0, false});
  if (it->first > kSmallArrayBytes) free_bytes_ -= it->first;
  free_.erase(it);
  return block;
}

std::byte* Arena::take(size_t bytes) {
  if (bytes == 0) bytes = 1;
  if (bytes > (size_t{1} << 46)) return nullptr;
  std::lock_guard lock(mutex_);
  if (bytes <= kSmallArrayBytes) {
    size_t room = 64;  // sizes grow by at most a quarter, so that freed blocks fit again
    while (room < bytes) room += std::max<size_t>(64, std::bit_floor(room) / 4);
    if (std::byte* const block = reuse(bytes, room, room); block != nullptr) return block;
    if (small_ == nullptr || small_->bytes() - small_used_ < room) {
      std::shared_ptr<Segment> fresh = Segment::make(segments_ + 1, kSmallSegmentBytes, shared_, &failure_);
      if (fresh == nullptr) return nullptr;
      ++segments_;
      small_ = std::move(fresh);
      small_used_ = 0;
    }
    std::byte* const block = small_->data() + small_used_;
    small_used_ += room;
    blocks_.emplace(block, Block{bytes, room, small_, 0, false});
    return block;
  }
  const size_t unit = bytes >= limits::kHugePageBytes ? limits::kHugePageBytes : 4096;
  const size_t room = (bytes + kStagger * kStaggers + unit - 1) / unit * unit;
  if (std::byte* const block = reuse(bytes, room, room + room / 4); block != nullptr) return block;
  std::shared_ptr<Segment> segment = Segment::make(segments_ + 1, room, shared_, &failure_);
  if (segment == nullptr) return nullptr;
  ++segments_;
  std::byte* const block = segment->data() + kStagger * (taken_++ % kStaggers);
  blocks_.emplace(block, Block{bytes, room, std::move(segment), 0, false});
  return block;
}

void Arena::free_locked(Blocks::iterator it) {
  Block block = std::move(it->second);
  std::byte* const base = const_cast<std::byte*>(it->first);
  blocks_.erase(it);
  if (shared_ && block.segment->file() < 0) return;  // it has become private; later blocks should be shared
  if (block.room > kSmallArrayBytes) {
    if (free_bytes_ + block.room > limits::kArenaCacheBytesMax) return;
    free_bytes_ += block.room;
  }
  free_.emplace(block.room, Free{base, std::move(block.segment)});
}

std::string Arena::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
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

// Whether every byte of a block is lent, so that its owner is not writing there.
bool Arena::all_on_loan(const std::byte* block, size_t bytes) const {
  const std::byte* at = block;
  for (auto it = loans_.lower_bound(block); it != loans_.end() && it->first <= at && at < block + bytes; ++it)
    at = std::max(at, it->first + it->second);
  return at >= block + bytes;
}

void Arena::add_teller(std::function<void(const Segments&)> teller) {
  std::lock_guard lock(renewing_);
  tellers_.push_back(std::move(teller));
}

void Arena::renew(const Segments& segments) {
  std::lock_guard renewing(renewing_);
  Segments withdrawn;
  for (const std::shared_ptr<const Segment>& segment : segments) {
    if (segment->withdrawn()) continue;  // an earlier renewal has done it
    std::const_pointer_cast<Segment>(segment)->withdraw();
    withdrawn.push_back(segment);
  }
  if (withdrawn.empty()) return;
  ++renewals_;
  for (const auto& tell : tellers_) tell(withdrawn);
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<const Segment>& old : withdrawn) {
    std::vector<Blocks::iterator> blocks;
    for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
      if (it->second.segment == old) blocks.push_back(it);
    }
    const bool alone = blocks.size() == 1 && blocks[0]->second.room > kSmallArrayBytes &&
                       all_on_loan(blocks[0]->first, blocks[0]->second.bytes);
    const std::shared_ptr<Segment> fresh = std::const_pointer_cast<Segment>(old)->replace(segments_ + 1, alone);
    if (fresh == nullptr) {
      for (const Blocks::iterator& block : blocks) lend_for_ever(block);
      continue;
    }
    if (fresh->file() >= 0) ++segments_;
    for (const Blocks::iterator& it : blocks) it->second.segment = fresh;
    for (auto it = free_.begin(); it != free_.end();) {
      if (it->second.segment == old && it->first > kSmallArrayBytes) free_bytes_ -= it->first;
      it = it->second.segment == old ? free_.erase(it) : std::next(it);
    }
    if (small_ == old) small_ = nullptr;
  }
}

uint64_t Arena::renewals() {
  std::lock_guard renewing(renewing_);
  return renewals_;
}

void Arena::lend_for_ever(Blocks::iterator block) {
  const std::byte* const end = block->first + block->second.bytes;
  std::vector<Range> again;
  for (auto it = loans_.lower_bound(block->first); it != loans_.end() && it->first < end; ++it)
    again.push_back({it->first, it->second});
  for (const Range& r : again) loans_.emplace(r.begin, r.bytes);
  block->second.loans += static_cast<uint32_t>(again.size());
}

bool Arena::registered(Range r, Range* block) const {
  std::lock_guard lock(mutex_);
  const auto it = find(r);
  if (it == blocks_.end()) return false;
  if (block != nullptr) *block = {it->first, it->second.bytes};
  return true;
}

bool Arena::locate(Range r, Place* place) const {
  std::lock_guard lock(mutex_);
  const auto it = find(r);
  if (it == blocks_.end() || it->second.segment->file() < 0) return false;
  place->segment = it->second.segment;
  place->offset = static_cast<uint64_t>(r.begin - it->second.segment->data());
  return true;
}

// Whether any of it is on loan; *as_it_is: as exactly this range.
bool Arena::on_loan(Range r, bool* as_it_is) const {
  auto it = loans_.lower_bound(r.begin);
  *as_it_is = it != loans_.end() && it->first == r.begin && it->second == r.bytes;
  if (it != loans_.end() && it->first < r.begin + r.bytes) return true;
  if (it == loans_.begin()) return false;
  --it;
  return it->first + it->second > r.begin;
}

Status Arena::lend(const Range* ranges, size_t n, const std::string& what, bool* ordinary) {
  const auto overlap = [](Range a, Range b) { return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes; };
  const auto equal = [](Range a, Range b) { return a.begin == b.begin && a.bytes == b.bytes; };
  if (n == 2 && overlap(ranges[0], ranges[1]) && !equal(ranges[0], ranges[1]))  // ordinary ones, too
    return Status(Code::kInvalidArgument, what + ": its arrays overlap without being the same");
  std::lock_guard lock(mutex_);
  bool same = false;
  for (size_t i = 0; i < n; ++i) {
    if (ranges[i].bytes == 0 || !on_loan(ranges[i], &same) || find(ranges[i]) == blocks_.end()) continue;
    return Status(
        Code::kBufferInUse,
        what + ": its registered array is still used by an earlier request; wait for that one's future first");
  }
  for (size_t i = 0; i < n; ++i) {
    if (ranges[i].bytes == 0) continue;
    const auto block = find(ranges[i]);
    if (block == blocks_.cend()) {
      if (ordinary != nullptr) *ordinary = true;
      continue;
    }
    if (on_loan(ranges[i], &same) && !same) {  // to this request
      end_locked(ranges, i);
      return Status(Code::kInvalidArgument, what + ": its arrays overlap without being the same");
    }
    loans_.emplace(ranges[i].begin, ranges[i].bytes);
    ++blocks_.find(block->first)->second.loans;
  }
  return {};
}

void Arena::end(const Range* ranges, size_t n) {
  if (n == 0) return;
  {
    std::lock_guard lock(mutex_);
    end_locked(ranges, n);
  }
  returns_.fetch_add(1, std::memory_order_seq_cst);
  if (waiting_.load(std::memory_order_seq_cst) != 0) os::wake_all(returns_);
}

bool Arena::wait_returned(Range r, int64_t deadline_ns) {
  for (;;) {
    const uint32_t seen = returns_.load(std::memory_order_seq_cst);
    {
      bool same = false;
      std::lock_guard lock(mutex_);
      if (!on_loan(r, &same)) return true;
    }
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    waiting_.fetch_add(1, std::memory_order_seq_cst);
    os::wait(returns_, seen, left);
    waiting_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Arena::end_locked(const Range* ranges, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const auto loan = loans_.find(ranges[i].begin);
    if (loan == loans_.end() || loan->second != ranges[i].bytes) continue;
    loans_.erase(loan);
    auto it = blocks_.upper_bound(ranges[i].begin);
    --it;
    if (--it->second.loans == 0 && it->second.given) free_locked(it);
  }
}

}  // namespace windlass
