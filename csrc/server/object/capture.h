// Capture: the shards of one object that are here, as they were at a cut, while they go on being used.
//
//     arm()      every shard here gets its ShardCapture; from then on nothing of the cut can be lost
//     next()     the next part, of whichever shard; then, once per shard, what else is known of it
//     give_up()  whatever is not captured is forgotten
//
// Shards whose writers have set much aside come first, so that writers find room again. Several captures may share the
// shards of an object, each a part of them, so that as many threads read.
//
// Thread safety: one thread calls; others go on using the shards.
#pragma once

#include <memory>
#include <vector>

#include "server/object/served_object.h"
#include "server/object/shard_capture.h"

namespace windlass {

class Capture {
 public:
  // clock: under BSP, of the cut, which contains the updates before it. Of the shards here it takes each parts-th,
  // beginning with number `part`.
  Capture(std::shared_ptr<ServedObject> object, uint64_t clock, CaptureMemory* memory, uint32_t part, uint32_t parts)
      : object_(std::move(object)),
        clock_(clock),
        memory_(memory),
        spares_(memory->spares()),
        part_(part),
        parts_(parts) {}
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() { give_up(); }

  // kInvalidArgument if a shard has gone beyond the cut already, or is being captured or moved.
  Status arm();

  // Takes the shards' turns. Idempotent; nothing can be asked for afterwards.
  void give_up();

  const ServedObject& object() const { return *object_; }
  // What writers have set aside of it, in bytes.
  uint64_t set_aside() const;
  // Where the memory of parts goes that are no longer used.
  const std::shared_ptr<SpareBuffers>& spares() const { return spares_; }
  // How many it captures.
  uint32_t shards() const { return static_cast<uint32_t>(captures_.size()); }

  enum Kind : uint8_t {
    kPart,   // some numbers of a shard
    kShard,  // a shard is complete
    kWait,   // the rest has not reached the cut
    kOver,
  };
  struct Next {
    Kind kind = kOver;
    uint32_t shard = 0;
    ShardCapture::Part part;  // of a table: the arrays of `rows` rows, one after another (see arrays_of)
    uint64_t rows = 0;
    // Of a complete shard.
    uint64_t version = 0, count = 0, made = 0, all_rows = 0, fingerprint = 0;
    std::vector<Watermark> watermarks;
  };
  Next next(uint64_t bytes_most);

  // Where the arrays of n rows of a table begin in the bytes of a part: keys, updates, touched, numbers of rows (if the
  // rule has any), weights, state arrays; and where they end.
  static std::vector<uint64_t> arrays_of(const TableSpec& spec, uint64_t n);

 private:
  struct One {
    uint32_t shard = 0;
    std::unique_ptr<ShardCapture> capture;
    uint64_t rows = 0, fingerprint = 0;
    std::vector<std::byte> raw = {};  // rows that were taken and have not been handed over, from there on
    uint64_t raw_at = 0;
    bool complete = false, over = false;  // all was taken; and that was said
    uint64_t raw_left() const { return raw.size() - raw_at; }
  };
  One* choose();
  // Whether there was something.
  bool take(One* one, uint64_t most, ShardCapture::Part* part);
  bool next_piece(One* one, uint64_t bytes_most, Next* next);
  bool next_rows(One* one, uint64_t bytes_most, Next* next);
  void close_up(const std::vector<uint64_t>& from, const std::vector<uint64_t>& to,
                std::vector<std::byte>* arrays) const;

  const std::shared_ptr<ServedObject> object_;
  const uint64_t clock_;
  CaptureMemory* const memory_;
  const std::shared_ptr<SpareBuffers> spares_;
  const uint32_t part_, parts_;
  std::vector<One> captures_;
  size_t at_ = 0;        // the shard that is being read
  One* rest_ = nullptr;  // the shard with rows that were taken and not handed over
  size_t asked_ = 0;     // how many in a row had nothing
  size_t left_ = 0;      // shards that are not over
};

}  // namespace windlass
