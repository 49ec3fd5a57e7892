#include "server/object/capture.h"

#include <algorithm>

#include "base/strided.h"

namespace windlass {
namespace {

constexpr uint64_t kCachedBytes = 128 << 10;

}  // namespace

Capture::~Capture() {
  for (const One& one : captures_) object_->end_capture(one.shard);
}

Status Capture::arm() {
  const std::string what = "checkpoint of '" + object_->spec().own_name() + "'";
  for (uint32_t shard = 0; shard < object_->shards(); ++shard) {
    if (object_->whereabouts(shard).first != object_->index()) continue;
    auto capture = std::make_unique<ShardCapture>(*object_, shard, clock_, memory_);
    if (!object_->begin_capture(shard, capture.get()))
      return Status(Code::kInvalidArgument,
                    what + ": shard " + std::to_string(shard) + " is moving, or another checkpoint is being taken");
    captures_.push_back({shard, std::move(capture)});
    bool late = false;
    Shard& there = *object_->find(shard);
    with_turn(there.turn, [&] { late = captures_.back().capture->is_late(there); });
    if (late)
      return Status(Code::kInvalidArgument, what + ": shard " + std::to_string(shard) + " is beyond clock " +
                                                std::to_string(clock_) + " already");
  }
  left_ = captures_.size();
  return {};
}

// The shard whose writers have set most aside, if that is much; else one after the other.
Capture::One* Capture::choose() {
  if (memory_->presses()) {
    const auto most = std::max_element(captures_.begin(), captures_.end(), [](const One& a, const One& b) {
      return a.capture->set_aside() < b.capture->set_aside();
    });
    if (most->capture->set_aside() > memory_->used() / 64) return &*most;
  }
  return &captures_[at_];
}

uint64_t Capture::set_aside() const {
  uint64_t sum = 0;
  for (const One& one : captures_) sum += one.capture->set_aside();
  return sum;
}

Capture::Next Capture::next(uint64_t bytes_most) {
  for (asked_ = 0; left_ != 0 && asked_ <= captures_.size();) {
    One& one = *choose();
    const bool in_turn = &one == &captures_[at_];
    Next next;
    next.shard = one.shard;
    bool has = false, over = one.over;
    Shard& shard = *object_->find(one.shard);
    if (!over) {
      with_turn(shard.turn, [&] {
        has = one.capture->take(shard, bytes_most, &next.part);
        over = one.capture->state() == ShardCapture::kDone;
      });
    }
    if (has) {
      next.kind = kPart;
      if (object_->table() != nullptr) {
        if (next.part.bytes.empty()) continue;  // it looked at rows that were never updated, or that others captured
        unzip(&one, &next);
      } else {
        one.fingerprint += object_->tensor_of(one.shard).fingerprint_of_piece(
            one.shard, next.part.piece, next.part.at, next.part.bytes.data(), next.part.bytes.size());
      }
      return next;
    }
    if (in_turn) at_ = (at_ + 1) % captures_.size();
    ++asked_;
    if (!over || one.over) continue;
    one.over = true;
    --left_;
    object_->end_capture(one.shard);
    const ShardCapture& capture = *one.capture;
    next.kind = kShard;
    next.version = capture.version();
    next.count = capture.count();
    next.made = capture.made();
    next.all_rows = one.rows;
    next.fingerprint =
        one.fingerprint + (object_->table() != nullptr
                               ? object_->table()->fingerprint_of_count(one.shard, capture.count())
                               : object_->tensor_of(one.shard).fingerprint_of_count(one.shard, capture.count()));
    next.watermarks = capture.watermarks();
    return next;
  }
  Next next;
  next.kind = left_ != 0 ? kWait : kOver;
  return next;
}

std::vector<uint64_t> Capture::arrays_of(const TableSpec& spec, uint64_t n) {
  const Layout layout = layout_of(spec.rule);
  std::vector<uint64_t> begins = {0};
  const auto add = [&](uint64_t bytes_of_a_row) { begins.push_back(begins.back() + n * bytes_of_a_row); };
  add(sizeof(uint64_t));
  add(sizeof(uint32_t));
  add(sizeof(uint32_t));
  if (layout.row_scalars != 0) add(layout.row_scalars * sizeof(float));
  for (int v = 0; v <= layout.vectors; ++v) add(spec.dim * sizeof(float));
  return begins;
}

// Rows, each with all it has, become arrays; some at a time, which the cache keeps until all is done with them.
void Capture::unzip(One* one, Next* next) const {
  const Table& table = *object_->table();
  const std::vector<std::byte> rows = std::move(next->part.bytes);
  const uint64_t row_bytes = table.copy_bytes(), n = rows.size() / row_bytes;
  next->rows = n;
  one->rows += n;
  const std::vector<uint64_t> begins = arrays_of(table.spec(), n), in_row = arrays_of(table.spec(), 1);
  std::vector<std::byte> arrays = spares_->take(begins.back());
  arrays.resize(begins.back());
  const uint64_t most = std::max<uint64_t>(1, kCachedBytes / row_bytes);
  for (uint64_t done = 0; done < n; done += most) {
    const uint64_t some = std::min(most, n - done);
    const std::byte* const from = rows.data() + done * row_bytes;
    one->fingerprint += table.fingerprint_of_rows(from, some);
    for (size_t a = 0; a + 1 < in_row.size(); ++a) {
      const uint64_t bytes = in_row[a + 1] - in_row[a];
      copy_strided(arrays.data() + begins[a] + done * bytes, bytes, from + in_row[a], row_bytes, bytes, some);
    }
  }
  next->part.bytes = std::move(arrays);
}

}  // namespace windlass
