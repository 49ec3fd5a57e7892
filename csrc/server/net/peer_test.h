// What the tests of a host share: frames made by hand, and a client that sends them over a socketpair and reads what
// comes back, byte by byte and without any of the client's own code.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/os.h"
#include "base/test.h"
#include "server/host.h"
#include "wire/frame.h"

namespace windlass::test {

inline constexpr int64_t kMsNs = 1'000'000;
inline int64_t after_ms(int64_t ms) { return os::now_ns() + ms * kMsNs; }

// Memory of this process that is really there.
inline int64_t resident_bytes() {
  std::FILE* const f = std::fopen("/proc/self/statm", "r");
  if (f == nullptr) return 0;
  long long total = 0, resident = 0;
  const int n = std::fscanf(f, "%lld %lld", &total, &resident);
  std::fclose(f);
  return n == 2 ? resident * int64_t{sysconf(_SC_PAGESIZE)} : 0;
}

// Looks until it is so, for ten seconds at most.
inline bool eventually(const std::function<bool()>& so) {
  for (const int64_t end = after_ms(kSanitized ? 30'000 : 10'000); os::now_ns() < end;) {
    if (so()) return true;
    usleep(200);
  }
  return so();
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}
template <class T>
std::vector<T> values_of(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// A block of one entry, or of several where `more` has the others. In an answer `shard` is the block's label.
struct FramePart {
  struct Head {
    uint32_t shard = 0, term = 0;
    uint64_t sequence = 0, clock = 0;
    uint32_t items = 0;
    uint64_t value = 0;
    uint16_t flags = 0;
    uint8_t status = 0;
    uint32_t numbers_crc = 0;
  };
  Head part;
  std::string items, numbers;  // items and argument; of an answer its body, its message, or how long it waited
  std::vector<wire::EntryItem> more;
  // Of an answer: what was not like the rest, and the values.
  std::vector<std::pair<wire::Exception, std::string>> exceptions;
  std::vector<uint64_t> values;
  // Within a step: what it is about.
  struct About {
    uint8_t op = 0, dtype_in = 0, dtype_out = 0;
    uint32_t object = 0;
    std::vector<double> hyper;
    std::optional<wire::Places> places;
    uint8_t hypers_claimed = 0;  // if not as many as there are
  };
  std::optional<About> about;

  Code code() const { return static_cast<Code>(part.status); }
  // As a client sees it.
  Status status() const { return part.status == 0 ? Status() : Status(code(), items); }
};

// A frame and what its blocks are about, unless they say so themselves.
struct FrameHead : wire::Header {
  uint32_t object = 0;
  uint8_t dtype_in = 0, dtype_out = 0;
};

struct Frame {
  FrameHead header;
  std::vector<double> hyper;
  std::optional<wire::Places> places;
  std::vector<FramePart> parts;

  FramePart::About about(const FramePart& p) const {
    if (p.about) return *p.about;
    return {header.op, header.dtype_in, header.dtype_out, header.object, hyper, places};
  }
  // The frame as it travels: lengths and checksums are filled in.
  std::string bytes() const {
    constexpr size_t kSection = limits::kSectionBytes;
    std::string out(kSection, '\0');
    wire::Header h = header;
    if (h.operation() != wire::Op::kStep && !wire::is_control(h.operation()) && h.operation() <= kLastOp)
      h.op = static_cast<uint8_t>(wire::Op::kStep) | (h.op & wire::kAnswer);
    h.blocks = static_cast<uint32_t>(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      const FramePart& p = parts[i];
      const FramePart::About about = this->about(p);
      const bool as_before = i != 0 && !p.about;
      wire::Block block;
      block.label = p.about ? static_cast<uint32_t>(i) : p.part.shard;
      block.object = about.object;
      block.op = about.op & static_cast<uint8_t>(~wire::kAnswer);
      block.dtype_in = about.dtype_in;
      block.dtype_out = about.dtype_out;
      block.flags = p.part.flags;
      block.entries = static_cast<uint16_t>(1 + p.more.size());
      if (wire::is_control(block.operation()) || block.operation() == wire::Op::kTick) block.entries = 0;
      block.clock = p.part.clock;
      block.term = p.part.term;
      block.shard = p.part.shard;
      block.sequence = p.part.sequence;
      block.items = p.part.items;
      std::string body;
      const auto put = [&](const auto& value) { body.append(reinterpret_cast<const char*>(&value), sizeof value); };
      if (header.answer()) {
        block.set_value(p.part.value);
        block.items = static_cast<uint32_t>(p.exceptions.size()) + (p.part.status != 0 ? 1 : 0);
        if (!p.values.empty()) block.flags |= wire::kHasValues;
        for (const uint64_t value : p.values) put(value);
        if (p.part.status != 0) {
          put(wire::Exception{wire::Exception::kAll, p.part.status, 0, 0, p.part.term,
                              static_cast<uint32_t>(p.items.size()), p.part.value});
          body += p.items;
          body.resize((body.size() + 7) & ~size_t{7});
        }
        for (const auto& [exception, message] : p.exceptions) {
          put(exception);
          body += message;
          body.resize((body.size() + 7) & ~size_t{7});
        }
        if (p.part.status == 0) body += p.items;
      } else {
        if (p.part.value != 0) {
          block.flags |= wire::kHasValue;
          put(p.part.value);
        }
        if (as_before) {
          block.flags |= wire::kAsBefore;
        } else {
          if (about.places) {
            block.flags |= wire::kHasPlaces;
            put(*about.places);
          }
          block.hypers = about.hypers_claimed != 0 ? about.hypers_claimed : static_cast<uint8_t>(about.hyper.size());
          for (const double value : about.hyper) put(value);
        }
        for (const wire::EntryItem& entry : p.more) put(entry);
        body += p.items;
      }
      block.body_bytes = static_cast<uint32_t>(body.size());
      block.numbers_bytes = static_cast<uint32_t>(p.numbers.size());
      block.body_crc = body.empty() ? 0 : crc32c(body.data(), body.size());
      const bool summed = (h.flags & wire::kChecksummed) != 0 && !p.numbers.empty();
      block.numbers_crc = summed ? crc32c(p.numbers.data(), p.numbers.size()) : 0;
      const size_t at = out.size();
      out.resize(at + kSection);
      wire::encode(block, reinterpret_cast<std::byte*>(&out[at]));
      out += body;
      out.resize(wire::padded(out.size()));
      out += p.numbers;
      out.resize(wire::padded(out.size()));
    }
    h.length = out.size() - kSection;
    wire::encode(h, reinterpret_cast<std::byte*>(out.data()));
    return out;
  }

 private:
  static constexpr auto kLastOp = static_cast<wire::Op>(wire::kOpMax);
};

// A block that came, taken apart.
inline FramePart part_of(const wire::Header& header, const wire::Block& block, const std::string& body,
                         std::string numbers) {
  FramePart p;
  p.part.shard = header.answer() ? block.label : block.shard;
  p.part.numbers_crc = block.numbers_crc;
  p.part.sequence = block.sequence;
  p.part.clock = block.clock;
  p.part.flags = block.flags;
  p.numbers = std::move(numbers);
  if (!header.answer()) {
    wire::Body read;
    p.part.term = block.term;
    p.part.items = block.items;
    p.about = FramePart::About{block.op, block.dtype_in, block.dtype_out, block.object, {}, {}};
    if (!wire::read(block, reinterpret_cast<const std::byte*>(body.data()), &read).ok()) return p;
    p.part.value = read.value;
    for (uint32_t i = 1; i < block.entries; ++i) p.more.push_back(read.at(block, i));
    p.items.assign(reinterpret_cast<const char*>(read.rest), read.rest_bytes);
    return p;
  }
  p.part.flags = 0;
  p.part.value = block.value();
  wire::Reader r(body);
  if (block.has(wire::kWaited)) p.items = r.get_bytes(sizeof(wire::Waited));
  for (uint32_t i = 0; block.has(wire::kHasValues) && i < block.entries; ++i) p.values.push_back(r.get<uint64_t>());
  for (uint32_t i = 0; i < block.items && r.ok(); ++i) {
    const auto e = r.get<wire::Exception>();
    std::string message = r.get_bytes(e.message_bytes);
    (void)r.get_bytes(-message.size() & 7);
    if (e.entry == 0 || e.entry == wire::Exception::kAll) {
      p.part.status = e.status;
      p.part.flags = e.flags;
      p.part.term = e.term;
      p.part.value = e.value;
      if (e.status != 0) p.items = message;
    }
    p.exceptions.emplace_back(e, std::move(message));
  }
  if (r.left() != 0) p.items = r.get_bytes(r.left());
  p.part.items = static_cast<uint32_t>(p.items.size() / sizeof(uint64_t));
  return p;
}

inline Frame frame_of(wire::Op op, uint32_t object = 0) {
  Frame f;
  f.header.op = static_cast<uint8_t>(op);
  f.header.object = object;
  return f;
}
inline Frame with_body(wire::Op op, std::string body) {
  Frame f = frame_of(op);
  f.parts.emplace_back().items = std::move(body);
  return f;
}

// One end of a stream of frames.
class Stream {
 public:
  Stream() = default;
  explicit Stream(int fd) : fd_(fd) {}
  Stream(Stream&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Stream& operator=(Stream&& o) noexcept {
    close();
    fd_ = std::exchange(o.fd_, -1);
    return *this;
  }
  ~Stream() { close(); }

  int fd() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  void end_sending() { shutdown(fd_, SHUT_WR); }
  // False when the other end is gone or does not read.
  bool send(const std::string& bytes, int timeout_ms = 20'000) {
    for (size_t at = 0; at < bytes.size();) {
      pollfd p{fd_, POLLOUT, 0};
      if (poll(&p, 1, timeout_ms) <= 0) return false;
      const ssize_t n = ::send(fd_, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
      at += n > 0 ? static_cast<size_t>(n) : 0;
    }
    return true;
  }
  // Exactly so many bytes; false when the stream ends first or nothing comes.
  bool receive(void* to, size_t bytes, int timeout_ms = 20'000) {
    auto* at = static_cast<char*>(to);
    while (bytes != 0) {
      pollfd p{fd_, POLLIN, 0};
      if (poll(&p, 1, timeout_ms) <= 0) return false;
      const ssize_t n = recv(fd_, at, bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (n <= 0) return false;
      at += n;
      bytes -= static_cast<size_t>(n);
    }
    return true;
  }
  // The next frame, every checksum of which must be right; false when the stream ends or nothing comes.
  bool receive(Frame* frame, int timeout_ms = 20'000) {
    std::byte head[limits::kSectionBytes];
    if (!receive(head, sizeof head, timeout_ms)) return false;
    *frame = {};
    CHECK_OK(wire::decode(head, &frame->header));
    uint64_t left = frame->header.length;
    for (uint32_t i = 0; i < frame->header.blocks; ++i) {
      wire::Block block;
      std::string body, numbers;
      if (!receive(head, sizeof head)) return false;
      CHECK_OK(wire::decode(head, &block));
      CHECK(left >= sizeof head + block.bytes());
      left -= sizeof head + block.bytes();
      if (!receive_padded(block.body_bytes, &body)) return false;
      if (!receive_padded(block.numbers_bytes, &numbers)) return false;
      if (!body.empty()) CHECK_EQ(crc32c(body.data(), body.size()), block.body_crc);
      if (!numbers.empty() && (frame->header.flags & wire::kChecksummed) != 0)
        CHECK_EQ(crc32c(numbers.data(), numbers.size()), block.numbers_crc);
      frame->parts.push_back(part_of(frame->header, block, body, std::move(numbers)));
    }
    CHECK_EQ(left, 0u);
    return true;
  }
  bool quiet(int ms) const {  // nothing comes
    pollfd p{fd_, POLLIN, 0};
    return poll(&p, 1, ms) == 0;
  }
  // The other end has closed, whatever it said before.
  bool ended(int timeout_ms = 20'000) {
    char bytes[1 << 16];
    for (;;) {
      pollfd p{fd_, POLLIN, 0};
      if (poll(&p, 1, timeout_ms) <= 0) return false;
      const ssize_t n = recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (n <= 0) return true;
    }
  }

 private:
  bool receive_padded(uint64_t bytes, std::string* text) {
    text->resize(wire::padded(bytes));
    if (!receive(text->data(), text->size())) return false;
    for (size_t i = bytes; i < text->size(); ++i) CHECK_EQ((*text)[i], 0);
    text->resize(bytes);
    return true;
  }

  int fd_ = -1;
};

struct SocketPair {
  SocketPair() {
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ours = fds[0];
    theirs = fds[1];
  }
  int ours, theirs;
};

inline Hello hello_as(uint8_t lane = 0, const std::string& app = "app", std::vector<std::string> servers = {"here:1"},
                      uint32_t index = 0) {
  Hello hello;
  hello.lane = lane;
  hello.app = app;
  hello.servers = std::move(servers);
  hello.index = index;
  return hello;
}

// A client on a connection of its own.
class Peer : public Stream {
 public:
  Peer(Host& host, const std::string& key, uint64_t session = 0) : Stream(connect(host, key)) {
    this->session = session != 0 ? session : os::random_u64();
  }
  // One that has said hello.
  static Peer greeted(Host& host, const std::string& key, uint64_t session = 0, const Hello& hello = hello_as()) {
    Peer peer(host, key, session);
    CHECK_OK(peer.hello(hello));
    return peer;
  }

  Status hello(const Hello& hello) {
    const std::vector<FramePart> answer = call(with_body(wire::Op::kHello, encode(hello)));
    if (answer.size() != 1) return Status(Code::kInternal, "no answer to hello");
    if (answer[0].part.status != 0) return answer[0].status();
    Welcome welcome;
    WL_RETURN_IF_ERROR(decode(answer[0].items, &welcome));
    app = welcome.app;
    incarnation = welcome.incarnation;
    return {};
  }

  // Sends the frame under the next request, or the one it has, and returns that.
  uint64_t start(Frame frame) {
    stamp(&frame);
    CHECK(send(frame.bytes()));
    return frame.header.request;
  }
  void stamp(Frame* frame) {
    if (frame->header.request == 0) frame->header.request = next_request++;
    if (frame->header.session == 0) frame->header.session = session;
    if (frame->header.app == 0) frame->header.app = app;
  }
  // The parts of its answer by shard; fewer when the stream has ended or nothing comes.
  std::vector<FramePart> finish(uint64_t request, size_t parts, int timeout_ms = 20'000) {
    std::vector<FramePart>& got = answers_[request];
    while (got.size() < parts) {
      Frame frame;
      if (!receive(&frame, timeout_ms)) break;
      CHECK(frame.header.answer());
      for (FramePart& part : frame.parts) answers_[frame.header.request].push_back(std::move(part));
      last_op = frame.header.op;
    }
    std::vector<FramePart> out = std::move(got);
    answers_.erase(request);
    return out;
  }
  std::vector<FramePart> call(const Frame& frame) {
    const uint64_t request = start(frame);
    return finish(request, std::max<size_t>(frame.parts.size(), 1));
  }
  FramePart call_one(const Frame& frame) {
    std::vector<FramePart> parts = call(frame);
    if (parts.size() != 1) {
      fail(__FILE__, __LINE__, "expected one part, saw " + std::to_string(parts.size()));
      parts.resize(1);
    }
    return parts[0];
  }
  // The answer about the connection itself that a broken rule gets, and then its end.
  Status thrown_out() {
    const std::vector<FramePart> said = finish(0, 1);
    const bool gone = ended();
    CHECK(gone);
    return said.size() == 1 ? said[0].status() : Status();
  }

  Status open(const ObjectSpec& spec, Map* map) {
    wire::Writer w;
    encode(spec, &w);
    const FramePart answer = call_one(with_body(wire::Op::kOpen, w.take()));
    if (answer.part.status != 0) return answer.status();
    wire::Reader r(answer.items);
    return decode(&r, map);
  }
  Status attach(const ObjectSpec& spec, const Map& map) {
    wire::Writer w;
    encode(map, &w);
    encode(spec, &w);
    return call_one(with_body(wire::Op::kAttach, w.take())).status();
  }
  Status remove(const ObjectSpec& spec, const Map& map) {
    wire::Writer w;
    encode(map, &w);
    encode(spec, &w);
    return call_one(with_body(wire::Op::kDelete, w.take())).status();
  }
  Map made(const ObjectSpec& spec) {
    Map map;
    CHECK_OK(open(spec, &map));
    CHECK_OK(attach(spec, map));
    return map;
  }
  // The sum over all shards, as TensorClient has it, without the name.
  uint64_t fingerprint(const Map& map, uint32_t shards) {
    Frame f = frame_of(wire::Op::kFingerprint, map.object);
    for (uint32_t s = 0; s < shards; ++s) {
      FramePart& p = f.parts.emplace_back();
      p.part.shard = s;
      p.part.term = map.run_of(s).term;
    }
    uint64_t sum = 0;
    const std::vector<FramePart> parts = call(f);
    CHECK_EQ(parts.size(), shards);
    for (const FramePart& p : parts) {
      CHECK_OK(p.status());
      sum += p.part.value;
    }
    return sum;
  }

  uint64_t session = 0, incarnation = 0, next_request = 2;
  uint32_t app = 0;
  uint8_t last_op = 0;

 private:
  static int connect(Host& host, const std::string& key) {
    const SocketPair pair;
    CHECK_OK(host.adopt(pair.theirs, "test", key));
    return pair.ours;
  }
  std::map<uint64_t, std::vector<FramePart>> answers_;
};

inline ObjectSpec a_tensor(const std::string& name, std::vector<uint64_t> shape, Dtype dtype = Dtype::kFloat32,
                           RuleKind rule = RuleKind::kSum) {
  ObjectSpec spec;
  spec.name = "app/" + name;
  spec.tensor.shape = std::move(shape);
  spec.tensor.dtype = dtype;
  spec.tensor.rule.kind = rule;
  return spec;
}

inline ObjectSpec a_table(const std::string& name, uint32_t dim, RuleKind rule = RuleKind::kSum) {
  ObjectSpec spec;
  spec.name = "app/" + name;
  spec.is_table = true;
  spec.table.dim = dim;
  spec.table.rule.kind = rule;
  return spec;
}

// A push, pull, ... of one part.
inline Frame about(wire::Op op, const Map& map, uint32_t shard, uint64_t sequence, std::string items = "",
                   std::string numbers = "", uint16_t flags = 0, Dtype dtype = Dtype::kFloat32) {
  Frame f = frame_of(op, map.object);
  f.header.dtype_in = f.header.dtype_out = static_cast<uint8_t>(dtype);
  FramePart p;
  p.part.shard = shard;
  p.part.term = map.runs.empty() ? 1 : map.run_of(shard).term;
  p.part.sequence = sequence;
  p.part.flags = flags;
  p.items = std::move(items);
  p.numbers = std::move(numbers);
  f.parts.push_back(std::move(p));
  return f;
}
inline Frame on_whole(wire::Op op, const Map& map, uint32_t shard, uint64_t sequence, std::string numbers = "",
                      Dtype dtype = Dtype::kFloat32) {
  return about(op, map, shard, sequence, "", std::move(numbers), wire::kWhole, dtype);
}
inline Frame on_spans(wire::Op op, const Map& map, uint32_t shard, uint64_t sequence,
                      const std::vector<uint64_t>& first_and_count, std::string numbers = "",
                      Dtype dtype = Dtype::kFloat32) {
  Frame f = about(op, map, shard, sequence, bytes_of(first_and_count), std::move(numbers), 0, dtype);
  f.parts[0].part.items = static_cast<uint32_t>(first_and_count.size() / 2);
  return f;
}
inline Frame on_keys(wire::Op op, const Map& map, uint32_t shard, uint64_t sequence, const std::vector<uint64_t>& keys,
                     std::string numbers = "", uint16_t flags = 0) {
  Frame f = about(op, map, shard, sequence, bytes_of(keys), std::move(numbers), flags);
  f.parts[0].part.items = static_cast<uint32_t>(keys.size());
  return f;
}

// Requests of one part each, as a step.
inline Frame in_step(const std::vector<Frame>& requests, std::vector<double> hyper = {}) {
  Frame step = frame_of(wire::Op::kStep);
  for (const Frame& f : requests) {
    FramePart p = f.parts[0];
    p.about = f.about(p);
    if (!hyper.empty()) p.about->hyper = hyper;
    step.parts.push_back(std::move(p));
  }
  return step;
}

// A frame as it travels, with some of its header or of its first block changed, and the checksums to fit.
template <class F>
void change_header(std::string* bytes, F change) {
  wire::Header h;
  std::memcpy(&h, bytes->data(), sizeof h);
  change(&h);
  wire::encode(h, reinterpret_cast<std::byte*>(bytes->data()));
}
template <class F>
void change_block(std::string* bytes, F change) {
  wire::Block b;
  std::memcpy(&b, bytes->data() + limits::kSectionBytes, sizeof b);
  change(&b);
  wire::encode(b, reinterpret_cast<std::byte*>(bytes->data()) + limits::kSectionBytes);
}

// Some keys of one shard, always the same.
inline std::vector<uint64_t> keys_in(uint32_t shard, size_t n) {
  std::vector<uint64_t> keys;
  for (size_t i = 0; i < n; ++i) keys.push_back(key_of(shard, mix(i + 1)));
  return keys;
}

}  // namespace windlass::test
