#include "server/object/vector.h"

#include <cstring>

namespace windlass {
namespace {

// Where the other shard is, as it travels: term in the high half, server in the low one.
uint64_t packed(std::pair<uint32_t, uint32_t> at) { return uint64_t{at.second} << 32 | at.first; }
constexpr uint64_t kNowhere = 0xFFFFFFFF;

// With the turn: whether the shard is here under that term. A frozen one is: it changes only at its new server.
bool is_here(Residence& home, uint32_t term) {
  return home.serves(term) || home.opens(term) || (home.state == Residence::kFrozen && home.term == term);
}

}  // namespace

bool ServedObject::is_like(const ServedObject& other) const {
  const auto group = [](const ObjectSpec& s) {
    return s.app() + "/" + (s.tensor.like.empty() ? s.own_name() : s.tensor.like);
  };
  return !spec_.is_table && !other.spec_.is_table && shards_ == other.shards_ &&
         spec_.tensor.shape == other.spec_.tensor.shape && spec_.tensor.dtype == other.spec_.tensor.dtype &&
         group(spec_) == group(other.spec_);
}

Status read_other(const Batch& batch, ServedObject& object, ServedObject* other, Entry* entry, VectorStep* step,
                  Buffer* memory) {
  const wire::VectorItem& item = step->item;
  entry->vector = step;
  const uint32_t index = entry->shard;
  if (entry->numbers_bytes != 0) {
    const Status status(Code::kShapeMismatch, "tensor '" + object.spec().own_name() + "': expected no numbers, saw " +
                                                  std::to_string(entry->numbers_bytes) + " bytes");
    entry->numbers_bytes = 0;
    return status;
  }
  entry->in = nullptr;
  if (!has_other(item.op()) || object.spec().is_table) return {};
  const std::string what = std::string(name_of(item.op())) + " of tensor '" + object.spec().own_name() + "', shard " +
                           std::to_string(index) + ", with ";
  step->other_at = kNowhere;
  if (other == nullptr)
    return Status(Code::kStaleMap, what + "object " + std::to_string(item.object) + ", which is not on this server");
  if (other == &object) return {};
  if (!object.is_like(*other))
    return Status(Code::kInvalidArgument, what + "'" + other->spec().own_name() + "': expected a tensor that is like " +
                                              "it, " + object.spec().describe() + ", saw " + other->spec().describe());
  const TensorSpec& spec = object.spec().tensor;
  const Cut cut = cut_of(spec);
  const uint64_t bytes = (cut.end_of(index) - cut.first_of(index)) * size_of(spec.dtype);
  const uint64_t at = wire::padded(sizeof item);
  std::byte* const to = memory->room(at + wire::padded(bytes));
  if (to == nullptr) return Status(Code::kResourceExhausted, what + "no memory for its numbers");
  std::memcpy(to, entry->body, sizeof item);
  Shard* const shard = other->find(index);
  bool here = false;
  uint64_t seen = 0;
  if (shard != nullptr) {
    with_turn(shard->turn, [&] {
      here = is_here(shard->home, item.term);
      if (!here) return;
      seen = shard->records.of(batch.caller.number, batch.caller.incarnation).sequence;
      if (seen >= item.sequence) std::memcpy(to + at, other->tensor_of(index).weights_of(index), bytes);
    });
  }
  if (!here) {
    const auto found = other->whereabouts(index);
    step->other_at = packed(found);
    return Status(Code::kStaleMap, what + "'" + other->spec().own_name() + "', whose shard is on server " +
                                       std::to_string(found.first) + " since term " + std::to_string(found.second));
  }
  if (seen < item.sequence)
    return Status(Code::kStaleMap, what + "'" + other->spec().own_name() + "': expected push " +
                                       std::to_string(item.sequence) + " of this worker, saw " + std::to_string(seen));
  entry->body = to;
  entry->in = to + at;
  entry->numbers_bytes = bytes;
  return {};
}

}  // namespace windlass
