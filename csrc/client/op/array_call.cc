#include "client/op/array_call.h"

#include <cstring>

namespace windlass {

ArrayCall::ArrayCall(std::shared_ptr<Handle> handle, const What& what, wire::Op op, const Array* in, const Array* out,
                     const Hyper& hyper, double weight, bool closes)
    : Call(handle->shared_session(), handle->progress(), what),
      closes_(closes),
      weight_(weight),
      handle_(std::move(handle)) {
  batch_.hyper = hyper;
  if (in != nullptr) {
    arrays_.in = in->data;
    batch_.in_dtype = arrays_.in_dtype = in->dtype;
    in_bytes_ = in->bytes();
  }
  if (out != nullptr) {
    arrays_.out = out->data;
    batch_.out_dtype = arrays_.out_dtype = out->dtype;
    out_bytes_ = out->bytes();
    batch_.streams = arrays_.stream = streams(*traits_of(op), out_bytes_, out_bytes_);
  }
  batch_.in_place = !handle_->remote();
}

bool ArrayCall::waits_for_update() const { return contributes() && handle_->sync().rounds(); }

bool ArrayCall::waits_for_close() const {
  const Sync& sync = handle_->sync();
  return contributes() && !closes_ && (sync.rounds() || (sync.gated() && batch_.op->returns));
}

bool ArrayCall::would_deadlock() const { return waits_for_update() && handle_->is_open(shards(), iteration_.clock); }

void ArrayCall::uncount() {
  if (contributes()) handle_->uncount(shards(), iteration_);
}

bool ArrayCall::is_alone() const { return contributes() && handle_->rule().kind == RuleKind::kForeign; }

// A push counts from now on; a pull asks for the present clock, or for the one that its worker has closed at the shard.
void ArrayCall::begin_iteration() {
  if (contributes()) {
    iteration_ = handle_->iteration_of_push(shards(), closes_, weight_);
    batch_.weight = iteration_.weight;
    batch_.object_weight = iteration_.object_weight;
    batch_.other_weight = iteration_.other_weight;
  }
  asked_ = contributes() ? iteration_.clock + 1 : session().clock();
  if (!pushes()) closed_ = handle_->closed_beyond(shards(), asked_);
}

bool ArrayCall::share(Arena::Segments* known, RemoteRoute::Plan* plan) {
  const uint64_t bytes = std::max(in_bytes_, out_bytes_), least = known != nullptr ? 1 : limits::kArenaBytesMin;
  if (bytes < least || shards().empty() || !remote_->links().sharing()) return false;
  sharing_.emplace(session().engine().arena(), known != nullptr ? *known : plan->segments, known != nullptr);
  if (!sharing_->find(arrays_.in, in_bytes_, arrays_.out, out_bytes_)) return false;
  if (sharing_->staged_in() != nullptr) arrays_.in = sharing_->staged_in();
  plan->places = &sharing_->places;
  return true;
}

Status ArrayCall::check_again() const {
  if (!contributes() || !handle_->rejects_nonfinite() ||
      handle_->are_finite(arrays_.in_dtype, arrays_.in, in_bytes_ / size_of(arrays_.in_dtype)))
    return {};
  return Status(Code::kNonFinite, what() + ": the gradient has NaN or infinity; nothing was applied");
}

// A user's rule runs on one thread: others would only wait for it. Over a socket, whole shards are sent from where they
// lie, which is no work.
uint64_t ArrayCall::work_of(bool in_place, uint64_t in_bytes, uint64_t out_bytes, bool whole) const {
  if (is_alone()) return 0;
  if (in_place) return std::max(in_bytes, out_bytes);
  return contributes() ? in_bytes : whole ? 0 : out_bytes;
}

Status ArrayCall::check_answer(uint32_t part, bool in_place, const PartAnswer& answer, uint64_t expected) {
  if (batch_.op->returns || waits_for_update()) note_answer(answer, asked(part), handle_->sync());
  if (in_place) expected = 0;
  if (answer.numbers_bytes == expected) return {};
  return Status(Code::kProtocolError, "shard " + std::to_string(shards()[part]) + " has " +
                                          std::to_string(answer.numbers_bytes) + " bytes of numbers, expected " +
                                          std::to_string(expected));
}

void ArrayCall::keep_input(bool under_way) {
  const void* const from = arrays_.in;
  const bool in_arena = sharing_ && sharing_->found() && sharing_->staged_in() != nullptr;
  const bool copies = contributes() && !owns_input_ && !in_arena;
  if (copies && kept_ == nullptr) {
    kept_ = std::make_unique_for_overwrite<std::byte[]>(in_bytes_ + 1);
    if (in_bytes_ != 0) std::memcpy(kept_.get(), from, in_bytes_);
  }
  const void* const to = copies ? kept_.get() : from;
  if (under_way) return remote_->move_out(from, in_bytes_, from == to ? nullptr : to, [&] { arrays_.in = to; });
  arrays_.in = to;
}

}  // namespace windlass
