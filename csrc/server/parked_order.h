// ParkedOrder: an order that came before its time, with its own copy of everything. It waits in its shard's Parked for
// the pushes before it, and is answered on the connection it came on.
#pragma once

#include <memory>

#include "base/buffer.h"
#include "server/answers.h"
#include "server/connection.h"
#include "server/hosted.h"
#include "session/parked.h"

namespace windlass {

class ParkedOrder final : public Waiting {
 public:
  static std::unique_ptr<Waiting> make(const std::shared_ptr<Connection>& from, const std::shared_ptr<Hosted>& object,
                                       const Order& order, const Status& checked, uint64_t out_bytes) {
    const uint64_t bytes = order.part.bytes() + sizeof(ParkedOrder);
    if (!from->host().charge_parked(bytes)) return nullptr;
    std::unique_ptr<ParkedOrder> made(new ParkedOrder(from, object, order, checked, out_bytes, bytes));
    if (!made->copy_bytes()) return nullptr;
    return made;
  }
  ~ParkedOrder() override {
    from_->host().refund_parked(charged_);
    from_->parked_no_more(order_.header.request);
  }

  // With the turn of its shard: whether what it waited for has come.
  bool ready(Shard& shard) const { return shard.records.of(order_.session, order_.header.session).sequence >= after(); }
  // Likewise.
  void run(Shard& shard) {
    if (!order_.pushes() && os::now_ns() > deadline_ns_)
      checked_ = Status(Code::kTimeout, "came too late for its caller");
    if (checked_.ok() && out_.room(out_bytes_ + 1) == nullptr)
      checked_ =
          Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes_) + " bytes");
    reply_.part.shard = order_.label;
    reply_.part.term = order_.part.term;
    (void)object_->run(order_, shard, checked_, order_.lying != nullptr ? lying_.out : out_.data(), &reply_);
  }
  // Without it.
  void answer() {
    Buffer buffer;
    wire::Header frame = order_.header;
    frame.op = static_cast<uint8_t>(order_.frame_op);
    Answers answers(from_->channel(), frame, &buffer);
    std::byte* const to = answers.open(reply_.numbers_bytes);
    if (to == nullptr) return;  // it will be asked again
    if (reply_.numbers_bytes != 0) std::memcpy(to, out_.data(), reply_.numbers_bytes);
    answers.add(reply_);
    answers.flush();
  }
  bool is_from(const Connection* connection) const { return from_.get() == connection; }

 private:
  ParkedOrder(std::shared_ptr<Connection> from, std::shared_ptr<Hosted> object, const Order& order, Status checked,
              uint64_t out_bytes, uint64_t charged)
      : Waiting(order.session, order.pushes() ? order.part.sequence - 1 : order.part.sequence),
        from_(std::move(from)),
        object_(std::move(object)),
        order_(order),
        checked_(std::move(checked)),
        out_bytes_(out_bytes),
        charged_(charged),
        lying_(order.lying != nullptr ? *order.lying : Lying()),
        deadline_ns_(order.header.deadline_ms == 0 ? limits::kNoDeadline
                                                   : os::now_ns() + int64_t{order.header.deadline_ms} * 1'000'000) {
    from_->parked_at(order.header.request, object_, order.part.shard);
  }

  bool copy_bytes() {
    const size_t bytes = order_.part.bytes();
    std::byte* const to = bytes_.room(bytes + 1);
    if (to == nullptr) return false;
    if (bytes != 0) std::memcpy(to, order_.items, bytes);
    order_.items = to;
    order_.numbers = to + wire::padded(order_.part.items_bytes);
    if (order_.lying == nullptr) return true;
    order_.lying = &lying_;
    order_.numbers = lying_.in;
    return true;
  }

  const std::shared_ptr<Connection> from_;
  const std::shared_ptr<Hosted> object_;
  Order order_;
  Status checked_;
  const uint64_t out_bytes_, charged_;
  const Lying lying_;
  const int64_t deadline_ns_;
  Buffer bytes_, out_;  // mappings of their own: gone when this is, and an answer's only as large as what is written
  Reply reply_;
};

}  // namespace windlass
