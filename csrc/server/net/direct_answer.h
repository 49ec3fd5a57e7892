// DirectAnswer: sends whole shards from where they lie, with their turns held, several at once: a socket takes a few
// large pieces more quickly than many small ones.
//
// Thread safety: none; one thread's.
#pragma once

#include <vector>

#include "base/crc32c.h"
#include "server/net/answers.h"
#include "server/net/channel.h"
#include "server/object/served_object.h"

namespace windlass {

class DirectAnswer {
 public:
  // heads: memory for headers; rest: memory for what the socket does not take at once.
  DirectAnswer(Channel& to, const wire::Header& request, AnswerQuota& quota, Buffer* heads, Buffer* rest)
      : to_(to), quota_(quota), heads_(heads), rest_(rest), header_(Answers::header_for(request)) {}
  ~DirectAnswer() { flush(); }

  // False if the entry cannot be answered like this.
  bool add(const Batch& batch, const Entry& entry, uint32_t label, ServedObject& object, Shard& shard) {
    if (!shard.turn.try_take()) return false;
    Outcome outcome;
    const std::byte* const weights = object.peek(batch, entry, shard, &outcome);
    std::byte* const heads = weights != nullptr ? heads_->room((kBlocksMax + 1) * wire::kSection) : nullptr;
    // What the socket does not take is copied. Without room for that the block is served in the ordinary way.
    if (heads == nullptr || !has_room(outcome.numbers_bytes)) {
      shard.turn.release();
      return false;
    }
    wire::Block block;
    block.label = label;
    block.op = static_cast<uint8_t>(wire::Op::kPull);
    block.entries = 1;
    block.sequence = outcome.sequence;
    block.clock = outcome.clock;
    block.set_value(outcome.value);
    block.numbers_bytes = static_cast<uint32_t>(outcome.numbers_bytes);
    if ((header_.flags & wire::kChecksummed) != 0) block.numbers_crc = crc32c(weights, outcome.numbers_bytes);
    std::byte* const head = heads + (header_.blocks + 1) * wire::kSection;
    wire::encode(block, head);
    if (pieces_.empty()) pieces_.push_back({heads, wire::kSection});
    pieces_.push_back({head, wire::kSection});
    pieces_.push_back({const_cast<std::byte*>(weights), outcome.numbers_bytes});
    if (const size_t pad = wire::padded(outcome.numbers_bytes) - outcome.numbers_bytes; pad != 0)
      pieces_.push_back({const_cast<std::byte*>(kZeros), pad});
    header_.length += wire::kSection + wire::padded(outcome.numbers_bytes);
    ++header_.blocks;
    turns_.push_back(&shard.turn);
    if (header_.blocks == kBlocksMax || header_.length >= most_) flush();
    return true;
  }
  void flush() {
    if (pieces_.empty()) return;
    wire::encode(header_, heads_->data());
    to_.send_lent(&pieces_, rest_, [this] {
      for (Turn* turn : turns_) turn->release();
    });
    rooms_.clear();
    most_ = limits::kSendBytes;
    pieces_.clear();
    turns_.clear();
    header_.length = 0;
    header_.blocks = 0;
  }

 private:
  bool has_room(uint64_t bytes) {
    if (header_.length + bytes <= limits::kBulkBytesMin) return true;
    AnswerQuota::Room room;
    if (!quota_.take(bytes, &room)) return false;
    rooms_.push_back(std::move(room));
    return true;
  }

  static constexpr size_t kBlocksMax = 32;
  static constexpr std::byte kZeros[wire::kSection] = {};
  Channel& to_;
  AnswerQuota& quota_;
  Buffer* const heads_;
  Buffer* const rest_;
  wire::Header header_;
  // The first frame is small if checksums must be computed, so that the client can begin early.
  size_t most_ = (header_.flags & wire::kChecksummed) != 0 ? limits::kBulkBytesMin : limits::kSendBytes;
  std::vector<os::Piece> pieces_;
  std::vector<Turn*> turns_;
  std::vector<AnswerQuota::Room> rooms_;  // for what the socket may not take
};

}  // namespace windlass
