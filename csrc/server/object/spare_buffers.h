// SpareBuffers: memory of a checkpoint that was written, for what is captured next. Fresh memory from the system costs
// as much as a third of the writing: each page of it is cleared, and its first use is a fault.
//
// Small buffers are not kept: most of a checkpoint lies in large ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/limits.h"

namespace windlass {

// Thread safety: any thread.
class SpareBuffers {
 public:
  // A buffer with room for so many bytes; what it holds is of no meaning.
  std::vector<std::byte> take(uint64_t bytes) {
    if (bytes >= kSmallest) {
      const std::lock_guard lock(mutex_);
      for (auto it = buffers_.rbegin(); it != buffers_.rend(); ++it) {
        if (it->capacity() < bytes || it->capacity() / 4 * 3 > bytes) continue;
        std::swap(*it, buffers_.back());
        std::vector<std::byte> found = std::move(buffers_.back());
        buffers_.pop_back();
        bytes_ -= found.capacity();
        return found;
      }
    }
    std::vector<std::byte> fresh;
    fresh.reserve(bytes);
    return fresh;
  }
  // Keeps a buffer that is no longer used, if there is room for it.
  void give(std::vector<std::byte> buffer) {
    if (buffer.capacity() < kSmallest) return;
    const std::lock_guard lock(mutex_);
    if (bytes_ + buffer.capacity() > limits::kCaptureSpareBytes) return;
    bytes_ += buffer.capacity();
    buffers_.push_back(std::move(buffer));
  }
  // How many bytes are kept.
  uint64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  static constexpr uint64_t kSmallest = 256 << 10;
  mutable std::mutex mutex_;
  std::vector<std::vector<std::byte>> buffers_;  // of what follows:
  uint64_t bytes_ = 0;
};

}  // namespace windlass
