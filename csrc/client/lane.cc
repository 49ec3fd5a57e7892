#include "client/lane.h"

#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "client/links.h"

namespace windlass {

using wire::Op;

namespace {

constexpr size_t kSection = limits::kSectionBytes;
constexpr uint64_t kHelloRequest = 1;
constexpr size_t kHeldBytes = 24;  // of a request that waits, in the answer to an ask
constexpr size_t kPiecesMax = 512;
constexpr std::byte kZeros[kSection] = {};

// A frame of one part with a body.
std::string frame_of(wire::Header header, const std::string* body) {
  std::string frame(kSection, '\0');
  if (body != nullptr) {
    wire::Part part;
    part.items_bytes = static_cast<uint32_t>(body->size());
    part.items_crc = crc32c(body->data(), body->size());
    frame.resize(2 * kSection);
    wire::encode(part, reinterpret_cast<std::byte*>(frame.data()) + kSection);
    frame += *body;
    frame.resize(wire::padded(frame.size()));
    header.parts = 1;
  }
  header.length = frame.size() - kSection;
  wire::encode(header, reinterpret_cast<std::byte*>(frame.data()));
  return frame;
}

// Whether a request must not overtake an earlier one, whatever their priorities: both are about one shard, or one is
// about several objects or none.
bool must_follow(const Ref<Trip>& later, const Ref<Trip>& earlier) {
  if (later->header.object == 0 || earlier->header.object == 0) return true;
  if (later->header.object != earlier->header.object) return false;
  // Parts are in the order of their shards.
  auto a = later->parts.begin(), b = earlier->parts.begin();
  while (a != later->parts.end() && b != earlier->parts.end() && a->shard != b->shard) a->shard < b->shard ? ++a : ++b;
  return a != later->parts.end() && b != earlier->parts.end();
}

}  // namespace

Lane::Lane(Links& links, uint32_t server, uint8_t number) : links_(links), server_(server), number_(number) {
  reset_parser();
}

Lane::~Lane() {
  if (fd() >= 0) os::close_socket(fd());
}

// ---- sending ------------------------------------------------------------------------------------------------------

void Lane::submit(const Ref<Trip>& trip) {
  Status failed;
  {
    std::lock_guard lock(mutex_);
    failed = failed_;
    if (failed.ok()) outbox_.add(trip->header.request, trip, trip->header.priority);
  }
  if (!failed.ok()) {
    trip->status = failed;
    conclude(trip);
  }
}

bool Lane::unsent_locked() const {
  if (state_ == kDown) return false;
  return piece_ < pieces_.size() || in_frame_ || !raw_.empty() || (state_ == kReady && outbox_.has_queued());
}

bool Lane::unsent() {
  std::lock_guard lock(mutex_);
  return unsent_locked();
}

bool Lane::watched() {
  std::lock_guard lock(mutex_);
  return watching_reading_ || watching_writing_;
}

bool Lane::idle() {
  std::lock_guard lock(mutex_);
  return outbox_.idle() && state_ != kGreeting;
}

bool Lane::has_freed() {
  std::lock_guard lock(mutex_);
  return std::any_of(announced_.begin(), announced_.end(), [](const auto& a) { return a.second.segment.expired(); });
}

void Lane::pump_send() {
  std::vector<Ref<Trip>> ended;
  {
    std::lock_guard lock(mutex_);
    while (state_ != kDown) {
      if (piece_ == pieces_.size()) {
        have_left(&ended);
        if (!ended.empty()) break;  // they end without the lock; whoever waits pumps again
        if (!fill()) break;
      }
      const size_t n = std::min(pieces_.size() - piece_, kPiecesMax);
      long sent = os::send_pieces(fd(), &pieces_[piece_], n, false, passing_ != nullptr ? passing_->file() : -1);
      if (sent == os::kWouldBlock) break;
      passing_ = nullptr;
      if (sent == os::kBroken) {
        os::shut_down(fd());  // the leader will see it
        break;
      }
      while (sent > 0) {
        os::Piece& p = pieces_[piece_];
        const size_t step = std::min(p.bytes, static_cast<size_t>(sent));
        p.data = static_cast<std::byte*>(p.data) + step;
        p.bytes -= step;
        sent -= static_cast<long>(step);
        if (p.bytes == 0) ++piece_;
      }
    }
  }
  for (const Ref<Trip>& trip : ended) conclude(trip);
}

// What was prepared is out; *ended gets what was only waiting for that.
void Lane::have_left(std::vector<Ref<Trip>>* ended) {
  if (leaving_.empty()) return;
  const int64_t now = os::now_ns();
  for (Ref<Trip>& trip : leaving_) {
    trip->leaving = false;
    trip->sent_ns = now;
    const auto parts = static_cast<int64_t>(trip->parts.size());
    spin_ns_.store(std::min(limits::kSpinNs + parts * limits::kSpinNsPerPart, limits::kSpinNsMax),
                   std::memory_order_relaxed);
    if (trip->lies && trip->bytes >= limits::kCrewBytesMin) {
      shared_ns_.store(now, std::memory_order_relaxed);
    } else if (trip->bytes >= limits::kBulkBytesMin) {
      large_ns_.store(now, std::memory_order_relaxed);
    }
    if (trip->ends_later) ended->push_back(std::move(trip));
  }
  leaving_.clear();
}

// Prepares what goes into the next system calls; false when there is nothing to send.
bool Lane::fill() {
  pieces_.clear();
  piece_ = 0;
  scratch_used_ = 0;
  if (scratch_.room(2 * limits::kChunkBytes) == nullptr) return false;
  if (!in_frame_) {
    if (!raw_.empty()) {
      std::memcpy(scratch_.room(raw_.size()), raw_.data(), raw_.size());
      add_piece(scratch_.data(), raw_.size());
      raw_.clear();
      return true;
    }
    if (state_ != kReady) return false;
    const Ref<Trip>* const next = outbox_.peek(must_follow);
    if (next == nullptr) return false;
    if (shares_ && announce(**next)) return true;
    begin_frame(*outbox_.next(must_follow));
  }
  add_parts();
  // Small requests go along.
  while (!in_frame_ && scratch_used_ < limits::kTogetherBytes && pieces_.size() + 8 < kPiecesMax && raw_.empty()) {
    const Ref<Trip>* const next = outbox_.peek(must_follow);
    if (next == nullptr || !is_small(**next)) break;
    begin_frame(*outbox_.next(must_follow));
    add_parts();
  }
  return true;
}

// Of the frame that has been begun, as much as goes into a system call.
void Lane::add_parts() {
  // What comes first is small where checksums or many parts take their time, so that the server has something to begin
  // with.
  const bool begins = next_part_ == 0;
  const size_t most = !begins                                                  ? limits::kSendBytes
                      : sending_->header.op == static_cast<uint8_t>(Op::kStep) ? limits::kTogetherBytes
                      : checksums_                                             ? limits::kBulkBytesMin
                                                                               : limits::kSendBytes;
  size_t bytes = 0;
  while (next_part_ < frame_parts_.size() && bytes < most && scratch_used_ < limits::kChunkBytes &&
         pieces_.size() + 4 < kPiecesMax) {
    if (!add_part(sending_->parts[frame_parts_[next_part_]], &bytes)) break;
    ++next_part_;
  }
  if (next_part_ != frame_parts_.size()) return;
  in_frame_ = false;
  leaving_.push_back(std::move(sending_));
  sending_ = Ref<Trip>();
}

// Whether little of it travels, and nothing has to go before it.
bool Lane::is_small(const Trip& trip) const {
  constexpr size_t kPartsMax = 16;
  constexpr uint64_t kBytesMax = uint64_t{4} << 10;
  if (trip.parts.size() > kPartsMax) return false;
  return may_lie(trip) || (trip.bytes <= kBytesMax && (!shares_ || trip.segments.empty()));
}

std::string Lane::arena_frame(uint32_t id, uint64_t bytes, uint64_t request) const {
  wire::Header header;
  header.op = static_cast<uint8_t>(Op::kArena);
  header.request = request;
  header.session = links_.incarnation();
  header.app = links_.app_number(server_);
  wire::Writer body;
  body.put(id);
  body.put(uint32_t{0});
  body.put(bytes);
  const std::string text = body.take();
  return frame_of(header, &text);
}

// Gives the server memory that a request lies in, once; false when there is nothing to give.
bool Lane::announce(const Trip& trip) {
  for (const std::shared_ptr<const Segment>& segment : trip.segments) {
    if (announced_.count(segment->id()) != 0 || segment->withdrawn()) continue;
    const uint64_t request = links_.next_request();
    announced_[segment->id()] = {segment, request, false};
    const std::string frame = arena_frame(segment->id(), segment->bytes(), request);
    std::memcpy(scratch_.room(frame.size()), frame.data(), frame.size());
    add_piece(scratch_.data(), frame.size());
    passing_ = segment;
    return true;
  }
  return false;
}

bool Lane::may_lie(const Trip& trip) const {
  return shares_ && !trip.places.empty() &&
         std::all_of(trip.segments.begin(), trip.segments.end(), [this](const auto& segment) {
           const auto it = announced_.find(segment->id());
           return it != announced_.end() && it->second.known && !segment->withdrawn();
         });
}

void Lane::heard_of_arena(Code code) {
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(announced_.begin(), announced_.end(),
                               [this](const auto& a) { return a.second.request == in_header_.request; });
  if (it == announced_.end()) return;
  if (code == Code::kCorrupt) {
    announced_.erase(it);  // damaged on its way
  } else if (code == Code::kProtocolError) {
    shares_ = false;  // the file did not come through: somebody is in between
  } else {
    it->second.known = true;  // if it was refused, requests are told why
  }
}

void Lane::begin_frame(const Ref<Trip>& trip) {
  sending_ = trip;
  trip->leaving = true;
  in_frame_ = true;
  next_part_ = 0;
  trip->begun = true;
  trip->sent_ns = 0;
  frame_parts_.clear();
  wire::Header header = trip->header;
  header.session = links_.incarnation();
  header.app = links_.app_number(server_);
  header.lane = number_;
  trip->lies = may_lie(*trip);
  const std::vector<std::byte>& extensions = trip->lies ? trip->places : trip->extensions;
  header.flags = trip->lies ? wire::kInArenas : checksums_ ? wire::kChecksummed : 0;
  const int64_t left_ms = (trip->deadline_ns - os::now_ns()) / 1'000'000;
  header.deadline_ms =
      trip->deadline_ns == limits::kNoDeadline ? 0 : static_cast<uint32_t>(std::clamp<int64_t>(left_ms, 1, UINT32_MAX));
  header.extension_bytes = static_cast<uint32_t>(extensions.size());
  if (header.extension_bytes != 0) header.extension_crc = crc32c(extensions.data(), extensions.size());
  header.length = header.extension_bytes;
  for (uint32_t i = 0; i < trip->parts.size(); ++i) {
    if (trip->header.op == static_cast<uint8_t>(Op::kList) ? i != 0 : trip->parts[i].answered) continue;
    frame_parts_.push_back(i);
    wire::Part part;
    trip->describe(trip->parts[i], &part);
    header.length += kSection + part.bytes();
  }
  header.parts = static_cast<uint32_t>(frame_parts_.size());
  std::byte* const at = scratch_.data() + scratch_used_;
  wire::encode(header, at);
  if (header.extension_bytes != 0) std::memcpy(at + kSection, extensions.data(), header.extension_bytes);
  scratch_used_ += kSection + header.extension_bytes;
  add_piece(at, kSection + header.extension_bytes);
}

void Lane::add_piece(const void* data, size_t bytes) {
  if (bytes == 0) return;
  if (!pieces_.empty()) {
    os::Piece& last = pieces_.back();
    if (static_cast<std::byte*>(last.data) + last.bytes == data) {
      last.bytes += bytes;
      return;
    }
  }
  pieces_.push_back({const_cast<void*>(data), bytes});
}

// False when there is no room for it any more in this chunk.
bool Lane::add_part(const Trip::Part& part, size_t* bytes) {
  Cargo& cargo = *sending_->cargo;
  wire::Part head;
  sending_->describe(part, &head);
  const std::byte* numbers = head.numbers_bytes != 0 ? cargo.numbers(part.part) : nullptr;
  const size_t items = wire::padded(head.items_bytes), whole = wire::padded(head.numbers_bytes);
  const bool gathers = head.numbers_bytes != 0 && numbers == nullptr;
  const size_t need = kSection + items + (gathers ? whole : 0);
  if (scratch_used_ + need > scratch_.bytes()) {
    if (scratch_used_ != 0) return false;
    if (scratch_.room(need) == nullptr) {
      os::shut_down(fd());  // there is no memory: the caller's time runs out rather than ours
      return false;
    }
  }
  std::byte* const at = scratch_.data() + scratch_used_;
  scratch_used_ += need;
  *bytes += need + (gathers ? 0 : whole);
  if (head.items_bytes != 0) {
    cargo.write_items(part.part, sending_->lies, at + kSection);
    std::memset(at + kSection + head.items_bytes, 0, items - head.items_bytes);
    head.items_crc = crc32c(at + kSection, head.items_bytes);
  }
  if (gathers) {
    std::byte* const to = at + kSection + items;
    cargo.gather(part.part, to);
    std::memset(to + head.numbers_bytes, 0, whole - head.numbers_bytes);
    numbers = to;
  }
  if (head.numbers_bytes != 0 && checksums_) head.numbers_crc = crc32c(numbers, head.numbers_bytes);
  wire::encode(head, at);
  add_piece(at, need);
  if (head.numbers_bytes != 0 && !gathers) {
    add_piece(numbers, head.numbers_bytes);
    add_piece(kZeros, whole - head.numbers_bytes);
  }
  return true;
}

void Lane::rebase(const std::byte* from, size_t bytes, const std::byte* to) {
  for (size_t i = piece_; i < pieces_.size(); ++i) {
    const auto* at = static_cast<const std::byte*>(pieces_[i].data);
    if (at >= from && at < from + bytes) pieces_[i].data = const_cast<std::byte*>(to + (at - from));
  }
}

void Lane::abandon(const Trip& trip) {
  if (in_trip_.get() != &trip || landed_ == nullptr || stage_ < kNumbers) return;
  if (stage_ == kPad) {
    landed_ = nullptr;
    discarded_ = true;
    return;
  }
  std::byte* const elsewhere = in_numbers_.room(wire::padded(in_part_.numbers_bytes));
  if (elsewhere == nullptr) {
    os::shut_down(fd());
    got_ = need_;  // nothing more goes there; the connection is over
    return;
  }
  landed_ = nullptr;
  discarded_ = true;
  target_ = elsewhere;
}

bool Lane::withdraw(const Ref<Trip>& trip, bool begun, const Status& status) {
  std::lock_guard receiving(receiving_);
  {
    std::lock_guard lock(mutex_);
    if (outbox_.find(trip->header.request) == nullptr || (trip->begun && !begun)) return false;
    abandon(*trip);
    if (trip->status.ok()) trip->status = status;
  }
  if (in_trip_.get() == trip.get()) {
    in_trip_ = Ref<Trip>();
    in_trip_part_ = nullptr;
  }
  finish(trip);
  return true;
}

// ---- who looks after it -------------------------------------------------------------------------------------------

bool Lane::try_lead(bool keep_watch) {
  if (led_.exchange(true, std::memory_order_seq_cst)) return false;
  if (!keep_watch) {
    std::lock_guard lock(mutex_);
    watch(false, false);
  }
  return true;
}

void Lane::unlead() {
  led_.store(false, std::memory_order_seq_cst);
  attend();
}

void Lane::attend() {
  std::lock_guard lock(mutex_);
  if (state_ == kDown) return;
  const bool reading = !led_.load(std::memory_order_seq_cst) && (!outbox_.idle() || state_ == kGreeting);
  watch(reading, unsent_locked());
}

void Lane::watch(bool reading, bool writing) {
  if (state_ == kDown || (reading == watching_reading_ && writing == watching_writing_)) return;
  watching_reading_ = reading;
  watching_writing_ = writing;
  links_.watch().change(fd(), links_.tag(*this), reading, writing);
}

void Lane::maintain(int64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (state_ == kDown || !raw_.empty()) return;
  for (auto it = announced_.begin(); it != announced_.end(); ++it) {
    if (!it->second.segment.expired()) continue;
    raw_ = arena_frame(it->first, 0, links_.next_request());
    announced_.erase(it);
    return;
  }
  if (state_ == kGreeting) {
    if (now_ns - asked_ns_ < ask_ns_) return;
    raw_ = hello_frame();
  } else {
    // The oldest request decides: that others are answered says nothing of it.
    const Ref<Trip>* const oldest = outbox_.oldest_sent();
    if (oldest == nullptr || (*oldest)->sent_ns == 0) return;
    if ((*oldest)->header.request != oldest_) {
      oldest_ = (*oldest)->header.request;
      ask_ns_ = limits::kAskMs * int64_t{1'000'000};
    }
    if (now_ns - std::max((*oldest)->sent_ns, asked_ns_) < ask_ns_) return;
    asked_ = outbox_.to_ask(limits::kAskedMax);
    wire::Header header;
    header.op = static_cast<uint8_t>(Op::kAsk);
    header.request = asking_ = links_.next_request();
    header.session = links_.incarnation();
    header.app = links_.app_number(server_);
    const std::string body(reinterpret_cast<const char*>(asked_.data()), asked_.size() * sizeof(uint64_t));
    raw_ = frame_of(header, &body);
  }
  asked_ns_ = now_ns;
  ask_ns_ = std::min<int64_t>(2 * ask_ns_, limits::kAskMsMax * int64_t{1'000'000});
}

std::string Lane::hello_frame() const {
  wire::Header header;
  header.op = static_cast<uint8_t>(Op::kHello);
  header.request = kHelloRequest;
  header.session = links_.incarnation();
  const std::string body = encode(links_.hello(*this));
  return frame_of(header, &body);
}

void Lane::attach(int fd) {
  {
    std::scoped_lock lock(receiving_, mutex_);
    if (state_ != kDown || !failed_.ok()) {
      os::close_socket(fd);
      return;
    }
    os::set_up_socket(fd, links_.stall_ms());
    os::close_after_fork(fd, true);
    checksums_ = links_.checksums(fd);
    shares_ = links_.shares(fd);
    fd_ = fd;
    state_ = kGreeting;
    raw_ = hello_frame();
    asked_ns_ = os::now_ns();
    ask_ns_ = limits::kAskMs * int64_t{1'000'000};
    watching_reading_ = watching_writing_ = false;
    links_.watch().add(fd, links_.tag(*this));
  }
  pump_send();
  attend();
}

void Lane::say_goodbye() {
  {
    std::lock_guard lock(mutex_);
    if (state_ != kReady || in_frame_) return;
    wire::Header header;
    header.op = static_cast<uint8_t>(Op::kGoodbye);
    header.request = links_.next_request();
    header.session = links_.incarnation();
    header.app = links_.app_number(server_);
    raw_ = frame_of(header, nullptr);
  }
  pump_send();
}

void Lane::cut_off(const Status& status, std::vector<std::shared_ptr<const Segment>>* segments) {
  std::scoped_lock lock(receiving_, mutex_);
  if (!failed_.ok()) return;
  failed_ = status;
  disconnect(&ended_by_failure_);
  outbox_.each([&](uint64_t, const Ref<Trip>& trip) {
    if (trip->lies) segments->insert(segments->end(), trip->segments.begin(), trip->segments.end());
  });
}

void Lane::fail() {
  std::vector<Ref<Trip>> ended, unanswered, strays;
  {
    std::scoped_lock lock(receiving_, mutex_);
    ended.swap(ended_by_failure_);
    outbox_.each([&](uint64_t, const Ref<Trip>& trip) {
      take_moved(trip, &strays);
      if (trip->unanswered != 0 && trip->status.ok()) trip->status = failed_;
      unanswered.push_back(trip);
    });
  }
  for (const Ref<Trip>& trip : ended) conclude(trip);
  for (const Ref<Trip>& trip : unanswered) finish(trip);
  for (const Ref<Trip>& stray : strays) stray->cargo->go_on(stray);
}

void Lane::release_moved() {
  std::vector<Ref<Trip>> ended, strays;
  {
    std::scoped_lock lock(receiving_, mutex_);
    if (state_ != kDown || !failed_.ok()) return;
    outbox_.each([&](uint64_t, const Ref<Trip>& trip) {
      if (trip->lies) return;
      take_moved(trip, &strays);
      if (trip->unanswered == 0) ended.push_back(trip);
    });
  }
  for (const Ref<Trip>& trip : ended) finish(trip);
  for (const Ref<Trip>& stray : strays) stray->cargo->go_on(stray);
}

// Parts of a trip, none of which is on its way out, whose shards are on another server by now.
void Lane::take_moved(const Ref<Trip>& trip, std::vector<Ref<Trip>>* strays) {
  for (Trip::Part& part : trip->parts) {
    uint32_t shard = 0;
    Owners* const owners = part.answered ? nullptr : trip->cargo->owners(part.part, &shard);
    if (owners == nullptr) continue;
    const Owners::At at = owners->of(shard);
    if (at.server == server_ || at.term <= part.term) continue;
    strays->push_back(trip->make_stray(part, server_));
    part.answered = true;
    --trip->unanswered;
  }
}

void Lane::break_if_told(const std::vector<std::shared_ptr<const Segment>>& segments) {
  std::lock_guard lock(receiving_);
  bool told = false;
  {
    std::lock_guard sending(mutex_);
    for (const auto& segment : segments) told = told || announced_.count(segment->id()) != 0;
  }
  if (told && state_ != kDown) tear_down("memory that it was told of has moved");
}

// With both locks; *ended gets what was only waiting for its frame to be out. Whoever polls the socket is woken first
// and looks at the state.
void Lane::disconnect(std::vector<Ref<Trip>>* ended) {
  if (state_ == kDown) return;
  if (sending_) leaving_.push_back(std::move(sending_));
  for (const Ref<Trip>& trip : leaving_) {
    trip->leaving = false;
    if (trip->ends_later) ended->push_back(trip);
  }
  leaving_.clear();
  links_.watch().remove(fd());
  os::shut_down(fd());
  os::close_socket(fd());
  fd_ = -1;
  state_ = kDown;
  outbox_.lost();
  pieces_.clear();
  piece_ = 0;
  in_frame_ = false;
  sending_ = Ref<Trip>();
  raw_.clear();
  announced_.clear();
  passing_ = nullptr;
  asked_.clear();
  reset_parser();
}

void Lane::tear_down(const std::string& why) {
  std::vector<Ref<Trip>> ended;
  {
    std::lock_guard lock(mutex_);
    disconnect(&ended);
  }
  for (const Ref<Trip>& trip : ended) conclude(trip);
  links_.want_dial(*this, why);
}

void Lane::finish(const Ref<Trip>& trip) {
  {
    std::lock_guard lock(mutex_);
    if (!outbox_.answered(trip->header.request)) return;  // it has ended before
    trip->ends_later = trip->leaving;
    if (trip->ends_later) return;
  }
  conclude(trip);
}

void Lane::conclude(const Ref<Trip>& trip) {
  const Ref<Future> owner = std::move(trip->owner);
  links_.trip_over(server_, trip->patient);
  trip->cargo->over(trip->status);
}

// ---- receiving ----------------------------------------------------------------------------------------------------

void Lane::reset_parser() {
  ahead_begin_ = ahead_end_ = 0;
  in_trip_ = Ref<Trip>();
  in_trip_part_ = nullptr;
  expect(kHeader, head_, kSection);
}

void Lane::expect(Stage stage, std::byte* to, size_t bytes) {
  stage_ = stage;
  target_ = to;
  need_ = bytes;
  got_ = 0;
}

bool Lane::pump_receive() {
  bool arrived = false;
  std::vector<Ref<Trip>> strays;
  {
    std::lock_guard lock(receiving_);
    arrived = receive();
    if (!strays_.empty()) strays.swap(strays_);
  }
  for (const Ref<Trip>& stray : strays) stray->cargo->go_on(stray);
  return arrived;
}

bool Lane::receive() {
  if (state_ == kDown) return false;
  if (ahead_.room(limits::kReadAheadBytes) == nullptr) return false;
  bool arrived = false;
  for (;;) {
    bool drained = false;
    if (got_ < need_ && ahead_begin_ == ahead_end_) {
      const size_t rest = need_ - got_;
      // Large: straight to where it belongs, with no more behind it than the next headers.
      const bool direct = rest >= limits::kDirectBytesMin;
      const size_t behind = direct ? 2 * kSection : limits::kReadAheadBytes;
      const os::Piece pieces[2] = {{target_ + got_, rest}, {ahead_.data(), behind}};
      const long n = os::receive_pieces(fd(), direct ? pieces : pieces + 1, direct ? 2 : 1, false);
      if (n == os::kWouldBlock) break;
      if (n == os::kBroken) {
        tear_down(complaint_.empty() ? os::failure_of(fd()) : complaint_);
        return true;
      }
      arrived = true;
      const size_t straight = direct ? std::min(rest, static_cast<size_t>(n)) : 0;
      got_ += straight;
      ahead_begin_ = 0;
      ahead_end_ = static_cast<size_t>(n) - straight;
      drained = static_cast<size_t>(n) < (direct ? rest : 0) + behind;
    }
    if (!parse()) {
      tear_down(complaint_);
      return true;
    }
    // Between frames, with nothing more to be had: the answer is worth more than a look that finds nothing.
    if (drained && stage_ == kHeader && got_ == 0 && ahead_begin_ == ahead_end_) break;
  }
  if (arrived) arrival_ns_.store(os::now_ns(), std::memory_order_relaxed);
  return arrived;
}

// Uses up what was read ahead.
bool Lane::parse() {
  for (;;) {
    if (const size_t n = std::min(need_ - got_, ahead_end_ - ahead_begin_); n != 0) {
      std::memcpy(target_ + got_, ahead_.data() + ahead_begin_, n);
      got_ += n;
      ahead_begin_ += n;
    }
    if (got_ < need_) return true;
    if (!advance()) return false;
  }
}

bool Lane::broken_rule(const std::string& what) {
  complaint_ = "an answer breaks the rules: " + what;
  return false;
}

bool Lane::advance() {
  switch (stage_) {
    case kHeader: {
      if (const Status status = wire::decode(head_, &in_header_); !status.ok()) return broken_rule(status.message());
      if (!in_header_.answer()) return broken_rule("a request, expected an answer");
      frame_left_ = in_header_.length - in_header_.extension_bytes;
      parts_left_ = in_header_.parts;
      {
        std::lock_guard lock(mutex_);
        Ref<Trip>* const trip = outbox_.find(in_header_.request);
        in_trip_ = trip != nullptr && (*trip)->header.op == (in_header_.op & ~wire::kAnswer) ? *trip : Ref<Trip>();
      }
      in_items_.resize(in_header_.extension_bytes);
      expect(kExtensions, reinterpret_cast<std::byte*>(in_items_.data()), in_items_.size());
      return true;
    }
    case kExtensions: break;
    case kPart:
      if (const Status status = wire::decode(head_, &in_part_); !status.ok()) return broken_rule(status.message());
      if (frame_left_ < kSection || in_part_.bytes() > frame_left_ - kSection)
        return broken_rule("a part of " + std::to_string(in_part_.bytes()) + " bytes, more than its frame has");
      frame_left_ -= kSection + in_part_.bytes();
      --parts_left_;
      find_part();
      // Memory that is mapped and not touched before the bytes come.
      if (in_part_.items_bytes != 0 && raw_items_.room(wire::padded(in_part_.items_bytes)) == nullptr)
        return broken_rule("no memory for its items");
      expect(kItems, raw_items_.data(), wire::padded(in_part_.items_bytes));
      return true;
    case kItems:
      in_items_.assign(reinterpret_cast<const char*>(raw_items_.data()), in_part_.items_bytes);
      raw_items_.shrink(limits::kBodyBytesMax);
      if (in_part_.items_bytes != 0 && crc32c(in_items_.data(), in_items_.size()) != in_part_.items_crc &&
          !broken(Break::kChecksums))
        return broken_rule("the checksum of the items is wrong");
      return expect_numbers();
    case kNumbers:
      expect(kPad, pad_, wire::padded(in_part_.numbers_bytes) - (landed_ != nullptr ? in_part_.numbers_bytes : need_));
      return true;
    case kPad:
      if (!end_part()) return false;
      break;
  }
  if (parts_left_ != 0) {
    expect(kPart, head_, kSection);
    return true;
  }
  if (frame_left_ != 0) return broken_rule("a frame longer than its parts");
  in_trip_ = Ref<Trip>();
  expect(kHeader, head_, kSection);
  return true;
}

void Lane::find_part() {
  in_trip_part_ = nullptr;
  if (!in_trip_) return;
  if (in_header_.operation() == Op::kList && in_part_.value <= limits::kObjectsMax) in_trip_->grow(in_part_.value);
  in_trip_part_ = in_trip_->find(in_part_.shard);
  if (in_trip_part_ != nullptr && in_trip_part_->answered) in_trip_part_ = nullptr;
}

bool Lane::expect_numbers() {
  landed_ = nullptr;
  discarded_ = false;
  const uint64_t bytes = in_part_.numbers_bytes;
  if (bytes != 0 && in_trip_part_ != nullptr && in_part_.status == 0)
    landed_ = in_trip_->cargo->landing(in_trip_part_->part, bytes);
  if (landed_ != nullptr) {
    expect(kNumbers, landed_, bytes);
    return true;
  }
  if (bytes != 0 && in_numbers_.room(wire::padded(bytes)) == nullptr) return broken_rule("no memory for its numbers");
  expect(kNumbers, in_numbers_.data(), wire::padded(bytes));
  return true;
}

bool Lane::end_part() {
  const uint64_t bytes = in_part_.numbers_bytes;
  if (bytes != 0 && (in_header_.flags & wire::kChecksummed) != 0 && !discarded_ &&
      crc32c(landed_ != nullptr ? landed_ : in_numbers_.data(), bytes) != in_part_.numbers_crc &&
      !broken(Break::kChecksums))
    return broken_rule("the checksum of the numbers is wrong");
  const auto code = in_part_.status <= kLastCode ? static_cast<Code>(in_part_.status) : Code::kInternal;
  if (in_header_.request == 0) {
    complaint_ = "it said: " + wire::printable(in_items_);
    return true;
  }
  if (in_header_.request == kHelloRequest && in_header_.operation() == Op::kHello) return welcomed(code);
  if (in_header_.operation() == Op::kAsk) return heard(code);
  if (in_header_.operation() == Op::kArena) {
    heard_of_arena(code);
    return true;
  }
  if (in_trip_part_ == nullptr) return true;      // answered before
  if (code == Code::kOutOfSequence) return true;  // lost, as it were: the next question finds that out
  if (code == Code::kCorrupt) {
    // The server may be at work on its other parts, and would write arrays once more after they have been answered; a
    // new connection begins when nothing of the old one is under way.
    if (in_trip_->lies) return broken_rule("a request arrived damaged");
    std::lock_guard lock(mutex_);
    outbox_.again(in_header_.request);
    return true;
  }
  if ((code == Code::kStaleMap || code == Code::kNotFound) && follow(code)) {
    // It is another trip's now.
  } else if (code == Code::kOk && (in_trip_part_->flags & wire::kEmpty) == 0) {
    const Status landed = in_trip_->cargo->land(in_trip_part_->part, in_trip_->lies, in_part_, in_items_,
                                                landed_ != nullptr || bytes == 0 ? nullptr : in_numbers_.data());
    if (!landed.ok()) return broken_rule(landed.message());
  } else if (code != Code::kOk && in_trip_->status.ok()) {
    in_trip_->status = Status(code, links_.servers()[server_] + ": " + wire::printable(in_items_));
  }
  in_trip_part_->answered = true;
  if (--in_trip_->unanswered != 0) return true;
  finish(in_trip_);
  in_trip_ = Ref<Trip>();  // what else the frame has is nobody's
  return true;
}

// A part whose shard is elsewhere, or has another term, goes on, also when its server has never heard of the object
// that is to come; false when it must not.
bool Lane::follow(Code code) {
  uint32_t shard = 0;
  Owners* const owners = in_trip_->cargo->owners(in_trip_part_->part, &shard);
  if (owners == nullptr || (code == Code::kNotFound && !owners->has_moved(shard))) return false;
  if (code == Code::kStaleMap && in_part_.value < links_.servers().size())
    owners->learn(shard, {static_cast<uint32_t>(in_part_.value), in_part_.term});
  strays_.push_back(in_trip_->make_stray(*in_trip_part_, server_));
  return true;
}

bool Lane::welcomed(Code code) {
  Status status;
  Welcome welcome;
  if (code == Code::kCorrupt) return broken_rule("the hello arrived damaged");  // another connection will do
  if (code != Code::kOk) {
    status = Status(code, links_.servers()[server_] + ": " + wire::printable(in_items_));
  } else {
    status = decode(in_items_, &welcome);
    if (status.ok()) status = links_.welcomed(server_, welcome);
  }
  if (!status.ok()) {
    refusal_ = status;
    complaint_ = status.message();
    return false;
  }
  complaint_.clear();
  uint8_t greeting = kGreeting;
  state_.compare_exchange_strong(greeting, kReady);
  links_.became_ready();
  return true;
}

bool Lane::heard(Code code) {
  if (code != Code::kOk) return true;
  std::lock_guard lock(mutex_);
  if (in_header_.request != asking_) return true;
  std::vector<uint64_t> held;
  for (wire::Reader reader(in_items_); reader.left() >= kHeldBytes;) {
    const auto id = reader.get<uint64_t>(), clock = reader.get<uint64_t>();
    const auto rank = reader.get<uint32_t>();
    reader.get<uint32_t>();
    held.push_back(id);
    if (const Ref<Trip>* const trip = outbox_.find(id); trip != nullptr) (*trip)->waits_for = {rank, clock};
  }
  for (const uint64_t id : asked_) {  // as above
    const Ref<Trip>* const trip = outbox_.find(id);
    if (trip != nullptr && (*trip)->lies && std::find(held.begin(), held.end(), id) == held.end())
      return broken_rule("a request was lost on its way");
  }
  outbox_.heard(asked_, held);
  asked_.clear();
  asking_ = 0;
  return true;
}

}  // namespace windlass
