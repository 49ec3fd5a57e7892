// Residence: where a shard is, as far as this server knows. Pure: no thread, socket or time inside.
//
//     kHere -> kFrozen -> kElsewhere      a shard that leaves; from kFrozen it may also come back to kHere
//     kElsewhere -> kArriving -> kArrived -> kHere      one that comes
//
// The server that a shard leaves decides when it has left: until then nobody but that server knows of the new term. So
// a copy that has arrived says nothing of itself, and the first request under its term is the proof that it counts.
//
// A shard inside the process of its client is always here, and nobody looks at this.
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <cstdint>

namespace windlass {

struct Residence {
  enum State : uint8_t {
    kHere,
    kFrozen,     // here and about to leave: it is not touched, and what comes is parked
    kElsewhere,  // at `server`, since `term`
    kArriving,   // likewise, and a copy is being written
    kArrived,    // likewise, and a copy is complete
  };
  State state = kHere;
  bool leaving = false;    // somebody is copying it
  uint32_t server = 0;     // who has it, where it is not here
  uint32_t term = 0;       // since when
  uint32_t next_term = 0;  // of the copy

  // Whether a request under this term can be served.
  bool serves(uint32_t asked) const { return state == kHere && term == asked; }
  // The same, once the copy that has arrived counts.
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
