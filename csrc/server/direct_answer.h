// DirectAnswer: whole shards that are sent from where they lie, under their turns, several at once: a socket takes a
// few large pieces more quickly than many small ones.
//
// Thread safety: none; one thread's.
#pragma once

#include <vector>

#include "base/crc32c.h"
#include "server/answers.h"
#include "server/channel.h"
#include "server/object/served_object.h"

namespace windlass {

class DirectAnswer {
 public:
  // heads: for the headers; rest: for what the socket does not take at once.
  DirectAnswer(Channel& to, const wire::Header& request, Buffer* heads, Buffer* rest)
      : to_(to), heads_(heads), rest_(rest), header_(Answers::header_for(request)) {}
  ~DirectAnswer() { flush(); }

  // False when the part cannot be answered like this.
  bool add(const Batch& batch, const Entry& entry, ServedObject& object, Shard& shard) {
    if (!shard.turn.try_take()) return false;
    Outcome outcome;
    const std::byte* const weights = object.peek(batch, entry, shard, &outcome);
    std::byte* const heads = weights != nullptr ? heads_->room((kPartsMax + 1) * kSection) : nullptr;
    if (heads == nullptr) {
      shard.turn.release();
      return false;
    }
    wire::Part part;
    part.shard = entry.shard;
    part.term = entry.term;
    part.sequence = outcome.sequence;
    part.clock = outcome.clock;
    part.value = outcome.value;
    part.numbers_bytes = outcome.numbers_bytes;
    if ((header_.flags & wire::kChecksummed) != 0) part.numbers_crc = crc32c(weights, outcome.numbers_bytes);
    std::byte* const head = heads + (header_.parts + 1) * kSection;
    wire::encode(part, head);
    if (pieces_.empty()) pieces_.push_back({heads, kSection});
    pieces_.push_back({head, kSection});
    pieces_.push_back({const_cast<std::byte*>(weights), outcome.numbers_bytes});
    if (const size_t pad = wire::padded(outcome.numbers_bytes) - outcome.numbers_bytes; pad != 0)
      pieces_.push_back({const_cast<std::byte*>(kZeros), pad});
    header_.length += kSection + wire::padded(outcome.numbers_bytes);
    ++header_.parts;
    turns_.push_back(&shard.turn);
    if (header_.parts == kPartsMax || header_.length >= most_) flush();
    return true;
  }
  void flush() {
    if (pieces_.empty()) return;
    wire::encode(header_, heads_->data());
    to_.send_lent(&pieces_, rest_, [this] {
      for (Turn* turn : turns_) turn->release();
    });
    most_ = limits::kSendBytes;
    pieces_.clear();
    turns_.clear();
    header_.length = 0;
    header_.parts = 0;
  }

 private:
  static constexpr size_t kSection = limits::kSectionBytes;
  static constexpr size_t kPartsMax = 32;
  static constexpr std::byte kZeros[kSection] = {};
  Channel& to_;
  Buffer* const heads_;
  Buffer* const rest_;
  wire::Header header_;
  // What comes first is small where checksums take their time, so that the client has something to begin with.
  size_t most_ = (header_.flags & wire::kChecksummed) != 0 ? limits::kBulkBytesMin : limits::kSendBytes;
  std::vector<os::Piece> pieces_;
  std::vector<Turn*> turns_;
};

}  // namespace windlass
