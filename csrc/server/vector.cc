#include "server/vector.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "base/breaks.h"

namespace windlass {
namespace {

// Where the other shard is, as it travels: the term above, the server below.
uint64_t packed(std::pair<uint32_t, uint32_t> at) { return uint64_t{at.second} << 32 | at.first; }
constexpr uint64_t kNowhere = 0xFFFFFFFF;

// With the turn: whether a shard of that term is here. One that is frozen is: it changes only where it goes.
bool is_here(Residence& home, uint32_t term) {
  return home.serves(term) || home.opens(term) || (home.state == Residence::kFrozen && home.term == term);
}

bool is_finite(Dtype dtype, uint64_t a) {
  if (dtype == Dtype::kInt64) return true;
  const auto number = std::bit_cast<double>(a);
  return std::isfinite(dtype == Dtype::kFloat32 ? static_cast<float>(number) : number);
}

}  // namespace

bool Hosted::is_like(const Hosted& other) const {
  const auto group = [](const ObjectSpec& s) {
    return s.app() + "/" + (s.tensor.like.empty() ? s.own_name() : s.tensor.like);
  };
  return !spec_.is_table && !other.spec_.is_table && shards_ == other.shards_ &&
         spec_.tensor.shape == other.spec_.tensor.shape && spec_.tensor.dtype == other.spec_.tensor.dtype &&
         group(spec_) == group(other.spec_);
}

Status Hosted::check_vector(const Order& o) const {
  const TensorSpec& spec = spec_.tensor;
  if (!spec.reject_nonfinite || !o.sets() || broken(Break::kNonfinite)) return {};
  const uint64_t elements = o.part.numbers_bytes / size_of(spec.dtype);
  if (is_finite(spec.dtype, o.vector.a) && (elements == 0 || kernels().finite(spec.dtype, o.numbers, elements)))
    return {};
  return refused(Code::kNonFinite, std::string(windlass::name_of(o.vector.op())) +
                                       ": NaN or infinity; nothing was applied to shard " +
                                       std::to_string(o.part.shard));
}

Status read_other(Host& host, Hosted& object, Order* order, Buffer* memory) {
  const wire::VectorItem& item = order->vector;
  const uint32_t index = order->part.shard;
  if (order->part.numbers_bytes != 0) {
    const Status status(Code::kShapeMismatch, "tensor '" + object.spec().own_name() + "': expected no numbers, saw " +
                                                  std::to_string(order->part.numbers_bytes) + " bytes");
    order->part.numbers_bytes = 0;
    return status;
  }
  order->numbers = nullptr;
  if (!has_other(item.op()) || object.spec().is_table) return {};
  const std::string what = std::string(name_of(item.op())) + " of tensor '" + object.spec().own_name() + "', shard " +
                           std::to_string(index) + ", with ";
  const std::shared_ptr<Hosted> other = host.find(item.object);
  order->other_at = kNowhere;
  if (other == nullptr)
    return Status(Code::kStaleMap, what + "object " + std::to_string(item.object) + ", which is not on this server");
  if (other.get() == &object) return {};
  if (!object.is_like(*other))
    return Status(Code::kInvalidArgument, what + "'" + other->spec().own_name() + "': expected a tensor that is like " +
                                              "it, " + object.spec().describe() + ", saw " + other->spec().describe());
  const TensorSpec& spec = object.spec().tensor;
  const Cut cut = cut_of(spec);
  const uint64_t bytes = (cut.end_of(index) - cut.first_of(index)) * size_of(spec.dtype);
  const uint64_t at = wire::padded(sizeof item);
  std::byte* const to = memory->room(at + wire::padded(bytes));
  if (to == nullptr) return Status(Code::kResourceExhausted, what + "no memory for its numbers");
  std::memcpy(to, order->items, sizeof item);
  Shard* const shard = other->find(index);
  bool here = false;
  uint64_t seen = 0;
  if (shard != nullptr) {
    with_turn(shard->turn, [&] {
      here = is_here(shard->home, item.term);
      if (!here) return;
      seen = shard->records.of(order->session, order->header.session).sequence;
      if (seen >= item.sequence) std::memcpy(to + at, other->tensor_of(index).weights_of(index), bytes);
    });
  }
  if (!here) {
    const auto found = other->whereabouts(index);
    order->other_at = packed(found);
    return Status(Code::kStaleMap, what + "'" + other->spec().own_name() + "', whose shard is on server " +
                                       std::to_string(found.first) + " since term " + std::to_string(found.second));
  }
  if (seen < item.sequence)
    return Status(Code::kStaleMap, what + "'" + other->spec().own_name() + "': expected push " +
                                       std::to_string(item.sequence) + " of this worker, saw " + std::to_string(seen));
  order->items = to;
  order->numbers = to + at;
  order->part.numbers_bytes = bytes;
  return {};
}

// With the turn.
void Hosted::write_vector(const Order& o) {
  const uint32_t index = o.part.shard;
  const Tensor::Piece weights = tensor_of(index).pieces_of(index)[0];
  const std::byte* const x = o.part.numbers_bytes != 0 ? o.numbers : weights.data;
  const Dtype dtype = spec_.tensor.dtype;
  kernels().vector(o.vector.op(), dtype, weights.data, x, o.vector.a, weights.bytes / size_of(dtype));
}

uint64_t Hosted::dot(const Order& o) const {
  const uint32_t index = o.part.shard;
  const Tensor::Piece weights = tensor_of(index).pieces_of(index)[0];
  const std::byte* const x = o.part.numbers_bytes != 0 ? o.numbers : weights.data;
  return kernels().dot(spec_.tensor.dtype, weights.data, x, weights.bytes / size_of(spec_.tensor.dtype));
}

}  // namespace windlass
