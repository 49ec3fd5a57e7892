// Engine: the root of a client process. It owns an arena, and either a server inside the process or links to servers
// elsewhere.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/os.h"
#include "base/status.h"
#include "client/arena/arena.h"
#include "server/server.h"

namespace windlass {

class Links;

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(int threads, uint64_t memory_bytes_max);
  // For servers elsewhere; shares the arena of `arena_of`, if given.
  Engine(std::shared_ptr<Links> links, const std::shared_ptr<Engine>& arena_of);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  Server& server() { return *server_; }                           // unless there are links
  const std::shared_ptr<Links>& links() const { return links_; }  // null if the server is inside the process
  Arena& arena() { return *arena_; }

  // Ok while the engine can be used: it is not closed, and not the copy that a fork made.
  Status usable() const;
  bool forked() const { return generation_ != os::fork_generation(); }
  // Refuses further requests and waits for those under way; kTimeout names how many are left.
  Status close(int64_t deadline_ns);
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // Limits the copies that asynchronous pushes of ordinary arrays make. Beyond the limit it waits for room; false if
  // there was none in time.
  bool reserve_kept(uint64_t bytes, int64_t deadline_ns);
  void release_kept(uint64_t bytes);

  // Inside the process nobody watches the gates: a caller that waits at one reports for whom, every so often. Set
  // before anybody can wait.
  struct Overdue {
    int64_t every_ns = 0;
    std::function<void(const std::string& line)> say;
  };
  void set_overdue(Overdue overdue) { overdue_ = std::move(overdue); }
  const Overdue& overdue() const { return overdue_; }

  // Requests under way, so that close() can wait for them.
  Status enter();
  void leave();

 private:
  Status wait_for_all(int64_t deadline_ns);

  const uint32_t generation_ = os::fork_generation();
  std::unique_ptr<Server> server_;
  std::shared_ptr<Links> links_;
  std::shared_ptr<Arena> arena_;
  std::atomic<bool> closed_{false};
  std::atomic<uint32_t> under_way_{0};
  std::atomic<uint64_t> kept_bytes_{0};
  std::atomic<uint32_t> kept_releases_{0};  // waited on for room
  std::atomic<uint32_t> kept_waiters_{0};
  Overdue overdue_;
};

}  // namespace windlass
