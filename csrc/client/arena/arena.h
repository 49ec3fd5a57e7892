// Arena: the registered arrays of a client, and which of them are on loan.
//
// A request may use a registered array in place, even after the call has returned. Until the request is done the array
// is on loan: a second request that touches it is refused, and its memory is not reused even if the caller's last
// reference goes. The arena does not know ordinary arrays.
//
// Blocks lie in segments, large ones in a segment of their own. With servers in other processes segments are nameless
// files (os::make_shared_file), which a server on the same host can be given; else they are plain memory.
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

// A piece of memory, freed with its last owner.
class Segment {
 public:
  // Null if there is no memory; *why then says why.
  static std::shared_ptr<Segment> make(uint32_t id, size_t bytes, bool shared, std::string* why);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  uint32_t id() const { return id_; }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_; }  // -1 if it is not shared
  // Its addresses are about to get other pages: no request may use it as shared memory any more.
  bool withdrawn() const { return withdrawn_.load(std::memory_order_acquire); }
  void withdraw() { withdrawn_.store(true, std::memory_order_release); }
  // Puts fresh pages with the same contents under its addresses, which no server knows and which the returned segment
  // owns. `alone`: nobody writes there meanwhile, and the new pages can be shared. Null if there is no memory.
  std::shared_ptr<Segment> replace(uint32_t id, bool alone);

 private:
  Segment(uint32_t id, std::byte* data, size_t bytes, int file) : id_(id), data_(data), bytes_(bytes), file_(file) {}
  const uint32_t id_;
  std::byte* const data_;
  const size_t bytes_;
  const int file_;
  const uint32_t generation_ = os::fork_generation();
  std::atomic<bool> withdrawn_{false};
  bool replaced_ = false;    // another segment owns its addresses
  bool was_shared_ = false;  // the memory is a mapping of a file, though a private one
};

// Where a registered array lies in a shared segment.
struct Place {
  std::shared_ptr<const Segment> segment;
  uint64_t offset = 0;
};

class Arena {
 public:
  // shared: servers on the same host may be given its memory.
  // rank: of the worker that owns the arrays; a server's pass may use those of several workers at once.
  explicit Arena(bool shared = false, uint32_t rank = 0);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A block of at least `bytes` on a cache line boundary; nullptr if there is no memory. A reused block is not zeroed.
  std::byte* take(size_t bytes);
  void give(std::byte* block);  // once no loan touches it
  std::string failure() const;  // why take() last returned nullptr

  // Whether the whole range lies in one block; *block becomes that block.
  bool registered(Range r, Range* block = nullptr) const;
  // The same for memory that can be shared; *place says where it is.
  bool locate(Range r, Place* place) const;

  // Lends registered ranges to a request, all or none; skips ordinary ones and sets *ordinary. `what` names the request
  // in the error. Two ranges of one request may be equal, but not overlap otherwise.
  Status lend(const Range* ranges, size_t n, const std::string& what, bool* ordinary = nullptr);
  void end(const Range* ranges, size_t n);
  // Waits until no byte of it is on loan; false at the deadline.
  bool wait_returned(Range r, int64_t deadline_ns);

  // Puts fresh pages under the addresses of segments that a server may still write, before their loans end. Memory that
  // becomes private is copied if it must be shared again. If there is no memory for fresh pages, what is on loan stays
  // on loan for ever.
  using Segments = std::vector<std::shared_ptr<const Segment>>;
  void renew(const Segments& segments);
  // How often addresses have begun to get fresh pages; waits for those that are getting them. Whoever knows pages and
  // not addresses, such as a GPU, compares it before and after a copy.
  uint64_t renewals();
  // Adds a callback for links that share this memory with servers. It is called when some of it is withdrawn, and must
  // break the connections to servers that know it: what they write there from then on is lost, so everything must be
  // sent again.
  void add_teller(std::function<void(const Segments&)> teller);

 private:
  struct Block {
    size_t bytes = 0;  // as asked for
    size_t room = 0;   // the block's capacity
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
  std::multimap<const std::byte*, size_t> loans_;  // bytes by beginning; loans are equal or do not overlap
  std::mutex renewing_;                            // one renewal at a time; guards what follows
  uint64_t renewals_ = 0;
  std::vector<std::function<void(const Segments&)>> tellers_;
  std::atomic<uint32_t> returns_{0};  // waited on for the end of a loan
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
