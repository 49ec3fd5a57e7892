#include "client/call.h"

#include "tensor/tensor.h"

namespace windlass {

Status check_array(const std::string& what, const Array& array, const uint64_t* shape, size_t dims, Dtype stored) {
  bool same = array.dims == dims;
  for (size_t i = 0; same && i < dims; ++i) same = array.shape[i] == shape[i];
  if (same && may_travel(array.dtype, stored)) return {};
  std::string expected = stored == Dtype::kFloat32 ? "float32, bfloat16 or float16" : name_of(stored);
  return Status(Code::kShapeMismatch, what + ": expected " + expected + " of shape " + describe_shape(shape, dims) +
                                          ", saw " + name_of(array.dtype) + " of shape " +
                                          describe_shape(array.shape, array.dims));
}

Status Call::start(const Array* arrays, size_t n, size_t bytes, How how) {
  Engine& engine = session_->engine();
  WL_RETURN_IF_ERROR(engine.enter());
  size_t used = 0;
  for (size_t i = 0; i < n; ++i) {
    if (arrays[i].data == nullptr || arrays[i].bytes() == 0) continue;
    lent_[used++] = arrays[i].range();
    ordinary_ = ordinary_ || !engine.arena().registered(arrays[i].range());
  }
  if (used != 0) {
    Status lent = engine.arena().lend(lent_, used, what_.c_str());
    if (!lent.ok()) {
      engine.leave();
      return lent;
    }
  }
  n_lent_ = used;
  Crew* helpers = bytes >= limits::kCrewBytesMin && engine.server().threads() > 1 ? &engine.server().crew() : nullptr;
  const Ref<Work> self(this);
  if (how == How::kWait || (!ordinary_ && bytes < limits::kAsyncBytesMin)) {
    begin(helpers);
  } else if (ordinary_) {
    begin_kept(helpers);
  } else {
    begin_later(&engine.server().crew());
  }
  return {};
}

Status Call::finish(int64_t deadline_ns) {
  Status status = wait(deadline_ns);
  if (status.code() != Code::kTimeout) return status;
  if (ordinary_) cancel();
  drop();
  return Status(Code::kTimeout, what_ + ": not done in time");
}

Status Call::wait(int64_t deadline_ns) {
  if (!wait_until(deadline_ns))
    return Status(Code::kTimeout, what_ + ": not done in time; it goes on and can be waited for again");
  std::lock_guard lock(seen_mutex_);
  seen_ = true;
  return status();
}

void Call::drop() {
  std::lock_guard lock(seen_mutex_);
  dropped_ = true;
  if (finished_ && !seen_ && !status().ok()) progress_->unseen.add(status());
}

void Call::finished() {
  Engine& engine = session_->engine();
  engine.arena().end(lent_, n_lent_);
  {
    std::lock_guard lock(seen_mutex_);
    finished_ = true;
    if (dropped_ && !seen_ && !status().ok()) progress_->unseen.add(status());
  }
  engine.leave();
}

}  // namespace windlass
