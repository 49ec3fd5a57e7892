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
  // ran: why it waits, kEarly or kGated. One that is gated has been taken already: what it brought need not be kept.
  static std::unique_ptr<Waiting> make(const std::shared_ptr<Connection>& from, const std::shared_ptr<Hosted>& object,
                                       const Order& order, const Status& checked, uint64_t out_bytes, Ran ran,
                                       const Shard& shard) {
    const uint64_t bytes = (keeps_bytes(order, ran) ? order.part.bytes() : 0) + sizeof(ParkedOrder);
    // Who is gated was let in: a client has a limited number of such requests.
    if (ran == Ran::kEarly && !from->host().charge_parked(bytes)) return nullptr;
    std::unique_ptr<ParkedOrder> made(new ParkedOrder(from, object, order, checked, out_bytes, bytes, ran));
    if (!made->copy_bytes()) return nullptr;
    if (ran == Ran::kGated) made->stop_at_gate(shard);
    return made;
  }
  ~ParkedOrder() override {
    if (charged_ != 0) from_->host().refund_parked(charged_);
    from_->parked_no_more(this);
  }

  bool ready(Shard& shard) override {
    if (gated()) return shard.gate == nullptr || shard.gate->opens(order_.rank, asked_, os::now_ns());
    return shard.records.of(order_.session, order_.header.session).sequence >= after_;
  }
  bool run(Shard& shard) override {
    if (!order_.pushes() && os::now_ns() > deadline_ns_)
      checked_ = Status(Code::kTimeout, "came too late for its caller");
    if (checked_.ok() && out_bytes_ != 0 && out_.data() == nullptr && out_.room(out_bytes_) == nullptr)
      checked_ =
          Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes_) + " bytes");
    reply_.part.shard = order_.label;
    reply_.part.term = order_.part.term;
    std::byte* const out = order_.lying != nullptr ? lying_.out : out_.data();
    const Ran ran = object_->run(order_, shard, checked_, out, &reply_, stage_);
    if (ran == Ran::kGated && !gated()) stop_at_gate(shard);
    if (ran == Ran::kDone && gated()) say_how_long();
    return ran == Ran::kDone;
  }
  Wants wants(uint64_t clock) override {
    return stage_ == Hosted::kTaken && clock == asked_ && checked_.ok() ? object_->wants(order_) : Wants();
  }
  void served() override { stage_ = Hosted::kServed; }
  wire::Header frame() const {
    wire::Header frame = order_.header;
    frame.op = static_cast<uint8_t>(order_.frame_op);
    return frame;
  }
  // Without the turn.
  void add_to(Answers* answers) {
    reply_.finish(object_->user_code());
    std::byte* const to = answers->open(reply_.numbers_bytes);
    if (to == nullptr) return;  // it will be asked again
    if (reply_.numbers_bytes != 0) std::memcpy(to, out_.data(), reply_.numbers_bytes);
    answers->add(reply_);
  }
  Connection& from() const { return *from_; }
  uint64_t request() const { return order_.header.request; }
  const std::shared_ptr<Hosted>& object() const { return object_; }
  const Order& order() const { return order_; }
  bool gated() const { return stage_ >= Hosted::kTaken; }
  uint64_t asked() const { return asked_; }
  int64_t since_ns() const { return since_ns_; }
  bool is_from(const Connection* connection) const { return from_.get() == connection; }

 private:
  ParkedOrder(std::shared_ptr<Connection> from, std::shared_ptr<Hosted> object, const Order& order, Status checked,
              uint64_t out_bytes, uint64_t bytes, Ran ran)
      : from_(std::move(from)),
        object_(std::move(object)),
        order_(order),
        checked_(std::move(checked)),
        after_(order.pushes() ? order.part.sequence - 1 : order.part.sequence),
        out_bytes_(out_bytes),
        charged_(ran == Ran::kEarly ? bytes : 0),
        stage_(ran == Ran::kEarly ? Hosted::kParked : Hosted::kTaken),
        lying_(order.lying != nullptr ? *order.lying : Lying()),
        deadline_ns_(order.header.deadline_ms == 0 ? limits::kNoDeadline
                                                   : os::now_ns() + int64_t{order.header.deadline_ms} * 1'000'000) {
    from_->parked_at(this, order.part.shard);
  }

  // A push that was taken is needed no more; a pull of rows still needs its keys.
  static bool keeps_bytes(const Order& order, Ran ran) { return ran == Ran::kEarly || order.op() != wire::Op::kPush; }
  void stop_at_gate(const Shard& shard) {
    stage_ = Hosted::kTaken;
    const bool looks = order_.op() == wire::Op::kPull || order_.op() == wire::Op::kQuery;
    asked_ = looks ? order_.part.clock : order_.part.clock + 1;
    since_ns_ = os::now_ns();
    blocker_ = shard.gate->blocker(order_.rank, asked_, since_ns_).rank;
  }
  // How long it waited and for whom, for its worker and for everybody.
  void say_how_long() {
    const int64_t ns = os::now_ns() - since_ns_;
    object_->crowd()->count_wait(blocker_, ns);
    if (reply_.part.status != 0 || order_.op() == wire::Op::kQuery) return;  // whose items are its result
    wire::Writer writer;
    writer.put(static_cast<uint64_t>(ns));
    writer.put(blocker_);
    writer.put(uint32_t{0});
    reply_.items = writer.take();
  }

  bool copy_bytes() {
    const size_t bytes = keeps_bytes(order_, gated() ? Ran::kGated : Ran::kEarly) ? order_.part.bytes() : 0;
    std::byte* const to = bytes != 0 ? bytes_.room(bytes) : nullptr;
    if (bytes != 0 && to == nullptr) return false;
    if (bytes != 0) std::memcpy(to, order_.items, bytes);
    order_.items = to;
    order_.numbers = bytes != 0 ? to + wire::padded(order_.part.items_bytes) : nullptr;
    if (order_.lying == nullptr) return true;
    order_.lying = &lying_;
    order_.numbers = lying_.in;
    return true;
  }

  const std::shared_ptr<Connection> from_;
  const std::shared_ptr<Hosted> object_;
  Order order_;
  Status checked_;
  const uint64_t after_;  // its session's sequence at the shard
  const uint64_t out_bytes_, charged_;
  Hosted::Stage stage_;
  uint64_t asked_ = 0;  // at the gate: the clock, since when, and for whom
  int64_t since_ns_ = 0;
  uint32_t blocker_ = Gate::kOutsider;
  const Lying lying_;
  const int64_t deadline_ns_;
  OnceBuffer bytes_, out_;
  Reply reply_;
};

}  // namespace windlass
