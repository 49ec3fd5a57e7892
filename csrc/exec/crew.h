// Crew: a server's threads. They help with large requests and run those that nobody waits for, both from a common list.
//
// Thread safety: every method from any thread, the destructor too: a request may hold the last reference to its server,
// and the thread that finishes it then destroys its own crew.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/ref.h"
#include "exec/crew_task.h"

namespace windlass {

class Crew {
 public:
  // Has fewer threads if there are no more to be had; without any, callers do the work of what they post.
  explicit Crew(int threads);
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew();  // finishes what was posted

  // The number of the calling thread: 1 and up in a crew, 0 for all others.
  static size_t number();
  size_t size() const { return threads_.size(); }

  // Adds a task and wakes at most `most` threads for it. `alive` keeps the task alive.
  void post(Ref<Counted> alive, CrewTask* task, size_t most = ~size_t{0});

 private:
  // What the threads share; each holds a reference of its own.
  struct List {
    void run();
    void spin();

    std::mutex mutex;
    std::condition_variable wake;
    struct Posted {
      Ref<Counted> alive;
      CrewTask* task;
    };
    std::deque<Posted> posted;
    bool stop = false;
    std::atomic<size_t> waiting{0};     // posted.size(), for the spinning thread
    std::atomic<bool> spinning{false};  // one thread at most: a wake-up costs more than a short spin
  };

  const std::shared_ptr<List> list_ = std::make_shared<List>();
  std::vector<std::thread> threads_;
};

}  // namespace windlass
