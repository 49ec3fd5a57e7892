#include "client/call.h"

#include "tensor/tensor.h"

namespace windlass {

Status check_array(const What& what, const char* role, const Array& array, const uint64_t* shape, size_t dims,
                   Dtype stored) {
  bool same = array.dims == dims;
  for (size_t i = 0; same && i < dims; ++i) same = array.shape[i] == shape[i];
  if (same && may_travel(array.dtype, stored)) return {};
  std::string expected = stored == Dtype::kFloat32 ? "float32, bfloat16 or float16" : name_of(stored);
  return Status(Code::kShapeMismatch, what.text(role) + ": expected " + expected + " of shape " +
                                          describe_shape(shape, dims) + ", saw " + name_of(array.dtype) + " of shape " +
                                          describe_shape(array.shape, array.dims));
}

Status Call::start(const Array* in, const Array* out, How how, int64_t deadline_ns) {
  Engine& engine = session_->engine();
  WL_RETURN_IF_ERROR(engine.enter());
  for (const Array* array : {in, out}) {
    if (array == nullptr || array->bytes() == 0) continue;
    lent_[n_lent_++] = array->range();
    bytes_ = std::max(bytes_, array->bytes());
  }
  if (n_lent_ != 0) {
    Status lent = engine.arena().lend(lent_, n_lent_, "", &ordinary_);
    if (!lent.ok()) {
      engine.leave();
      return Status(lent.code(), what() + lent.message());
    }
  }
  if (how == How::kFuture && ordinary_) {
    if (!engine.reserve_kept(bytes_, deadline_ns)) {
      engine.arena().end(lent_, n_lent_);
      engine.leave();
      return Status(Code::kTimeout, what() + ": not begun; " + std::to_string(limits::kKeptBytesMax) +
                                        " bytes of earlier pushes wait for busy shards");
    }
    kept_bytes_ = bytes_;
  }
  admitted();
  Crew* helpers = bytes_ >= limits::kCrewBytesMin && engine.server().threads() > 1 ? &engine.server().crew() : nullptr;
  const Ref<Work> self(this);
  if (how == How::kWait || (!ordinary_ && bytes_ < limits::kAsyncBytesMin)) {
    begin(helpers);
  } else if (!ordinary_) {
    begin_later(&engine.server().crew(), engine.server().threads() > 1);
  } else {
    begin_kept(helpers);
  }
  return {};
}

Status Call::finish(int64_t deadline_ns) {
  Status status = wait(deadline_ns);
  if (status.code() != Code::kTimeout) return status;
  drop();
  if (ordinary_) answers_ = false;
  const bool goes_on = pushes() && (!ordinary_ || session_->engine().reserve_kept(bytes_, 0));
  if (ordinary_ && goes_on) {
    kept_bytes_ = bytes_;
    if ((bits_ & kFinished) != 0) release_kept();  // too late for finished() to do it
    let_go();
  } else if (ordinary_) {
    cancel();
  }
  return Status(Code::kTimeout, what() + ": not done in time" +
                                    (goes_on    ? "; the push goes on"
                                     : pushes() ? "; shards that were busy never got it"
                                                : ""));
}

Status Call::wait(int64_t deadline_ns) {
  if (session_->engine().forked()) return session_->engine().usable();
  if (!wait_until(deadline_ns))
    return Status(Code::kTimeout, what() + ": not done in time; it goes on and can be waited for again");
  bits_.fetch_or(kSeen, std::memory_order_acq_rel);
  return status();
}

void Call::mark(Bit bit, uint8_t other) {
  const uint8_t before = bits_.fetch_or(bit);
  if ((before & other) == 0 || (before & kSeen) != 0) return;
  if (Status s = status(); !s.ok()) progress_->unseen.add(s);
}

void Call::drop() { mark(kDropped, kFinished); }

void Call::finished() {
  Engine& engine = session_->engine();
  engine.arena().end(lent_, n_lent_);
  mark(kFinished, kDropped);
  release_kept();
}

void Call::release_kept() {
  if (const uint64_t bytes = kept_bytes_.exchange(0); bytes != 0) session_->engine().release_kept(bytes);
}

void Call::over() { session_->engine().leave(); }

}  // namespace windlass
