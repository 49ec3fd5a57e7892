#include "bench/wire.h"

#include <errno.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/os.h"
#include "rule/kernels.h"

namespace windlass {
namespace {

constexpr size_t kPieceMax = size_t{1} << 20;  // what is read at once
constexpr size_t kRoundTripMax = 4096;

enum class Op : uint32_t { kPush, kPull, kRoundTrips };

// What the asking end sends first. The other answers with one byte when it is ready, and the clock starts.
struct Command {
  Op op = Op::kPush;
  uint32_t spinning = 0;
  uint64_t bytes = 0;          // of gradient, of weights or of a round trip
  uint64_t request_bytes = 0;  // of a pull
  uint64_t piece_bytes = 0;    // of a push: what is read at once
  uint64_t count = 0;          // of round trips
  char rest[24] = {};
};
static_assert(sizeof(Command) == 64);

Status broken(const char* what) {
  return Status(Code::kInternal, std::string("bare socket: ") + what + ": " + std::strerror(errno));
}

Status send_all(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes != 0) {
    const ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return broken("send");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return {};
}

// At least one byte, at most `most`; 0 bytes when the other end has closed.
Status recv_some(int fd, void* into, size_t most, bool spinning, size_t* got) {
  for (;;) {
    const ssize_t n = recv(fd, into, most, spinning ? MSG_DONTWAIT : 0);
    if (n < 0 && (errno == EINTR || (spinning && errno == EAGAIN))) continue;
    if (n < 0) return broken("recv");
    *got = static_cast<size_t>(n);
    return {};
  }
}

Status recv_all(int fd, void* into, size_t bytes, size_t piece, bool spinning = false) {
  char* at = static_cast<char*>(into);
  while (bytes != 0) {
    size_t got = 0;
    WL_RETURN_IF_ERROR(recv_some(fd, at, std::min(bytes, piece), spinning, &got));
    if (got == 0) return Status(Code::kInternal, "bare socket: the other end has closed");
    at += got;
    bytes -= got;
  }
  return {};
}

// Zeroed pages that go back at the end.
class Pages {
 public:
  Pages() = default;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { os::unmap(data_, bytes_); }

  Status grow(size_t bytes) {  // loses what was there
    if (bytes <= bytes_) return {};
    os::unmap(data_, bytes_);
    data_ = os::map(bytes);
    bytes_ = data_ == nullptr ? 0 : bytes;
    if (data_ == nullptr)
      return Status(Code::kResourceExhausted, "bare socket: no memory for " + std::to_string(bytes) + " bytes");
    std::memset(data_, 0, bytes);  // so that no page is the kernel's shared page of zeros, which costs nothing to read
    return {};
  }
  char* data() { return reinterpret_cast<char*>(data_); }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class Peer {
 public:
  explicit Peer(int fd) : fd_(fd) {}

  Status run() {
    WL_RETURN_IF_ERROR(buffer_.grow(kPieceMax));
    for (;;) {
      Command c;
      size_t got = 0;
      WL_RETURN_IF_ERROR(recv_some(fd_, &c, sizeof c, false, &got));
      if (got == 0) return {};
      WL_RETURN_IF_ERROR(recv_all(fd_, reinterpret_cast<char*>(&c) + got, sizeof c - got, sizeof c));
      if (c.op != Op::kRoundTrips) WL_RETURN_IF_ERROR(weights_.grow(c.bytes));
      WL_RETURN_IF_ERROR(send_all(fd_, "", 1));
      switch (c.op) {
        case Op::kPush: WL_RETURN_IF_ERROR(push(c.bytes, std::min<size_t>(c.piece_bytes, kPieceMax))); break;
        case Op::kPull: WL_RETURN_IF_ERROR(pull(c.bytes, c.request_bytes)); break;
        case Op::kRoundTrips: WL_RETURN_IF_ERROR(round_trips(c)); break;
      }
    }
  }

 private:
  // Applies whole numbers as they come; the bytes of one that is cut go in front of the next piece.
  Status push(size_t bytes, size_t piece) {
    const RuleKernels& sgd = kernels(RuleKind::kSgd);
    const Step step = sgd.prepare(Hyper{{1e-6}}, 1);
    size_t applied = 0, kept = 0;
    while (applied < bytes) {
      size_t got = 0;
      WL_RETURN_IF_ERROR(recv_some(fd_, buffer_.data() + kept, std::min(piece, bytes - applied) - kept, false, &got));
      if (got == 0) return Status(Code::kInternal, "bare socket: the other end has closed");
      const size_t whole = (kept + got) / sizeof(float) * sizeof(float);
      Dense d;
      d.w = weights_.data() + applied;
      d.g = buffer_.data();
      d.n = whole / sizeof(float);
      sgd.dense(step, d);
      applied += whole;
      kept += got - whole;
      std::memmove(buffer_.data(), buffer_.data() + whole, kept);
    }
    return send_all(fd_, "", 1);
  }

  Status pull(size_t bytes, size_t request_bytes) {
    while (request_bytes != 0) {
      const size_t n = std::min(request_bytes, kPieceMax);
      WL_RETURN_IF_ERROR(recv_all(fd_, buffer_.data(), n, n));
      request_bytes -= n;
    }
    return send_all(fd_, weights_.data(), bytes);
  }

  Status round_trips(const Command& c) {
    const size_t bytes = std::min<size_t>(c.bytes, kRoundTripMax);
    for (uint64_t i = 0; i < c.count; ++i) {
      WL_RETURN_IF_ERROR(recv_all(fd_, buffer_.data(), bytes, bytes, c.spinning != 0));
      WL_RETURN_IF_ERROR(send_all(fd_, buffer_.data(), bytes));
    }
    return {};
  }

  const int fd_;
  Pages weights_, buffer_;
};

Status ask(int fd, const Command& c) {
  char ready = 0;
  WL_RETURN_IF_ERROR(send_all(fd, &c, sizeof c));
  return recv_all(fd, &ready, 1, 1);
}

// Seconds of each of `repeats` exchanges; before(), such as an agreement with the other end, is not timed.
template <class Before, class Exchange>
Status each_of(int repeats, std::vector<double>* seconds, Before before, Exchange exchange) {
  if (repeats < 1) return Status(Code::kInvalidArgument, "bare socket: repeats must be at least 1");
  seconds->clear();
  seconds->reserve(static_cast<size_t>(repeats));
  for (int r = 0; r < repeats; ++r) {
    WL_RETURN_IF_ERROR(before());
    const int64_t start = os::now_ns();
    WL_RETURN_IF_ERROR(exchange());
    seconds->push_back(static_cast<double>(os::now_ns() - start) * 1e-9);
  }
  return {};
}

void pause(int64_t ns) {
  const timespec t{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  nanosleep(&t, nullptr);
}

}  // namespace

Status limit_wire_serve(int fd) { return Peer(fd).run(); }

Status limit_wire_push(int fd, const float* g, size_t n, size_t piece_bytes, int repeats,
                       std::vector<double>* seconds) {
  const Command c{.op = Op::kPush, .bytes = n * sizeof(float), .piece_bytes = piece_bytes};
  const auto agree = [&] { return ask(fd, c); };
  return each_of(repeats, seconds, agree, [&]() -> Status {
    char done = 0;
    WL_RETURN_IF_ERROR(send_all(fd, g, c.bytes));
    return recv_all(fd, &done, 1, 1);
  });
}

Status limit_wire_pull(int fd, size_t request_bytes, float* out, size_t n, size_t piece_bytes, int repeats,
                       std::vector<double>* seconds) {
  const Command c{.op = Op::kPull, .bytes = n * sizeof(float), .request_bytes = request_bytes};
  const std::vector<char> request(request_bytes);
  const auto agree = [&] { return ask(fd, c); };
  return each_of(repeats, seconds, agree, [&]() -> Status {
    WL_RETURN_IF_ERROR(send_all(fd, request.data(), request.size()));
    return recv_all(fd, out, c.bytes, piece_bytes);
  });
}

Status limit_wire_expect_round_trips(int fd, size_t bytes, int repeats, bool spinning) {
  if (bytes == 0 || bytes > kRoundTripMax || repeats < 1)
    return Status(Code::kInvalidArgument, "bare socket: round trips are of 1 to 4096 bytes, and at least one");
  const auto trips = static_cast<uint64_t>(repeats);
  return ask(fd, {.op = Op::kRoundTrips, .spinning = spinning, .bytes = bytes, .count = trips});
}

Status limit_wire_round_trips(int fd, size_t bytes, int repeats, bool spinning, int64_t pause_ns,
                              std::vector<double>* seconds) {
  WL_RETURN_IF_ERROR(limit_wire_expect_round_trips(fd, bytes, repeats, spinning));
  std::vector<char> data(bytes);
  const auto rest = [&]() -> Status {
    if (pause_ns > 0) pause(pause_ns);
    return {};
  };
  return each_of(repeats, seconds, rest, [&]() -> Status {
    WL_RETURN_IF_ERROR(send_all(fd, data.data(), bytes));
    return recv_all(fd, data.data(), bytes, bytes, spinning);
  });
}

}  // namespace windlass
