#include "server/connection.h"

#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "server/answers.h"

namespace windlass {

using wire::Op;

namespace {

constexpr size_t kSection = limits::kSectionBytes;
constexpr uint64_t kLargeBytes = uint64_t{1} << 20;     // parts from here on count against the staging limit
constexpr size_t kKeptBufferBytes = size_t{16} << 20;   // a thread keeps no more between requests
constexpr size_t kStreamHelpers = 2;                    // one reads while two work; more would wait for the stream
constexpr uint64_t kTwoBytesMax = uint64_t{128} << 10;  // parts up to this are read in pairs
constexpr int64_t kSoonNs = 2 * limits::kSpinNs;
constexpr int64_t kTakeInNsPerKiB = 100;  // what a client may take to receive an answer, and to check it
constexpr int64_t kTakeInNsMax = 200'000;

thread_local Buffer t_in, t_out;      // of the part at hand, and of its answer
thread_local Buffer t_heads, t_rest;  // of answers that are sent from where they lie

Status ended(const char* where) { return Status(Code::kServerLost, std::string("the connection ended ") + where); }

// Runs f with the turn held, and returns when it has run; if another thread has the turn, that one runs it.
template <class F>
void with_turn(Turn& turn, F f) {
  if (turn.try_take()) {
    f();
    turn.release();
    return;
  }
  struct Left final : Job {
    explicit Left(F& of) : f(of) {}
    void run() override {
      f();
      done.store(1, std::memory_order_release);
      os::wake_all(done);
    }
    F& f;
    std::atomic<uint32_t> done{0};
  };
  Left left(f);
  turn.run(left);
  while (left.done.load(std::memory_order_acquire) == 0) os::wait(left.done, 0, -1);
}

}  // namespace

// An order that came before its time, with its own copy of everything.
class ParkedOrder final : public Waiting {
 public:
  static std::unique_ptr<Waiting> make(const std::shared_ptr<Connection>& from, const std::shared_ptr<Hosted>& object,
                                       const Order& order, const Status& checked, uint64_t out_bytes) {
    const uint64_t bytes = order.part.bytes() + sizeof(ParkedOrder);
    if (!from->host_.charge_parked(bytes)) return nullptr;
    std::unique_ptr<ParkedOrder> made(new ParkedOrder(from, object, order, checked, out_bytes, bytes));
    if (!made->copy_bytes()) return nullptr;
    return made;
  }
  ~ParkedOrder() override {
    from_->host_.refund_parked(charged_);
    std::lock_guard lock(from_->parked_mutex_);
    auto& all = from_->parked_;
    if (const auto it = std::find(all.begin(), all.end(), order_.header.request); it != all.end()) all.erase(it);
  }

  // With the turn of its shard.
  void run(Shard& shard) {
    if (!order_.pushes() && os::now_ns() > deadline_ns_)
      checked_ = Status(Code::kTimeout, "came too late for its caller");
    if (checked_.ok() && out_.room(out_bytes_ + 1) == nullptr)
      checked_ =
          Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes_) + " bytes");
    reply_.part.shard = order_.part.shard;
    reply_.part.term = order_.part.term;
    (void)object_->run(order_, shard, checked_, order_.lying != nullptr ? lying_.out : out_.data(), &reply_);
  }
  // Without it.
  void answer() {
    Buffer buffer;
    Answers answers(*from_, order_.header, &buffer);
    std::byte* const to = answers.open(reply_.numbers_bytes);
    if (to == nullptr) return;  // it will be asked again
    if (reply_.numbers_bytes != 0) std::memcpy(to, out_.data(), reply_.numbers_bytes);
    answers.add(reply_);
    answers.flush();
  }
  bool is_from(const Connection* connection) const { return from_.get() == connection; }

 private:
  ParkedOrder(std::shared_ptr<Connection> from, std::shared_ptr<Hosted> object, const Order& order, Status checked,
              uint64_t out_bytes, uint64_t charged)
      : Waiting(order.session, order.pushes() ? order.part.sequence - 1 : order.part.sequence),
        from_(std::move(from)),
        object_(std::move(object)),
        order_(order),
        checked_(std::move(checked)),
        out_bytes_(out_bytes),
        charged_(charged),
        lying_(order.lying != nullptr ? *order.lying : Lying()),
        deadline_ns_(order.header.deadline_ms == 0 ? limits::kNoDeadline
                                                   : os::now_ns() + int64_t{order.header.deadline_ms} * 1'000'000) {
    std::lock_guard lock(from_->parked_mutex_);
    from_->parked_.push_back(order.header.request);
    const std::pair<std::shared_ptr<Hosted>, uint32_t> at(object_, order.part.shard);
    if (std::find(from_->parked_at_.begin(), from_->parked_at_.end(), at) == from_->parked_at_.end())
      from_->parked_at_.push_back(at);
  }

  bool copy_bytes() {
    const size_t bytes = order_.part.bytes();
    std::byte* const to = bytes_.room(bytes + 1);
    if (to == nullptr) return false;
    if (bytes != 0) std::memcpy(to, order_.items, bytes);
    order_.items = to;
    order_.numbers = to + wire::padded(order_.part.items_bytes);
    if (order_.lying == nullptr) return true;
    order_.lying = &lying_;
    order_.numbers = lying_.in;
    return true;
  }

  const std::shared_ptr<Connection> from_;
  const std::shared_ptr<Hosted> object_;
  Order order_;
  Status checked_;
  const uint64_t out_bytes_, charged_;
  const Lying lying_;
  const int64_t deadline_ns_;
  Buffer bytes_, out_;  // mappings of their own: gone when this is, and an answer's only as large as what is written
  Reply reply_;
};

template <class GiveBack>
bool Connection::send_lent(std::vector<os::Piece>* pieces, Buffer* spare, GiveBack give_back) {
  std::unique_lock lock(sending_, std::try_to_lock);
  size_t left = 0, at = 0;
  for (const os::Piece& p : *pieces) left += p.bytes;
  while (lock.owns_lock() && left != 0) {
    long sent = os::send_pieces(fd_, pieces->data() + at, pieces->size() - at, false);
    if (sent <= 0) break;
    sent_bytes_.fetch_add(sent, std::memory_order_relaxed);
    left -= static_cast<size_t>(sent);
    for (; sent > 0; ++at) {
      os::Piece& p = (*pieces)[at];
      const size_t step = std::min(p.bytes, static_cast<size_t>(sent));
      p.data = static_cast<std::byte*>(p.data) + step;
      p.bytes -= step;
      sent -= static_cast<long>(step);
      if (p.bytes != 0) break;
    }
  }
  std::byte* const rest = left != 0 ? spare->room(left) : nullptr;
  if (rest != nullptr) {
    std::byte* to = rest;
    for (; at < pieces->size(); ++at) {
      std::memcpy(to, (*pieces)[at].data, (*pieces)[at].bytes);
      to += (*pieces)[at].bytes;
    }
  }
  give_back();
  if (left == 0) return true;
  if (rest == nullptr) {  // there is no memory, and half a frame is out
    broken_ = true;
    shut_down();
    return false;
  }
  if (!lock.owns_lock()) lock.lock();
  return send_locked(rest, left);
}

// Whole shards that are sent from where they lie, under their turns, several at once: a socket takes a few large
// pieces more quickly than many small ones.
class Lent {
 public:
  Lent(Connection& to, const wire::Header& request) : to_(to), header_(Answers::header_for(request)) {}
  ~Lent() { flush(); }

  // False when the part cannot be answered like this.
  bool add(const Order& order, Hosted& object, Shard& shard) {
    if (!shard.turn.try_take()) return false;
    Reply reply;
    const std::byte* const weights = object.peek(order, shard, &reply);
    std::byte* const heads = weights != nullptr ? t_heads.room((kPartsMax + 1) * kSection) : nullptr;
    if (heads == nullptr) {
      shard.turn.release();
      return false;
    }
    wire::Part& part = reply.part;
    part.shard = order.part.shard;
    part.term = order.part.term;
    part.numbers_bytes = reply.numbers_bytes;
    if ((header_.flags & wire::kChecksummed) != 0) part.numbers_crc = crc32c(weights, reply.numbers_bytes);
    std::byte* const head = heads + (header_.parts + 1) * kSection;
    wire::encode(part, head);
    if (pieces_.empty()) pieces_.push_back({heads, kSection});
    pieces_.push_back({head, kSection});
    pieces_.push_back({const_cast<std::byte*>(weights), reply.numbers_bytes});
    if (const size_t pad = wire::padded(reply.numbers_bytes) - reply.numbers_bytes; pad != 0)
      pieces_.push_back({const_cast<std::byte*>(kZeros), pad});
    header_.length += kSection + wire::padded(reply.numbers_bytes);
    ++header_.parts;
    turns_.push_back(&shard.turn);
    if (header_.parts == kPartsMax || header_.length >= most_) flush();
    return true;
  }
  void flush() {
    if (pieces_.empty()) return;
    wire::encode(header_, t_heads.data());
    to_.send_lent(&pieces_, &t_rest, [this] {
      for (Turn* turn : turns_) turn->release();
    });
    most_ = limits::kSendBytes;
    pieces_.clear();
    turns_.clear();
    header_.length = 0;
    header_.parts = 0;
  }

 private:
  static constexpr size_t kPartsMax = 32;
  static constexpr std::byte kZeros[kSection] = {};
  Connection& to_;
  wire::Header header_;
  // What comes first is small where checksums take their time, so that the client has something to begin with.
  size_t most_ = (header_.flags & wire::kChecksummed) != 0 ? limits::kBulkBytesMin : limits::kSendBytes;
  std::vector<os::Piece> pieces_;
  std::vector<Turn*> turns_;
};

// A request whose parts are being read.
class Incoming final : public Helped {
 public:
  Incoming(std::shared_ptr<Connection> from, const wire::Header& header, uint64_t left_bytes)
      : from_(std::move(from)),
        header_(header),
        object_(from_->host_.find(header.object)),
        left_parts_(header.parts),
        left_bytes_(left_bytes) {}

  static constexpr size_t kAtOnceMax = 16;
  Hyper hyper;
  size_t hypers = 0;
  bool shared = false;  // several threads read its parts
  size_t at_once = 1;   // parts that a thread takes
  Lying lying;          // where the client's arrays are, when they are in arenas
  Status misplaced;     // what is wrong with that

  bool lies() const { return (header_.flags & wire::kInArenas) != 0; }
  void find_arrays(const wire::Places& p) {
    const Arenas& arenas = from_->guest_->arenas;
    if (p.in_arena != 0) misplaced = arenas.find(p.in_arena, p.in_offset, p.in_bytes, &lying.in_mapping);
    if (p.out_arena != 0 && misplaced.ok())
      misplaced = arenas.find(p.out_arena, p.out_offset, p.out_bytes, &lying.out_mapping);
    if (!misplaced.ok()) return;
    if (p.in_arena != 0) {
      lying.in = lying.in_mapping->data() + p.in_offset;
      lying.in_bytes = p.in_bytes;
    }
    if (p.out_arena != 0) {
      lying.out = lying.out_mapping->data() + p.out_offset;
      lying.out_bytes = p.out_bytes;
    }
    lying.base = p.base;
  }

  // About how much there is to do.
  uint64_t work_bytes() const {
    if (lies()) return std::max(lying.in_bytes, lying.out_bytes);
    const bool rows = object_ != nullptr && object_->spec().is_table && header_.operation() == Op::kPull;
    return rows ? header_.length / sizeof(uint64_t) * object_->spec().table.dim * sizeof(float) : header_.length;
  }

  void help() override {
    helpers_.fetch_add(1, std::memory_order_acq_rel);
    {
      Answers answers(*from_, header_, &t_out);
      Lent lent(*from_, header_);
      Batch batch;
      for (;;) {
        if (!shared && !from_->has_ahead(kSection)) lent.flush();  // whoever waits for the peer has no turn
        if (!next(&batch)) break;
        for (size_t i = 0; i < batch.n; ++i) {
          if (lend(batch.parts[i], &lent)) continue;
          lent.flush();
          serve(batch.parts[i], batch.bytes, &answers);
        }
        if (batch.staged != 0) from_->host_.release(batch.staged);
      }
      lent.flush();
      answers.flush();
      t_in.shrink(kKeptBufferBytes);
      t_out.shrink(kKeptBufferBytes);
    }
    if (helpers_.fetch_sub(1, std::memory_order_acq_rel) == 1 && shared) os::wake_all(helpers_);
  }

  // After help(): waits for the others. What was wrong with the stream, if anything.
  Status finish() {
    for (uint32_t n; (n = helpers_.load(std::memory_order_acquire)) != 0;) os::wait(helpers_, n, 10'000'000);
    std::lock_guard lock(reading_);
    if (status_.ok() && left_bytes_ != 0) {
      return Status(Code::kProtocolError, "frame: " + std::to_string(left_bytes_) + " bytes more than its parts have");
    }
    return status_;
  }

 private:
  // What one thread takes from the stream at once: a part, whole, in this thread's memory or, where it is the only
  // one, in what was read ahead. Where the numbers lie elsewhere there is little to read and much to do, and threads
  // would wait for each other: then several parts, of which only the last may have bytes.
  struct Batch {
    wire::Part parts[kAtOnceMax];
    size_t n = 0;
    std::byte* bytes = nullptr;
    uint64_t staged = 0;
  };
  bool next(Batch* batch) {
    std::lock_guard lock(reading_);
    batch->n = 0;
    while (batch->n < at_once && left_parts_ != 0 && status_.ok()) {
      status_ = read_part(&batch->parts[batch->n], &batch->bytes, &batch->staged);
      --left_parts_;
      if (!status_.ok() || batch->parts[batch->n++].bytes() != 0) break;
    }
    return batch->n != 0;
  }

  Status read_part(wire::Part* part, std::byte** at, uint64_t* staged) {
    *staged = 0;
    std::byte head[kSection];
    if (!from_->read(head, kSection)) return ended("within a frame");
    WL_RETURN_IF_ERROR(wire::decode(head, part));
    const uint64_t after = uint64_t{left_parts_ - 1} * kSection;
    if (left_bytes_ < kSection + after || part->bytes() > left_bytes_ - kSection - after) {
      return Status(Code::kProtocolError, "part: " + std::to_string(part->bytes()) + " bytes, more than its frame has");
    }
    left_bytes_ -= kSection + part->bytes();
    const uint64_t bytes = part->bytes();
    if (!shared && (*at = from_->in_place(bytes)) != nullptr) return {};
    // Neighbours tend to be of one size: two at a time halve the system calls.
    const uint64_t two = bytes <= kTwoBytesMax && !shared ? std::min(left_bytes_, kSection + bytes) : 0;
    if (bytes >= kLargeBytes) {
      if (!from_->host_.reserve(bytes, os::now_ns() + int64_t{limits::kStallMs} * 1'000'000))
        return Status(Code::kResourceExhausted, "no room for " + std::to_string(bytes) + " bytes of a request");
      *staged = bytes;
    }
    Status status;
    from_->hurried_ = *staged != 0;
    if (bytes >= kLargeBytes && broken(Break::kLengths)) std::memset(t_in.room(bytes), 0, bytes);
    if (bytes != 0 && t_in.room(bytes) == nullptr) {
      status = Status(Code::kResourceExhausted, "no memory for " + std::to_string(bytes) + " bytes of a request");
    } else if (bytes != 0 && !from_->read(t_in.data(), bytes, two)) {
      status = ended("within a part");
    }
    from_->hurried_ = false;
    *at = t_in.data();
    if (!status.ok() && *staged != 0) from_->host_.release(*staged);
    return status;
  }

  Status check_sums(const Order& o) const {
    if (o.part.items_bytes != 0 && crc32c(o.items, o.part.items_bytes) != o.part.items_crc &&
        !broken(Break::kChecksums))
      return Status(Code::kCorrupt, "the checksum of the items of shard " + std::to_string(o.part.shard) + " is wrong");
    if (o.part.numbers_bytes != 0 && (header_.flags & wire::kChecksummed) != 0 &&
        crc32c(o.numbers, o.part.numbers_bytes) != o.part.numbers_crc && !broken(Break::kChecksums))
      return Status(Code::kCorrupt,
                    "the checksum of the numbers of shard " + std::to_string(o.part.shard) + " is wrong");
    return {};
  }

  // Whether the object and the shard are here, under the term that the client thinks.
  Status locate(const Order& o, Shard** shard) const {
    if (object_ == nullptr) {
      return Status(Code::kNotFound, "object " + std::to_string(header_.object) + " is not on this server");
    }
    *shard = object_->find(o.part.shard);
    const std::string what = "'" + object_->spec().own_name() + "', shard " + std::to_string(o.part.shard);
    if (*shard == nullptr) return Status(Code::kStaleMap, what + ": not on this server");
    if (const uint32_t term = object_->map().run_of(o.part.shard).term; term != o.part.term && !broken(Break::kTerms)) {
      return Status(Code::kStaleMap,
                    what + ": expected term " + std::to_string(term) + ", saw " + std::to_string(o.part.term));
    }
    return {};
  }

  bool lend(const wire::Part& part, Lent* lent) {
    if (shared || lies() || header_.operation() != Op::kPull || part.bytes() != 0 || part.flags != wire::kWhole)
      return false;
    const Order order{header_, part, hyper, hypers, from_->guest_->number, nullptr, nullptr};
    Shard* shard = nullptr;
    return locate(order, &shard).ok() && lent->add(order, *object_, *shard);
  }

  void serve(const wire::Part& part, std::byte* bytes, Answers* answers) {
    Order order{header_, part, hyper, hypers, from_->guest_->number, bytes, bytes + wire::padded(part.items_bytes)};
    Reply reply;
    reply.part.shard = part.shard;
    reply.part.term = part.term;
    Shard* shard = nullptr;
    Status wrong = check_sums(order);
    if (lies()) {
      order.numbers = lying.in;
      order.lying = &lying;
    }
    if (wrong.ok()) wrong = locate(order, &shard);
    if (wrong.ok() && !misplaced.ok() && !order.pushes()) wrong = misplaced;
    if (!wrong.ok()) {
      if (answers->open(0) != nullptr) {
        reply.refuse(wrong);
        answers->add(reply);
      }
      return;
    }
    uint64_t out_bytes = 0;
    Status checked = misplaced.ok() ? object_->check(order, &out_bytes) : misplaced;
    std::byte* out = answers->open(out_bytes);
    if (out == nullptr) {
      checked = Status(Code::kResourceExhausted, "no memory for an answer of " + std::to_string(out_bytes) + " bytes");
      out = answers->open(0);
      if (out == nullptr) return;
    }
    if (lies()) out = lying.out;
    bool parked = false;
    std::vector<std::unique_ptr<ParkedOrder>> freed;
    with_turn(shard->turn, [&] {
      if (!object_->run(order, *shard, checked, out, &reply)) {
        parked = park(order, checked, out_bytes, *shard, &reply);
        return;
      }
      while (!shard->parked.empty()) {
        const Record& record = shard->records.of(order.session, order.header.session);
        std::unique_ptr<Waiting> waiting = shard->parked.take(order.session, record.sequence);
        if (waiting == nullptr) break;
        freed.emplace_back(static_cast<ParkedOrder*>(waiting.release()));
        freed.back()->run(*shard);
      }
    });
    if (!parked) answers->add(reply);
    for (const auto& f : freed) f->answer();
  }

  bool park(const Order& order, const Status& checked, uint64_t out_bytes, Shard& shard, Reply* reply) {
    std::unique_ptr<Waiting> waiting = ParkedOrder::make(from_, object_, order, checked, out_bytes);
    if (waiting != nullptr && shard.parked.park(&waiting)) return true;
    const Record& record = shard.records.of(order.session, order.header.session);
    reply->part.sequence = record.sequence;
    reply->refuse(Status(Code::kOutOfSequence, "shard " + std::to_string(order.part.shard) + " expected sequence " +
                                                   std::to_string(record.sequence + 1) + ", saw " +
                                                   std::to_string(order.part.sequence)));
    return false;
  }

  const std::shared_ptr<Connection> from_;
  const wire::Header header_;
  const std::shared_ptr<Hosted> object_;
  std::mutex reading_;  // of what follows, and of the stream
  uint32_t left_parts_;
  uint64_t left_bytes_;
  Status status_;
  std::atomic<uint32_t> helpers_{0};
};

Connection::Connection(Host& host, int fd, std::string peer, std::string key)
    : host_(host), fd_(fd), peer_(std::move(peer)), key_(std::move(key)), local_(os::same_host(fd)) {
  os::set_up_socket(fd_, limits::kStallMs);
}

Connection::~Connection() {
  os::close_socket(fd_);
  for (size_t i = 0; i < files_.n; ++i) os::close_file(files_.fds[i]);
}

bool Connection::wait_ended(int64_t deadline_ns) const {
  while (ended_.load(std::memory_order_acquire) == 0) {
    const int64_t left = deadline_ns - os::now_ns();
    if (left <= 0) return false;
    os::wait(ended_, 0, left);
  }
  return true;
}

bool Connection::send(const std::byte* frame, size_t bytes) {
  std::lock_guard lock(sending_);
  return send_locked(frame, bytes);
}

bool Connection::send_locked(const std::byte* frame, size_t bytes) {
  while (bytes != 0 && !broken_) {
    const os::Piece piece{const_cast<std::byte*>(frame), bytes};
    const long n = os::send_pieces(fd_, &piece, 1, true);
    if (n <= 0) {  // gone, or has not read for so long that it does not count any more
      broken_ = true;
      shut_down();
      break;
    }
    sent_bytes_.fetch_add(n, std::memory_order_relaxed);
    frame += n;
    bytes -= static_cast<size_t>(n);
  }
  return bytes == 0;
}

// Waits awake for a moment, unless another thread does; then asleep. `rest`: of something that is arriving already. A
// new request is looked for by receiving, which is quickest; the rest of one by polling, since receiving takes a lock
// that whoever sends needs as well.
long Connection::receive(const os::Piece* pieces, size_t n, bool rest, int64_t spin_ns) {
  long got = receive_some(pieces, n, false);
  if (got != os::kWouldBlock) return got;
  if (host_.begin_spin()) {
    const int64_t end = os::now_ns() + spin_ns;
    os::Polled socket{fd_, false, !rest};
    do {
      if (rest) os::poll(&socket, 1, 0);
      if (socket.ready) got = receive_some(pieces, n, false);
    } while (got == os::kWouldBlock && os::now_ns() < end);
    host_.end_spin();
  }
  if (got != os::kWouldBlock) return got;
  if (hurried_) {  // memory that others wait for is held for this
    os::Polled socket{fd_, false, false};
    os::poll(&socket, 1, limits::kStagedStallMs * int64_t{1'000'000});
    if (!socket.ready) return os::kBroken;
  }
  return receive_some(pieces, n, true);
}

bool Connection::read(void* to, size_t bytes, size_t behind) {
  auto* at = static_cast<std::byte*>(to);
  while (bytes != 0) {
    if (ahead_begin_ != ahead_end_) {
      const size_t n = std::min(bytes, ahead_end_ - ahead_begin_);
      std::memcpy(at, ahead_.data() + ahead_begin_, n);
      ahead_begin_ += n;
      at += n;
      bytes -= n;
      continue;
    }
    // Large: straight to where it belongs, with no more behind it than was asked for and the next headers.
    const bool direct = bytes >= limits::kDirectBytesMin;
    const size_t ahead = direct ? behind + 2 * kSection : limits::kReadAheadBytes;
    if (ahead_.room(std::max(ahead, limits::kReadAheadBytes)) == nullptr) return false;
    const os::Piece pieces[2] = {{at, bytes}, {ahead_.data(), ahead}};
    const long n = receive(direct ? pieces : pieces + 1, direct ? 2 : 1, true, limits::kSpinNs);
    if (n <= 0) return false;
    const size_t straight = direct ? std::min(bytes, static_cast<size_t>(n)) : 0;
    at += straight;
    bytes -= straight;
    ahead_begin_ = 0;
    ahead_end_ = static_cast<size_t>(n) - straight;
  }
  return true;
}

// Waits for the first bytes of a frame, for as long as it takes. Where requests come quickly the next is waited for
// awake: to be woken costs 20 us.
bool Connection::wait_for_frame() {
  if (ahead_begin_ != ahead_end_) return true;
  if (ahead_.room(limits::kReadAheadBytes) == nullptr) return false;
  const os::Piece piece{ahead_.data(), limits::kReadAheadBytes};
  const int64_t begin = os::now_ns();
  // A client asks for more once it has taken in what it has been sent.
  const int64_t taking_in = std::min<int64_t>(sent_bytes_.exchange(0) * kTakeInNsPerKiB / 1024, kTakeInNsMax);
  long n = os::kWouldBlock;
  while (n == os::kWouldBlock) {
    n = busy_ ? receive(&piece, 1, taking_in > limits::kSpinNs, limits::kSpinNs + taking_in)
              : receive_some(&piece, 1, true);
  }
  busy_ = os::now_ns() - begin < kSoonNs + taking_in;
  if (n <= 0) return false;
  ahead_begin_ = 0;
  ahead_end_ = static_cast<size_t>(n);
  return true;
}

void Connection::run() {
  while (!broken_ && wait_for_frame()) {
    const Status status = serve_frame();
    if (status.ok()) continue;
    if (status.code() != Code::kServerLost) {
      wire::Header about;
      about.op = static_cast<uint8_t>(Op::kHello);
      answer_control(about, status, {});
    }
    break;
  }
  shut_down();
  forget_parked();
  ended_.store(1, std::memory_order_release);
  os::wake_all(ended_);
  if (guest_ != nullptr) host_.leave(guest_);
}

void Connection::forget_parked() {
  std::vector<std::pair<std::shared_ptr<Hosted>, uint32_t>> places;
  {
    std::lock_guard lock(parked_mutex_);
    places.swap(parked_at_);
  }
  for (const auto& [object, index] : places) {
    Shard* const shard = object->find(index);
    with_turn(shard->turn, [&] {
      shard->parked.drop_if([&](const Waiting& w) { return static_cast<const ParkedOrder&>(w).is_from(this); });
    });
  }
}

Status Connection::serve_frame() {
  std::byte head[kSection];
  if (!read(head, kSection)) return ended("within a header");
  wire::Header header;
  WL_RETURN_IF_ERROR(wire::decode(head, &header));
  if (header.answer()) return Status(Code::kProtocolError, "frame: an answer, expected a request");
  if (header.request == 0) return Status(Code::kProtocolError, "frame: request 0");
  const Op op = header.operation();
  if (op == Op::kHello) return serve_control(header);
  if (guest_ == nullptr) return Status(Code::kProtocolError, std::string(name_of(op)) + " before hello");
  if (header.session != guest_->incarnation || header.app != guest_->app) {
    return Status(Code::kProtocolError, std::string(name_of(op)) + ": of another session or app than said hello");
  }
  if (wire::is_control(op)) return serve_control(header);

  const Ref<Incoming> incoming(new Incoming(shared_from_this(), header, header.length - header.extension_bytes));
  if (header.extension_bytes != 0) {
    std::byte extensions[limits::kExtensionBytesMax];
    if (!read(extensions, header.extension_bytes)) return ended("within extensions");
    if (crc32c(extensions, header.extension_bytes) != header.extension_crc)
      return Status(Code::kProtocolError, "frame: the checksum of the extensions is wrong");
    wire::Places places;
    WL_RETURN_IF_ERROR(
        wire::read_extensions(extensions, header.extension_bytes, incoming->hyper.v, &incoming->hypers, &places));
    if (incoming->lies()) incoming->find_arrays(places);
  }
  Server& server = host_.server();
  incoming->shared = header.parts > 1 && server.threads() > 1 && incoming->work_bytes() >= limits::kCrewBytesMin;
  if (incoming->shared) {
    const auto threads = static_cast<size_t>(server.threads());
    if (incoming->lies()) incoming->at_once = std::clamp<size_t>(header.parts / (4 * threads), 1, Incoming::kAtOnceMax);
    server.crew().post(incoming, incoming->lies() ? threads - 1 : kStreamHelpers);
  }
  incoming->help();
  return incoming->finish();
}

// Operations that are about no shard: one part, small, with a body.
Status Connection::serve_control(const wire::Header& header) {
  std::string body;
  uint64_t left = header.length;
  if (header.extension_bytes != 0 || header.parts > 1) return Status(Code::kProtocolError, "frame: expected one part");
  Status corrupt;
  if (header.parts == 1) {
    std::byte head[kSection];
    wire::Part part;
    if (!read(head, kSection)) return ended("within a frame");
    WL_RETURN_IF_ERROR(wire::decode(head, &part));
    left -= kSection;
    if (part.items_bytes > limits::kBodyBytesMax || part.bytes() != left || part.numbers_bytes != 0)
      return Status(Code::kProtocolError, "part: a body of " + std::to_string(part.items_bytes) + " bytes, at most " +
                                              std::to_string(limits::kBodyBytesMax));
    body.resize(wire::padded(part.items_bytes));
    if (!read(body.data(), body.size())) return ended("within a body");
    body.resize(part.items_bytes);
    if (crc32c(body.data(), body.size()) != part.items_crc)
      corrupt = Status(Code::kCorrupt, "the checksum of the body is wrong");
    left = 0;
  }
  if (left != 0) return Status(Code::kProtocolError, "frame: longer than its parts");
  std::vector<std::string> answers;
  const Status status = corrupt.ok() ? control(header, body, &answers) : corrupt;
  if (header.operation() == Op::kGoodbye) return ended("with goodbye");
  answer_control(header, status, answers);
  return {};
}

Status Connection::control(const wire::Header& header, const std::string& body, std::vector<std::string>* answers) {
  switch (header.operation()) {
    case Op::kHello: answers->emplace_back(); return hello(header, body, &answers->back());
    case Op::kGoodbye: host_.goodbye(guest_); return {};
    case Op::kAsk: answers->push_back(held(body)); return {};
    case Op::kArena: return arena(body);
    case Op::kOpen: {
      wire::Reader reader(body);
      ObjectSpec spec;
      Map map;
      WL_RETURN_IF_ERROR(decode(&reader, &spec));
      WL_RETURN_IF_ERROR(host_.open(spec, &map));
      wire::Writer writer;
      encode(map, &writer);
      answers->push_back(writer.take());
      return {};
    }
    case Op::kAttach:
    case Op::kDetach: {
      wire::Reader reader(body);
      ObjectSpec spec;
      Map map;
      WL_RETURN_IF_ERROR(decode(&reader, &map));
      WL_RETURN_IF_ERROR(decode(&reader, &spec));
      answers->emplace_back();
      return header.operation() == Op::kAttach ? host_.attach(spec, map) : host_.detach(spec, map);
    }
    case Op::kList: {
      std::vector<Catalogue::Entry> entries;
      WL_RETURN_IF_ERROR(host_.list(&entries));
      for (const Catalogue::Entry& entry : entries) {
        wire::Writer writer;
        encode(entry.map, &writer);
        encode(entry.spec, &writer);
        answers->push_back(writer.take());
      }
      return {};
    }
    default: return Status(Code::kInternal, "no such operation");
  }
}

Status Connection::hello(const wire::Header& header, const std::string& body, std::string* answer) {
  if (guest_ != nullptr && header.session != guest_->incarnation)
    return Status(Code::kProtocolError, "hello: a second time, as another session");
  Hello hello;
  WL_RETURN_IF_ERROR(decode(body, &hello));
  if (guest_ == nullptr) WL_RETURN_IF_ERROR(host_.welcome(shared_from_this(), hello, key_, header.session, &guest_));
  *answer = encode(Welcome{host_.incarnation(), guest_->app});
  return {};
}

// The file came beside the first byte of this very frame, or of one before that did not ask for it.
Status Connection::arena(const std::string& body) {
  wire::Reader reader(body);
  const auto id = reader.get<uint32_t>();
  reader.get<uint32_t>();
  const auto bytes = reader.get<uint64_t>();
  if (!reader.at_end() || id == 0) return Status(Code::kProtocolError, "arena: malformed");
  if (bytes == 0) {
    guest_->arenas.drop(id);
    return {};
  }
  if (files_.lost) return Status(Code::kProtocolError, "arena: more files came than are expected");
  if (files_.n == 0) return Status(Code::kProtocolError, "arena " + std::to_string(id) + ": no file came with it");
  const int file = files_.fds[0];
  std::copy(files_.fds + 1, files_.fds + files_.n, files_.fds);
  --files_.n;
  return guest_->arenas.add(id, bytes, file, host_.arena_bytes_max());
}

std::string Connection::held(const std::string& asked) {
  wire::Reader reader(asked);
  wire::Writer writer;
  std::lock_guard lock(parked_mutex_);
  while (reader.left() >= sizeof(uint64_t)) {
    const auto id = reader.get<uint64_t>();
    if (std::find(parked_.begin(), parked_.end(), id) != parked_.end()) writer.put(id);
  }
  return writer.take();
}

void Connection::answer_control(const wire::Header& header, const Status& status,
                                const std::vector<std::string>& bodies) {
  Buffer buffer;
  Answers answers(*this, header, &buffer);
  const size_t n = std::max<size_t>(bodies.size(), 1);
  for (size_t i = 0; i < n; ++i) {
    Reply reply;
    reply.part.shard = static_cast<uint32_t>(i);
    reply.part.value = n;  // how many there are
    if (!status.ok()) {
      reply.refuse(status);
    } else if (i < bodies.size()) {
      reply.items = bodies[i];
    } else {
      reply.part.value = 0;
    }
    if (answers.open(0) == nullptr) return;
    answers.add(reply);
    if (!status.ok()) break;
  }
  answers.flush();
}

}  // namespace windlass
