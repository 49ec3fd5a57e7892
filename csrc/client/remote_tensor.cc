// Requests on tensors whose shards are on servers elsewhere.
#include <algorithm>
#include <cstring>

#include "client/remote.h"
#include "client/sharing.h"
#include "client/tensor.h"

namespace windlass {
namespace {

class RemoteTensorCall final : public TensorCall, public Remote {
 public:
  RemoteTensorCall(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& request)
      : TensorCall(client, what, request), Remote(client->links()), sharing_(session().engine().arena()) {
    priority_ = request.priority;
    if (request.in != nullptr) in_bytes_ = request.in->bytes();
    if (request.out != nullptr) out_bytes_ = request.out->bytes();
  }

 protected:
  // Future.
  bool wait_until(int64_t deadline_ns) override { return done() || wait_away(*this, deadline_ns); }
  void let_go() override { keep_input(true); }
  void cancel() override {
    if (pushes_) return keep_input(true);
    // A server that has been told where the output is may still write there.
    withdraw_all(!sharing_.found());
    move_out(nullptr, 0, nullptr, [] {});
  }

  // Call.
  bool always_goes_on() const override { return true; }
  void give_way() override { withdraw_all(false); }
  std::string stuck() override { return Remote::stuck(); }
  bool take_back(bool* any) override {
    if (pushes_) return Remote::take_back(any);
    return withdraw(false, Status(Code::kCancelled, what() + ": cancelled"), any);
  }
  Status launch(How how, int64_t deadline_ns) override {
    const bool places = find_places();
    make_trips({.op = op_,
                .object = client_->map().object,
                .dtype_in = arrays_.in_dtype,
                .dtype_out = arrays_.out_dtype,
                .flags = static_cast<uint16_t>(closes_ ? wire::kCloses : 0),
                .bytes = bytes(),
                .priority = priority_,
                .hyper = pushes_ ? &hyper_ : nullptr,
                .patient = waits_for_close(),
                .deadline_ns = deadline_ns,
                .places = places ? &sharing_.places : nullptr,
                .segments = sharing_.segments},
               *client_->owners(), shards_);
    WL_RETURN_IF_ERROR(reserve(what(), deadline_ns));
    if (how == How::kFuture && pushes_ && ordinary()) keep_input(false);
    expect(trips());
    {
      std::lock_guard lock(session().order_mutex());
      std::vector<uint64_t>& sent = client_->progress()->sent;
      begin_iteration();
      if (waits_for_update()) write_weights(hyper_, iteration_, places ? &sharing_.places : nullptr);
      number([&](uint32_t shard, Trip::Part* part) {
        part->sequence = pushes_ ? ++sent[shard] : sent[shard];
        part->clock = pushes_ ? iteration_.clock : asked(part->part);
      });
      if (pushes_) tell_clock(session(), iteration_.clock);
      submit(this);
    }
    set_off(how);
    return {};
  }

  // Cargo.
  void describe(uint32_t part, bool lies, wire::Part* to) override {
    const Cut& cut = client_->cut();
    if (!newer_than_.empty()) to->value = newer_than_[shards_[part]];
    if (pushes_ && !lies) to->numbers_bytes = count(part) * size_of(arrays_.in_dtype);
    const Span& first = spans(part)[0];
    const bool places = lies && !along(part);
    if (span_count(part) == 1 && !places && first.n == cut.end_of(shards_[part]) - cut.first_of(shards_[part])) {
      to->flags |= wire::kWhole;
    } else {
      if (places) to->flags |= wire::kPlaced;
      to->items = static_cast<uint32_t>(span_count(part));
      to->items_bytes = static_cast<uint32_t>(span_count(part) * (places ? 3 : 2) * sizeof(uint64_t));
    }
  }
  void write_items(uint32_t part, bool lies, std::byte* to) override {
    const size_t bytes = (lies && !along(part) ? 3 : 2) * sizeof(uint64_t);
    for (size_t i = 0; i < span_count(part); ++i) {
      const uint64_t item[3] = {spans(part)[i].first, spans(part)[i].n, spans(part)[i].at};
      std::memcpy(to + i * bytes, item, bytes);
    }
  }
  const std::byte* numbers(uint32_t part) override {
    return together(part) ? static_cast<const std::byte*>(arrays_.in) + spans(part)[0].at * size_of(arrays_.in_dtype)
                          : nullptr;
  }
  void gather(uint32_t part, std::byte* to) override {
    const size_t size = size_of(arrays_.in_dtype);
    for (size_t i = 0; i < span_count(part); ++i) {
      const Span& s = spans(part)[i];
      std::memcpy(to, static_cast<const std::byte*>(arrays_.in) + s.at * size, s.n * size);
      to += s.n * size;
    }
  }
  std::byte* landing(uint32_t part, uint64_t bytes) override {
    const size_t size = size_of(arrays_.out_dtype);
    if (!answers() || arrays_.out == nullptr || !repeats_.empty() || !together(part) || bytes != count(part) * size)
      return nullptr;
    return static_cast<std::byte*>(arrays_.out) + spans(part)[0].at * size;
  }
  Status land(uint32_t part, bool lies, const wire::Part& answer, const std::string& items,
              const std::byte* numbers) override {
    if (arrays_.out != nullptr || waits_for_update()) note_answer(answer, items, asked(part), client_->sync());
    const bool changed = (answer.flags & wire::kUnchanged) == 0;
    if (lies && answer.numbers_bytes != 0)
      return Status(Code::kProtocolError, "shard " + std::to_string(answer.shard) + " has numbers of its own");
    if (lies && changed && sharing_.staged_out() != nullptr && answers()) unstage(part);
    if (changed && !lies && arrays_.out != nullptr &&
        answer.numbers_bytes != count(part) * size_of(arrays_.out_dtype)) {
      return Status(Code::kProtocolError, "shard " + std::to_string(answer.shard) + " has " +
                                              std::to_string(answer.numbers_bytes) + " bytes of numbers");
    }
    if (changed) changed_.store(true, std::memory_order_relaxed);
    if (versioned_) versions_[shards_[part]] = answer.value;
    if (changed && numbers != nullptr && answers() && arrays_.out != nullptr) {
      repeats_.empty() ? scatter(part, numbers) : scatter_repeats(part, numbers);
    }
    return {};
  }
  void over(const Status& status) override { end(status); }
  Owners* owners(uint32_t part, uint32_t* shard) override {
    *shard = shards_[part];
    return client_->owners().get();
  }

 private:
  // Whether a server on the same host can use the arrays where they are.
  bool find_places() {
    const bool small = std::max(in_bytes_, out_bytes_) < limits::kArenaBytesMin;
    if (small || !links_->sharing() || !repeats_.empty() || combined_ != nullptr || shards_.empty()) return false;
    if (!sharing_.find(arrays_.in, in_bytes_, arrays_.out, out_bytes_)) return false;
    if (sharing_.staged_in() != nullptr) arrays_.in = sharing_.staged_in();
    sharing_.places.base = spans_[0].first - spans_[0].at;
    return true;
  }
  // Whether the part's elements lie in the arrays in their own order.
  bool along(uint32_t part) const {
    for (size_t i = 0; i < span_count(part); ++i) {
      if (spans(part)[i].at != spans(part)[i].first - sharing_.places.base) return false;
    }
    return true;
  }
  void unstage(uint32_t part) {
    const size_t size = size_of(arrays_.out_dtype);
    for (size_t i = 0; i < span_count(part); ++i) {
      const Span& s = spans(part)[i];
      std::memcpy(static_cast<std::byte*>(arrays_.out) + s.at * size, sharing_.staged_out() + s.at * size, s.n * size);
    }
  }
  // Whether the part's spans follow each other in the caller's arrays.
  bool together(uint32_t part) const {
    for (size_t i = 1; i < span_count(part); ++i) {
      if (spans(part)[i].at != spans(part)[i - 1].at + spans(part)[i - 1].n) return false;
    }
    return true;
  }
  void scatter(uint32_t part, const std::byte* from) {
    const size_t size = size_of(arrays_.out_dtype);
    for (size_t i = 0; i < span_count(part); ++i) {
      const Span& s = spans(part)[i];
      std::memcpy(static_cast<std::byte*>(arrays_.out) + s.at * size, from, s.n * size);
      from += s.n * size;
    }
  }
  void withdraw_all(bool begun) {
    bool any = false;
    withdraw(begun, Status(Code::kCancelled, what() + ": cancelled"), &any);
  }
  // The caller has its array back: what is still needed of it is copied. `under_way`: lanes may be using it.
  void keep_input(bool under_way) {
    const void* const from = arrays_.in;
    if (sharing_.staged_in() != nullptr && sharing_.found()) {
      if (under_way) move_out(nullptr, 0, nullptr, [] {});
      return;
    }
    if (pushes_ && combined_ == nullptr && kept_ == nullptr) {
      kept_ = std::make_unique_for_overwrite<std::byte[]>(in_bytes_ + 1);
      if (in_bytes_ != 0) std::memcpy(kept_.get(), from, in_bytes_);
    }
    const void* const to = pushes_ && combined_ == nullptr ? kept_.get() : from;
    if (!under_way) {
      arrays_.in = to;
      return;
    }
    move_out(from, in_bytes_, from == to ? nullptr : to, [&] { arrays_.in = to; });
  }

  uint64_t in_bytes_ = 0, out_bytes_ = 0;
  uint8_t priority_ = 0;
  Sharing sharing_;
};

}  // namespace

Ref<TensorCall> make_remote_call(std::shared_ptr<TensorClient> client, const What& what, const TensorRequest& request) {
  return Ref<TensorCall>(new RemoteTensorCall(std::move(client), what, request));
}

}  // namespace windlass
