// Buffer: memory for one thing at a time, kept for the next. Fresh memory costs a page fault every 4 KiB, so a buffer
// only grows; the pages of one that is never filled are never there.
//
// OnceBuffer: memory for one thing, taken once. What is small comes from the heap: a mapping costs two system calls and
// a page fault, more than the work of a small request. What is large is a mapping, and is gone when the buffer is.
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

  // At least so many bytes on a page boundary, with anything in them; nullptr when there is no memory. What was there
  // before is gone when it had to grow.
  std::byte* room(size_t bytes) {
    if (bytes <= bytes_) return data_;
    os::unmap(data_, bytes_);
    bytes_ = 0;
    size_t want = 64 << 10;
    while (want < bytes) want *= 2;
    data_ = os::map(want);
    if (data_ != nullptr) bytes_ = want;
    return data_;
  }
  // Lets go of it if it has grown beyond what is worth keeping.
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
  // So many bytes with anything in them; nullptr when there is no memory. Once.
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
