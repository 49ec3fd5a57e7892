// Departure: a shard on its way to another server, as the server that it leaves sees it.
//
//     begin | rows rows rows ... | rows erased ... | # | the rest, records, gate, pushes, end | acknowledged: commit()
//           | the shard is in use: all rows,       |   | it is frozen                         | else abort(): it thaws
//           | a few at a turn; then what changed   |   |
//
// A frozen shard does not change, and no thread blocks on it: entries that come are parked as if they had come too
// early. After commit() parked and later entries are refused with the shard's new server and term; after abort() they
// run. So the switch happens on this server, in one turn: before it nobody knows the new term, and after it nothing is
// served here.
//
// A tensor's shard is small: it is frozen at once and sent from where it lies.
//
// Thread safety: none; one thread's. Others go on using the shard meanwhile.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "messages/chunk.h"
#include "server/object/served_object.h"

namespace windlass {

class Departure {
 public:
  // *out stays null if the shard has already left for that server under that term: there is nothing to do.
  static Status begin(std::shared_ptr<ServedObject> object, uint32_t shard, uint32_t server, uint32_t term,
                      std::unique_ptr<Departure>* out);
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;
  ~Departure() { abort(); }

  // The next chunk: its header, and its body in place, both valid until the next call. *more is false after the last.
  struct Pieces {
    const std::byte* head = nullptr;
    const std::byte* body = nullptr;
    size_t body_bytes = 0;
  };
  Status next(Pieces* pieces, bool* more);
  bool frozen() const { return frozen_; }

  // The other server has all of it: makes the switch.
  Status commit();
  // The shard stays here. Does nothing after commit().
  void abort();

 private:
  enum Phase { kBegin, kCopy, kChanges, kFreeze, kRest, kErased, kRecords, kCrowd, kGate, kPushes, kEnd, kOver };

  Departure(std::shared_ptr<ServedObject> object, uint32_t shard, uint32_t server, uint32_t term)
      : object_(std::move(object)), index_(shard), server_(server), term_(term), shard_(*object_->find(shard)) {}
  TableShard& rows() const { return object_->table()->shard(index_); }
  void copy_rows();
  void take_changes();
  void copy_changes();
  void freeze();
  void write_records();
  void give(Chunk::Kind kind, uint32_t items, const void* body, size_t bytes);

  const std::shared_ptr<ServedObject> object_;
  const uint32_t index_, server_, term_;
  Shard& shard_;
  Phase phase_ = kBegin;
  bool frozen_ = false;
  bool over_ = false;

  Buffer buffer_;                  // rows
  Table::CopyCursor cursor_;       // where the first copy has got to
  std::vector<uint64_t> changed_;  // hashes of rows to copy again
  size_t next_changed_ = 0;
  size_t rounds_ = 0;
  std::vector<uint64_t> gone_;  // keys whose rows were erased
  std::vector<Tensor::Piece> arrays_;
  size_t next_array_ = 0, array_at_ = 0;  // and how much of it was sent
  std::vector<std::string> records_;      // bodies
  std::vector<uint32_t> counts_;          // of each
  size_t next_records_ = 0;
  uint64_t all_records_ = 0;
  std::vector<std::string> pushes_;  // bodies: what waits for its update
  size_t next_push_ = 0;
  std::string body_;

  Chunk chunk_;
  std::byte head_[limits::kSectionBytes];
  Pieces* pieces_ = nullptr;  // what next() fills
};

}  // namespace windlass
