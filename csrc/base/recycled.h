// Recycled: a base class of objects that are made and destroyed for every request. Each thread keeps one freed block
// for the next object of the same size; beyond a kilobyte, malloc and free would take a tenth of a small request.
//
// Under sanitizers, which watch every block, memory comes from the heap each time.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

namespace windlass {

// What a thread keeps.
struct RecycledBlock {
  void* block = nullptr;
  size_t bytes = 0;
  bool over = false;  // the thread is ending
  ~RecycledBlock() {
    over = true;
    bytes = 0;
    ::operator delete(std::exchange(block, nullptr));
  }
};

class Recycled {
 public:
  static void* operator new(size_t bytes) {
    RecycledBlock& kept = t_block;
    if (kept.bytes == bytes) return std::exchange(kept.bytes, 0), std::exchange(kept.block, nullptr);
    return ::operator new(bytes);
  }
  static void operator delete(void* block, size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    RecycledBlock& kept = t_block;
    if (kept.block == nullptr && !kept.over) {
      kept.block = block;
      kept.bytes = bytes;
      return;
    }
#endif
    (void)bytes;
    ::operator delete(block);
  }

 private:
  static inline thread_local RecycledBlock t_block;
};

}  // namespace windlass
