#include "server/net/incoming.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "base/breaks.h"
#include "exec/crew.h"
#include "server/host.h"
#include "server/net/direct_answer.h"

namespace windlass {

namespace {

using wire::kSection;
constexpr uint64_t kLargeBytes = uint64_t{64} << 10;     // larger blocks count against the staging limit
constexpr size_t kKeptBufferBytes = size_t{1} << 20;     // a thread keeps no more between requests
constexpr int64_t kLookNs = 100'000'000;                 // how often who waits for room looks whether it is next
constexpr uint64_t kMuchWork = 8;                        // times as many bytes to work on as to read
constexpr size_t kStreamHelpers = 2;                     // one reads while two work; more would wait for the stream
constexpr uint64_t kSmallBytesMax = uint64_t{32} << 10;  // of all blocks that a thread takes at once
constexpr uint64_t kTwoBytesMax = uint64_t{128} << 10;   // blocks up to this are read in pairs

thread_local Request::Taken t_blocks[Request::kAtOnceMax];
thread_local Buffer t_in, t_out;             // of the present block, and of its answer
thread_local std::vector<std::byte> t_kept;  // answers that leave together with those of other threads
thread_local Buffer t_heads, t_rest;         // of a DirectAnswer

}  // namespace

Incoming::Incoming(std::shared_ptr<Connection> from, const wire::Header& header)
    : from_(std::move(from)),
      channel_(from_->channel()),
      request_(from_, header),
      left_blocks_(header.blocks),
      left_bytes_(header.length) {}

void Incoming::call_help(Server& server) {
  shared_ = request_.header().blocks > 1 && server.threads() > 1 && request_.is_large();
  if (!shared_) return;
  threads_ = static_cast<size_t>(server.threads());
  if (request_.in_place()) {
    at_once_ = Request::kAtOnceMax;
    if (take_all()) shares_.divide(static_cast<uint32_t>(all_.size()), threads_);
  }
  const wire::Header& header = request_.header();
  const bool little_to_read = request_.in_place() || header.work_bytes > kMuchWork * header.length;
  server.crew().post(Ref<Counted>(this), this, little_to_read ? threads_ - 1 : kStreamHelpers);
}

void Incoming::help() {
  helpers_.fetch_add(1, std::memory_order_acq_rel);
  const bool together = shared_ && request_.in_place();
  if (together) begin_together();
  try {
    Answers answers(channel_, request_.header(), &t_out);
    t_kept.clear();
    if (together) answers.keep_in(&t_kept);
    DirectAnswer direct(channel_, request_.header(), from_->host().answers(), &t_heads, &t_rest);
    Some some;
    Freed freed;
    for (;;) {
      if (!shared_ && !channel_.has_ahead(kSection)) direct.flush();  // hold no turn while waiting for the peer
      if (!next(&some, &freed)) break;
      if (!shared_ && some.n == 1 && request_.answer_directly(some.blocks[0], &direct)) continue;
      direct.flush();
      request_.serve(some.blocks, some.n, &answers, &freed);
      if (some.staged != 0) from_->host().release(some.staged);
    }
    direct.flush();
    answers.flush();
    together ? end_together(t_kept, &freed) : deliver(&freed);
    t_in.shrink(kKeptBufferBytes);
    t_out.shrink(kKeptBufferBytes);
    t_rest.shrink(kKeptBufferBytes);
  } catch (const std::bad_alloc&) {
    std::lock_guard lock(reading_);
    status_ = Status(Code::kResourceExhausted, "no memory for a request");
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

// With the stream (reading_ held), in the order of the frame.
void Incoming::take(Request::Taken* taken) {
  entries_ += taken->block.entries;
  request_.take(taken);
}

Status Incoming::finish() {
  for (uint32_t n; (n = helpers_.load(std::memory_order_acquire)) != 0;) os::wait(helpers_, n, 10'000'000);
  std::lock_guard lock(reading_);
  channel_.expect_pause(entries_);
  if (status_.ok() && left_bytes_ != 0) {
    return Status(Code::kProtocolError, "frame: " + std::to_string(left_bytes_) + " bytes more than its blocks have");
  }
  return status_;
}

// Takes all blocks in place, if they have been read ahead and are well formed.
bool Incoming::take_all() {
  const std::byte* const begin = channel_.ahead(0, left_bytes_);
  if (begin == nullptr) return false;
  uint64_t at = 0;
  std::vector<Request::Taken> all(left_blocks_);
  for (Request::Taken& taken : all) {
    if (left_bytes_ - at < kSection || !wire::decode(begin + at, &taken.block).ok()) return false;
    at += kSection;
    if (taken.block.bytes() > std::min(left_bytes_ - at, kSmallBytesMax)) return false;
    taken.bytes = const_cast<std::byte*>(begin + at);
    at += taken.block.bytes();
  }
  if (at != left_bytes_) return false;
  for (Request::Taken& taken : all) take(&taken);
  channel_.skip(at);
  left_blocks_ = 0;
  left_bytes_ = 0;
  all_ = std::move(all);
  return true;
}

bool Incoming::next_read(Some* some) {
  uint32_t first = 0;
  some->staged = 0;
  some->n = shares_.take(Crew::number(), static_cast<uint32_t>(at_once_), &first);
  some->blocks = all_.data() + first;
  return some->n != 0;
}

bool Incoming::next(Some* some, Freed* freed) {
  if (!all_.empty()) return next_read(some);
  // Deliver to others before waiting for the peer, or for a thread that may wait for it: a slow client delays nobody
  // else.
  std::unique_lock lock(reading_, std::try_to_lock);
  if (!lock) {
    deliver(freed);
    lock.lock();
  }
  if (!freed->empty() && left_blocks_ != 0 && !has_block_ahead()) deliver(freed);
  size_t used = 0;  // bytes of this thread's memory
  some->blocks = t_blocks;
  some->n = 0;
  some->staged = 0;
  // Fewer towards the end, so that the threads end together.
  const size_t most = std::clamp<size_t>(left_blocks_ / (2 * threads_), 1, at_once_);
  while (some->n < most && left_blocks_ != 0 && status_.ok()) {
    Request::Taken& taken = some->blocks[some->n];
    if (most != 1 && read_small_block(&taken, &used)) {
      ++some->n;
      continue;
    }
    if (some->n != 0 && (used != 0 || !channel_.has_ahead(kSection))) break;  // serve these first
    status_ = read_block(&taken, &some->staged);
    --left_blocks_;
    if (!status_.ok()) break;
    take(&taken);
    if (some->blocks[some->n++].block.bytes() != 0) break;
  }
  return some->n != 0;
}

// Whether the whole next block has been read ahead.
bool Incoming::has_block_ahead() {
  const std::byte* const head = channel_.ahead(0, kSection);
  wire::Block block;
  return head != nullptr && wire::decode(head, &block).ok() && channel_.ahead(kSection, block.bytes()) != nullptr;
}

// Takes the next block, if it has been read ahead and is small enough to join those before.
bool Incoming::read_small_block(Request::Taken* taken, size_t* used) {
  const std::byte* const head = channel_.ahead(0, kSection);
  wire::Block block;
  if (head == nullptr || !wire::decode(head, &block).ok()) return false;
  const uint64_t bytes = block.bytes(), after = uint64_t{left_blocks_ - 1} * kSection;
  if (bytes > kSmallBytesMax - *used || channel_.ahead(kSection, bytes) == nullptr) return false;
  if (left_bytes_ < kSection + after || bytes > left_bytes_ - kSection - after) return false;
  std::byte* const to = t_in.room(kSmallBytesMax);
  if (to == nullptr) return false;
  channel_.skip(kSection);
  if (!channel_.read(to + *used, bytes)) return false;
  *taken = {};
  taken->block = block;
  taken->bytes = to + *used;
  take(taken);
  *used += bytes;
  left_bytes_ -= kSection + bytes;
  --left_blocks_;
  return true;
}

// Waits for room for a large block, unless its worker is next in an update: others, who have room, wait for it.
bool Incoming::reserve(const wire::Block& block, uint64_t bytes) {
  Host& host = from_->host();
  if (host.reserve(bytes, false, 0)) return true;
  const int64_t deadline_ns = os::now_ns() + int64_t{limits::kStallMs} * 1'000'000;
  do {
    if (host.reserve(bytes, request_.is_next(block), os::now_ns() + kLookNs)) return true;
  } while (os::now_ns() < deadline_ns && !channel_.gone());
  return false;
}

Status Incoming::read_block(Request::Taken* taken, uint64_t* staged) {
  *taken = {};
  wire::Block* const block = &taken->block;
  std::byte** const at = &taken->bytes;
  *staged = 0;
  std::byte head[kSection];
  if (!channel_.read(head, kSection)) return connection_ended("within a frame");
  WL_RETURN_IF_ERROR(wire::decode(head, block));
  const uint64_t after = uint64_t{left_blocks_ - 1} * kSection;
  if (left_bytes_ < kSection + after || block->bytes() > left_bytes_ - kSection - after) {
    return Status(Code::kProtocolError, "block: " + std::to_string(block->bytes()) + " bytes, more than its frame has");
  }
  left_bytes_ -= kSection + block->bytes();
  const uint64_t bytes = block->bytes();
  if (!shared_ && (*at = channel_.in_place(bytes)) != nullptr) return {};
  // Neighbours tend to be of one size: reading two at a time halves the system calls.
  const uint64_t two = bytes <= kTwoBytesMax && !shared_ ? std::min(left_bytes_, kSection + bytes) : 0;
  if (bytes > kLargeBytes) {
    *staged = Buffer::size_for(bytes);
    if (!reserve(*block, *staged)) {
      *staged = 0;
      return Status(Code::kResourceExhausted, "no room for " + std::to_string(bytes) + " bytes of a request");
    }
  }
  Status status;
  channel_.hurry(*staged != 0);
  if (bytes > kLargeBytes && broken(Break::kLengths)) std::memset(t_in.room(bytes), 0, bytes);
  if (bytes != 0 && t_in.room(bytes) == nullptr) {
    status = Status(Code::kResourceExhausted, "no memory for " + std::to_string(bytes) + " bytes of a request");
  } else if (bytes != 0 && !channel_.read(t_in.data(), bytes, two)) {
    status = connection_ended("within a block");
  }
  channel_.hurry(false);
  *at = t_in.data();
  if (!status.ok() && *staged != 0) from_->host().release(*staged);
  return status;
}

}  // namespace windlass
