// ShardCapture: one shard as it was at a cut, taken while the shard goes on being used.
//
// Whoever changes the shard calls before_write() first, which sets aside what is not captured yet: all the rest of a
// tensor's shard. Of a table's shard the table itself sets aside single rows (table/row_capture.h). Who saves takes
// what was set aside, and reads the rest in place, a little in each turn.
//
//     kWaits  -> kOpen -> kDone       under BSP it waits until the update before the cut is made; others open at once
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/object/spare_buffers.h"
#include "session/shard.h"
#include "table/row_capture.h"

namespace windlass {

class ServedObject;

// Bounds what is set aside by all captures of a server. Writers that find it full wait; who saves makes room.
class CaptureMemory {
 public:
  explicit CaptureMemory(uint64_t bytes_max) : bytes_max_(bytes_max) {}
  void add(uint64_t bytes) { used_.fetch_add(bytes, std::memory_order_relaxed); }
  void remove(uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  bool full() const { return used_.load(std::memory_order_relaxed) >= bytes_max_.load(std::memory_order_relaxed); }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t limit() const { return bytes_max_.load(std::memory_order_relaxed); }
  void set_limit(uint64_t bytes_max) { bytes_max_.store(bytes_max, std::memory_order_relaxed); }
  // Whether so much is set aside that taking it comes before everything else.
  bool presses() const { return used() > limit() / 4; }
  // Shared by the captures that are under way, and gone after the last of them and its arrays.
  std::shared_ptr<SpareBuffers> spares() {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<SpareBuffers> there = spares_.lock();
    if (there == nullptr) spares_ = there = std::make_shared<SpareBuffers>();
    return there;
  }

 private:
  std::atomic<uint64_t> bytes_max_;
  std::atomic<uint64_t> used_{0};
  std::mutex mutex_;
  std::weak_ptr<SpareBuffers> spares_;
};

// A worker's pushes that a captured shard contains: the first `sequence` of them.
struct Watermark {
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t sequence = 0;
  uint64_t clock = 0;
};

class ShardCapture {
 public:
  enum State : uint8_t { kWaits, kOpen, kDone };

  ShardCapture(ServedObject& object, uint32_t index, uint64_t clock, CaptureMemory* memory)
      : object_(object), index_(index), clock_(clock), memory_(memory), spares_(memory->spares()) {}
  ShardCapture(const ShardCapture&) = delete;
  ShardCapture& operator=(const ShardCapture&) = delete;
  ~ShardCapture();

  // Whether the shard is beyond the cut already: nothing can be captured any more.
  bool is_late(const Shard& shard) const;
  // Opens if the shard has reached the cut.
  void look(Shard& shard);
  // Call before anything of the shard changes.
  void before_write(Shard& shard);
  void after_write();
  // Whether a writer should wait for room first.
  bool holds_up(const Shard& shard) const;

  // A part of a tensor's shard, or rows of a table's.
  struct Part {
    size_t piece = 0;  // of a tensor's shard: which of Tensor::pieces_of()
    uint64_t at = 0;   // and where in it, in bytes
    std::vector<std::byte> bytes;
  };
  // Takes about `most` bytes. False if there is nothing to take now.
  bool take(Shard& shard, uint64_t most, Part* part);

  State state() const { return state_; }
  uint64_t version() const { return version_; }
  uint64_t count() const { return count_; }
  uint64_t made() const { return made_; }
  const std::vector<Watermark>& watermarks() const { return watermarks_; }
  // Of a table, once it is open.
  uint64_t rows_at_cut() const { return rows_.rows_at_cut(); }
  // What writers have set aside, readable at any time.
  uint64_t set_aside() const { return set_aside_.load(std::memory_order_relaxed); }

 private:
  void open(Shard& shard);
  bool take_rows(uint64_t most, Part* part);
  bool take_piece(uint64_t most, Part* part);
  void count_rows();

  ServedObject& object_;
  const uint32_t index_;
  const uint64_t clock_;
  CaptureMemory* const memory_;
  const std::shared_ptr<SpareBuffers> spares_;
  State state_ = kWaits;
  uint64_t version_ = 0, count_ = 0, made_ = 0;
  std::vector<Watermark> watermarks_;
  RowCapture rows_;   // of a table
  size_t piece_ = 0;  // of a tensor: how far it was taken
  uint64_t at_ = 0;
  std::vector<Part> aside_;  // set aside by a writer, from there on
  size_t next_aside_ = 0;
  std::atomic<uint64_t> set_aside_{0};  // bytes of all that
};

}  // namespace windlass
