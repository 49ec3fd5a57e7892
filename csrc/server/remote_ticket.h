// RemoteTicket: a ticket of an entry that came in a frame. It has its own copy of everything, and is answered on the
// connection it came on.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "server/answers.h"
#include "server/connection.h"
#include "server/object/ticket.h"

namespace windlass {

// Before the ticket, which refers to it.
struct KeptBatch {
  const std::shared_ptr<ServedObject> kept_object;
  const Batch kept_batch;
};

class RemoteTicket final : private KeptBatch, public Ticket {
 public:
  // `frame`: of the request; `label`: how its answer names this entry. Nullptr when there is no room for it.
  static std::unique_ptr<Waiting> make(const std::shared_ptr<Connection>& from, const wire::Header& frame,
                                       uint32_t label, const std::shared_ptr<ServedObject>& object, const Batch& batch,
                                       const Entry& entry, const Status& checked, uint64_t out_bytes, Verdict why,
                                       const Shard& shard) {
    // What is gated was let in, and a client has a limited number of such requests; its push is needed no more.
    const bool early = why == Verdict::kEarly;
    const uint64_t bytes =
        sizeof(RemoteTicket) + entry.body_bytes + entry.items * item_bytes(entry) + (early ? entry.numbers_bytes : 0);
    if (early && !from->host().charge_parked(bytes)) return nullptr;
    std::unique_ptr<RemoteTicket> made(
        new RemoteTicket(from, frame, label, object, batch, entry, checked, out_bytes, why, early ? bytes : 0, shard));
    if (!made->copy(early)) return nullptr;
    return made;
  }
  ~RemoteTicket() override {
    if (charged_ != 0) from_->host().refund_parked(charged_);
    from_->parked_no_more(this);
  }

  Sink& sink() override { return *from_; }
  std::pair<int, uint64_t> order() const override { return {-int{frame_.priority}, frame_.request}; }

  // Without the turn.
  void add_to(Answers* answers) {
    outcome().finish(kept_object->user_code());
    std::byte* const to = answers->open(outcome().numbers_bytes);
    if (to == nullptr) return;  // it will be asked again
    if (outcome().numbers_bytes != 0) std::memcpy(to, out_.data(), outcome().numbers_bytes);
    answers->add(label_, outcome());
  }
  const wire::Header& frame() const { return frame_; }
  uint64_t request() const { return frame_.request; }
  const std::shared_ptr<ServedObject>& shared_object() const { return kept_object; }

 private:
  RemoteTicket(std::shared_ptr<Connection> from, const wire::Header& frame, uint32_t label,
               const std::shared_ptr<ServedObject>& object, const Batch& batch, const Entry& entry,
               const Status& checked, uint64_t out_bytes, Verdict why, uint64_t charged, const Shard& shard)
      : KeptBatch{object, batch},
        Ticket(*object, kept_batch, entry, checked, why, shard),
        from_(std::move(from)),
        frame_(frame),
        label_(label),
        out_bytes_(out_bytes),
        charged_(charged),
        deadline_ns_(batch.deadline_ms == 0 ? limits::kNoDeadline
                                            : os::now_ns() + int64_t{batch.deadline_ms} * 1'000'000) {
    from_->parked_at(this, entry.shard);
  }

  static size_t item_bytes(const Entry& e) {
    return e.spans != nullptr ? sizeof(Span) : e.keyed != nullptr ? sizeof(Keyed) : 0;
  }
  bool copy(bool numbers) {
    Entry& e = own_entry();
    const size_t items = e.items * item_bytes(e), body = (e.body_bytes + 7) & ~size_t{7};
    const size_t brought = numbers ? e.numbers_bytes : 0;
    std::byte* at = bytes_.room(items + body + brought + 1);
    if (at == nullptr) return false;
    const auto keep = [&](const void* from, size_t n, size_t room) {
      std::byte* const to = at;
      if (n != 0) std::memcpy(to, from, n);
      at += room;
      return to;
    };
    if (e.spans != nullptr) e.spans = reinterpret_cast<const Span*>(keep(e.spans, items, items));
    if (e.keyed != nullptr) e.keyed = reinterpret_cast<const Keyed*>(keep(e.keyed, items, items));
    e.body = keep(e.body, e.body_bytes, body);
    if (e.vector != nullptr) {
      vector_ = *e.vector;
      e.vector = &vector_;
    }
    if (!kept_batch.in_place) e.in = brought != 0 ? keep(e.in, brought, brought) : nullptr;
    return true;
  }
  Status prepare(Entry* e) override {
    if (!batch().op->numbered && os::now_ns() > deadline_ns_)
      return Status(Code::kTimeout, "came too late for its caller");
    if (batch().in_place || out_bytes_ == 0) return {};
    e->out = out_.data() != nullptr ? out_.data() : out_.room(out_bytes_);
    if (e->out != nullptr) return {};
    return Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes_) + " bytes");
  }

  const std::shared_ptr<Connection> from_;
  const wire::Header frame_;
  const uint32_t label_;
  const uint64_t out_bytes_, charged_;
  const int64_t deadline_ns_;
  VectorStep vector_;
  OnceBuffer bytes_, out_;
};

}  // namespace windlass
