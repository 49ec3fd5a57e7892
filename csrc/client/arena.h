// Arena: the registered arrays of a client, and who has borrowed them.
//
// A request may use a registered array in place, after the call has returned. Until the request is done the array is
// on loan: a second request that touches it is refused, and its memory is not given to anyone else even if the
// caller's last reference goes. Ordinary arrays are none of the arena's business.
//
// Freed blocks are kept (up to a limit) and reused: fresh memory costs a page fault every 4 KiB.
//
// Thread safety: every method from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/status.h"

namespace windlass {

struct Range {
  const std::byte* begin = nullptr;
  size_t bytes = 0;
};

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // A block of at least `bytes` on a cache line boundary; nullptr when there is no memory. Not zeroed when reused.
  std::byte* take(size_t bytes);
  void give(std::byte* block);  // once no loan touches it

  // True when the whole range lies in one block.
  bool registered(Range r) const;

  // Lends registered ranges to a request, all or none; ordinary ones are passed over, and *ordinary becomes true.
  // `what` names the request in the error. Two ranges of one request may be equal, but not overlap otherwise.
  Status lend(const Range* ranges, size_t n, const char* what, bool* ordinary = nullptr);
  void end(const Range* ranges, size_t n);

 private:
  struct Block {
    size_t bytes = 0;  // as asked for
    std::byte* mapping = nullptr;
    size_t mapped = 0;
    uint32_t loans = 0;
    bool given = false;  // give() was called while on loan
  };
  struct Free {
    std::byte* block;
    Block of;
  };

  using Blocks = std::map<const std::byte*, Block>;
  Blocks::const_iterator find(Range r) const;
  void free_locked(Blocks::iterator it);

  mutable std::mutex mutex_;
  Blocks blocks_;
  std::vector<Range> loans_;
  std::multimap<size_t, Free> free_;  // by mapped bytes
  size_t free_bytes_ = 0;
  uint32_t taken_ = 0;
};

}  // namespace windlass
