// Payload: what a request sends to servers elsewhere, part by part, and where the answers go.
//
// A lane calls it while it sends (describe, write_items, numbers, ...) and while it receives (landing, land), one
// thread at a time. `in_place`: the numbers lie in arenas that the server shares, so they do not travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "client/net/owners.h"
#include "wire/frame.h"

namespace windlass {

// What a part sends, and what its answer returns.
struct Parcel {
  uint32_t items = 0;           // spans or keys
  uint32_t items_bytes = 0;     // of all of them
  uint32_t argument_bytes = 0;  // of the operation's argument
  bool same_argument = false;   // all parts of the request have the same
  uint16_t flags = 0;           // wire::BlockFlag
  uint64_t value = 0;
  uint64_t numbers_bytes = 0;  // that travel
  uint64_t answer_bytes = 0;   // of the answer's numbers, unless it is refused or nothing is newer
  uint64_t work_bytes = 0;     // that the server's threads read or write for it
};

// The answer to a part.
struct PartAnswer {
  uint64_t value = 0;
  uint64_t clock = 0;
  uint16_t flags = 0;
  uint32_t term = 0;    // of a shard that is elsewhere
  wire::Waited waited;  // at gates, at the shard of its block that waited longest
  std::string body;     // keys, the answer to a query, or why it was refused
  uint64_t numbers_bytes = 0;
};

class Payload {
 public:
  virtual void describe(uint32_t part, bool in_place, Parcel* to) = 0;
  virtual void write_items(uint32_t, bool, std::byte*) {}
  virtual void write_argument(uint32_t, std::byte*) {}
  // Whether the part may share a block with the one before it: its argument is the same, and its answer has no body.
  virtual bool joins(uint32_t) const { return false; }
  // Where the items of n neighbouring parts lie together in an arena; false if they do not.
  virtual bool list(uint32_t, uint32_t, wire::ListedItems*) { return false; }
  // Where the part's numbers lie together, or nullptr: then gather() writes them.
  virtual const std::byte* numbers(uint32_t) { return nullptr; }
  virtual void gather(uint32_t, std::byte*) {}
  // Where to receive so many bytes of the answer's numbers, or nullptr: then land() gets them.
  virtual std::byte* landing(uint32_t, uint64_t) { return nullptr; }
  // Takes a part's answer, complete and with a valid checksum. `numbers` is null if there are none or landing() took
  // them. An error means that the answer makes no sense.
  virtual Status land(uint32_t, bool, const PartAnswer&, const std::byte*) { return {}; }
  // Takes a part's refusal. True: that is as good as an answer, and no error.
  virtual bool refused(uint32_t, Code) { return false; }
  // Who has the shard that a part is about; nullptr if it is about none.
  virtual Owners* owners(uint32_t part, uint32_t* shard) = 0;

 protected:
  ~Payload() = default;
};

}  // namespace windlass
