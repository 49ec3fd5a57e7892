// Threads that may not be there: a limit of processes, threads or address space is no reason to end a process.
#pragma once

#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "base/breaks.h"

namespace windlass {

// For tests: while it is set no thread is to be had.
inline std::atomic<bool> g_no_threads{false};

// Starts a thread that runs f. False if there is none to be had; f is gone then.
template <class F>
[[nodiscard]] bool start_thread(F f, std::thread* out) {
  if (g_no_threads.load(std::memory_order_relaxed)) return false;
  try {
    *out = std::thread(std::move(f));
    return true;
  } catch (const std::exception&) {  // std::thread says it like this, and only like this
    if (broken(Break::kThreads)) throw;
    return false;
  }
}

// The same for a thread that nobody joins.
template <class F>
[[nodiscard]] bool start_detached(F f) {
  std::thread thread;
  if (!start_thread(std::move(f), &thread)) return false;
  thread.detach();
  return true;
}

}  // namespace windlass
