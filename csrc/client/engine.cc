#include "client/engine.h"

#include "client/table.h"
#include "client/tensor.h"

namespace windlass {

Engine::Engine(int threads, uint64_t memory_bytes_max)
    : server_(std::make_unique<Server>(threads, memory_bytes_max)), arena_(std::make_unique<Arena>()) {}

Engine::~Engine() {
  if (forked()) {
    // The threads are not here and a lock may have been held when the process was copied: leave everything as it is.
    (void)server_.release();
    (void)arena_.release();
  }
}

Status Engine::usable() const {
  if (forked()) {
    return Status(Code::kForkedProcess,
                  "this cluster was opened before the process forked; call windlass.connect() in the child");
  }
  if (closed()) return Status(Code::kClosed, "the cluster has been closed");
  return {};
}

Status Engine::enter() {
  WL_RETURN_IF_ERROR(usable());
  under_way_.fetch_add(1, std::memory_order_seq_cst);
  if (closed()) {
    leave();
    return usable();
  }
  return {};
}

void Engine::leave() {
  if (under_way_.fetch_sub(1, std::memory_order_seq_cst) == 1 && closed()) os::wake_all(under_way_);
}

bool Engine::reserve_kept(uint64_t bytes, int64_t deadline_ns) {
  for (;;) {
    const uint32_t releases = kept_releases_.load(std::memory_order_seq_cst);
    uint64_t used = kept_bytes_.load(std::memory_order_seq_cst);
    while (used == 0 || used + bytes <= limits::kKeptBytesMax) {  // one alone may be larger
      if (kept_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_seq_cst)) return true;
    }
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    kept_waiters_.fetch_add(1, std::memory_order_seq_cst);
    os::wait(kept_releases_, releases, left);
    kept_waiters_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Engine::release_kept(uint64_t bytes) {
  kept_bytes_.fetch_sub(bytes, std::memory_order_seq_cst);
  kept_releases_.fetch_add(1, std::memory_order_seq_cst);
  if (kept_waiters_.load(std::memory_order_seq_cst) != 0) os::wake_all(kept_releases_);
}

Status Engine::close(int64_t deadline_ns) {
  if (forked()) return {};
  closed_.store(true, std::memory_order_seq_cst);
  for (;;) {
    const uint32_t left = under_way_.load(std::memory_order_seq_cst);
    if (left == 0) return {};
    const int64_t time_left = deadline_ns - os::now_ns();
    if (time_left <= 0) {
      return Status(Code::kTimeout,
                    "close: " + std::to_string(left) + " requests are still under way; they will finish");
    }
    os::wait(under_way_, left, time_left);
  }
}

Status Session::open(std::shared_ptr<Engine> engine, uint32_t rank, uint32_t world_size,
                     std::shared_ptr<Session>* out) {
  WL_RETURN_IF_ERROR(engine->usable());
  if (world_size == 0 || rank >= world_size) {
    return Status(Code::kInvalidArgument,
                  "rank " + std::to_string(rank) + " is not in a world of " + std::to_string(world_size));
  }
  uint32_t number = 0;
  WL_RETURN_IF_ERROR(engine->server().new_session(&number));
  out->reset(new Session(std::move(engine), number, rank, world_size));
  return {};
}

std::shared_ptr<Progress> Session::progress(const std::string& name, uint32_t shards) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Progress>& p = progress_[name];
  if (p == nullptr) p = std::make_shared<Progress>(shards);
  return p;
}

Status Session::take_unseen() {
  std::lock_guard lock(mutex_);
  for (auto& [name, p] : progress_) WL_RETURN_IF_ERROR(p->unseen.take());
  return {};
}

Status Session::fingerprint(int64_t deadline_ns, uint64_t* out) {
  WL_RETURN_IF_ERROR(engine_->usable());
  WL_RETURN_IF_ERROR(take_unseen());
  uint64_t sum = 0;
  for (const Server::Object& object : engine_->server().objects()) {
    uint64_t one = 0;
    WL_RETURN_IF_ERROR(object.tensor != nullptr
                           ? TensorClient::attach(shared_from_this(), object.tensor)->fingerprint(deadline_ns, &one)
                           : TableClient::attach(shared_from_this(), object.table)->fingerprint(deadline_ns, &one));
    sum += one;
  }
  *out = sum;
  return {};
}

void Unseen::add(const Status& status) {
  std::lock_guard lock(mutex_);
  if (count_.fetch_add(1, std::memory_order_release) == 0) first_ = status;
}

Status Unseen::take() {
  if (count_.load(std::memory_order_acquire) == 0) return {};
  std::lock_guard lock(mutex_);
  const uint32_t n = count_.exchange(0, std::memory_order_acq_rel);
  if (n == 0) return {};
  Status first = std::exchange(first_, Status());
  return Status(first.code(),
                first.message() + " (from " +
                    (n == 1 ? "an earlier request" : std::to_string(n) + " earlier requests, the first of them") +
                    " whose future was dropped)");
}

}  // namespace windlass
