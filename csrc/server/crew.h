// Crew: a server's threads. They take the parts of a large request from a common list, and run requests that nobody
// waits for.
//
// Thread safety: every method from any thread, except the destructor.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/ref.h"
#include "server/work.h"

namespace windlass {

class Crew {
 public:
  explicit Crew(int threads);
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew();  // finishes what was posted

  void post(Ref<Work> work);
  int threads() const { return static_cast<int>(threads_.size()); }
  void abandon();  // in the child of a fork: the threads are not there

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Ref<Work>> posted_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace windlass
