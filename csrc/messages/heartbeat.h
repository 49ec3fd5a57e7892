// Heartbeat: tells the other end of a connection, once per period, that this process is alive.
//
// A thread of its own writes the same bytes every period, so that neither a held GIL nor a busy interpreter looks like
// a death; only a process that is stopped or gone falls silent. Python makes the connection, and makes a new one when
// wait() says that it is broken.
//
// Thread safety: every method from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/os.h"

namespace windlass {

class Heartbeat {
 public:
  // Owns the socket from here on. Sends the first beat at once.
  Heartbeat(int fd, std::string beat, int64_t period_ns);
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;
  ~Heartbeat();

  // Waits until the connection is broken or stop() was called; false at the deadline.
  bool wait(int64_t deadline_ns) const;
  bool ended() const;
  void stop();  // closes the connection

 private:
  // What the thread shares with the object, which it may outlive.
  struct Shared {
    int fd = -1;
    std::string beat;
    int64_t period_ns = 0;
    os::Watch watch;
    std::atomic<bool> stopped{false};
    std::atomic<uint32_t> running{1};
  };
  static void run(Shared& shared);

  const std::shared_ptr<Shared> shared_;
  const uint32_t generation_ = os::fork_generation();
};

}  // namespace windlass
