// Weights and rule state of a tensor, read and put as they are stored: TensorClient::snapshot and put.
//
// Both go shard by shard, some at a time, so that little more than the caller's arrays is in memory. A put to servers
// elsewhere has a copy of what it sends: it is numbered like a push and may be sent again after its caller has given
// up.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "client/remote.h"
#include "client/tensor.h"
#include "tensor/planes.h"

namespace windlass {
namespace {

constexpr uint64_t kAtOnceBytes = uint64_t{32} << 20;

uint64_t bytes_of(const std::vector<Plane>& planes) {
  return std::accumulate(planes.begin(), planes.end(), uint64_t{0},
                         [](uint64_t n, const Plane& s) { return n + s.bytes; });
}

// Calls f with neighbouring shards that are about so large together, until it fails.
template <class F>
Status for_some(const TensorClient& t, F f) {
  std::vector<uint32_t> some;
  uint64_t bytes = 0;
  for (uint32_t shard = 0; shard < t.cut().shards; ++shard) {
    const uint64_t more = bytes_of(planes_of(t.spec(), t.cut(), shard));
    if (!some.empty() && bytes + more > kAtOnceBytes) {
      WL_RETURN_IF_ERROR(f(some));
      some.clear();
      bytes = 0;
    }
    some.push_back(shard);
    bytes += more;
  }
  return some.empty() ? Status() : f(some);
}

// What is put into some shards of a tensor on servers elsewhere.
class PutCall final : public Work, public Remote {
 public:
  PutCall(std::shared_ptr<TensorClient> client, const std::vector<uint32_t>& shards, const PlaneArrays& from)
      : Remote(client->links()), client_(std::move(client)), shards_(shards) {
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
  }

  Status start(const What& what, int64_t deadline_ns) {
    Session& session = client_->session();
    WL_RETURN_IF_ERROR(session.engine().enter());
    make_trips({.op = wire::Op::kPut,
                .object = client_->map().object,
                .dtype_in = client_->spec().dtype,
                .bytes = numbers_.size(),
                .deadline_ns = deadline_ns},
               *client_->owners(), shards_);
    if (const Status status = reserve(what.text(), deadline_ns); !status.ok()) {
      session.engine().leave();
      return status;
    }
    begin_away(trips());
    {
      std::lock_guard lock(session.order_mutex());
      number([&](uint32_t shard, Trip::Part* part) {
        part->sequence = ++client_->progress()->sent[shard];
        part->clock = session.clock();
      });
      submit(this);
    }
    set_off(How::kWait);
    return {};
  }
  Status finish(const What& what, int64_t deadline_ns) {
    if (wait_until(deadline_ns)) {
      const Status s = status();
      return s.ok() ? s : Status(s.code(), what.text() + ": " + s.message());
    }
    given_up_ = true;
    return Status(Code::kTimeout, what.text() + ": not done in time; " + stuck() + "; what was sent goes on");
  }

  // Work.
  bool wait_until(int64_t deadline_ns) override { return done() || wait_away(*this, deadline_ns); }

  // Cargo.
  void describe(uint32_t part, bool, wire::Part* to) override {
    to->items_bytes = sizeof(wire::PutItem);
    to->numbers_bytes = starts_[part + 1] - starts_[part];
  }
  void write_items(uint32_t part, bool, std::byte* to) override { std::memcpy(to, &items_[part], sizeof items_[part]); }
  const std::byte* numbers(uint32_t part) override { return numbers_.data() + starts_[part]; }
  void gather(uint32_t, std::byte*) override {}
  std::byte* landing(uint32_t, uint64_t) override { return nullptr; }
  Status land(uint32_t, bool, const wire::Part&, const std::string&, const std::byte*) override { return {}; }
  void over(const Status& status) override { end_away(status); }
  Owners* owners(uint32_t part, uint32_t* shard) override {
    *shard = shards_[part];
    return client_->owners().get();
  }

 protected:
  Turn& turn(uint32_t) override { __builtin_unreachable(); }
  Status run(uint32_t, bool) override { return {}; }
  void finished() override {
    if (const Status s = status(); given_up_ && !s.ok())
      client_->progress()->unseen.add(Status(s.code(), "put of tensor '" + client_->name() + "': " + s.message()));
  }
  void over() override { client_->session().engine().leave(); }

 private:
  const std::shared_ptr<TensorClient> client_;
  const std::vector<uint32_t> shards_;
  std::vector<wire::PutItem> items_;  // of each part
  std::vector<size_t> starts_;        // of each part in numbers_, and the end
  std::vector<std::byte> numbers_;
  std::atomic<bool> given_up_{false};
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
  WL_RETURN_IF_ERROR(session().engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  WL_RETURN_IF_ERROR(check_finite(what, from));
  if (remote()) {
    return for_some(*this, [&](const std::vector<uint32_t>& shards) {
      const Ref<PutCall> call(new PutCall(shared_from_this(), shards, from));
      WL_RETURN_IF_ERROR(call->start(what, deadline_ns));
      return call->finish(what, deadline_ns);
    });
  }
  const Status status = each_shard(
      what, cut_.shards, [this](uint32_t i) -> Turn& { return tensor_->shard(i).turn; },
      [this, &from](uint32_t i) {
        const std::vector<Plane> planes = planes_of(spec_, cut_, i);
        const std::vector<Tensor::Piece> pieces = tensor_->pieces_of(i);
        for (size_t k = 0; k < planes.size(); ++k) {
          if (from.planes[k] != nullptr) std::memcpy(pieces[k].data, from.planes[k] + planes[k].at, planes[k].bytes);
        }
        Shard& shard = tensor_->shard(i);
        if (from.counts != nullptr) shard.count = from.counts[i];
        shard.records.of(session().number()).seen = ++shard.version;
        return Status();
      },
      shared_from_this(), deadline_ns);
  if (status.code() != Code::kTimeout) return status;
  return Status(Code::kTimeout, status.message() + "; shards that were busy never got it");
}

Status TensorClient::snapshot(const PlaneArrays& to, int64_t deadline_ns) {
  const What what{"snapshot", "tensor", name_};
  WL_RETURN_IF_ERROR(session().engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const auto give = [&](size_t plane, const std::byte* from, const Plane& at) {
    if (to.planes[plane] != nullptr && at.bytes != 0) std::memcpy(to.planes[plane] + at.at, from, at.bytes);
  };
  if (!remote()) {
    return each_shard(
        what, cut_.shards, [this](uint32_t i) -> Turn& { return tensor_->shard(i).turn; },
        [this, &to, &give](uint32_t i) {
          const std::vector<Plane> planes = planes_of(spec_, cut_, i);
          const std::vector<Tensor::Piece> pieces = tensor_->pieces_of(i);
          for (size_t k = 0; k < planes.size(); ++k) give(k, pieces[k].data, planes[k]);
          if (to.counts != nullptr) to.counts[i] = tensor_->shard(i).count;
          return Status();
        },
        shared_from_this(), deadline_ns);
  }
  return for_some(*this, [&](const std::vector<uint32_t>& shards) {
    const Ref<Exchange> exchange(new Exchange(links()));
    WL_RETURN_IF_ERROR(
        exchange->ask_shards(wire::Op::kSnapshot, owners(), shards, sent(), 0, "", what.text(), deadline_ns));
    for (size_t part = 0; part < shards.size(); ++part) {
      const Exchange::Answer& answer = exchange->answers[part];
      const std::vector<Plane> planes = planes_of(spec_, cut_, shards[part]);
      uint64_t count = 0;
      if (answer.items.size() != sizeof count || answer.numbers.size() != bytes_of(planes))
        return Status(Code::kProtocolError, what.text() + ": shard " + std::to_string(shards[part]) + " has " +
                                                std::to_string(answer.numbers.size()) + " bytes of numbers, expected " +
                                                std::to_string(bytes_of(planes)));
      std::memcpy(&count, answer.items.data(), sizeof count);
      if (to.counts != nullptr) to.counts[shards[part]] = count;
      const std::byte* from = answer.numbers.data();
      for (size_t k = 0; k < planes.size(); from += planes[k++].bytes) give(k, from, planes[k]);
    }
    return Status();
  });
}

}  // namespace windlass
