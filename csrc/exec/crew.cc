#include "exec/crew.h"

#include "base/limits.h"
#include "base/os.h"
#include "base/thread.h"

namespace windlass {

namespace {

thread_local size_t t_number = 0;

}  // namespace

size_t Crew::number() { return t_number; }

Crew::Crew(int threads) {
  for (int i = 0; i < threads; ++i) {
    std::thread thread;
    const auto run = [list = list_, i] {
      t_number = static_cast<size_t>(i) + 1;
      list->run();
    };
    if (!start_thread(run, &thread)) return;  // those that are there do all of the work
    threads_.push_back(std::move(thread));
  }
}

Crew::~Crew() {
  {
    std::lock_guard lock(list_->mutex);
    list_->stop = true;
  }
  list_->wake.notify_all();
  for (std::thread& t : threads_) {
    t.get_id() == std::this_thread::get_id() ? t.detach() : t.join();
  }
}

void Crew::post(Ref<Counted> alive, CrewTask* task, size_t most) {
  if (threads_.empty()) return task->help();
  {
    std::lock_guard lock(list_->mutex);
    list_->posted.push_back({std::move(alive), task});
    list_->waiting.store(list_->posted.size(), std::memory_order_release);
  }
  if (most >= threads_.size()) return list_->wake.notify_all();
  for (size_t i = 0; i < most; ++i) list_->wake.notify_one();
}

// Spins for a moment: the next large request often follows at once.
void Crew::List::spin() {
  static const bool may_spin = os::cores() > 1;
  if (!may_spin || spinning.exchange(true, std::memory_order_acq_rel)) return;
  const int64_t end = os::now_ns() + limits::kSpinNs;
  while (waiting.load(std::memory_order_acquire) == 0 && os::now_ns() < end) {
  }
  spinning.store(false, std::memory_order_release);
}

void Crew::List::run() {
  std::unique_lock lock(mutex);
  for (;;) {
    wake.wait(lock, [this] { return stop || !posted.empty(); });
    if (posted.empty()) return;
    Posted work = posted.front();
    lock.unlock();
    work.task->help();
    lock.lock();
    if (!posted.empty() && posted.front().task == work.task) posted.pop_front();
    waiting.store(posted.size(), std::memory_order_release);
    lock.unlock();
    work.alive = Ref<Counted>();  // may be the last reference to everything
    spin();
    lock.lock();
  }
}

}  // namespace windlass
