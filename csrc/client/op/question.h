// Question: asks shards for something that only reads, each at its turn: how many rows, a fingerprint, a scan, a
// snapshot, whether everything has arrived. It owns all memory it uses, so a caller can give up at its deadline.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/op/handle.h"

namespace windlass {

class Question final : public Call {
 public:
  // Where the object is: inside the process, or on servers elsewhere.
  struct Where {
    std::shared_ptr<ServedObject> object;
    std::shared_ptr<Owners> owners;
  };
  Question(std::shared_ptr<Session> session, std::shared_ptr<Progress> progress, Where where, const What& what,
           wire::Op op, std::vector<uint32_t> shards, uint64_t value, std::string body)
      : Call(std::move(session), std::move(progress), what),
        where_(std::move(where)),
        shards_(std::move(shards)),
        value_(value),
        body_(std::move(body)),
        answers_(shards_.size()) {
    aim(op, where_.object.get(), where_.owners, shards_);
  }

  // Call before it is asked: where the object was deleted, that is an answer.
  void accept_deleted() { accepts_deleted_ = true; }
  bool refused(uint32_t part, Code code) override {
    return Call::refused(part, code) || (accepts_deleted_ && code == Code::kDeleted);
  }

  // Asks, and waits for all answers.
  Status ask(int64_t deadline_ns) {
    WL_RETURN_IF_ERROR(start(nullptr, nullptr, How::kWait, deadline_ns));
    return finish(deadline_ns);
  }
  std::vector<Handle::Answer> take_answers() { return std::move(answers_); }

  Status fill(uint32_t part, bool, Entry* entry) override {
    entry->value = value_;
    entry->body = reinterpret_cast<const std::byte*>(body_.data());
    entry->body_bytes = static_cast<uint32_t>(body_.size());
    uint64_t out_bytes = 0;
    Status wrong = where_.object->check(batch(), entry, &out_bytes);
    answers_[part].numbers.resize(out_bytes);
    entry->out = answers_[part].numbers.data();
    return wrong;
  }
  Status landed(uint32_t part, Outcome* outcome) override {
    Handle::Answer& answer = answers_[part];
    answer.value = outcome->value;
    answer.flags = outcome->flags;
    answer.body = std::move(outcome->body);
    answer.numbers.resize(outcome->numbers_bytes);
    answer.call = std::move(outcome->call);
    return outcome->status;
  }

  void describe(uint32_t, bool, Parcel* to) override {
    to->value = value_;
    to->argument_bytes = static_cast<uint32_t>(body_.size());
    to->same_argument = true;
  }
  void write_argument(uint32_t, std::byte* to) override { body_.copy(reinterpret_cast<char*>(to), body_.size()); }
  bool joins(uint32_t) const override { return !batch_.op->answers_at_length; }
  Status land(uint32_t part, bool, const PartAnswer& answer, const std::byte* numbers) override {
    Handle::Answer& a = answers_[part];
    a.value = answer.value;
    a.flags = answer.flags;
    a.body = answer.body;
    if (numbers != nullptr) a.numbers.assign(numbers, numbers + answer.numbers_bytes);
    return {};
  }

 protected:
  bool is_large() const override { return shards_.size() > 1; }  // it may read whole shards
  uint64_t clock_of(uint32_t) const override { return 0; }

 private:
  const Where where_;
  const std::vector<uint32_t> shards_;
  const uint64_t value_;
  const std::string body_;
  bool accepts_deleted_ = false;
  std::vector<Handle::Answer> answers_;
};

}  // namespace windlass
