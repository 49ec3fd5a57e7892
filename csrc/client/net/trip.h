// Trip: one request to one server, from the moment it is queued until every part has its answer.
//
// Its Payload (client/net/payload.h) knows what travels and where the answers go. Numbers that lie together in memory
// are sent and received in place; others pass through the lane's own memory. A trip can be sent more than once, so the
// payload's numbers must not change until the trip is over.
//
// Parts travel in blocks: neighbours that have everything but their shard, sequence and items in common. A block is
// answered as a whole. Its parts are chosen once, when the trip is queued, so that an answer to an earlier sending
// still fits.
//
// Parts whose shards turn out to be elsewhere are redirected: they become another trip, with the same sequences and
// clocks.
//
//     trip to A:  part 0, part 1, part 2        A refuses part 1: shard 7 is on B since term 5
//     trip to B:          part 1                the work is done when both trips are over
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/ref.h"
#include "base/status.h"
#include "client/arena/arena.h"
#include "client/net/payload.h"
#include "exec/future.h"
#include "sync/gate.h"
#include "wire/frame.h"

namespace windlass {

class RemoteRoute;

class Trip : public Counted {
 public:
  // What all parts about one object have in common, on any server.
  struct Common {
    wire::Op op = wire::Op::kStep;
    uint32_t object = 0;
    uint8_t dtype_in = 0, dtype_out = 0;
    uint8_t hypers = 0;
    double hyper[limits::kPushNumbersMax] = {};
    const wire::Places* places = nullptr;  // of the arrays, if a server on the same host can use them

    bool is_about_shards() const { return object != 0; }
  };
  struct Part {
    uint32_t part = 0;  // the payload's number for it
    uint32_t shard = 0;
    uint32_t term = 0;
    uint16_t flags = 0;
    bool answered = false;
    uint64_t sequence = 0;
    uint64_t clock = 0;
    const Common* common = nullptr;
  };
  // Neighbouring parts; its position in `blocks` is its label.
  struct Block {
    uint32_t first = 0, n = 0;
  };

  Trip(RemoteRoute* route, Payload* payload) : route(route), payload(payload) {}

  // Call once, when the parts are numbered.
  void make_blocks();
  // The answer to a list has more parts than the request.
  void grow(size_t n) {
    for (auto i = static_cast<uint32_t>(parts.size()); i < n; ++i, ++unanswered) {
      parts.push_back({.part = i, .common = parts[0].common});
      blocks.push_back({i, 1});
    }
  }
  uint32_t unanswered_in(const Block& block) const {
    uint32_t n = 0;
    for (uint32_t i = block.first; i < block.first + block.n; ++i) n += parts[i].answered ? 0 : 1;
    return n;
  }
  // A new trip for a part that `server` refused, or does not answer. begun: that server may have done it all the same.
  Ref<Trip> redirect(const Part& part, uint32_t server, bool begun) const;
  // Whether the part's shard is on another server than this one by now, as far as the client knows.
  bool has_moved(const Part& part, uint32_t server) const;
  // Whether nobody misses the answer of a server that is gone: it has nothing to close, to let in or to forget.
  static bool is_moot(const Part& part) {
    const wire::Op op = part.common->op;
    return op == wire::Op::kTick || op == wire::Op::kClose || op == wire::Op::kEnter || op == wire::Op::kDetach;
  }
  void describe(const Part& p, bool shared, Parcel* to) const {
    if ((p.flags & wire::kEmpty) == 0) payload->describe(p.part, shared, to);
    to->flags |= p.flags;
  }

  wire::Header header;  // without length and blocks
  uint32_t object = 0;  // what it is about; 0: several, or none
  // The shareable memory that its arrays lie in.
  std::vector<std::shared_ptr<const Segment>> segments;
  bool placed = false;    // some arrays can be shared
  bool in_place = false;  // they were, in the frame that was last sent
  bool ticks = false;     // it also says that its worker has closed everything before the clock of its first part
  std::vector<Part> parts;
  std::vector<Block> blocks;
  uint32_t unanswered = 0;
  int64_t deadline_ns = 0;
  uint64_t bytes = 0;                          // approximate: chooses the lane
  int64_t sent_ns = 0;                         // when the whole trip was last sent; 0: not yet
  bool begun = false;                          // some of it may have been sent, by this trip or the one before it
  bool repeated = false;                       // it was sent again: a server may have done it when it refuses it
  bool leaving = false;                        // its frame is being sent
  bool ends_later = false;                     // its answer came while it was being sent again
  Status status;                               // the first refusal
  Ref<Future> owner;                           // keeps the payload alive
  uint32_t came_from = 0;                      // of a redirected trip: the server that did not serve it
  uint32_t detours = 0;                        // likewise: how often
  bool rested = false;                         // likewise: it has waited since
  bool patient = false;                        // it is answered when all workers have closed its iteration
  View::Worker waits_for{Gate::kOutsider, 0};  // at a gate, when the server was last asked
  RemoteRoute* const route;
  Payload* const payload;
};

}  // namespace windlass
