// What the tests of connections share: clients that are joined to hosts in the same process, and a relay between them
// through whose hands every frame passes.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "client/client_test.h"
#include "client/net/links.h"
#include "server/net/peer_test.h"

namespace windlass::test {

// Passes frames on between pairs of sockets, in one thread.
class Relay {
 public:
  struct Passing {
    const bool answer;  // from the host to the client
    std::string& held;  // frames of this direction that were kept back; the hands' own
    bool cut = false;   // set: the connection ends behind what is passed on
  };
  // What becomes of a frame: the bytes that go on in its place.
  using Hands = std::function<std::string(Passing&, std::string frame)>;

  explicit Relay(Hands hands) : hands_(std::move(hands)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    thread_ = std::thread([this] { run(); });
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  ~Relay() {
    stop_ = true;
    wake();
    thread_.join();
    for (const auto& pair : pairs_) pair->close();
    ::close(wake_);
  }

  void add(int to_client, int to_host) {
    auto pair = std::make_unique<Pair>();
    pair->fd[0] = to_client;
    pair->fd[1] = to_host;
    for (const int fd : pair->fd) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    {
      std::lock_guard lock(mutex_);
      fresh_.push_back(std::move(pair));
    }
    wake();
  }

 private:
  struct Pair {
    int fd[2] = {-1, -1};
    std::string in[2], out[2];  // from, and to, the end
    std::string held[2];        // by hands, from the end
    bool ending = false;        // once all is out
    void close() {
      for (int& f : fd) {
        if (f >= 0) ::close(std::exchange(f, -1));
      }
    }
  };

  void wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof one);
  }
  void run() {
    std::vector<pollfd> polled;
    while (!stop_) {
      polled.assign(1, {wake_, POLLIN, 0});
      for (const auto& pair : pairs_) {
        for (int end = 0; end < 2; ++end) {
          const bool reads = !pair->ending && pair->out[1 - end].size() < kMostBytes;
          polled.push_back(
              {pair->fd[end], static_cast<short>((reads ? POLLIN : 0) | (pair->out[end].empty() ? 0 : POLLOUT)), 0});
        }
      }
      poll(polled.data(), polled.size(), 100);
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t n = ::read(wake_, &count, sizeof count);
      for (size_t i = 0; i < pairs_.size(); ++i) {
        for (int end = 0; end < 2; ++end) move(*pairs_[i], end, polled[1 + 2 * i + end].revents);
      }
      std::erase_if(pairs_, [](const std::unique_ptr<Pair>& p) {
        if (p->fd[0] >= 0 && !(p->ending && p->out[0].empty() && p->out[1].empty())) return false;
        p->close();
        return true;
      });
      std::lock_guard lock(mutex_);
      for (auto& pair : fresh_) pairs_.push_back(std::move(pair));
      fresh_.clear();
    }
    std::lock_guard lock(mutex_);
    for (auto& pair : fresh_) pairs_.push_back(std::move(pair));
  }
  void move(Pair& pair, int end, short events) {
    if (pair.fd[end] < 0) return;
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !pair.ending) {
      char bytes[1 << 16];
      const ssize_t n = ::recv(pair.fd[end], bytes, sizeof bytes, MSG_DONTWAIT);
      if (n > 0) pair.in[end].append(bytes, static_cast<size_t>(n));
      if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) pair.ending = true;
      pass_on(pair, end);
    }
    write(pair, end);
    write(pair, 1 - end);
  }
  void pass_on(Pair& pair, int end) {
    std::string& in = pair.in[end];
    while (in.size() >= limits::kSectionBytes && !pair.ending) {
      wire::Header header;
      std::memcpy(&header, in.data(), sizeof header);
      const size_t bytes = limits::kSectionBytes + header.length;
      if (in.size() < bytes) return;
      Passing passing{end == 1, pair.held[end]};
      pair.out[1 - end] += hands_(passing, in.substr(0, bytes));
      in.erase(0, bytes);
      pair.ending = passing.cut;
    }
  }
  static void write(Pair& pair, int end) {
    std::string& out = pair.out[end];
    while (!out.empty()) {
      const ssize_t n = ::send(pair.fd[end], out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (n <= 0) {
        pair.ending = true;
        out.clear();
        return;
      }
      out.erase(0, static_cast<size_t>(n));
    }
  }

  static constexpr size_t kMostBytes = 4 << 20;
  const Hands hands_;
  const int wake_;
  std::atomic<bool> stop_{false};
  std::vector<std::unique_ptr<Pair>> pairs_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Pair>> fresh_;
  std::thread thread_;
};

// A frame that is as it should be, taken apart.
inline Frame parsed(const std::string& bytes) {
  Frame frame;
  std::memcpy(static_cast<wire::Header*>(&frame.header), bytes.data(), sizeof(wire::Header));
  size_t at = limits::kSectionBytes;
  for (uint32_t i = 0; i < frame.header.blocks; ++i) {
    wire::Block block;
    std::memcpy(&block, bytes.data() + at, sizeof block);
    at += sizeof block;
    const std::string body = bytes.substr(at, block.body_bytes);
    at += wire::padded(block.body_bytes);
    frame.parts.push_back(part_of(frame.header, block, body, bytes.substr(at, block.numbers_bytes)));
    at += wire::padded(block.numbers_bytes);
  }
  return frame;
}
// What a frame does: its own operation, or that of its first block.
inline wire::Op op_of(const std::string& frame) {
  const auto op = static_cast<wire::Op>(static_cast<uint8_t>(frame[5]) & ~wire::kAnswer);
  if (op != wire::Op::kStep || frame.size() < 2 * limits::kSectionBytes) return op;
  return static_cast<wire::Op>(frame[limits::kSectionBytes + 4]);
}

// Hosts in this process, and the list that clients are given.
class Hosts {
 public:
  explicit Hosts(size_t n, int threads = 2, uint64_t memory_bytes_max = ~uint64_t{0}) {
    for (size_t i = 0; i < n; ++i) {
      names.push_back("host" + std::to_string(i) + ":1");
      hosts_.push_back(std::make_unique<Host>(threads, memory_bytes_max));
    }
  }
  Host& operator[](size_t i) { return *hosts_[i]; }
  size_t size() const { return hosts_.size(); }
  std::vector<std::string> names;

 private:
  std::vector<std::unique_ptr<Host>> hosts_;
};

// A worker whose servers are elsewhere: its links, and the thread that dials for them, as Python would.
class Joined : public Worker {
 public:
  explicit Joined(Hosts& hosts, Relay* relay = nullptr, int checksums = -1)
      : Joined(hosts, relay, std::make_shared<Links>(hosts.names, "app", 0, 1, checksums), 0, 1) {}
  Joined(Hosts& hosts, uint32_t rank, uint32_t world_size, Relay* relay = nullptr, bool shares = true)
      : Joined(hosts, relay, std::make_shared<Links>(hosts.names, "app", rank, world_size, -1, shares), rank,
               world_size) {
    CHECK_OK(session->enter(soon()));
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;
  ~Joined() {
    allow_dialing();
    links->stop();
    CHECK(links->ended(soon()));
    dialer_.join();
    std::lock_guard lock(mutex_);
    for (const int fd : fds_) ::close(fd);
  }

  bool ready() { return links->wait_ready(soon()).ok(); }
  // Breaks a connection, the one that was made so long ago.
  void cut(size_t which) {
    std::lock_guard lock(mutex_);
    if (fds_.empty()) return;
    shutdown(fds_[which % fds_.size()], SHUT_RDWR);
  }
  void cut_all() {
    std::lock_guard lock(mutex_);
    for (const int fd : fds_) shutdown(fd, SHUT_RDWR);
  }
  // From now on other hosts are dialled.
  void redirect(Hosts& hosts) {
    std::lock_guard lock(mutex_);
    hosts_ = &hosts;
  }
  // From now on nobody dials.
  void stop_dialing() { dialing_mutex_.lock(), held_ = true; }
  void allow_dialing() {
    if (std::exchange(held_, false)) dialing_mutex_.unlock();
  }

  const std::shared_ptr<Links> links;
  std::atomic<int> dials{0};

 private:
  Joined(Hosts& hosts, Relay* relay, std::shared_ptr<Links> made, uint32_t rank, uint32_t world_size)
      : Worker(std::make_shared<Engine>(made, nullptr), rank, world_size),
        links(std::move(made)),
        hosts_(&hosts),
        relay_(relay) {
    static std::atomic<int> count{0};
    key_ = "client" + std::to_string(++count);
    dialer_ = std::thread([this] {
      Links::Wanted wanted{};
      while (links->need_dial(&wanted)) {
        std::lock_guard lock(dialing_mutex_);
        dial(wanted);
      }
    });
  }
  void dial(const Links::Wanted& wanted) {
    const SocketPair ours;
    int theirs = ours.theirs;
    if (relay_ != nullptr) {
      const SocketPair behind;
      relay_->add(ours.theirs, behind.ours);
      theirs = behind.theirs;
    }
    Hosts* hosts = nullptr;
    {
      std::lock_guard lock(mutex_);
      hosts = hosts_;
      fds_.push_back(fcntl(ours.ours, F_DUPFD_CLOEXEC, 0));
      if (fds_.size() > 2 * limits::kLanes * hosts->size()) {  // long broken
        ::close(fds_.front());
        fds_.erase(fds_.begin());
      }
    }
    ++dials;
    if (const Status status = (*hosts)[wanted.server].adopt(theirs, "test", key_); !status.ok()) {
      ::close(ours.ours);
      return links->lost(wanted.server, Status(Code::kServerLost, status.message()));
    }
    links->attach(wanted, ours.ours);
  }

  Hosts* hosts_;
  Relay* const relay_;
  std::string key_;
  std::mutex mutex_, dialing_mutex_;
  bool held_ = false;
  std::vector<int> fds_;
  std::thread dialer_;
};

}  // namespace windlass::test
