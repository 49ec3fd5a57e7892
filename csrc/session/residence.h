// Residence: where a shard is, as far as this server knows. Pure: no thread, socket or time inside.
//
//     kHere -> kFrozen -> kElsewhere      a shard that leaves; from kFrozen it may also come back to kHere
//     kElsewhere -> kArriving -> kArrived -> kHere      one that comes
//     any of these -> kDeleted                          its object is no more
//
// The server that a shard leaves decides when it has left, and no request carries the new term before that. So a copy
// that has arrived does not count yet; the first request under its term proves that it does.
//
// A shard inside its client's process is always here and does not use this.
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <cstdint>

namespace windlass {

struct Residence {
  enum State : uint8_t {
    kHere,
    kFrozen,     // here and about to leave: it does not change, and requests are parked
    kElsewhere,  // at `server`, since `term`
    kArriving,   // likewise, and a copy is being written
    kArrived,    // likewise, and a copy is complete
    kDeleted,    // for good: nobody else has it either
  };
  State state = kHere;
  bool leaving = false;    // it is being copied
  uint32_t server = 0;     // which server has it, where it is not here
  uint32_t term = 0;       // since when
  uint32_t next_term = 0;  // of the copy

  bool deleted() const { return state == kDeleted; }
  void become(State next) {
    state = deleted() ? kDeleted : next;
  }  // whoever moves a shard may not know that it is gone
  // Whether a request under this term can be served.
  bool serves(uint32_t asked) const { return state == kHere && term == asked; }
  // The same for an arrived copy, which counts from the first request under its term.
  bool opens(uint32_t asked) {
    if (state != kArrived || asked != next_term) return false;
    settle();
    return true;
  }
  void settle() {
    state = kHere;
    term = next_term;
  }
};

}  // namespace windlass
