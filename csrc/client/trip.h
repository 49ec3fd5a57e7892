// Trip: one request to one server, from the moment it is queued until every part has its answer.
//
// What travels and where the answers go is the business of its Cargo. Numbers that lie together in memory are sent from
// there and land there; others pass through the lane's own memory. A trip can be sent more than once, so the cargo's
// numbers stay as they are until the trip is over.
//
// A part whose shard turns out to be elsewhere goes on as a trip of its own, a stray, with the same sequence and clock:
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
#include "client/arena.h"
#include "client/owners.h"
#include "exec/future.h"
#include "sync/gate.h"
#include "wire/frame.h"

namespace windlass {

// A lane calls these while it sends (describe, items, numbers) or receives (landing, land), one thread at a time.
// `lies`: the numbers lie in arenas and do not travel.
class Trip;

class Cargo {
 public:
  // Fills in items, items_bytes, numbers_bytes, value and flags.
  virtual void describe(uint32_t part, bool lies, wire::Part* to) = 0;
  virtual void write_items(uint32_t part, bool lies, std::byte* to) = 0;
  // Where the part's numbers lie together, or nullptr: then gather() writes them.
  virtual const std::byte* numbers(uint32_t part) = 0;
  virtual void gather(uint32_t part, std::byte* to) = 0;
  // Where so many bytes of the answer's numbers go, or nullptr: then land() gets them.
  virtual std::byte* landing(uint32_t part, uint64_t bytes) = 0;
  // A part's answer, complete and right. `numbers` is null where there are none or landing() took them. An error means
  // that the answer makes no sense.
  virtual Status land(uint32_t part, bool lies, const wire::Part& answer, const std::string& items,
                      const std::byte* numbers) = 0;
  // All parts have their answer, or never will.
  virtual void over(const Status& status) = 0;

  // Who has the shard that a part is about; nullptr where it is about none.
  virtual Owners* owners(uint32_t part, uint32_t* shard) = 0;
  // There is a stray: over() comes once more. From any thread, with a lane's locks held.
  virtual void add_stray() = 0;
  // It is ready to go on. From any thread, without locks.
  virtual void go_on(const Ref<Trip>& stray) = 0;

 protected:
  ~Cargo() = default;
};

class Trip : public Counted {
 public:
  struct Part {
    uint32_t part = 0;  // the cargo's number for it
    uint32_t shard = 0;
    uint32_t term = 0;
    uint64_t sequence = 0;
    uint64_t clock = 0;
    uint16_t flags = 0;
    bool answered = false;
  };

  explicit Trip(Cargo* cargo) : cargo(cargo) {}

  // Nullptr when it has no such part.
  Part* find(uint32_t shard) {
    if (hint_ < parts.size() && parts[hint_].shard == shard) return &parts[hint_++];
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].shard == shard) {
        hint_ = i + 1;
        return &parts[i];
      }
    }
    return nullptr;
  }
  // An answer may have more parts than could be known.
  void grow(size_t n) {
    for (size_t i = parts.size(); i < n; ++i, ++unanswered) {
      parts.push_back({.part = static_cast<uint32_t>(i), .shard = static_cast<uint32_t>(i)});
    }
  }
  // A trip of its own for a part that `server` refused, or does not answer.
  Ref<Trip> make_stray(const Part& part, uint32_t server) const {
    Ref<Trip> stray(new Trip(cargo));
    stray->header = header;
    stray->extensions = extensions;
    stray->places = places;
    stray->segments = segments;
    stray->parts.push_back(part);
    stray->unanswered = 1;
    stray->deadline_ns = deadline_ns;
    stray->bytes = bytes;
    stray->owner = owner;
    stray->came_from = server;
    stray->detours = detours + 1;
    stray->patient = patient;
    cargo->add_stray();
    return stray;
  }
  // The whole frame with everything that has no answer yet.
  void describe(const Part& p, wire::Part* to) const {
    to->shard = p.shard;
    to->term = p.term;
    to->sequence = p.sequence;
    to->clock = p.clock;
    to->flags = p.flags;
    if ((p.flags & wire::kEmpty) == 0) cargo->describe(p.part, lies, to);
  }

  wire::Header header;  // without length and parts
  std::vector<std::byte> extensions;
  // Where its arrays can be shared: what is sent instead of extensions, and the memory they lie in.
  std::vector<std::byte> places;
  std::vector<std::shared_ptr<const Segment>> segments;
  bool lies = false;  // they are, in the frame that was last sent
  std::vector<Part> parts;
  uint32_t unanswered = 0;
  int64_t deadline_ns = 0;
  uint64_t bytes = 0;                          // about: which lane it takes
  int64_t sent_ns = 0;                         // when all of it had last been sent; 0: not yet
  bool begun = false;                          // some of it may have left
  bool leaving = false;                        // its frame is on its way out
  bool ends_later = false;                     // its answer came while it was being sent again
  Status status;                               // the first refusal
  Ref<Future> owner;                           // keeps the cargo while it is under way
  uint32_t came_from = 0;                      // of a stray: where it was not served
  uint32_t detours = 0;                        // likewise: how often
  bool rested = false;                         // likewise: it has waited since
  bool patient = false;                        // it is answered when its iteration has been closed by all
  View::Worker waits_for{Gate::kOutsider, 0};  // at a gate, when that was last asked
  Cargo* cargo;

 private:
  size_t hint_ = 0;
};

}  // namespace windlass
