// Vector operations between tensors that are alike: TensorClient::vector.
//
// Each shard is done on its own, on the server that has that shard of both tensors (server/object/vector.h). A write is
// numbered like a push to this tensor. It must see what this session has pushed to the other tensor before, so it names
// the last sequence sent there. A server that has not got so far, or does not have the other shard, does nothing and
// says so. Then the client settles the other tensor's shards, which waits for those pushes and finds out where they
// are, and tries again under a new sequence, until the deadline. That happens while pushes are on the other lane, or
// while the shards of tensors that are alike move.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "client/op/tensor.h"

namespace windlass {
namespace {

constexpr uint64_t kOtherAtOnceBytes = uint64_t{32} << 20;  // copied of the other tensor, inside the process
constexpr int64_t kPauseNs = 500'000, kPauseNsMax = 64'000'000;

// One attempt at some shards.
class VectorCall final : public Call {
 public:
  VectorCall(std::shared_ptr<TensorClient> client, std::shared_ptr<TensorClient> other, const What& what, VectorOp op,
             uint64_t a, std::vector<uint32_t> shards)
      : Call(client->shared_session(), client->progress(), what),
        client_(std::move(client)),
        other_(std::move(other)),
        op_(op),
        a_(a),
        shards_(std::move(shards)),
        dots_(shards_.size()) {
    batch_.in_dtype = client_->spec().dtype;
    aim(writes(op_) ? wire::Op::kVector : wire::Op::kDot, client_->shared_object().get(), client_->owners(), shards_);
    is_remote() ? must_see_.resize(shards_.size()) : steps_.resize(shards_.size());
  }
  // Inside the process: snapshots of the other tensor's shards. They were copied at their own turns, so that nobody
  // holds two.
  void set_other(std::vector<Handle::Answer> copies) { copies_ = std::move(copies); }

  // Valid once the call is done.
  const std::vector<uint64_t>& dots() const { return dots_; }
  const std::vector<uint32_t>& apart() const { return apart_; }  // shards to which nothing was done
  const std::string& why() const { return why_; }

  Status fill(uint32_t part, bool, Entry* entry) override {
    steps_[part].item = item(Map::kFirstTerm, 0);
    entry->clock = session().clock();
    entry->vector = &steps_[part];
    if (!copies_.empty()) {
      entry->in = copies_[part].numbers.data();  // the weights come first
      entry->numbers_bytes = bytes_of(part);
    }
    uint64_t none = 0;
    return client_->object().check(batch(), entry, &none);
  }
  Status landed(uint32_t part, Outcome* outcome) override {
    dots_[part] = outcome->value;
    return outcome->status;
  }

  void describe(uint32_t part, bool, Parcel* to) override {
    to->argument_bytes = sizeof(wire::VectorItem);
    to->work_bytes = bytes_of(part);
  }
  void write_argument(uint32_t part, std::byte* to) override {
    // Uses what is known of the other shard each time it is sent.
    const uint32_t term = other_ != nullptr ? other_->owners()->of(shards_[part]).term : 0;
    const wire::VectorItem item = this->item(term, must_see_[part]);
    std::memcpy(to, &item, sizeof item);
  }
  Status land(uint32_t part, bool, const PartAnswer& answer, const std::byte*) override {
    dots_[part] = answer.value;
    if ((answer.flags & wire::kApart) == 0) return {};
    if (other_ == nullptr) return Status(Code::kProtocolError, "apart, but there is no other tensor");
    const auto server = static_cast<uint32_t>(answer.value), term = static_cast<uint32_t>(answer.value >> 32);
    if (server < remote_->links().servers()) other_->owners()->learn(shards_[part], {server, term});
    std::lock_guard lock(mutex_);
    apart_.push_back(shards_[part]);
    why_ = wire::printable(answer.body);
    return {};
  }
  void begin_iteration() override {
    if (other_ == nullptr || !is_remote()) return;
    const std::vector<uint64_t>& seen = other_->progress()->sent;
    for (size_t i = 0; i < shards_.size(); ++i) must_see_[i] = seen[shards_[i]];
  }

 protected:
  // If the caller gave up a write that was not done, the next caller gets an error.
  void finished() override {
    if (writes(op_) && given_up() && !apart_.empty()) fail(Status(Code::kTimeout, "shards that never got it: " + why_));
    Call::finished();
  }
  bool is_large() const override {
    return shards_.size() * client_->cut().per_shard * size_of(client_->spec().dtype) >= limits::kCrewBytesMin;
  }
  wire::VectorItem item(uint32_t term, uint64_t sequence) const {
    wire::VectorItem item;
    item.operation = static_cast<uint8_t>(op_);
    item.a = a_;
    if (other_ == nullptr) return item;
    item.object = other_->map().object;
    item.term = term;
    item.sequence = sequence;
    return item;
  }

 private:
  uint64_t bytes_of(uint32_t part) const {
    const Cut& cut = client_->cut();
    return (cut.end_of(shards_[part]) - cut.first_of(shards_[part])) * size_of(client_->spec().dtype);
  }

  const std::shared_ptr<TensorClient> client_, other_;
  const VectorOp op_;
  const uint64_t a_;
  const std::vector<uint32_t> shards_;
  std::vector<uint64_t> dots_;  // of each part

  // Inside the process:
  std::vector<VectorStep> steps_;
  std::vector<Handle::Answer> copies_;

  // On servers elsewhere:
  std::vector<uint64_t> must_see_;  // of each part: the last sequence sent to the other shard
  std::mutex mutex_;                // guards what follows
  std::vector<uint32_t> apart_;
  std::string why_;  // the last one's reason
};

bool is_finite(Dtype dtype, uint64_t a) {
  if (dtype == Dtype::kInt64) return true;
  const auto number = std::bit_cast<double>(a);
  return std::isfinite(dtype == Dtype::kFloat32 ? static_cast<float>(number) : number);
}

}  // namespace

Status TensorClient::check_other(VectorOp op, const TensorClient& other) const {
  const std::string what = What{name_of(op), "tensor", name_}.text() + " with tensor '" + other.name_ + "': ";
  if (&other.session() != &session())
    return Status(Code::kInvalidArgument, what + "expected a tensor of the same worker, saw another's");
  if (group_ == other.group_ && spec_.shape == other.spec_.shape && spec_.dtype == other.spec_.dtype) return {};
  return Status(Code::kInvalidArgument, what +
                                            "expected a tensor that was made with like=, to lie where this one does\n" +
                                            "  this:  " + describe(spec_) + "\n  other: " + describe(other.spec_));
}

Status TensorClient::vector(VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns, uint64_t* dot) {
  const What what{name_of(op), "tensor", name_};
  WL_RETURN_IF_ERROR(session().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  if (other != nullptr) {
    WL_RETURN_IF_ERROR(check_other(op, *other));
    WL_RETURN_IF_ERROR(other->take_unseen());
  }
  if (spec_.reject_nonfinite && writes(op) && !is_finite(spec_.dtype, a))
    return Status(Code::kNonFinite, what.text() + ": the number is NaN or infinity; nothing was changed");
  std::vector<uint64_t> dots(cut_.shards);
  WL_RETURN_IF_ERROR(remote() ? vector_remote(what, op, other, a, deadline_ns, dots.data())
                              : vector_local(what, op, other, a, deadline_ns, dots.data()));
  // Adds in the order of the shards: the sum is the same for any number of servers.
  if (spec_.dtype == Dtype::kInt64) {
    *dot = std::accumulate(dots.begin(), dots.end(), uint64_t{0});
    return {};
  }
  double sum = 0;
  for (const uint64_t d : dots) sum += std::bit_cast<double>(d);
  *dot = std::bit_cast<uint64_t>(sum);
  return {};
}

Status TensorClient::vector_remote(const What& what, VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns,
                                   uint64_t* dots) {
  const std::shared_ptr<TensorClient> alive = other != nullptr ? other->shared_from_this() : nullptr;
  std::vector<uint32_t> left(cut_.shards);
  std::iota(left.begin(), left.end(), 0);
  std::string why;  // why some were apart the last time
  // Adds to a timeout where the shards are that were apart.
  const auto placed = [&](const Status& status) {
    if (status.code() != Code::kTimeout || why.empty()) return status;
    const auto server = [&](TensorClient& t) { return std::to_string(t.owners()->of(left[0]).server); };
    return Status(Code::kTimeout, status.message() + "; shard " + std::to_string(left[0]) + " of '" + name_ +
                                      "' is on server " + server(*this) + ", that of '" + other->name_ +
                                      "' on server " + server(*other) + "; the last of " + std::to_string(left.size()) +
                                      " to be refused: " + why);
  };
  for (int64_t pause_ns = kPauseNs; !left.empty(); pause_ns = std::min(2 * pause_ns, kPauseNsMax)) {
    const Ref<VectorCall> call(new VectorCall(shared_from_this(), alive, what, op, a, left));
    if (const Status status = call->start(nullptr, nullptr, How::kWait, deadline_ns); !status.ok())
      return placed(status);
    if (const Status status = call->finish(deadline_ns); !status.ok()) return placed(status);
    for (size_t i = 0; i < left.size(); ++i) dots[left[i]] = call->dots()[i];
    left = call->apart();
    if (left.empty()) break;
    std::sort(left.begin(), left.end());
    const bool again = !std::exchange(why, call->why()).empty();
    if (const Status status = other->settle(what, left, deadline_ns); !status.ok()) return placed(status);
    if (!again) continue;  // usually once is enough
    if (os::now_ns() + pause_ns >= deadline_ns)
      return placed(Status(Code::kTimeout, what.text() + ": not done in time"));
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause_ns));
  }
  return {};
}

// Waits until this session's pushes to these shards have arrived; learns where the shards are.
Status TensorClient::settle(const What& what, const std::vector<uint32_t>& shards, int64_t deadline_ns) {
  std::vector<Answer> answers;
  return ask_shards(what, wire::Op::kSettle, shards, 0, "", deadline_ns, &answers);
}

// Inside the process: some shards at a time, since the other tensor's shards are copied.
Status TensorClient::vector_local(const What& what, VectorOp op, TensorClient* other, uint64_t a, int64_t deadline_ns,
                                  uint64_t* dots) {
  const bool copies = other != nullptr && &other->object() != &object();
  const uint64_t shard_bytes = cut_.per_shard * size_of(spec_.dtype);
  const uint32_t at_once = copies ? static_cast<uint32_t>(std::max<uint64_t>(kOtherAtOnceBytes / shard_bytes, 1)) : ~0u;
  const std::shared_ptr<TensorClient> alive = other != nullptr ? other->shared_from_this() : nullptr;
  for (uint32_t first = 0, n = 0; first < cut_.shards; first += n) {
    n = std::min(at_once, cut_.shards - first);
    std::vector<uint32_t> some(n);
    std::iota(some.begin(), some.end(), first);
    std::vector<Answer> theirs;
    if (copies) WL_RETURN_IF_ERROR(other->ask_shards(what, wire::Op::kSnapshot, some, 0, "", deadline_ns, &theirs));
    const Ref<VectorCall> call(new VectorCall(shared_from_this(), alive, what, op, a, std::move(some)));
    call->set_other(std::move(theirs));
    WL_RETURN_IF_ERROR(call->start(nullptr, nullptr, How::kWait, deadline_ns));
    WL_RETURN_IF_ERROR(call->finish(deadline_ns));
    std::copy(call->dots().begin(), call->dots().end(), dots + first);
  }
  return {};
}

}  // namespace windlass
