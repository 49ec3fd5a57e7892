// Reads and writes weights and rule state of a tensor as they are stored: TensorClient::snapshot and put.
//
// Both do some shards at a time, so that little more than the caller's arrays is in memory. A put to servers elsewhere
// has a copy of what it sends: it is numbered like a push and may be sent again after its caller has given up.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "client/op/tensor.h"
#include "tensor/planes.h"

namespace windlass {
namespace {

uint64_t bytes_of(const std::vector<Plane>& planes) {
  return std::accumulate(planes.begin(), planes.end(), uint64_t{0},
                         [](uint64_t n, const Plane& s) { return n + s.bytes; });
}

// Calls f with groups of neighbouring shards of limited size, until it fails.
template <class F>
Status for_some(const TensorClient& t, F f) {
  std::vector<uint32_t> some;
  uint64_t bytes = 0;
  for (uint32_t shard = 0; shard < t.cut().shards; ++shard) {
    const uint64_t more = bytes_of(planes_of(t.spec(), t.cut(), shard));
    if (!some.empty() && bytes + more > limits::kPutBytes) {
      WL_RETURN_IF_ERROR(f(some));
      some.clear();
      bytes = 0;
    }
    some.push_back(shard);
    bytes += more;
  }
  return some.empty() ? Status() : f(some);
}

// A put into some shards of a tensor.
class PutCall final : public Call {
 public:
  PutCall(std::shared_ptr<TensorClient> client, const What& what, const std::vector<uint32_t>& shards,
          const PlaneArrays& from)
      : Call(client->shared_session(), client->progress(), what), client_(std::move(client)), shards_(shards) {
    for (const uint32_t shard : shards_) {
      wire::PutItem& item = items_.emplace_back();
      starts_.push_back(numbers_.size());
      const std::vector<Plane> planes = planes_of(client_->spec(), client_->cut(), shard);
      for (size_t i = 0; i < planes.size(); ++i) {
        if (from.planes[i] == nullptr) continue;
        item.planes |= 1u << i;
        numbers_.insert(numbers_.end(), from.planes[i] + planes[i].at, from.planes[i] + planes[i].at + planes[i].bytes);
      }
      item.sets_count = from.counts != nullptr ? 1 : 0;
      if (from.counts != nullptr) item.count = from.counts[shard];
    }
    starts_.push_back(numbers_.size());
    batch_.in_dtype = client_->spec().dtype;
    aim(wire::Op::kPut, client_->shared_object().get(), client_->owners(), shards_);
  }

  Status fill(uint32_t part, bool, Entry* entry) override {
    entry->clock = session().clock();
    entry->body = reinterpret_cast<const std::byte*>(&items_[part]);
    entry->body_bytes = sizeof items_[part];
    entry->in = numbers_.data() + starts_[part];
    entry->numbers_bytes = starts_[part + 1] - starts_[part];
    return {};
  }

  void describe(uint32_t part, bool, Parcel* to) override {
    to->argument_bytes = sizeof(wire::PutItem);
    to->numbers_bytes = to->work_bytes = starts_[part + 1] - starts_[part];
  }
  void write_argument(uint32_t part, std::byte* to) override { std::memcpy(to, &items_[part], sizeof items_[part]); }
  const std::byte* numbers(uint32_t part) override { return numbers_.data() + starts_[part]; }

 protected:
  bool is_large() const override { return numbers_.size() >= limits::kCrewBytesMin; }
  Status add_to_plan(Arena::Segments*, RemoteRoute::Plan* plan) override {
    plan->bytes = numbers_.size();
    return {};
  }

 private:
  const std::shared_ptr<TensorClient> client_;
  const std::vector<uint32_t> shards_;
  std::vector<wire::PutItem> items_;  // of each part
  std::vector<size_t> starts_;        // of each part in numbers_, and the end
  std::vector<std::byte> numbers_;
};

}  // namespace

Status TensorClient::check_finite(const What& what, const PlaneArrays& from) const {
  if (!spec_.reject_nonfinite) return {};
  const std::vector<uint64_t> bytes = plane_bytes(spec_, cut_);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const Dtype dtype = i == 0 ? spec_.dtype : Dtype::kFloat32;
    if (from.planes[i] == nullptr || kernels().finite(dtype, from.planes[i], bytes[i] / size_of(dtype))) continue;
    return Status(Code::kNonFinite, what.text() + (i == 0 ? ": the weights have" : ": the state has") +
                                        " NaN or infinity; nothing was put");
  }
  return {};
}

Status TensorClient::put(const PlaneArrays& from, int64_t deadline_ns) {
  const What what{"put", "tensor", name_};
  WL_RETURN_IF_ERROR(session().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  WL_RETURN_IF_ERROR(check_finite(what, from));
  return for_some(*this, [&](const std::vector<uint32_t>& shards) {
    const Ref<PutCall> call(new PutCall(shared_from_this(), what, shards, from));
    WL_RETURN_IF_ERROR(call->start(nullptr, nullptr, How::kWait, deadline_ns));
    return call->finish(deadline_ns);
  });
}

Status TensorClient::snapshot(const PlaneArrays& to, int64_t deadline_ns) {
  const What what{"snapshot", "tensor", name_};
  WL_RETURN_IF_ERROR(session().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const auto give = [&](size_t plane, const std::byte* from, const Plane& at) {
    if (to.planes[plane] != nullptr && at.bytes != 0) std::memcpy(to.planes[plane] + at.at, from, at.bytes);
  };
  return for_some(*this, [&](const std::vector<uint32_t>& shards) {
    std::vector<Answer> answers;
    WL_RETURN_IF_ERROR(ask_shards(what, wire::Op::kSnapshot, shards, 0, "", deadline_ns, &answers));
    for (size_t part = 0; part < shards.size(); ++part) {
      const Answer& answer = answers[part];
      const std::vector<Plane> planes = planes_of(spec_, cut_, shards[part]);
      uint64_t count = 0;
      if (answer.body.size() != sizeof count || answer.numbers.size() != bytes_of(planes))
        return Status(Code::kProtocolError, what.text() + ": shard " + std::to_string(shards[part]) + " has " +
                                                std::to_string(answer.numbers.size()) + " bytes of numbers, expected " +
                                                std::to_string(bytes_of(planes)));
      std::memcpy(&count, answer.body.data(), sizeof count);
      if (to.counts != nullptr) to.counts[shards[part]] = count;
      const std::byte* from = answer.numbers.data();
      for (size_t k = 0; k < planes.size(); from += planes[k++].bytes) give(k, from, planes[k]);
    }
    return Status();
  });
}

Status TensorClient::counts(int64_t deadline_ns, std::vector<int64_t>* out) {
  const What what{"count of updates", "tensor", name_};
  WL_RETURN_IF_ERROR(session().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  std::vector<uint32_t> shards(cut_.shards);
  std::iota(shards.begin(), shards.end(), 0);
  std::vector<Answer> answers;
  WL_RETURN_IF_ERROR(ask_shards(what, wire::Op::kSnapshot, shards, wire::kCountAlone, "", deadline_ns, &answers));
  for (const Answer& answer : answers) {
    uint64_t count = 0;
    if (answer.body.size() != sizeof count || !answer.numbers.empty())
      return Status(Code::kProtocolError, what.text() + ": a shard's answer is none");
    std::memcpy(&count, answer.body.data(), sizeof count);
    out->push_back(static_cast<int64_t>(count));
  }
  return {};
}

}  // namespace windlass
