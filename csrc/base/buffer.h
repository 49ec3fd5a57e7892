// Buffer: memory for one thing at a time, reused for the next. Fresh memory costs a page fault every 4 KiB, so a buffer
// only grows. Pages that are never written are never backed.
//
// What threads keep between two things is limited, all threads together: idle connections cost nothing then.
//
// OnceBuffer: memory for one thing, taken once. A small one comes from the heap, since a mapping costs two system calls
// and a page fault, more than the work of a small request. A large one is mapped, and unmapped with the buffer.
//
// Thread safety: none; one thread's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/os.h"

namespace windlass {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(); }

  // Returns at least `bytes` uninitialised bytes on a page boundary; nullptr when there is no memory. Growing loses the
  // old contents.
  std::byte* room(size_t bytes) {
    if (bytes <= bytes_) return data_;
    free();
    const size_t want = size_for(bytes);
    data_ = os::map(want);
    if (data_ == nullptr) return nullptr;
    bytes_ = want;
    all_.fetch_add(want, std::memory_order_relaxed);
    return data_;
  }
  // What room() takes for so many bytes.
  static size_t size_for(size_t bytes) {
    size_t want = kLeastBytes;
    while (want < bytes) want *= 2;
    return want;
  }
  // Frees the memory if it has grown beyond `most` bytes, or if all buffers together have grown too large.
  void shrink(size_t most) {
    if (bytes_ <= most && (bytes_ <= kLeastBytes || all_.load(std::memory_order_relaxed) <= kAllBytesMax)) return;
    free();
  }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kLeastBytes = size_t{64} << 10;
  static constexpr uint64_t kAllBytesMax = uint64_t{32} << 20;

  void free() {
    if (bytes_ == 0) return;
    os::unmap(std::exchange(data_, nullptr), bytes_);
    all_.fetch_sub(std::exchange(bytes_, 0), std::memory_order_relaxed);
  }

  static inline std::atomic<uint64_t> all_{0};  // bytes of all buffers
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class OnceBuffer {
 public:
  // Returns `bytes` uninitialised bytes; nullptr when there is no memory to map. Call it once.
  std::byte* room(size_t bytes) {
    if (bytes > kHeapBytesMax) return mapped_.room(bytes);
    heap_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    return heap_.get();
  }
  std::byte* data() const { return heap_ != nullptr ? heap_.get() : mapped_.data(); }

 private:
  static constexpr size_t kHeapBytesMax = size_t{16} << 10;
  std::unique_ptr<std::byte[]> heap_;
  Buffer mapped_;
};

}  // namespace windlass
