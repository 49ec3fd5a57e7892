// What the core asks of the operating system. The only implementation is os_linux.cc, and no other file makes system
// calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace windlass::os {

// Zeroed memory of at least `bytes`, huge pages advised where it is large enough; nullptr when there is none.
// Starts on a huge page boundary when bytes >= one huge page. unmap() takes what map() was given.
std::byte* map(size_t bytes);
void unmap(std::byte* p, size_t bytes);

// Makes memory that can be shared with other processes: an unnamed file, fully allocated and sealed against resizing.
// bytes: a multiple of 4096. Returns -1 on failure, and *why says why.
int make_shared_file(size_t bytes, std::string* why);
// Checks that a file from a peer is like that and has `bytes` bytes: "" if so, else what is wrong.
std::string complaint_about_shared_file(int fd, uint64_t bytes);
bool same_file(int a, int b);
// Makes a shared mapping private to this process, with its present contents, whoever writes the file from now on. Other
// threads may use the memory meanwhile.
bool make_private(int fd, std::byte* p, size_t bytes);
// For tests: WINDLASS_STOP=NAME:N stops the process within its Nth operation of that name.
bool stops_within(const char* name);
void stop_process();
// Maps a shared file for reading and writing, on huge pages where possible: at `at`, in place of what is there, or
// anywhere.
std::byte* map_shared(int fd, size_t bytes, std::byte* at = nullptr);
void unmap_shared(std::byte* p, size_t bytes);
void close_file(int fd);

// Blocks while *word == expected, until a wake or until `timeout_ns` have passed (< 0: no limit). May return early.
void wait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
void wake_all(const std::atomic<uint32_t>& word);

int64_t now_ns();       // monotonic
uint64_t random_u64();  // from the kernel: for incarnations, never for numbers that must repeat
int cores();            // that this process may run on

// Connected sockets. Python makes them; the core uses and closes them.
struct Piece {  // laid out as the kernel's iovec
  void* data;
  size_t bytes;
};
inline constexpr long kWouldBlock = 0;  // nothing could be done without waiting
inline constexpr long kBroken = -1;     // the peer closed, or the connection failed

void set_up_socket(int fd, int stall_ms);  // no delay, and no call blocks for longer than stall_ms
bool same_host(int fd);                    // a Unix socket
bool hung_up(int fd);                      // closed or shut down, by either end
std::string failure_of(int fd);            // why a socket is broken, in words
// Files that a peer passed over a Unix socket; the receiver closes them. Those beyond kMost are closed at once, and
// `lost` is set.
struct Files {
  static constexpr size_t kMost = 4;
  int fds[kMost] = {-1, -1, -1, -1};
  size_t n = 0;
  bool lost = false;
};
// Return how many bytes, at least one, or kWouldBlock or kBroken. `wait`: kWouldBlock only when stall_ms have passed.
// `file`: passed with the first byte.
long send_pieces(int fd, const Piece* pieces, size_t n, bool wait, int file = -1);
long receive_pieces(int fd, const Piece* pieces, size_t n, bool wait, Files* files = nullptr);
// With `wait`, receives all bytes unless the connection ends or stalls.
long receive(int fd, void* to, size_t bytes, bool wait);
void shut_down(int fd);  // wakes threads that wait on it
void close_socket(int fd);

// Waits until one of the sockets can be read (or written, where asked), or for timeout_ns. Sets `ready`.
struct Polled {
  int fd;
  bool writing;
  bool ready;
};
void poll(Polled* sockets, size_t n, int64_t timeout_ns);

// A set of sockets that one thread waits on; any thread may wake it.
class Watch {
 public:
  Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch();
  void add(int fd, uint64_t tag);  // watched for nothing at first
  void change(int fd, uint64_t tag, bool reading, bool writing);
  void remove(int fd);
  void wake();
  // Writes the tags of ready sockets and returns how many. A wake-up ends the wait.
  size_t wait(uint64_t* tags, size_t most, int64_t timeout_ns);

 private:
  int epoll_, event_;
};

// Marks a file to be closed in the child of a fork, which must not keep the parent's connections alive.
void close_after_fork(int fd, bool on);

// Goes up by one in the child of every fork; an object that remembers another number was copied by a fork.
uint32_t fork_generation();

}  // namespace windlass::os
