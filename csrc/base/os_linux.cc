#include "base/os.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/limits.h"

namespace windlass::os {
namespace {

std::atomic<uint32_t> g_fork_generation{0};

// The child of a fork may take no lock, so this is a plain array; files that do not fit stay open in the child.
constexpr size_t kClosedAfterForkMax = 4096;
std::atomic<int> g_closed_after_fork[kClosedAfterForkMax];  // fd + 1; 0: free

void in_child() {
  g_fork_generation.fetch_add(1, std::memory_order_relaxed);
  for (std::atomic<int>& slot : g_closed_after_fork) {
    if (const int fd = slot.exchange(0, std::memory_order_relaxed); fd != 0) close(fd - 1);
  }
}
[[maybe_unused]] const int g_fork_hook = pthread_atfork(nullptr, nullptr, in_child);

static_assert(sizeof(Piece) == sizeof(iovec) && offsetof(Piece, bytes) == offsetof(iovec, iov_len));

long outcome(ssize_t n) {
  if (n > 0) return n;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return kWouldBlock;
  return kBroken;
}

msghdr message_of(const Piece* pieces, size_t n) {
  msghdr m{};
  m.msg_iov = reinterpret_cast<iovec*>(const_cast<Piece*>(pieces));
  m.msg_iovlen = n;
  return m;
}

constexpr size_t kHuge = limits::kHugePageBytes;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kCollapse = 25;  // MADV_COLLAPSE: since Linux 6.1, and not in every header

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

int make_shared_file(size_t bytes, std::string* why) {
  const int fd = memfd_create("windlass", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const char* failed = fd < 0 ? "memfd_create" : nullptr;
  // Allocate now: running out of memory later would be a signal instead of an error.
  if (failed == nullptr && fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) failed = "fallocate";
  if (failed == nullptr && fcntl(fd, F_ADD_SEALS, kSeals) != 0) failed = "sealing";
  if (failed == nullptr) return fd;
  *why = std::string(failed) + ": " + std::strerror(errno);
  if (fd >= 0) close(fd);
  return -1;
}

std::string complaint_about_shared_file(int fd, uint64_t bytes) {
  struct stat s{};
  struct statfs f{};
  if (fstat(fd, &s) != 0 || fstatfs(fd, &f) != 0) return "it is no file";
  constexpr long kTmpfs = 0x01021994;
  if (!S_ISREG(s.st_mode) || f.f_type != kTmpfs) return "it is no file in memory";
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return "it is not sealed";
  if ((seals & F_SEAL_WRITE) != 0 || (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) return "it cannot be written";
  if (static_cast<uint64_t>(s.st_size) != bytes)
    return "expected " + std::to_string(bytes) + " bytes, saw " + std::to_string(s.st_size);
  if (static_cast<uint64_t>(s.st_blocks) * 512 < bytes)
    return "it has holes: " + std::to_string(s.st_blocks * 512) + " of " + std::to_string(bytes) + " bytes are there";
  return "";
}

bool same_file(int a, int b) {
  struct stat x{}, y{};
  return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

std::byte* map_shared(int fd, size_t bytes, std::byte* at) {
  const bool given = at != nullptr;
  if (!given && bytes >= kHuge) {  // reserve a place on a huge page boundary first
    std::byte* const raw = map_raw(bytes + kHuge);
    if (raw == nullptr) return nullptr;
    const size_t skip = (kHuge - reinterpret_cast<uintptr_t>(raw) % kHuge) % kHuge;
    if (skip != 0) munmap(raw, skip);
    if (skip != kHuge) munmap(raw + skip + bytes, kHuge - skip);
    at = raw + skip;
  }
  const int flags = MAP_SHARED | (at != nullptr ? MAP_FIXED : 0);
  void* const p = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (p == MAP_FAILED) {
    if (at != nullptr && !given) munmap(at, bytes);
    return nullptr;
  }
  if (bytes >= kHuge) madvise(p, bytes / kHuge * kHuge, kCollapse);  // advice: without it everything works, only slower
  return static_cast<std::byte*>(p);
}

bool make_private(int fd, std::byte* p, size_t bytes) {
  if (mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) == MAP_FAILED) return false;
  // Writing to a page makes it private. An atomic or with 0 keeps the contents, so that no other thread's write is
  // lost.
  for (size_t at = 0; at < bytes; at += 4096) {
    std::atomic_ref<unsigned char>(*reinterpret_cast<unsigned char*>(p + at)).fetch_or(0, std::memory_order_relaxed);
  }
  return true;
}

bool stops_within(const char* name) {
  static const std::string set = [] {
    const char* text = std::getenv("WINDLASS_STOP");
    return std::string(text != nullptr ? text : "");
  }();
  if (set.empty()) return false;
  static std::atomic<int> count{0};
  const size_t colon = set.find(':');
  return set.compare(0, colon, name) == 0 && colon != std::string::npos && ++count == std::stoi(set.substr(colon + 1));
}

// Signals this very thread, which then does not return before the process continues.
void stop_process() { syscall(SYS_tgkill, getpid(), gettid(), SIGSTOP); }

void unmap_shared(std::byte* p, size_t bytes) {
  if (p != nullptr) munmap(p, bytes);
}

void close_file(int fd) {
  if (fd >= 0) close(fd);
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

void set_up_socket(int fd, int stall_ms) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  const timeval stall{stall_ms / 1000, stall_ms % 1000 * 1000};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &stall, sizeof stall);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &stall, sizeof stall);
  if (same_host(fd)) {
    const int bytes = 1 << 20;  // the default makes both ends wake each other twice as often
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    return;
  }
  const int on = 1;
  const unsigned dead_ms = static_cast<unsigned>(stall_ms);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &dead_ms, sizeof dead_ms);
}

bool same_host(int fd) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&name), &bytes) == 0 && name.ss_family == AF_UNIX;
}

bool hung_up(int fd) {
  pollfd polled{fd, POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0;
}

std::string failure_of(int fd) {
  int error = 0;
  socklen_t bytes = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0 || error == 0) return "the peer closed the connection";
  char text[128];
  return strerror_r(error, text, sizeof text);
}

long send_pieces(int fd, const Piece* pieces, size_t n, bool wait, int file) {
  msghdr m = message_of(pieces, n);
  alignas(cmsghdr) char beside[CMSG_SPACE(sizeof file)] = {};
  if (file >= 0) {
    m.msg_control = beside;
    m.msg_controllen = sizeof beside;
    cmsghdr* const c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(c), &file, sizeof file);
  }
  return outcome(sendmsg(fd, &m, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT)));
}

long receive_pieces(int fd, const Piece* pieces, size_t n, bool wait, Files* files) {
  msghdr m = message_of(pieces, n);
  alignas(cmsghdr) char beside[CMSG_SPACE(sizeof(int) * Files::kMost)];
  if (files != nullptr) {
    m.msg_control = beside;
    m.msg_controllen = sizeof beside;
  }
  if (wait && files != nullptr) {
    // A thread asleep in recvmsg() on a Unix socket also wakes when the peer reads; one asleep in ppoll() does not.
    pollfd readable{fd, POLLIN, 0};
    timeval stall{};
    socklen_t bytes = sizeof stall;
    getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &stall, &bytes);
    const timespec ts{stall.tv_sec, stall.tv_usec * 1000};
    if (ppoll(&readable, 1, &ts, nullptr) == 0) return kWouldBlock;
  }
  const long got = outcome(recvmsg(fd, &m, MSG_CMSG_CLOEXEC | (wait ? 0 : MSG_DONTWAIT)));
  if (files == nullptr || got <= 0) return got;
  if ((m.msg_flags & MSG_CTRUNC) != 0) files->lost = true;
  for (cmsghdr* c = CMSG_FIRSTHDR(&m); c != nullptr; c = CMSG_NXTHDR(&m, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= c->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(c) + at, sizeof file);
      if (files->n < Files::kMost) {
        files->fds[files->n++] = file;
      } else {
        files->lost = true;
        close(file);
      }
    }
  }
  return got;
}

long receive(int fd, void* to, size_t bytes, bool wait) {
  return outcome(recv(fd, to, bytes, wait ? MSG_WAITALL : MSG_DONTWAIT));
}

void shut_down(int fd) { shutdown(fd, SHUT_RDWR); }

void close_socket(int fd) {
  close_after_fork(fd, false);
  close(fd);
}

void poll(Polled* sockets, size_t n, int64_t timeout_ns) {
  static thread_local std::vector<pollfd> all;
  all.resize(n);
  for (size_t i = 0; i < n; ++i) {
    all[i] = {sockets[i].fd, static_cast<short>(POLLIN | (sockets[i].writing ? POLLOUT : 0)), 0};
  }
  const int64_t left = std::max<int64_t>(timeout_ns, 0);
  const timespec ts{left / 1'000'000'000, left % 1'000'000'000};
  const int ready = ppoll(all.data(), n, &ts, nullptr);
  for (size_t i = 0; i < n; ++i) sockets[i].ready = ready > 0 && all[i].revents != 0;
}

Watch::Watch() : epoll_(epoll_create1(EPOLL_CLOEXEC)), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  close_after_fork(epoll_, true);
  close_after_fork(event_, true);
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.u64 = ~uint64_t{0};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, event_, &e);
}

Watch::~Watch() {
  close_socket(event_);
  close_socket(epoll_);
}

void Watch::add(int fd, uint64_t tag) {
  epoll_event e{};
  e.data.u64 = tag;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e);
}

void Watch::change(int fd, uint64_t tag, bool reading, bool writing) {
  epoll_event e{};
  e.events = (reading ? EPOLLIN : 0u) | (writing ? EPOLLOUT : 0u);
  e.data.u64 = tag;
  if (e.events == 0) e.events = EPOLLET;  // else a closed peer would be reported again and again
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &e);
}

void Watch::remove(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

void Watch::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_, &one, sizeof one);
}

size_t Watch::wait(uint64_t* tags, size_t most, int64_t timeout_ns) {
  constexpr size_t kMany = 64;
  epoll_event events[kMany];
  const int ms = timeout_ns < 0 ? -1 : static_cast<int>(std::min<int64_t>((timeout_ns + 999'999) / 1'000'000, 1 << 30));
  const int n = epoll_wait(epoll_, events, static_cast<int>(std::min(most, kMany)), ms);
  size_t ready = 0;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == ~uint64_t{0}) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(event_, &count, sizeof count);
    } else {
      tags[ready++] = events[i].data.u64;
    }
  }
  return ready;
}

void close_after_fork(int fd, bool on) {
  for (std::atomic<int>& slot : g_closed_after_fork) {
    int seen = on ? 0 : fd + 1;
    if (slot.compare_exchange_strong(seen, on ? fd + 1 : 0, std::memory_order_relaxed)) return;
  }
}

uint32_t fork_generation() { return g_fork_generation.load(std::memory_order_relaxed); }

}  // namespace windlass::os
