// Lane: receiving. client/net/lane_send.cc has sending.
#include <algorithm>
#include <cstring>

#include "base/breaks.h"
#include "base/crc32c.h"
#include "client/net/lane.h"
#include "client/net/links.h"
#include "client/net/remote_route.h"

namespace windlass {

using wire::Op;

namespace {

using wire::kSection;
constexpr size_t kHeldBytes = 24;  // per waiting request, in the answer to an ask

}  // namespace

void Lane::reset_parser() {
  ahead_begin_ = ahead_end_ = 0;
  in_trip_ = Ref<Trip>();
  is_wanted_ = false;
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
  std::vector<Ref<Trip>> redirected;
  {
    std::lock_guard lock(receiving_);
    arrived = receive();
    if (!redirected_.empty()) redirected.swap(redirected_);
  }
  RemoteRoute::go_on(redirected);
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
      // Large reads go straight to their destination, and read no more ahead than the next headers.
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
    // Between frames with the socket drained: return the answer now instead of another read that finds nothing.
    if (drained && stage_ == kHeader && got_ == 0 && ahead_begin_ == ahead_end_) break;
  }
  if (arrived) arrival_ns_.store(os::now_ns(), std::memory_order_relaxed);
  return arrived;
}

// Parses what was read ahead.
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
      frame_left_ = in_header_.length;
      blocks_left_ = in_header_.blocks;
      std::lock_guard lock(mutex_);
      Ref<Trip>* const trip = outbox_.find(in_header_.request);
      in_trip_ = trip != nullptr && (*trip)->header.op == (in_header_.op & ~wire::kAnswer) ? *trip : Ref<Trip>();
      break;
    }
    case kBlock:
      if (const Status status = wire::decode(head_, &in_block_); !status.ok()) return broken_rule(status.message());
      if (frame_left_ < kSection || in_block_.bytes() > frame_left_ - kSection)
        return broken_rule("a block of " + std::to_string(in_block_.bytes()) + " bytes, more than its frame has");
      frame_left_ -= kSection + in_block_.bytes();
      --blocks_left_;
      if (!find_block()) return false;
      // Only maps memory: no page is touched before the bytes come.
      if (in_block_.body_bytes != 0 && in_body_.room(wire::padded(in_block_.body_bytes)) == nullptr)
        return broken_rule("no memory for its body");
      expect(kBody, in_body_.data(), wire::padded(in_block_.body_bytes));
      return true;
    case kBody:
      if (in_block_.body_bytes != 0 && crc32c(in_body_.data(), in_block_.body_bytes) != in_block_.body_crc &&
          !broken(Break::kChecksums))
        return broken_rule("the checksum of the body is wrong");
      return expect_numbers();
    case kNumbers:
      expect(kPad, pad_,
             wire::padded(in_block_.numbers_bytes) - (landed_ != nullptr ? in_block_.numbers_bytes : need_));
      return true;
    case kPad:
      if (!end_block()) return false;
      in_body_.shrink(limits::kBodyBytesMax);
      break;
  }
  if (blocks_left_ != 0) {
    expect(kBlock, head_, kSection);
    return true;
  }
  if (frame_left_ != 0) return broken_rule("a frame longer than its blocks");
  in_trip_ = Ref<Trip>();
  expect(kHeader, head_, kSection);
  return true;
}

bool Lane::find_block() {
  is_wanted_ = false;
  if (!in_trip_) return true;
  Trip& trip = *in_trip_;
  if (in_header_.operation() == Op::kList && in_block_.value() <= limits::kObjectsMax) trip.grow(in_block_.value());
  if (in_block_.label >= trip.blocks.size()) return true;
  const uint32_t expected = trip.unanswered_in(trip.blocks[in_block_.label]);
  if (expected == 0) return true;
  const bool is_about_shards = in_header_.operation() == Op::kStep && in_block_.operation() != Op::kTick;
  if (is_about_shards && in_block_.entries != expected)
    return broken_rule(std::to_string(in_block_.entries) + " entries, expected " + std::to_string(expected));
  is_wanted_ = true;
  return true;
}

bool Lane::expect_numbers() {
  landed_ = nullptr;
  discarded_ = false;
  const uint32_t bytes = in_block_.numbers_bytes;
  if (bytes != 0 && is_wanted_ && in_block_.items == 0) {
    const Trip::Block& block = in_trip_->blocks[in_block_.label];
    if (block.n == 1) landed_ = in_trip_->payload->landing(in_trip_->parts[block.first].part, bytes);
  }
  if (landed_ != nullptr) {
    expect(kNumbers, landed_, bytes);
    return true;
  }
  if (bytes != 0 && in_numbers_.room(wire::padded(bytes)) == nullptr) return broken_rule("no memory for its numbers");
  expect(kNumbers, in_numbers_.data(), wire::padded(bytes));
  return true;
}

bool Lane::end_block() {
  const uint32_t bytes = in_block_.numbers_bytes;
  if (bytes != 0 && (in_header_.flags & wire::kChecksummed) != 0 && !discarded_ &&
      crc32c(landed_ != nullptr ? landed_ : in_numbers_.data(), bytes) != in_block_.numbers_crc &&
      !broken(Break::kChecksums))
    return broken_rule("the checksum of the numbers is wrong");
  return answer_parts();
}

// Parses the body of an answer: how long it waited, values, exceptions, then the operation's own bytes.
bool Lane::answer_parts() {
  wire::Reader reader(in_body_.data(), in_block_.body_bytes);
  in_answer_ = {};
  in_answer_.clock = in_block_.clock;
  if (in_block_.has(wire::kWaited)) in_answer_.waited = reader.get<wire::Waited>();
  std::vector<uint64_t> values;
  for (uint32_t i = 0; in_block_.has(wire::kHasValues) && i < in_block_.entries; ++i)
    values.push_back(reader.get<uint64_t>());
  struct Refusal {
    wire::Exception exception;
    std::string message;
  };
  std::vector<Refusal> exceptions;
  for (uint32_t i = 0; i < in_block_.items && reader.ok(); ++i) {
    Refusal& r = exceptions.emplace_back();
    r.exception = reader.get<wire::Exception>();
    r.message = reader.get_bytes(r.exception.message_bytes);
    (void)reader.get_bytes(-r.message.size() & 7);
  }
  if (!reader.ok()) return broken_rule("a body that is too short for what it says");
  in_answer_.body = reader.get_bytes(reader.left());
  const auto code_of = [](const wire::Exception& e) {
    return e.status <= kLastCode ? static_cast<Code>(e.status) : Code::kInternal;
  };
  const Refusal* const all =
      exceptions.size() == 1 && exceptions[0].exception.entry == wire::Exception::kAll ? exceptions.data() : nullptr;
  const Code code = all != nullptr ? code_of(all->exception) : Code::kOk;
  const std::string& said = all != nullptr ? all->message : in_answer_.body;
  if (in_header_.request == 0) {
    complaint_ = "it said: " + wire::printable(said);
    return true;
  }
  if (in_header_.request == wire::kHelloRequest && in_header_.operation() == Op::kHello) return welcomed(code, said);
  if (in_header_.operation() == Op::kAsk) return heard(code);
  if (in_header_.operation() == Op::kArena) {
    heard_of_arena(code);
    return true;
  }
  if (!is_wanted_) return true;  // answered before
  Trip& trip = *in_trip_;
  for (const Refusal& r : exceptions) {
    const Code refused = code_of(r.exception);
    if (refused == Code::kOutOfSequence) return true;  // counts as lost: the next ask finds that out
    if (refused != Code::kCorrupt) continue;
    // The server may still work on its other blocks, and could write arrays again after they have been answered. A new
    // connection starts only when nothing of the old one is under way.
    if (trip.in_place) return broken_rule("a request arrived damaged");
    std::lock_guard lock(mutex_);
    outbox_.again(in_header_.request);
    return true;
  }
  const Trip::Block& block = trip.blocks[in_block_.label];
  const std::byte* numbers = landed_ != nullptr || in_block_.numbers_bytes == 0 ? nullptr : in_numbers_.data();
  uint64_t left = in_block_.numbers_bytes;
  uint32_t entry = 0;
  const bool alone = block.n == 1;
  for (uint32_t i = block.first; i < block.first + block.n; ++i) {
    Trip::Part& part = trip.parts[i];
    if (part.answered) continue;
    const auto mine = std::find_if(exceptions.begin(), exceptions.end(), [&](const Refusal& r) {
      return r.exception.entry == entry || r.exception.entry == wire::Exception::kAll;
    });
    PartAnswer answer = alone ? std::move(in_answer_) : in_answer_;
    answer.value = entry < values.size() ? values[entry] : alone ? in_block_.value() : 0;
    Code status = Code::kOk;
    if (mine != exceptions.end()) {
      status = code_of(mine->exception);
      answer.flags = mine->exception.flags;
      answer.value = mine->exception.value;
      if (status != Code::kOk) answer.body = std::move(mine->message);
      answer.term = mine->exception.term;
    }
    const std::byte* own = numbers;
    if (alone) {
      answer.numbers_bytes = left;
    } else if (status == Code::kOk && (answer.flags & wire::kUnchanged) == 0 && (part.flags & wire::kEmpty) == 0) {
      Parcel parcel;
      trip.payload->describe(part.part, trip.in_place && part.common->places != nullptr, &parcel);
      answer.numbers_bytes = parcel.answer_bytes;
      if (answer.numbers_bytes > left) return broken_rule("too few numbers for its entries");
      if (numbers != nullptr) numbers += answer.numbers_bytes;
    }
    left -= answer.numbers_bytes;
    if (!answer_part(&part, status, answer, answer.numbers_bytes != 0 ? own : nullptr)) return false;
    ++entry;
  }
  if (left != 0) return broken_rule("more numbers than its entries have");
  if (trip.unanswered != 0) return true;
  finish(in_trip_);
  in_trip_ = Ref<Trip>();  // nobody wants the rest of the frame
  return true;
}

bool Lane::answer_part(Trip::Part* part, Code code, const PartAnswer& answer, const std::byte* numbers) {
  Trip& trip = *in_trip_;
  if ((code == Code::kStaleMap || code == Code::kNotFound) && follow(*part, code, answer)) {
    // Another trip has it now.
  } else if (code == Code::kOk && (part->flags & wire::kEmpty) == 0) {
    const bool in_place = trip.in_place && part->common->places != nullptr;
    if (const Status landed = trip.payload->land(part->part, in_place, answer, numbers); !landed.ok())
      return broken_rule(landed.message());
  } else if (code != Code::kOk) {
    const bool fine = trip.payload->refused(part->part, code);
    if (!fine && trip.status.ok())
      trip.status = Status(code, links_.address(server_) + ": " + wire::printable(answer.body));
  }
  part->answered = true;
  --trip.unanswered;
  return true;
}

// Redirects a part whose shard is elsewhere or has another term. A server that does not know the object may be one that
// the shard is still on its way to. False if the part must not be redirected. Who refuses a part has not done it,
// unless it was sent before: the shard may have moved with it.
bool Lane::follow(const Trip::Part& part, Code code, const PartAnswer& answer) {
  uint32_t shard = 0;
  Owners* const owners = in_trip_->payload->owners(part.part, &shard);
  if (owners == nullptr || (code == Code::kNotFound && !owners->has_moved(shard))) return false;
  if (code == Code::kStaleMap && answer.value < links_.servers())
    owners->learn(shard, {static_cast<uint32_t>(answer.value), answer.term});
  std::lock_guard lock(mutex_);
  redirected_.push_back(in_trip_->redirect(part, server_, in_trip_->repeated));
  return true;
}

bool Lane::welcomed(Code code, const std::string& said) {
  Status status;
  Welcome welcome;
  if (code == Code::kCorrupt) return broken_rule("the hello arrived damaged");  // retry with another connection
  if (code == Code::kTimeout) {                                                 // likewise: it has not been told of us
    complaint_ = "it said: " + wire::printable(said);
    return false;
  }
  if (code == Code::kResourceExhausted && was_ready_) {  // who was here before waits until there is room again
    complaint_ = "it said: " + wire::printable(said);
    links_.rest_before_dial(server_);
    return false;
  }
  if (code != Code::kOk) {
    status = Status(code, links_.address(server_) + ": " + wire::printable(said));
  } else {
    status = decode(said, &welcome);
    if (status.ok()) status = links_.welcomed(server_, welcome);
  }
  if (!status.ok()) {
    if (links_.may_come_back(status)) links_.rest_before_dial(server_);
    refusal_ = status;
    complaint_ = status.message();
    return false;
  }
  complaint_.clear();
  was_ready_ = true;
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
  for (wire::Reader reader(in_answer_.body); reader.left() >= kHeldBytes;) {
    const auto id = reader.get<uint64_t>(), clock = reader.get<uint64_t>();
    const auto rank = reader.get<uint32_t>();
    reader.get<uint32_t>();
    held.push_back(id);
    if (const Ref<Trip>* const trip = outbox_.find(id); trip != nullptr) (*trip)->waits_for = {rank, clock};
  }
  for (const uint64_t id : asked_) {  // in place: break the connection, as in answer_parts()
    const Ref<Trip>* const trip = outbox_.find(id);
    if (trip != nullptr && (*trip)->in_place && std::find(held.begin(), held.end(), id) == held.end())
      return broken_rule("a request was lost on its way");
  }
  outbox_.heard(asked_, held);
  asked_.clear();
  asking_ = 0;
  return true;
}

}  // namespace windlass
