#include "server/crew.h"

#include <new>

namespace windlass {

Crew::Crew(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

Crew::~Crew() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Crew::abandon() {
  // The thread objects name threads of another process; destroying them joinable would end this one.
  for (std::thread& t : threads_) new (&t) std::thread();
  threads_.clear();
}

void Crew::post(Ref<Work> work) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(work));
  }
  wake_.notify_all();
}

void Crew::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !posted_.empty(); });
    if (posted_.empty()) return;
    Ref<Work> work = posted_.front();
    lock.unlock();
    work->help();
    lock.lock();
    if (!posted_.empty() && posted_.front().get() == work.get()) posted_.pop_front();
    lock.unlock();
    work = Ref<Work>();
    lock.lock();
  }
}

}  // namespace windlass
