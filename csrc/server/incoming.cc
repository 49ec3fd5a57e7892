#include "server/incoming.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/breaks.h"
#include "exec/crew.h"
#include "server/direct_answer.h"
#include "server/host.h"

namespace windlass {

namespace {

constexpr size_t kSection = limits::kSectionBytes;
constexpr uint64_t kLargeBytes = uint64_t{1} << 20;      // parts from here on count against the staging limit
constexpr size_t kKeptBufferBytes = size_t{16} << 20;    // a thread keeps no more between requests
constexpr size_t kStreamHelpers = 2;                     // one reads while two work; more would wait for the stream
constexpr uint64_t kSmallBytesMax = uint64_t{32} << 10;  // of parts that a thread takes at once
constexpr uint64_t kTwoBytesMax = uint64_t{128} << 10;   // parts up to this are read in pairs

thread_local Buffer t_in, t_out;             // of the part at hand, and of its answer
thread_local std::vector<std::byte> t_kept;  // answers that leave together with others'
thread_local Buffer t_heads, t_rest;         // of answers that are sent from where they lie

Status ended(const char* where) { return Status(Code::kServerLost, std::string("the connection ended ") + where); }

}  // namespace

Incoming::Incoming(std::shared_ptr<Connection> from, const wire::Header& header)
    : from_(std::move(from)),
      channel_(from_->channel()),
      request_(from_, header),
      left_parts_(header.parts),
      left_bytes_(header.length - header.extension_bytes) {}

void Incoming::call_help(Server& server) {
  shared_ = request_.header().parts > 1 && server.threads() > 1 && request_.is_large();
  if (!shared_) return;
  threads_ = static_cast<size_t>(server.threads());
  if (request_.in_place()) {
    at_once_ = Request::kAtOnceMax;
    if (take_all()) shares_.divide(static_cast<uint32_t>(all_.size()), threads_);
  }
  const OpTraits* const op = traits_of(request_.header().operation());
  const bool queries = op != nullptr && op->walks;  // little to read, much to do
  server.crew().post(Ref<Counted>(this), this, request_.in_place() || queries ? threads_ - 1 : kStreamHelpers);
}

void Incoming::help() {
  helpers_.fetch_add(1, std::memory_order_acq_rel);
  const bool together = shared_ && request_.in_place();
  if (together) begin_together();
  {
    Answers answers(channel_, request_.header(), &t_out);
    t_kept.clear();
    if (together) answers.keep_in(&t_kept);
    DirectAnswer direct(channel_, request_.header(), &t_heads, &t_rest);
    Batch batch;
    Freed freed;
    for (;;) {
      if (!shared_ && !channel_.has_ahead(kSection)) direct.flush();  // whoever waits for the peer has no turn
      if (!next(&batch, &freed)) break;
      if (!shared_ && batch.n == 1 && request_.answer_directly(batch.parts[0].part, &direct)) continue;
      direct.flush();
      request_.serve(batch.parts, batch.n, &answers, &freed);
      if (batch.staged != 0) from_->host().release(batch.staged);
    }
    direct.flush();
    answers.flush();
    together ? end_together(t_kept, &freed) : deliver(&freed);
    t_in.shrink(kKeptBufferBytes);
    t_out.shrink(kKeptBufferBytes);
  }
  if (helpers_.fetch_sub(1, std::memory_order_acq_rel) == 1 && shared_) os::wake_all(helpers_);
}

void Incoming::begin_together() {
  std::lock_guard lock(ending_);
  ++working_;
}

void Incoming::end_together(const std::vector<std::byte>& answers, Freed* freed) {
  std::unique_lock lock(ending_);
  answers_.insert(answers_.end(), answers.begin(), answers.end());
  freed_.insert(freed_.end(), std::make_move_iterator(freed->begin()), std::make_move_iterator(freed->end()));
  freed->clear();
  if (--working_ != 0) return;
  const std::vector<std::byte> all = std::exchange(answers_, {});
  Freed others = std::exchange(freed_, {});
  lock.unlock();
  deliver(&others);
  if (!all.empty()) (void)channel_.send(all.data(), all.size());
}

Status Incoming::finish() {
  for (uint32_t n; (n = helpers_.load(std::memory_order_acquire)) != 0;) os::wait(helpers_, n, 10'000'000);
  std::lock_guard lock(reading_);
  if (status_.ok() && left_bytes_ != 0) {
    return Status(Code::kProtocolError, "frame: " + std::to_string(left_bytes_) + " bytes more than its parts have");
  }
  return status_;
}

// All parts, where they are, if they have been read ahead and are as they should be.
bool Incoming::take_all() {
  const std::byte* const begin = channel_.ahead(0, left_bytes_);
  if (begin == nullptr) return false;
  uint64_t at = 0;
  std::vector<Request::Taken> all(left_parts_);
  for (Request::Taken& taken : all) {
    if (left_bytes_ - at < kSection || !wire::decode(begin + at, &taken.part).ok()) return false;
    at += kSection;
    if (taken.part.bytes() > std::min(left_bytes_ - at, kSmallBytesMax)) return false;
    taken.bytes = const_cast<std::byte*>(begin + at);
    at += taken.part.bytes();
  }
  if (at != left_bytes_) return false;
  channel_.skip(at);
  left_parts_ = 0;
  left_bytes_ = 0;
  all_ = std::move(all);
  return true;
}

bool Incoming::next_read(Batch* batch) {
  uint32_t first = 0;
  batch->staged = 0;
  batch->n = shares_.take(Crew::number(), static_cast<uint32_t>(at_once_), &first);
  std::copy_n(all_.begin() + first, batch->n, batch->parts);
  return batch->n != 0;
}

bool Incoming::next(Batch* batch, Freed* freed) {
  if (!all_.empty()) return next_read(batch);
  // Answers others before it waits for the peer, or for a thread that may: a slow client holds up nobody else.
  std::unique_lock lock(reading_, std::try_to_lock);
  if (!lock) {
    deliver(freed);
    lock.lock();
  }
  if (!freed->empty() && left_parts_ != 0 && !has_part_ahead()) deliver(freed);
  size_t used = 0;  // of this thread's memory
  batch->n = 0;
  batch->staged = 0;
  // Less and less towards the end, so that the threads end together.
  const size_t most = std::clamp<size_t>(left_parts_ / (2 * threads_), 1, at_once_);
  while (batch->n < most && left_parts_ != 0 && status_.ok()) {
    Request::Taken& taken = batch->parts[batch->n];
    if (most != 1 && read_small_part(&taken, &used)) {
      ++batch->n;
      continue;
    }
    if (batch->n != 0 && (used != 0 || !channel_.has_ahead(kSection))) break;  // first these, then more
    status_ = read_part(&taken, &batch->staged);
    --left_parts_;
    if (!status_.ok() || batch->parts[batch->n++].part.bytes() != 0) break;
  }
  return batch->n != 0;
}

// Whether all of the next part has been read ahead.
bool Incoming::has_part_ahead() {
  const std::byte* const head = channel_.ahead(0, kSection);
  wire::Part part;
  return head != nullptr && wire::decode(head, &part).ok() && channel_.ahead(kSection, part.bytes()) != nullptr;
}

// The next part, if it has been read ahead and goes well with those before.
bool Incoming::read_small_part(Request::Taken* taken, size_t* used) {
  const std::byte* const head = channel_.ahead(0, kSection);
  wire::Part part;
  if (head == nullptr || !wire::decode(head, &part).ok()) return false;
  const uint64_t bytes = part.bytes(), after = uint64_t{left_parts_ - 1} * kSection;
  if (bytes > kSmallBytesMax - *used || channel_.ahead(kSection, bytes) == nullptr) return false;
  if (left_bytes_ < kSection + after || bytes > left_bytes_ - kSection - after) return false;
  std::byte* const to = t_in.room(kSmallBytesMax);
  if (to == nullptr) return false;
  channel_.skip(kSection);
  if (!channel_.read(to + *used, bytes)) return false;
  *taken = {part, to + *used};
  *used += bytes;
  left_bytes_ -= kSection + bytes;
  --left_parts_;
  return true;
}

Status Incoming::read_part(Request::Taken* taken, uint64_t* staged) {
  wire::Part* const part = &taken->part;
  std::byte** const at = &taken->bytes;
  *staged = 0;
  std::byte head[kSection];
  if (!channel_.read(head, kSection)) return ended("within a frame");
  WL_RETURN_IF_ERROR(wire::decode(head, part));
  const uint64_t after = uint64_t{left_parts_ - 1} * kSection;
  if (left_bytes_ < kSection + after || part->bytes() > left_bytes_ - kSection - after) {
    return Status(Code::kProtocolError, "part: " + std::to_string(part->bytes()) + " bytes, more than its frame has");
  }
  left_bytes_ -= kSection + part->bytes();
  const uint64_t bytes = part->bytes();
  if (!shared_ && (*at = channel_.in_place(bytes)) != nullptr) return {};
  // Neighbours tend to be of one size: two at a time halve the system calls.
  const uint64_t two = bytes <= kTwoBytesMax && !shared_ ? std::min(left_bytes_, kSection + bytes) : 0;
  if (bytes >= kLargeBytes) {
    if (!from_->host().reserve(bytes, os::now_ns() + int64_t{limits::kStallMs} * 1'000'000))
      return Status(Code::kResourceExhausted, "no room for " + std::to_string(bytes) + " bytes of a request");
    *staged = bytes;
  }
  Status status;
  channel_.hurry(*staged != 0);
  if (bytes >= kLargeBytes && broken(Break::kLengths)) std::memset(t_in.room(bytes), 0, bytes);
  if (bytes != 0 && t_in.room(bytes) == nullptr) {
    status = Status(Code::kResourceExhausted, "no memory for " + std::to_string(bytes) + " bytes of a request");
  } else if (bytes != 0 && !channel_.read(t_in.data(), bytes, two)) {
    status = ended("within a part");
  }
  channel_.hurry(false);
  *at = t_in.data();
  if (!status.ok() && *staged != 0) from_->host().release(*staged);
  return status;
}

}  // namespace windlass
