#include "base/os.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/limits.h"

namespace windlass::os {
namespace {

std::atomic<uint32_t> g_fork_generation{0};
[[maybe_unused]] const int g_fork_hook =
    pthread_atfork(nullptr, nullptr, [] { g_fork_generation.fetch_add(1, std::memory_order_relaxed); });

constexpr size_t kHuge = limits::kHugePageBytes;

// What map() really maps: whole huge pages for large requests, so that the kernel can back each with one.
size_t mapped_bytes(size_t bytes) {
  const size_t unit = bytes >= kHuge ? kHuge : 4096;
  return (bytes + unit - 1) / unit * unit;
}

std::byte* map_raw(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
}

}  // namespace

std::byte* map(size_t bytes) {
  if (bytes == 0 || bytes > (size_t{1} << 46)) return nullptr;
  const size_t want = mapped_bytes(bytes);
  if (want < kHuge) return map_raw(want);
  // Map one huge page more than asked for and give the unaligned ends back.
  std::byte* raw = map_raw(want + kHuge);
  if (raw == nullptr) return nullptr;
  const size_t skip = (kHuge - reinterpret_cast<uintptr_t>(raw) % kHuge) % kHuge;
  if (skip != 0) munmap(raw, skip);
  if (skip != kHuge) munmap(raw + skip + want, kHuge - skip);
  madvise(raw + skip, want, MADV_HUGEPAGE);  // advice: without it everything works, only slower
  return raw + skip;
}

void unmap(std::byte* p, size_t bytes) {
  if (p != nullptr) munmap(p, mapped_bytes(bytes));
}

void wait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  timespec ts{};
  if (timeout_ns >= 0) {
    ts.tv_sec = timeout_ns / 1'000'000'000;
    ts.tv_nsec = timeout_ns % 1'000'000'000;
  }
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, timeout_ns >= 0 ? &ts : nullptr, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, nullptr, nullptr, 0);
}

int64_t now_ns() {
  timespec ts{};
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
}

uint64_t random_u64() {
  uint64_t x = 0;
  if (getrandom(&x, sizeof x, 0) != sizeof x)
    x = static_cast<uint64_t>(now_ns()) ^ (static_cast<uint64_t>(getpid()) << 32);
  return x;
}

int cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  const int n = CPU_COUNT(&set);
  return n > 0 ? n : 1;
}

uint32_t fork_generation() { return g_fork_generation.load(std::memory_order_relaxed); }

}  // namespace windlass::os
