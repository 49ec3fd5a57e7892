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

// Memory that other processes can be given: a file without a name, all of whose bytes are there and whose size nobody
// can change. bytes: a multiple of 4096. -1 when there is none, and *why says why.
int make_shared_file(size_t bytes, std::string* why);
// Ok when a file that came from elsewhere is like that, as large as it is said to be; else why not.
std::string complaint_about_shared_file(int fd, uint64_t bytes);
bool same_file(int a, int b);
// Maps it for reading and writing, on huge pages where they can be had. `at`: over what is mapped there, else anywhere.
// Makes a shared mapping this process's own, with the contents it has, whoever else writes the file from now on. Other
// threads may use the memory meanwhile.
bool make_private(int fd, std::byte* p, size_t bytes);
// For tests: WINDLASS_STOP=NAME:N stops the process in the middle of the Nth thing of that name that it does.
bool stops_within(const char* name);
void stop_process();
std::byte* map_shared(int fd, size_t bytes, std::byte* at = nullptr);
void unmap_shared(std::byte* p, size_t bytes);
void close_file(int fd);

// Blocks while *word == expected, until a wake or until `timeout_ns` have passed (< 0: no limit). May return early.
void wait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
void wake_all(const std::atomic<uint32_t>& word);

int64_t now_ns();       // monotonic
uint64_t random_u64();  // from the kernel: for incarnations, never for numbers that must repeat
int cores();            // that this process may run on

// Sockets that are connected. Python makes them; here they are used and closed.
struct Piece {  // laid out as the kernel's iovec
  void* data;
  size_t bytes;
};
inline constexpr long kWouldBlock = 0;  // nothing could be done without waiting
inline constexpr long kBroken = -1;     // the peer closed, or the connection failed

void set_up_socket(int fd, int stall_ms);  // no delay, and no blocking call longer than that
bool same_host(int fd);                    // a Unix socket
std::string failure_of(int fd);            // why a socket is broken, in words
// Files that came beside the bytes of a Unix socket, and are ours to close. More than fit are closed, and `lost` is
// set.
struct Files {
  static constexpr size_t kMost = 4;
  int fds[kMost] = {-1, -1, -1, -1};
  size_t n = 0;
  bool lost = false;
};
// At least one byte, or one of the above. `wait`: kWouldBlock only when stall_ms have passed. `file`: travels beside
// the first byte.
long send_pieces(int fd, const Piece* pieces, size_t n, bool wait, int file = -1);
long receive_pieces(int fd, const Piece* pieces, size_t n, bool wait, Files* files = nullptr);
// With `wait`, all bytes unless the connection ends or stalls.
long receive(int fd, void* to, size_t bytes, bool wait);
void shut_down(int fd);  // wakes who waits on it
void close_socket(int fd);

// Waits until one of the sockets can be read (or written, where asked), or for timeout_ns. Sets `ready`.
struct Polled {
  int fd;
  bool writing;
  bool ready;
};
void poll(Polled* sockets, size_t n, int64_t timeout_ns);

// A set of sockets that one thread watches; a wake-up from any thread.
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
  // The tags of those that are ready; returns how many. A wake-up ends the wait.
  size_t wait(uint64_t* tags, size_t most, int64_t timeout_ns);

 private:
  int epoll_, event_;
};

// Closed in the child of a fork, which must not keep the parent's connections alive.
void close_after_fork(int fd, bool on);

// Goes up by one in the child of every fork; who remembers another number is a copy made by a fork.
uint32_t fork_generation();

}  // namespace windlass::os
