// Buffer: memory for one thing at a time, kept for the next. Fresh memory costs a page fault every 4 KiB, so a buffer
// only grows; the pages of one that is never filled are never there.
//
// Thread safety: none.
#pragma once

#include <cstddef>
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

}  // namespace windlass
