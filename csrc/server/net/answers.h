// Answers: the blocks of an answer, gathered into frames.
//
// A block's numbers are written in place, where they will be sent from. Small blocks share a frame and small frames a
// system call; they leave once they are large enough together, or at the end.
//
// Thread safety: none; one thread's.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/crc32c.h"
#include "server/net/channel.h"
#include "server/object/batch.h"
#include "wire/frame.h"

namespace windlass {

class Answers {
 public:
  // The block that is answered.
  struct Of {
    uint32_t label;
    uint8_t op;
  };
  // held: this thread has the right to send, and must not wait for the client.
  Answers(Channel& to, const wire::Header& request, Buffer* buffer, bool held = false)
      : to_(to), held_(held), header_(header_for(request)), buffer_(buffer) {}

  static wire::Header header_for(const wire::Header& request) {
    wire::Header header;
    header.op = request.op | wire::kAnswer;
    header.flags = request.flags & (wire::kChecksummed | wire::kInArenas);
    header.request = request.request;
    header.session = request.session;
    header.app = request.app;
    header.lane = request.lane;
    header.priority = request.priority;
    return header;
  }

  // Appends frames to *kept instead of sending them.
  void keep_in(std::vector<std::byte>* kept) { kept_ = kept; }

  // Blocks from now on answer this request.
  void begin(const wire::Header& request) {
    end_frame();
    header_ = header_for(request);
  }

  // The memory that an answer of one block takes.
  static uint64_t memory_for(uint64_t numbers_bytes) {
    return Buffer::size_for(std::max(2 * limits::kAnswerBytes, 3 * wire::kSection + wire::padded(numbers_bytes)));
  }
  // Where a block writes its `numbers_bytes` of numbers; nullptr if there is no memory. add() moves them if the block
  // turns out to have a body, too.
  std::byte* open(uint64_t numbers_bytes) {
    const size_t need = used_ + 2 * wire::kSection + wire::padded(numbers_bytes);
    if (need > buffer_->bytes()) {
      flush();
      if (buffer_->room(std::max(2 * limits::kAnswerBytes, 3 * wire::kSection + wire::padded(numbers_bytes))) ==
          nullptr)
        return nullptr;
    }
    return buffer_->data() + used_ + wire::kSection;
  }
  // Adds the block whose numbers were written where the last open() said, those of entry i from at[i] on. values: if
  // there are several entries, whether each one's value is sent.
  void add(const Of& of, const Outcome* outcomes, uint32_t n, const uint64_t* at, bool values) {
    wire::Block block = head_of(of);
    block.entries = static_cast<uint16_t>(n);
    block.sequence = outcomes[0].sequence;
    block.set_value(outcomes[0].value);
    block.clock = ~uint64_t{0};
    int64_t waited_ns = 0;
    uint32_t waited_for = Gate::kOutsider;
    std::byte* const numbers = buffer_->data() + used_ + wire::kSection;
    uint64_t gathered = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const Outcome& o = outcomes[i];
      if (o.status.ok()) block.clock = std::min(block.clock, o.clock);
      if (o.waited_ns > waited_ns) {
        waited_ns = o.waited_ns;
        waited_for = o.waited_for;
      }
      if (o.numbers_bytes != 0 && at[i] != gathered) std::memmove(numbers + gathered, numbers + at[i], o.numbers_bytes);
      gathered += o.numbers_bytes;
      if (!o.status.ok() || o.flags != 0) ++block.items;
    }
    if (block.clock == ~uint64_t{0}) block.clock = 0;
    body_.clear();
    if (waited_ns != 0) {
      block.flags |= wire::kWaited;
      put(wire::Waited{static_cast<uint64_t>(waited_ns), waited_for, 0});
    }
    if (n > 1 && values) {
      block.flags |= wire::kHasValues;
      for (uint32_t i = 0; i < n; ++i) put(outcomes[i].value);
    }
    for (uint32_t i = 0; block.items != 0 && i < n; ++i) {
      const Outcome& o = outcomes[i];
      if (!o.status.ok() || o.flags != 0) put_exception(i, o);
    }
    if (n == 1) body_ += outcomes[0].body;
    add(block, gathered);
  }
  // Adds a block whose entries are all refused for one reason, or which is about no shard.
  void add_all(const Of& of, uint16_t entries, const Status& status) {
    if (open(0) == nullptr) return;
    wire::Block block = head_of(of);
    block.entries = entries;
    body_.clear();
    if (!status.ok()) {
      Outcome outcome;
      outcome.status = status;
      put_exception(wire::Exception::kAll, outcome);
      block.items = 1;
    }
    add(block, 0);
  }
  void flush() {
    end_frame();
    if (begin_ == 0) return;
    if (kept_ != nullptr) {
      kept_->insert(kept_->end(), buffer_->data(), buffer_->data() + begin_);
    } else if (held_) {
      (void)to_.send_held(buffer_->data(), begin_);
    } else {
      (void)to_.send(buffer_->data(), begin_);
    }
    begin_ = 0;
    used_ = wire::kSection;
  }
  // Sends what there is and frees the memory for it: this thread is about to wait for others, who may need some.
  void flush_and_shrink() {
    flush();
    buffer_->shrink(2 * limits::kAnswerBytes);
  }
  size_t bytes() const { return used_; }  // not sent yet

 private:
  static wire::Block head_of(const Of& of) {
    wire::Block block;
    block.label = of.label;
    block.op = of.op;
    return block;
  }
  template <class T>
  void put(const T& value) {
    body_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put_exception(uint32_t entry, const Outcome& o) {
    wire::Exception e;
    e.entry = entry;
    e.status = static_cast<uint8_t>(o.status.code());
    e.flags = o.flags;
    e.term = o.term;
    e.value = o.value;
    e.message_bytes = static_cast<uint32_t>(o.status.message().size());
    put(e);
    body_ += o.status.message();
    body_.resize((body_.size() + 7) & ~size_t{7});
  }
  // Adds the block that was opened: its numbers are in place, its body is body_.
  void add(wire::Block block, uint64_t numbers_bytes) {
    const size_t body = wire::padded(body_.size()), numbers = wire::padded(numbers_bytes);
    if (buffer_->bytes() < used_ + wire::kSection + body + numbers) {
      const std::vector<std::byte> kept(buffer_->data() + used_ + wire::kSection,
                                        buffer_->data() + used_ + wire::kSection + numbers_bytes);
      flush();
      if (std::byte* fresh = buffer_->room(2 * wire::kSection + body + numbers); fresh != nullptr && !kept.empty())
        std::memcpy(fresh + used_ + wire::kSection, kept.data(), kept.size());
      if (buffer_->data() == nullptr) return;
    }
    std::byte* const at = buffer_->data() + used_;
    if (body != 0) {
      if (numbers_bytes != 0) std::memmove(at + wire::kSection + body, at + wire::kSection, numbers_bytes);
      std::memset(at + body, 0, wire::kSection);  // its last section, which the copy may not fill
      std::memcpy(at + wire::kSection, body_.data(), body_.size());
    }
    std::byte* const first = at + wire::kSection + body;
    std::memset(first + numbers_bytes, 0, numbers - numbers_bytes);
    block.body_bytes = static_cast<uint32_t>(body_.size());
    block.numbers_bytes = static_cast<uint32_t>(numbers_bytes);
    if (block.body_bytes != 0) block.body_crc = crc32c(body_.data(), body_.size());
    if (block.numbers_bytes != 0 && (header_.flags & wire::kChecksummed) != 0)
      block.numbers_crc = crc32c(first, numbers_bytes);
    wire::encode(block, at);
    used_ += wire::kSection + body + numbers;
    ++header_.blocks;
    if (used_ >= limits::kAnswerBytes) flush();
  }
  void end_frame() {
    if (header_.blocks == 0) return;
    header_.length = used_ - begin_ - wire::kSection;
    wire::encode(header_, buffer_->data() + begin_);
    header_.blocks = 0;
    begin_ = used_;
    used_ += wire::kSection;
  }

  Channel& to_;
  const bool held_;
  std::vector<std::byte>* kept_ = nullptr;
  wire::Header header_;
  Buffer* const buffer_;
  std::string body_;              // of the block at hand
  size_t begin_ = 0;              // of the frame
  size_t used_ = wire::kSection;  // its header comes first
};

}  // namespace windlass
