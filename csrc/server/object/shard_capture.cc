#include "server/object/shard_capture.h"

#include <algorithm>
#include <utility>

#include "base/breaks.h"
#include "server/object/served_object.h"

namespace windlass {

ShardCapture::~ShardCapture() {
  if (const uint64_t left = set_aside(); left != 0) {
    memory_->remove(left);
    object_.staging().changed();
  }
}

bool ShardCapture::is_late(const Shard& shard) const {
  return object_.spec().sync().rounds() && shard.gate->made() > clock_;
}

void ShardCapture::look(Shard& shard) {
  if (state_ == kWaits && (!object_.spec().sync().rounds() || shard.gate->made() >= clock_)) open(shard);
}

void ShardCapture::open(Shard& shard) {
  state_ = kOpen;
  version_ = shard.version;
  count_ = shard.count;
  made_ = object_.spec().sync().rounds() ? shard.gate->made() : 0;
  shard.records.each([&](const Record& r) { watermarks_.push_back({r.rank, r.incarnation, r.sequence, r.clock}); });
  if (object_.table() == nullptr) return;
  TableShard& rows = object_.table()->shard(index_);
  rows_.begin(rows.rows, rows.free_rows);
  rows.capture = &rows_;
}

void ShardCapture::before_write(Shard& shard) {
  if (broken(Break::kCapture)) return;
  look(shard);
  if (state_ != kOpen || object_.table() != nullptr) return;
  uint64_t bytes = 0;
  for (Part part; take_piece(~uint64_t{0}, &part); part = {}) {
    bytes += part.bytes.size();
    aside_.push_back(std::move(part));
  }
  set_aside_.fetch_add(bytes, std::memory_order_relaxed);
  memory_->add(bytes);
}

bool ShardCapture::holds_up(const Shard& shard) const {
  if (state_ == kDone || !memory_->full()) return false;
  const bool reached = !object_.spec().sync().rounds() || shard.gate->made() >= clock_;
  return reached && (object_.table() != nullptr || aside_.empty());
}

// Rows are set aside by the table, which does not count them.
void ShardCapture::count_rows() {
  const uint64_t before = set_aside(), now = rows_.bytes();
  set_aside_.store(now, std::memory_order_relaxed);
  now > before ? memory_->add(now - before) : memory_->remove(before - now);
  if (now < before) object_.staging().changed();
}

void ShardCapture::after_write() {
  if (state_ == kOpen && object_.table() != nullptr) count_rows();
}

bool ShardCapture::take(Shard& shard, uint64_t most, Part* part) {
  look(shard);
  if (state_ != kOpen) return false;
  if (object_.table() != nullptr) return take_rows(most, part);
  if (next_aside_ < aside_.size()) {
    *part = std::move(aside_[next_aside_++]);
    set_aside_.fetch_sub(part->bytes.size(), std::memory_order_relaxed);
    memory_->remove(part->bytes.size());
    object_.staging().changed();
  } else if (!take_piece(most, part)) {
    state_ = kDone;
    return false;
  }
  return true;
}

bool ShardCapture::take_rows(uint64_t most, Part* part) {
  Table& table = *object_.table();
  const uint64_t row = table.copy_bytes();
  if (!rows_.scanned && rows_.bytes() < most) rows_.expect(most);
  while (!rows_.scanned && rows_.bytes() < most)
    table.capture(index_, std::clamp<uint64_t>((most - rows_.bytes()) / row, 1, limits::kScanRowsMax));
  *part = {0, 0, rows_.take()};
  count_rows();
  if (!rows_.scanned || !part->bytes.empty()) return true;
  table.shard(index_).capture = nullptr;
  state_ = kDone;
  return false;
}

// The next part of the tensor's shard as it is.
bool ShardCapture::take_piece(uint64_t most, Part* part) {
  const std::vector<Tensor::Piece> pieces = object_.tensor_of(index_).pieces_of(index_);
  while (piece_ < pieces.size() && at_ == pieces[piece_].bytes) {
    ++piece_;
    at_ = 0;
  }
  if (piece_ == pieces.size()) return false;
  const uint64_t n = std::min(most, pieces[piece_].bytes - at_);
  const std::byte* const from = pieces[piece_].data + at_;
  *part = {piece_, at_, spares_->take(n)};
  part->bytes.assign(from, from + n);
  at_ += n;
  return true;
}

}  // namespace windlass
