#include "client/engine.h"

#include <algorithm>
#include <utility>

#include "client/net/links.h"

namespace windlass {

Engine::Engine(int threads, uint64_t memory_bytes_max)
    : server_(std::make_unique<Server>(threads, memory_bytes_max)), arena_(std::make_shared<Arena>()) {}

Engine::Engine(std::shared_ptr<Links> links, const std::shared_ptr<Engine>& arena_of)
    : links_(std::move(links)),
      arena_(arena_of != nullptr ? arena_of->arena_ : std::make_shared<Arena>(links_->may_share(), links_->rank())) {
  arena_->add_teller([links = std::weak_ptr<Links>(links_)](const Arena::Segments& segments) {
    if (const std::shared_ptr<Links> alive = links.lock(); alive != nullptr) alive->break_if_told(segments);
  });
  links_->set_renew([arena = arena_](const auto& segments) { arena->renew(segments); });
  links_->start();
}

Engine::~Engine() {
  if (forked()) {
    // In the child of a fork there are no threads, and a lock may have been held: leak everything.
    (void)server_.release();
    new std::shared_ptr<Links>(std::move(links_));
    new std::shared_ptr<Arena>(std::move(arena_));
  } else if (links_ != nullptr) {
    links_->stop();
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
    while (used == 0 || used + bytes <= limits::kKeptBytesMax) {  // a single one may be larger
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
  const bool again = closed_.exchange(true, std::memory_order_seq_cst);
  // Callers inside the process may wait for workers that will not come any more.
  if (server_ != nullptr) server_->end_waits(Status(Code::kClosed, "the cluster has been closed"));
  Status status = wait_for_all(deadline_ns);
  if (links_ != nullptr && !again) {
    if (status.ok()) links_->say_goodbye();
    links_->stop();
    (void)links_->ended(os::now_ns() + int64_t{1'000'000'000});
    if (!status.ok()) status = Status(Code::kTimeout, status.message() + "; they are given up");
  } else if (!status.ok()) {
    status = Status(Code::kTimeout, status.message() + "; they will finish");
  }
  return status;
}

Status Engine::wait_for_all(int64_t deadline_ns) {
  for (;;) {
    const uint32_t left = under_way_.load(std::memory_order_seq_cst);
    if (left == 0) return {};
    const int64_t time_left = deadline_ns - os::now_ns();
    if (time_left <= 0) {
      return Status(Code::kTimeout, "close: " + std::to_string(left) + " requests are still under way");
    }
    os::wait(under_way_, left, time_left);
  }
}

}  // namespace windlass
