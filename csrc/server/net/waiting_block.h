// WaitingBlock: a block with entries that wait in their shards. It has its own copy of what they need, gathers the
// outcomes of all its entries, and can be answered when the last has ended.
//
//     block of 3 entries:   0 done    1 waits    2 waits          nothing is sent
//                                     1 runs                      nothing is sent
//                                                2 is due         the answer of all three may leave
//
// The answer is made when the client's socket takes it: entries that are due read their shards then, and not when their
// gates open, which may be for all workers at once. So what waits costs little, however much it asks for.
//
// Thread safety: ticket() with the shard's turn, before ended_serving(); ended() from any thread, once per entry;
// answer() from one thread at a time.
// Memory: its tickets own it together, and its connection once it can be answered; before that the connection has a
// weak reference. It counts against the host's quota for requests that wait.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/breaks.h"
#include "base/buffer.h"
#include "server/net/answers.h"
#include "server/net/connection.h"
#include "server/object/ticket.h"

namespace windlass {

class WaitingBlock : public std::enable_shared_from_this<WaitingBlock> {
 public:
  // Nullptr if there is no memory, or no room for it; force: whatever room there is. `entries` are checked; out_at:
  // where the numbers of each begin in the answer.
  static std::shared_ptr<WaitingBlock> make(const std::shared_ptr<Connection>& from, const wire::Header& frame,
                                            uint32_t label, const std::shared_ptr<ServedObject>& object,
                                            const Batch& batch, const std::vector<Entry>& entries,
                                            const std::vector<uint64_t>& out_at, bool force);
  ~WaitingBlock();
  // With the turn of its shard: a ticket for entry i. Nullptr if there is no room for it.
  static std::unique_ptr<Waiting> ticket(const std::shared_ptr<WaitingBlock>& block, uint32_t i, const Status& checked,
                                         Verdict why, const Shard& shard);
  // Whether an answer has the value of every entry: nobody uses the versions of a table's shards.
  static bool has_values(const ServedObject& object, const OpTraits& op) {
    return !op.closes && !(object.spec().is_table && (op.contributes || op.returns));
  }

  // Where entry i writes what it returns; nullptr if there is no memory.
  std::byte* out(uint32_t i);
  // Entry i has ended, or is due. True if that was the last, and the block can be answered.
  bool ended(uint32_t i, Outcome&& outcome, bool due = false);
  bool ended_serving() { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  // Makes the answer. False if an entry must wait again; *freed gets what that set free.
  bool answer(Answers* answers, Freed* freed);
  void answered() { answered_.store(true, std::memory_order_release); }  // it has been sent, or will be before others
  // What the answer can take.
  uint64_t answer_bytes() const { return out_at_.back() + entries_[0].length; }
  // Whether it calls a function of the user's, which takes a while.
  bool calls() const { return batch_.op->op == wire::Op::kCall; }
  // Whether the answer shows an update under BSP that it has not read yet.
  bool shows_update() const { return has_due_ && object_->spec().sync().rounds(); }

  uint64_t asked() const { return object_->clock_asked(batch_, entries_[0]); }  // at the gate

  const wire::Header& frame() const { return frame_; }
  ServedObject& object() const { return *object_; }
  // Whether it changes nothing.
  bool reads() const { return !batch_.op->numbered && !batch_.op->closes; }
  // Whether its caller has given up waiting.
  bool overdue() const { return reads() && deadline_ns_ != limits::kNoDeadline && os::now_ns() > deadline_ns_; }
  // Whether it has not been answered; *blocker: the worker that a waiting one waits for at its gate, if any.
  bool waits_for(View::Worker* blocker);
  // Drops the tickets of its entries.
  void forget();

 private:
  friend class RemoteTicket;
  WaitingBlock(std::shared_ptr<Connection> from, const wire::Header& frame, uint32_t label,
               std::shared_ptr<ServedObject> object, const Batch& batch, const std::vector<Entry>& entries,
               const std::vector<uint64_t>& out_at)
      : from_(std::move(from)),
        frame_(frame),
        label_(label),
        object_(std::move(object)),
        batch_(batch),
        entries_(entries),
        out_at_(out_at),
        outcomes_(entries.size()),
        due_(entries.size()),
        waits_(new std::atomic<bool>[entries.size()]()),
        began_ns_(os::now_ns()),
        deadline_ns_(batch.deadline_ms == 0 ? limits::kNoDeadline : began_ns_ + int64_t{batch.deadline_ms} * 1'000'000),
        left_(static_cast<uint32_t>(entries.size()) + 1) {}
  uint64_t items_bytes() const;
  bool charge(uint64_t bytes, bool force);
  bool copy_items(uint64_t bytes);
  bool keep_numbers(uint64_t kept_bytes);
  Verdict read(uint32_t i, std::byte* to);
  void wait_again(uint32_t i, Verdict why, const std::byte* made, Freed* freed);

  const std::shared_ptr<Connection> from_;
  const wire::Header frame_;
  const uint32_t label_;
  const std::shared_ptr<ServedObject> object_;
  const Batch batch_;
  std::vector<Entry> entries_;  // with their own copies of items and argument
  const std::vector<uint64_t> out_at_;
  std::vector<Outcome> outcomes_;
  std::vector<uint8_t> due_;  // entries that have yet to read; each its own byte, for several threads
  std::atomic<bool> has_due_{false}, answered_{false};
  const std::unique_ptr<std::atomic<bool>[]> waits_;
  const int64_t began_ns_, deadline_ns_;
  std::atomic<uint32_t> left_;  // entries that have not ended, plus one while they are being served
  VectorStep vector_;
  OnceBuffer items_, numbers_;
  bool has_numbers_ = false;
  uint64_t charged_ = 0;
  std::mutex out_mutex_;  // guards out_
  OnceBuffer out_;
};

// A ticket of an entry that came in a frame.
class RemoteTicket final : public Ticket {
 public:
  RemoteTicket(std::shared_ptr<WaitingBlock> block, uint32_t i, const Status& checked, Verdict why, const Shard& shard)
      : Ticket(block->object(), block->batch_, block->entries_[i], checked, why, shard, block->began_ns_),
        block_(std::move(block)),
        i_(i) {
    block_->waits_[i_].store(true, std::memory_order_release);
  }

  Sink& sink() override { return *block_->from_; }
  std::pair<int, uint64_t> order() const override { return {-int{block_->frame_.priority}, block_->frame_.request}; }
  WaitingBlock& block() { return *block_; }
  uint32_t index() const { return i_; }

 private:
  bool has_numbers() const { return !batch().in_place && block_->out_at_[i_ + 1] != block_->out_at_[i_]; }
  bool reads_later() const override {
    return (has_numbers() || batch().op->answers_at_length) && !broken(Break::kAnswers);
  }
  Status prepare(Entry* e) override {
    if (block_->overdue()) return Status(Code::kTimeout, "came too late for its caller");
    if (!has_numbers()) return {};
    e->out = block_->out(i_);
    if (e->out != nullptr) return {};
    return Status(Code::kResourceExhausted, "no memory for its answer");
  }

  const std::shared_ptr<WaitingBlock> block_;
  const uint32_t i_;
};

}  // namespace windlass
