#include "server/object/capture.h"

#include <algorithm>
#include <cstring>

#include "base/strided.h"

namespace windlass {
namespace {

constexpr uint64_t kTurnBytes = 128 << 10;  // of rows taken in a turn: pushes wait meanwhile, and the cache keeps them

}  // namespace

void Capture::give_up() {
  for (const One& one : captures_) {
    if (!one.over) object_->end_capture(one.shard);
  }
  captures_.clear();
  left_ = 0;
}

Status Capture::arm() {
  const std::string what = "checkpoint of '" + object_->spec().own_name() + "'";
  for (uint32_t shard = 0, here = 0; shard < object_->shards(); ++shard) {
    if (object_->whereabouts(shard).first != object_->index() || here++ % parts_ != part_) continue;
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

// The shard of which rows are left over, or whose writers have set most aside, if that is much; else one after the
// other.
Capture::One* Capture::choose() {
  if (rest_ != nullptr) return rest_;
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
    if (object_->table() != nullptr ? next_rows(&one, bytes_most, &next) : next_piece(&one, bytes_most, &next)) {
      next.kind = kPart;
      return next;
    }
    if (in_turn) at_ = (at_ + 1) % captures_.size();
    ++asked_;
    if (!one.complete || one.over) continue;
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

bool Capture::take(One* one, uint64_t most, ShardCapture::Part* part) {
  if (one->complete) return false;
  bool has = false;
  Shard& shard = *object_->find(one->shard);
  with_turn(shard.turn, [&] {
    has = one->capture->take(shard, most, part);
    one->complete = one->capture->state() == ShardCapture::kDone;
  });
  return has;
}

bool Capture::next_piece(One* one, uint64_t bytes_most, Next* next) {
  ShardCapture::Part& part = next->part;
  if (!take(one, bytes_most, &part)) return false;
  one->fingerprint += object_->tensor_of(one->shard)
                          .fingerprint_of_piece(one->shard, part.piece, part.at, part.bytes.data(), part.bytes.size());
  return true;
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

// Moves arrays together that have fewer entries than there was room for.
void Capture::close_up(const std::vector<uint64_t>& from, const std::vector<uint64_t>& to,
                       std::vector<std::byte>* arrays) const {
  std::vector<std::byte> fewer;
  const bool small = to.back() < arrays->size() / 2;
  if (small) {
    fewer = spares_->take(to.back());
    fewer.resize(to.back());
  }
  std::byte* const there = small ? fewer.data() : arrays->data();
  for (size_t a = 0; a + 1 < to.size(); ++a) std::memmove(there + to[a], arrays->data() + from[a], to[a + 1] - to[a]);
  if (small) {
    std::swap(*arrays, fewer);
    spares_->give(std::move(fewer));
  } else {
    arrays->resize(to.back());
  }
}

// Rows, each with all it has, become arrays, while the cache has them.
bool Capture::next_rows(One* one, uint64_t bytes_most, Next* next) {
  const Table& table = *object_->table();
  const uint64_t row_bytes = table.copy_bytes(), most_cached = std::max<uint64_t>(1, kTurnBytes / row_bytes);
  const std::vector<uint64_t> in_row = arrays_of(table.spec(), 1);
  std::vector<uint64_t> begins;
  std::vector<std::byte> arrays;
  uint64_t n = 0, room = 0;
  do {
    if (one->raw_left() == 0) {
      ShardCapture::Part taken;
      if (!take(one, kTurnBytes, &taken)) break;
      one->raw = std::move(taken.bytes);
      one->raw_at = 0;
      continue;  // nothing, if these rows were never updated, or others captured them
    }
    if (room == 0) {
      room = std::clamp<uint64_t>(one->capture->rows_at_cut(), 1, std::max<uint64_t>(1, bytes_most / row_bytes));
      begins = arrays_of(table.spec(), room);
      arrays = spares_->take(begins.back());
      arrays.resize(begins.back());
    }
    const uint64_t some = std::min({room - n, one->raw_left() / row_bytes, most_cached});
    const std::byte* const from = one->raw.data() + one->raw_at;
    one->fingerprint += table.fingerprint_of_rows(from, some);
    for (size_t a = 0; a + 1 < in_row.size(); ++a) {
      const uint64_t bytes = in_row[a + 1] - in_row[a];
      copy_strided(arrays.data() + begins[a] + n * bytes, bytes, from + in_row[a], row_bytes, bytes, some);
    }
    one->raw_at += some * row_bytes;
    n += some;
  } while (n < room || room == 0);
  rest_ = one->raw_left() != 0 ? one : nullptr;
  if (rest_ == nullptr) {
    one->raw = std::vector<std::byte>();  // there are as many as shards
    one->raw_at = 0;
  }
  if (n == 0) return false;
  one->rows += n;
  next->rows = n;
  if (n < room) close_up(begins, arrays_of(table.spec(), n), &arrays);
  next->part.bytes = std::move(arrays);
  return true;
}

}  // namespace windlass
