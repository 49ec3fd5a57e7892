// Arena: the registered arrays of a client, and who has borrowed them.
//
// A request may use a registered array in place, after the call has returned. Until the request is done the array is
// on loan: a second request that touches it is refused, and its memory is not given to anyone else even if the
// caller's last reference goes. Ordinary arrays are none of the arena's business.
//
// Blocks lie in segments, large ones in one of their own. With servers in other processes segments are files without
// a name (os::make_shared_file), so that a server on the same host can be given them; else they are plain memory.
// Freed blocks are kept (up to a limit) and reused: fresh memory costs a page fault every 4 KiB.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/os.h"
#include "base/status.h"

namespace windlass {

struct Range {
  const std::byte* begin = nullptr;
  size_t bytes = 0;

  bool contains(const Range& r) const {
    return r.begin >= begin && r.bytes <= bytes && static_cast<size_t>(r.begin - begin) <= bytes - r.bytes;
  }
};

// A piece of memory, gone with its last owner.
class Segment {
 public:
  // Null when there is no memory.
  static std::shared_ptr<Segment> make(uint32_t id, size_t bytes, bool shared, std::string* why);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  uint32_t id() const { return id_; }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_; }  // -1 when it is not shared
  // There will be other pages under its addresses: no request lies in it any more.
  bool withdrawn() const { return withdrawn_.load(std::memory_order_acquire); }
  void withdraw() { withdrawn_.store(true, std::memory_order_release); }
  // Puts them there: fresh pages with the same contents, which no server knows and another segment has. `alone`: nobody
  // writes there meanwhile, and the new pages can be shared. Null when there is no memory.
  std::shared_ptr<Segment> replace(uint32_t id, bool alone);

 private:
  Segment(uint32_t id, std::byte* data, size_t bytes, int file) : id_(id), data_(data), bytes_(bytes), file_(file) {}
  const uint32_t id_;
  std::byte* const data_;
  const size_t bytes_;
  const int file_;
  const uint32_t generation_ = os::fork_generation();
  std::atomic<bool> withdrawn_{false};
  bool replaced_ = false;    // its addresses are another's
  bool was_shared_ = false;  // the memory is a mapping of a file, though it is nobody else's
};

// Where a registered array is in a segment that is shared.
struct Place {
  std::shared_ptr<const Segment> segment;
  uint64_t offset = 0;
};

class Arena {
 public:
  // shared: servers on the same host may be given its memory.
  // rank: of the worker whose arrays they are; those of different workers meet in a server's pass.
  explicit Arena(bool shared = false, uint32_t rank = 0);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A block of at least `bytes` on a cache line boundary; nullptr when there is no memory. Not zeroed when reused.
  std::byte* take(size_t bytes);
  void give(std::byte* block);  // once no loan touches it
  std::string failure() const;  // why there was no memory when there last was none

  // True when the whole range lies in one block, which *block becomes.
  bool registered(Range r, Range* block = nullptr) const;
  // The same, for memory that can be shared; *place says where it is.
  bool locate(Range r, Place* place) const;

  // Lends registered ranges to a request, all or none; ordinary ones are passed over, and *ordinary becomes true.
  // `what` names the request in the error. Two ranges of one request may be equal, but not overlap otherwise.
  Status lend(const Range* ranges, size_t n, const std::string& what, bool* ordinary = nullptr);
  void end(const Range* ranges, size_t n);
  // Until no byte of it is on loan, or the time is up: false.
  bool wait_returned(Range r, int64_t deadline_ns);

  // Puts fresh pages under the addresses of segments that a server may still write, before their loans end. What
  // becomes private is copied when it is to be shared again. Where there is no memory for that, what is on loan stays
  // so for ever.
  using Segments = std::vector<std::shared_ptr<const Segment>>;
  void renew(const Segments& segments);
  // Whoever tells servers of its memory: is called when some of it is withdrawn, and breaks the connections to servers
  // that know it. What they write there from then on is lost, so everything has to be sent again.
  void add_teller(std::function<void(const Segments&)> teller);

 private:
  struct Block {
    size_t bytes = 0;  // as asked for
    size_t room = 0;   // what there is
    std::shared_ptr<Segment> segment;
    uint32_t loans = 0;
    bool given = false;  // give() was called while on loan
  };
  struct Free {
    std::byte* block;
    std::shared_ptr<Segment> segment;
  };

  using Blocks = std::map<const std::byte*, Block>;
  Blocks::const_iterator find(Range r) const;
  bool on_loan(Range r, bool* as_it_is) const;
  std::byte* reuse(size_t bytes, size_t room, size_t most);
  void free_locked(Blocks::iterator it);
  void end_locked(const Range* ranges, size_t n);
  void lend_for_ever(Blocks::iterator block);
  bool all_on_loan(const std::byte* block, size_t bytes) const;

  const bool shared_;
  mutable std::mutex mutex_;
  Blocks blocks_;
  std::multimap<const std::byte*, size_t> loans_;  // bytes by beginning; none overlaps another, unless it equals it
  std::mutex renewing_;                            // one renewal at a time, and of what follows
  std::vector<std::function<void(const Segments&)>> tellers_;
  std::atomic<uint32_t> returns_{0};  // for who waits for a loan to end
  std::atomic<uint32_t> waiting_{0};
  std::multimap<size_t, Free> free_;  // by room
  size_t free_bytes_ = 0;             // of blocks with a segment of their own
  std::shared_ptr<Segment> small_;    // the segment that small blocks are cut from
  size_t small_used_ = 0;
  uint32_t segments_ = 0;
  std::string failure_;
  uint32_t taken_;
};

}  // namespace windlass
