// Buffer: memory for one thing at a time, reused for the next. Fresh memory costs a page fault every 4 KiB, so a buffer
// only grows. Pages that are never written are never backed.
//
// OnceBuffer: memory for one thing, taken once. A small one comes from the heap, since a mapping costs two system calls
// and a page fault, more than the work of a small request. A large one is mapped, and unmapped with the buffer.
//
// Thread safety: none.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "base/os.h"

namespace windlass {

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { os::unmap(data_, bytes_); }

  // Returns at least `bytes` uninitialised bytes on a page boundary; nullptr when there is no memory. Growing loses the
  // old contents.
  std::byte* room(size_t bytes) {
    if (bytes <= bytes_) return data_;
    os::unmap(data_, bytes_);
    bytes_ = 0;
    const size_t want = size_for(bytes);
    data_ = os::map(want);
    if (data_ != nullptr) bytes_ = want;
    return data_;
  }
  // What room() takes for so many bytes.
  static size_t size_for(size_t bytes) {
    size_t want = 64 << 10;
    while (want < bytes) want *= 2;
    return want;
  }
  // Frees the memory if it has grown beyond `most` bytes.
  void shrink(size_t most) {
    if (bytes_ <= most) return;
    os::unmap(std::exchange(data_, nullptr), std::exchange(bytes_, 0));
  }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
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
