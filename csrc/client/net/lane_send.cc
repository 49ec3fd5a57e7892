// Lane: sending. client/net/lane.cc has connections and leaders, client/net/lane_receive.cc receiving.
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "client/net/lane.h"
#include "client/net/links.h"
#include "client/net/remote_route.h"

namespace windlass {

using wire::Op;

namespace {

using wire::kSection;
constexpr size_t kPiecesMax = 512;
constexpr std::byte kZeros[kSection] = {};

// Whether a request must not overtake an earlier one, whatever their priorities: both touch the same shard, or one is
// about several objects or none.
bool must_follow(const Ref<Trip>& later, const Ref<Trip>& earlier) {
  if (later->object == 0 || earlier->object == 0) return true;
  if (later->object != earlier->object) return false;
  // Parts are in the order of their shards.
  auto a = later->parts.begin(), b = earlier->parts.begin();
  while (a != later->parts.end() && b != earlier->parts.end() && a->shard != b->shard) a->shard < b->shard ? ++a : ++b;
  return a != later->parts.end() && b != earlier->parts.end();
}

std::byte* put(std::byte* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return to + bytes;
}

}  // namespace

// A frame of one block with a body.
std::string Lane::frame_of(wire::Header header, const std::string* body) {
  std::string frame(kSection, '\0');
  if (body != nullptr) {
    wire::Block block;
    block.op = header.op;
    block.body_bytes = static_cast<uint32_t>(body->size());
    block.body_crc = crc32c(body->data(), body->size());
    frame.resize(2 * kSection);
    wire::encode(block, reinterpret_cast<std::byte*>(frame.data()) + kSection);
    frame += *body;
    frame.resize(wire::padded(frame.size()));
    header.blocks = 1;
  }
  header.length = frame.size() - kSection;
  wire::encode(header, reinterpret_cast<std::byte*>(frame.data()));
  return frame;
}

// A request may have been planned before its server was lost. Its caller may hold locks, so that parts which are
// elsewhere by now are sent on by the thread of Links.
void Lane::submit(const Ref<Trip>& trip) {
  Status failed;
  {
    std::lock_guard lock(mutex_);
    failed = failed_;
    if (failed.ok()) outbox_.add(trip->header.request, trip, trip->header.priority);
  }
  if (failed.ok()) return;
  std::vector<Ref<Trip>> redirected;
  give_up(trip, failed, &redirected);
  conclude(trip);
  for (const Ref<Trip>& r : redirected) {
    if (!links_.rest(r, 0)) RemoteRoute::end_redirected(r, failed);
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
        if (!ended.empty()) break;  // end them without the lock; the caller that waits pumps again
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

// All prepared frames have been sent; *ended gets trips that only waited for that.
void Lane::have_left(std::vector<Ref<Trip>>* ended) {
  if (leaving_.empty()) return;
  const int64_t now = os::now_ns();
  for (Ref<Trip>& trip : leaving_) {
    trip->leaving = false;
    trip->sent_ns = now;
    const auto parts = static_cast<int64_t>(trip->parts.size());
    spin_ns_.store(std::min(limits::kSpinNs + parts * limits::kSpinNsPerPart, limits::kSpinNsMax),
                   std::memory_order_relaxed);
    if (trip->in_place && trip->bytes >= limits::kCrewBytesMin) {
      shared_ns_.store(now, std::memory_order_relaxed);
    } else if (trip->bytes >= limits::kBulkBytesMin) {
      large_ns_.store(now, std::memory_order_relaxed);
    }
    if (trip->ends_later) ended->push_back(std::move(trip));
  }
  leaving_.clear();
}

// Prepares the pieces for the next system calls; false if there is nothing to send.
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
  add_blocks();
  // Adds small requests to the same system call.
  while (!in_frame_ && scratch_used_ < limits::kTogetherBytes && pieces_.size() + 8 < kPiecesMax && raw_.empty()) {
    const Ref<Trip>* const next = outbox_.peek(must_follow);
    if (next == nullptr || !is_small(**next)) break;
    begin_frame(*outbox_.next(must_follow));
    add_blocks();
  }
  return true;
}

// Adds as many blocks of the present frame as go into a system call.
void Lane::add_blocks() {
  // The first piece is small if checksums or many objects take time, so that the server can begin early.
  const bool begins = next_block_ == 0;
  const size_t most = !begins                 ? limits::kSendBytes
                      : sending_->object == 0 ? limits::kTogetherBytes
                      : checksums_            ? limits::kBulkBytesMin
                                              : limits::kSendBytes;
  size_t bytes = 0;
  while (next_block_ < frame_blocks_.size() && bytes < most && scratch_used_ < limits::kChunkBytes &&
         pieces_.size() + 4 < kPiecesMax) {
    if (!add_block(frame_blocks_[next_block_], &bytes)) break;
    ++next_block_;
  }
  if (next_block_ != frame_blocks_.size()) return;
  in_frame_ = false;
  leaving_.push_back(std::move(sending_));
  sending_ = Ref<Trip>();
}

// Whether it is only a few bytes, and nothing must be sent before it.
bool Lane::is_small(const Trip& trip) const {
  constexpr size_t kBlocksMax = 16;
  constexpr uint64_t kBytesMax = uint64_t{4} << 10;
  if (trip.blocks.size() > kBlocksMax) return false;
  return may_share(trip) || (trip.bytes <= kBytesMax && (!shares_ || trip.segments.empty()));
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

// Shares memory that a request lies in with the server, once; false if there is nothing to share.
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

bool Lane::may_share(const Trip& trip) const {
  return shares_ && trip.placed && std::all_of(trip.segments.begin(), trip.segments.end(), [this](const auto& segment) {
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
    announced_.erase(it);  // it arrived damaged: share it again
  } else if (code == Code::kProtocolError) {
    shares_ = false;  // the file did not arrive: there is a proxy in between
  } else {
    it->second.known = true;  // if it was refused, answers to requests say why
  }
}

void Lane::begin_frame(const Ref<Trip>& trip) {
  sending_ = trip;
  trip->leaving = true;
  in_frame_ = true;
  next_block_ = 0;
  trip->repeated = trip->repeated || trip->begun;
  trip->begun = true;
  trip->sent_ns = 0;
  frame_blocks_.clear();
  frame_parts_.clear();
  wire::Header header = trip->header;
  header.session = links_.incarnation();
  header.app = links_.app_number(server_);
  header.lane = number_;
  trip->in_place = may_share(*trip);
  header.flags = static_cast<uint16_t>((trip->in_place ? wire::kInArenas
                                        : checksums_   ? wire::kChecksummed
                                                       : 0) |
                                       (trip->ticks ? wire::kTicks : 0) | (trip->object == 0 ? wire::kManyObjects : 0));
  const int64_t left_ms = (trip->deadline_ns - os::now_ns()) / 1'000'000;
  header.deadline_ms =
      trip->deadline_ns == limits::kNoDeadline ? 0 : static_cast<uint32_t>(std::clamp<int64_t>(left_ms, 1, UINT32_MAX));
  const Trip::Common* before = nullptr;
  for (uint32_t label = 0; label < trip->blocks.size(); ++label) {
    const bool is_list = trip->header.operation() == Op::kList;  // its answer has more blocks than its request
    if (is_list && label != 0) break;
    const Outgoing block = outgoing(label, before);
    if (block.n == 0) continue;
    header.length += kSection + block.head.bytes();
    header.work_bytes += block.work_bytes;
    before = trip->parts[trip->blocks[label].first].common;
    frame_blocks_.push_back(block);
  }
  header.blocks = static_cast<uint32_t>(frame_blocks_.size());
  std::byte* const at = scratch_.data() + scratch_used_;
  wire::encode(header, at);
  scratch_used_ += kSection;
  add_piece(at, kSection);
}

// The parts of a block that have no answer yet. before: what the previous block in the frame is about.
Lane::Outgoing Lane::outgoing(uint32_t label, const Trip::Common* before) {
  const Trip& trip = *sending_;
  const Trip::Block& block = trip.blocks[label];
  const Trip::Common& common = *trip.parts[block.first].common;
  const bool in_place = trip.in_place && common.places != nullptr;
  const bool as_before = before == &common;
  Outgoing out;
  out.first = frame_parts_.size();
  wire::Block& head = out.head;
  head.label = label;
  head.object = common.object;
  head.op = static_cast<uint8_t>(common.op);
  head.dtype_in = common.dtype_in;
  head.dtype_out = common.dtype_out;
  if (!as_before) head.hypers = common.hypers;
  uint32_t items_bytes = 0, argument_bytes = 0, next_shard = 0;
  bool run = true;
  for (uint32_t i = block.first; i < block.first + block.n; ++i) {
    const Trip::Part& part = trip.parts[i];
    if (part.answered && trip.header.operation() != Op::kList) continue;
    Parcel parcel;
    trip.describe(part, in_place, &parcel);
    items_bytes += parcel.items_bytes;
    head.numbers_bytes += static_cast<uint32_t>(parcel.numbers_bytes);
    out.work_bytes += parcel.work_bytes;
    run = run && parcel.items == 0 && (out.n == 0 || part.shard == next_shard);
    next_shard = part.shard + 1;
    frame_parts_.push_back(i);
    if (out.n++ != 0) continue;
    head.flags = parcel.flags;
    if (parcel.value != 0) head.flags |= wire::kHasValue;
    argument_bytes = as_before && parcel.same_argument ? 0 : parcel.argument_bytes;
    head.term = part.term;
    head.shard = part.shard;
    head.sequence = part.sequence;
    head.clock = part.clock;
    head.items = parcel.items;
  }
  if (as_before) head.flags |= wire::kAsBefore;
  if (in_place && !as_before) head.flags |= wire::kHasPlaces;
  if (run && out.n > 1) head.flags |= wire::kRun;
  wire::ListedItems list;
  if (in_place && out.n == block.n && (head.flags & wire::kPlaced) != 0 &&
      trip.payload->list(trip.parts[block.first].part, block.n, &list)) {
    head.flags |= wire::kListed;
    items_bytes = sizeof list;
  }
  head.entries = common.is_about_shards() ? static_cast<uint16_t>(out.n) : 0;
  head.body_bytes = wire::head_bytes(head.flags, head.hypers, head.entries) + items_bytes + argument_bytes;
  return out;
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

// Adds a block; false if it does not fit into this system call any more.
bool Lane::add_block(const Outgoing& block, size_t* bytes) {
  wire::Block head = block.head;
  const std::byte* numbers = nullptr;
  if (head.numbers_bytes != 0 && block.n == 1)
    numbers = sending_->payload->numbers(sending_->parts[frame_parts_[block.first]].part);
  const size_t body = wire::padded(head.body_bytes), whole = wire::padded(head.numbers_bytes);
  const bool gathers = head.numbers_bytes != 0 && numbers == nullptr;
  const size_t need = kSection + body + (gathers ? whole : 0);
  if (scratch_used_ + need > scratch_.bytes()) {
    if (scratch_used_ != 0) return false;
    if (scratch_.room(need) == nullptr) {
      os::shut_down(fd());  // no memory: reconnect and try again, until the caller's deadline
      return false;
    }
  }
  std::byte* const at = scratch_.data() + scratch_used_;
  scratch_used_ += need;
  *bytes += need + (gathers ? 0 : whole);
  if (head.body_bytes != 0) {
    write_body(block, at + kSection);
    std::memset(at + kSection + head.body_bytes, 0, body - head.body_bytes);
    head.body_crc = crc32c(at + kSection, head.body_bytes);
  }
  if (gathers) {
    std::byte* const to = at + kSection + body;
    gather_numbers(block, to);
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

// Writes the body as wire::Body reads it.
void Lane::write_body(const Outgoing& block, std::byte* to) const {
  const Trip& trip = *sending_;
  const wire::Block& head = block.head;
  Payload& payload = *trip.payload;
  const Trip::Part& first = trip.parts[frame_parts_[block.first]];
  const Trip::Common& common = *first.common;
  const bool in_place = trip.in_place && common.places != nullptr, listed = head.has(wire::kListed);
  std::byte* const end = to + head.body_bytes;
  std::byte* items = to + wire::head_bytes(head.flags, head.hypers, head.entries);
  if (listed) {
    wire::ListedItems list;
    (void)payload.list(first.part, static_cast<uint32_t>(block.n), &list);
    items = put(items, &list, sizeof list);
  }
  for (size_t i = 0; i < block.n; ++i) {
    const Trip::Part& part = trip.parts[frame_parts_[block.first + i]];
    Parcel parcel;
    trip.describe(part, in_place, &parcel);
    if (i == 0) {
      if (head.has(wire::kHasValue)) to = put(to, &parcel.value, sizeof parcel.value);
      if (head.has(wire::kHasPlaces)) to = put(to, common.places, sizeof *common.places);
      to = put(to, common.hyper, head.hypers * sizeof(double));
    } else if (head.has(wire::kRun)) {
      to = put(to, &part.sequence, sizeof part.sequence);
    } else {
      const wire::EntryItem entry{part.shard, parcel.items, part.sequence};
      to = put(to, &entry, sizeof entry);
    }
    if (listed || parcel.items_bytes == 0) continue;
    payload.write_items(part.part, in_place, items);
    items += parcel.items_bytes;
  }
  if (items != end) payload.write_argument(first.part, items);
}

void Lane::gather_numbers(const Outgoing& block, std::byte* to) const {
  const Trip& trip = *sending_;
  for (size_t i = 0; i < block.n; ++i) {
    const Trip::Part& part = trip.parts[frame_parts_[block.first + i]];
    Parcel parcel;
    trip.describe(part, false, &parcel);
    const std::byte* const together = block.n == 1 ? nullptr : trip.payload->numbers(part.part);
    if (together != nullptr) {
      std::memcpy(to, together, parcel.numbers_bytes);
    } else if (parcel.numbers_bytes != 0) {
      trip.payload->gather(part.part, to);
    }
    to += parcel.numbers_bytes;
  }
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
  std::byte* const elsewhere = in_numbers_.room(wire::padded(in_block_.numbers_bytes));
  if (elsewhere == nullptr) {
    os::shut_down(fd());
    got_ = need_;  // write no more there; the connection is over
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
    is_wanted_ = false;
  }
  finish(trip);
  return true;
}

}  // namespace windlass
