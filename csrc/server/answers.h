// Answers: the parts of an answer, gathered into frames.
//
// A part's numbers are written where they will be sent from. Small parts share a frame, small frames a system call;
// they leave when they are large enough together, or at the end.
//
// Thread safety: none; one thread's.
#pragma once

#include <cstring>
#include <vector>

#include "base/buffer.h"
#include "base/crc32c.h"
#include "server/channel.h"
#include "server/object/batch.h"
#include "wire/frame.h"

namespace windlass {

class Connection;

// Sends a frame without waiting for the client.
void post_to(Connection& connection, const std::byte* frame, size_t bytes, uint8_t priority);

class Answers {
 public:
  // posts: where it is another client's thread that answers, which must not wait for this one.
  Answers(Channel& to, const wire::Header& request, Buffer* buffer, Connection* posts = nullptr)
      : to_(to), posts_(posts), header_(header_for(request)), buffer_(buffer) {}

  static wire::Header header_for(const wire::Header& request) {
    wire::Header header;
    header.op = request.op | wire::kAnswer;
    header.flags = request.flags;
    header.request = request.request;
    header.session = request.session;
    header.app = request.app;
    header.object = request.object;
    header.dtype_out = request.dtype_out;
    header.lane = request.lane;
    header.priority = request.priority;
    return header;
  }

  // Frames are kept here instead, for somebody else to send.
  void keep_in(std::vector<std::byte>* kept) { kept_ = kept; }

  // What comes from now on answers this request.
  void begin(const wire::Header& request) {
    end_frame();
    header_ = header_for(request);
  }

  // Where a part with so many bytes of numbers writes them; nullptr when there is no memory. A part that turns out to
  // have items as well moves them.
  std::byte* open(uint64_t numbers_bytes) {
    const size_t need = used_ + 2 * kSection + wire::padded(numbers_bytes);
    if (need > buffer_->bytes()) {
      flush();
      if (buffer_->room(std::max(2 * limits::kAnswerBytes, 3 * kSection + wire::padded(numbers_bytes))) == nullptr)
        return nullptr;
    }
    return buffer_->data() + used_ + kSection;
  }
  // The part whose numbers were written where the last open() said.
  void add(uint32_t label, const Outcome& outcome) {
    wire::Part part;
    part.shard = label;
    part.term = outcome.term;
    part.sequence = outcome.sequence;
    part.clock = outcome.clock;
    part.value = outcome.value;
    part.flags = outcome.flags;
    part.items = static_cast<uint32_t>(outcome.body.size() / sizeof(uint64_t));  // of a scan: its keys
    part.status = static_cast<uint8_t>(outcome.status.code());
    const std::string waited = outcome.waited_ns != 0 && outcome.body.empty() ? waited_of(outcome) : "";
    add(part,
        !outcome.status.ok()   ? outcome.status.message()
        : outcome.body.empty() ? waited
                               : outcome.body,
        outcome.numbers_bytes);
  }
  void add(wire::Part part, const std::string& text, uint64_t numbers_bytes) {
    const size_t items = wire::padded(text.size()), numbers = wire::padded(numbers_bytes);
    if (buffer_->bytes() < used_ + kSection + items + numbers) {
      std::byte* const kept = new std::byte[numbers_bytes + 1];
      if (numbers_bytes != 0) std::memcpy(kept, buffer_->data() + used_ + kSection, numbers_bytes);
      flush();
      if (std::byte* fresh = buffer_->room(2 * kSection + items + numbers); fresh != nullptr)
        std::memcpy(fresh + used_ + kSection, kept, numbers_bytes);
      delete[] kept;
      if (buffer_->data() == nullptr) return;
    }
    std::byte* const at = buffer_->data() + used_;
    if (items != 0) {
      std::memmove(at + kSection + items, at + kSection, numbers_bytes);
      std::memset(at + items, 0, kSection);  // the last of the items' sections, before they fill it
      std::memcpy(at + kSection, text.data(), text.size());
    }
    std::byte* const first = at + kSection + items;
    std::memset(first + numbers_bytes, 0, numbers - numbers_bytes);
    part.items_bytes = static_cast<uint32_t>(text.size());
    part.numbers_bytes = numbers_bytes;
    if (part.items_bytes != 0) part.items_crc = crc32c(text.data(), text.size());
    if (part.numbers_bytes != 0 && (header_.flags & wire::kChecksummed) != 0)
      part.numbers_crc = crc32c(first, numbers_bytes);
    wire::encode(part, at);
    used_ += kSection + items + numbers;
    ++header_.parts;
    if (used_ >= limits::kAnswerBytes) flush();
  }
  void flush() {
    end_frame();
    if (begin_ == 0) return;
    if (kept_ != nullptr) {
      kept_->insert(kept_->end(), buffer_->data(), buffer_->data() + begin_);
    } else if (posts_ != nullptr) {
      post_to(*posts_, buffer_->data(), begin_, header_.priority);
    } else {
      (void)to_.send(buffer_->data(), begin_);
    }
    begin_ = 0;
    used_ = kSection;
  }
  size_t bytes() const { return used_; }  // that have not left yet

 private:
  static constexpr size_t kSection = limits::kSectionBytes;
  // How long it waited at the gate, and for whom.
  static std::string waited_of(const Outcome& outcome) {
    wire::Writer writer;
    writer.put(static_cast<uint64_t>(outcome.waited_ns));
    writer.put(outcome.waited_for);
    writer.put(uint32_t{0});
    return writer.take();
  }
  void end_frame() {
    if (header_.parts == 0) return;
    header_.length = used_ - begin_ - kSection;
    wire::encode(header_, buffer_->data() + begin_);
    header_.parts = 0;
    begin_ = used_;
    used_ += kSection;
  }

  Channel& to_;
  Connection* const posts_;
  std::vector<std::byte>* kept_ = nullptr;
  wire::Header header_;
  Buffer* const buffer_;
  size_t begin_ = 0;        // of the frame
  size_t used_ = kSection;  // its header comes first
};

}  // namespace windlass
