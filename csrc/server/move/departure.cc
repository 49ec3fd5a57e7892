#include "server/move/departure.h"

#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "server/object/ticket.h"

namespace windlass {

Status Departure::begin(std::shared_ptr<ServedObject> object, uint32_t index, uint32_t server, uint32_t term,
                        std::unique_ptr<Departure>* out) {
  out->reset();
  const std::string what = "move of '" + object->spec().own_name() + "', shard " + std::to_string(index);
  Shard* const shard = object->find(index);
  if (shard == nullptr) return Status(Code::kStaleMap, what + ": it has never been on this server");
  if (server == object->index()) return Status(Code::kInvalidArgument, what + ": it would go where it is");
  Status status;
  bool goes = false;
  Table::CopyCursor cursor;
  with_turn(shard->turn, [&] {
    Residence& home = shard->home;
    if (home.state == Residence::kElsewhere && home.server == server && home.term == term) return;
    if (home.state == Residence::kArrived && term > home.next_term) home.settle();  // the mover knows that it arrived
    if (home.deleted()) {
      status = object->gone();
    } else if (shard->capture != nullptr) {
      status = Status(Code::kInvalidArgument, what + ": a checkpoint is being taken of it");
    } else if (home.leaving) {
      status = Status(Code::kInvalidArgument, what + ": it is on its way already");
    } else if (home.state != Residence::kHere) {
      status = Status(Code::kStaleMap, what + ": it is on server number " + std::to_string(home.server) +
                                           " since term " + std::to_string(home.term));
    } else if (term <= home.term) {
      status = Status(Code::kInvalidArgument,
                      what + ": expected a term above " + std::to_string(home.term) + ", saw " + std::to_string(term));
    } else {
      goes = home.leaving = true;
      if (object->table() != nullptr) {
        object->table()->shard(index).changes = std::make_unique<Changes>();
        cursor = object->table()->begin_copy(index);
      }
    }
  });
  if (!goes) return status;
  object->set_used();
  out->reset(new Departure(std::move(object), index, server, term));
  (*out)->cursor_ = cursor;
  return {};
}

void Departure::give(Chunk::Kind kind, uint32_t items, const void* body, size_t bytes) {
  chunk_.kind = kind;
  chunk_.bytes = bytes;
  chunk_.object = object_->map().object;
  chunk_.shard = index_;
  chunk_.term = term_;
  chunk_.server = server_;
  chunk_.items = items;
  chunk_.body_crc = crc32c(body, bytes);
  encode(chunk_, head_);
  ++chunk_.number;
  *pieces_ = {head_, static_cast<const std::byte*>(body), bytes};
}

Status Departure::next(Pieces* pieces, bool* more) {
  *more = true;
  *pieces = {};
  pieces_ = pieces;
  while (pieces->head == nullptr) {
    switch (phase_) {
      case kBegin:
        body_ = encode_begin(object_->map(), object_->spec());
        if (body_.size() > limits::kShardChunkBytesMax)
          return Status(Code::kResourceExhausted, "move: the map has too many runs");
        give(Chunk::kBegin, 0, body_.data(), body_.size());
        phase_ = object_->table() != nullptr ? kCopy : kFreeze;
        break;
      case kCopy: copy_rows(); break;
      case kChanges: copy_changes(); break;
      case kFreeze: freeze(); break;
      case kRest:
        if (object_->table() != nullptr) {
          copy_changes();
        } else if (next_array_ < arrays_.size()) {
          const Tensor::Piece& array = arrays_[next_array_];  // of a shard that a rule wants whole it may be large
          const size_t bytes = std::min(array.bytes - array_at_, limits::kShardChunkBytesMax);
          give(Chunk::kArray, static_cast<uint32_t>(next_array_), array.data + array_at_, bytes);
          array_at_ += bytes;
          if (array_at_ == array.bytes) {
            array_at_ = 0;
            ++next_array_;
          }
        } else {
          phase_ = kRecords;
        }
        break;
      case kErased:
        give(Chunk::kErased, static_cast<uint32_t>(gone_.size()), gone_.data(), gone_.size() * sizeof(uint64_t));
        phase_ = frozen_ ? kRest : kChanges;
        break;
      case kRecords:
        if (next_records_ == 0) {
          write_records();
          if (all_records_ > limits::kShardRecordsMax)
            return Status(Code::kResourceExhausted, "move: " + std::to_string(all_records_) + " sessions, at most " +
                                                        std::to_string(limits::kShardRecordsMax));
        }
        if (next_records_ < records_.size()) {
          const std::string& body = records_[next_records_];
          give(Chunk::kRecords, counts_[next_records_++], body.data(), body.size());
        } else {
          phase_ = shard_.gate != nullptr ? kCrowd : kEnd;
        }
        break;
      case kCrowd: {
        uint32_t items = 0;
        body_ = encode(object_->workers()->heard(), &items);
        give(Chunk::kCrowd, items, body_.data(), body_.size());
        phase_ = kGate;
        break;
      }
      case kGate:
        with_turn(shard_.turn, [&] {
          body_ = encode(*shard_.gate, os::now_ns());
          if (shard_.staged != nullptr)
            pushes_ = static_cast<BspUpdates&>(*shard_.staged)
                          .copy(*shard_.gate, object_->target(index_), limits::kShardChunkBytesMax / 2);
        });
        give(Chunk::kGate, 0, body_.data(), body_.size());
        phase_ = kPushes;
        break;
      case kPushes:
        if (next_push_ < pushes_.size()) {
          const std::string& body = pushes_[next_push_++];
          give(Chunk::kPush, 0, body.data(), body.size());
        } else {
          phase_ = kEnd;
        }
        break;
      case kEnd: {
        ShardEnd end;
        with_turn(shard_.turn, [&] {
          end.version = shard_.version;
          end.count = shard_.count;
        });
        if (object_->table() != nullptr) end.rows = object_->table()->rows(index_);
        end.records = all_records_;
        body_.assign(reinterpret_cast<const char*>(&end), sizeof end);
        give(Chunk::kEnd, 0, body_.data(), body_.size());
        phase_ = kOver;
        break;
      }
      case kOver: *more = false; return {};
    }
    if (buffer_.bytes() == 0 && (phase_ == kCopy || phase_ == kChanges || phase_ == kRest) &&
        object_->table() != nullptr &&
        buffer_.room(std::max(limits::kShardChunkBytes, object_->table()->copy_bytes())) == nullptr)
      return Status(Code::kResourceExhausted, "move: no memory for a copy of rows");
  }
  return {};
}

// Copies some more of all rows, at the shard's turn.
void Departure::copy_rows() {
  const Table& table = *object_->table();
  size_t n = 0;
  bool more = false;
  const size_t most = std::max<size_t>(1, limits::kShardChunkBytes / table.copy_bytes());
  with_turn(shard_.turn, [&] { more = table.copy(index_, &cursor_, most, buffer_.data(), &n); });
  if (n != 0) give(Chunk::kRows, static_cast<uint32_t>(n), buffer_.data(), n * table.copy_bytes());
  if (!more) phase_ = kChanges;
}

void Departure::take_changes() {
  next_changed_ = 0;
  with_turn(shard_.turn, [&] { changed_ = rows().changes->take(); });
}

// Copies some more of the rows that changed after they were copied. Once few are left, or too many keep coming, the
// shard is frozen.
void Departure::copy_changes() {
  const Table& table = *object_->table();
  if (next_changed_ == changed_.size()) {
    changed_.clear();
    next_changed_ = 0;
    if (frozen_) {
      phase_ = kRecords;
      return;
    }
    size_t left = 0;
    with_turn(shard_.turn, [&] { left = rows().changes->size(); });
    if (left <= limits::kShardLeftRows || rounds_++ == limits::kShardRoundsMax) {
      phase_ = kFreeze;
      return;
    }
    take_changes();
    return;
  }
  const size_t most = std::max<size_t>(1, limits::kShardChunkBytes / table.copy_bytes());
  const size_t n = std::min(most, changed_.size() - next_changed_);
  size_t copied = 0;
  gone_.clear();
  with_turn(shard_.turn,
            [&] { table.copy(index_, changed_.data() + next_changed_, n, buffer_.data(), &copied, &gone_); });
  next_changed_ += n;
  if (copied != 0) give(Chunk::kRows, static_cast<uint32_t>(copied), buffer_.data(), copied * table.copy_bytes());
  if (!gone_.empty()) phase_ = kErased;
}

void Departure::freeze() {
  with_turn(shard_.turn, [&] { shard_.home.become(Residence::kFrozen); });
  frozen_ = true;
  phase_ = kRest;
  if (object_->table() != nullptr) {
    take_changes();
  } else {
    arrays_ = object_->tensor_of(index_).pieces_of(index_);
  }
}

void Departure::write_records() {
  with_turn(shard_.turn, [&] {
    wire::Writer writer;
    uint32_t n = 0;
    size_t bytes = 0;
    const auto close = [&] {
      if (n == 0) return;
      records_.push_back(writer.take());
      counts_.push_back(n);
      n = 0;
      bytes = 0;
    };
    if (broken(Break::kMove)) return;
    shard_.records.each([&](const Record& record) {
      encode(record, &writer);
      ++n;
      ++all_records_;
      bytes += 64 + (record.kept != nullptr ? record.kept->size() * limits::kMessageBytesMax : 0);
      if (bytes >= limits::kShardChunkBytesMax / 4) close();
    });
    close();
  });
}

Status Departure::commit() {
  if (over_ || phase_ != kOver) return Status(Code::kInternal, "move: commit before the end");
  over_ = true;
  Freed parked;
  with_turn(shard_.turn, [&] {
    shard_.home.become(Residence::kElsewhere);
    shard_.home.server = server_;
    shard_.home.term = term_;
    shard_.records.clear();
    shard_.staged.reset();
    if (object_->table() != nullptr) rows().changes.reset();
    while (std::unique_ptr<Waiting> waiting = shard_.parked.take_if([](const Waiting&) { return true; })) {
      (void)waiting->run(shard_);
      parked.push_back(std::move(waiting));
    }
  });
  object_->give_memory(index_);
  with_turn(shard_.turn, [&] { shard_.home.leaving = false; });
  deliver(&parked);
  return {};
}

void Departure::abort() {
  if (std::exchange(over_, true)) return;
  Freed parked;
  with_turn(shard_.turn, [&] {
    shard_.home.leaving = false;
    shard_.home.become(Residence::kHere);
    if (object_->table() != nullptr) rows().changes.reset();
    object_->set_view(shard_, index_, object_->workers()->view(object_->map().object));  // it missed views
    shard_.parked.free(shard_, &parked);
  });
  deliver(&parked);
}

}  // namespace windlass
