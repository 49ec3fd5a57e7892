#include "server/net/frame_batch.h"

#include <algorithm>
#include <new>

#include "exec/crew.h"

namespace windlass {
namespace {

using wire::kSection;
constexpr uint64_t kSmallFrameBytes = uint64_t{256} << 10;  // larger requests are shared block by block
constexpr uint64_t kSharedBytes = uint64_t{256} << 10;
constexpr size_t kAtOnce = 4;
constexpr size_t kKeptBytes = 2 * limits::kAnswerBytes;  // a thread keeps no more between batches
constexpr size_t kLeaveBytes = size_t{4} << 10;  // sent early, so that the client can begin while the rest is served

thread_local Buffer t_answers;

}  // namespace

FrameBatch::FrameBatch(std::shared_ptr<Connection> from) : from_(std::move(from)), channel_(from_->channel()) {}

bool FrameBatch::take() {
  size_t at = 0;
  for (;;) {
    std::byte* const head = channel_.ahead(at, kSection);
    wire::Header header;
    // Stop at anything unusual: Connection::serve_frame() reports what is wrong with it.
    if (head == nullptr || !wire::decode(head, &header).ok() || !from_->expects(header)) break;
    std::byte* const bytes = channel_.ahead(at + kSection, header.length);
    if (bytes == nullptr) break;
    const uint64_t work = header.length + std::min(header.work_bytes, kSmallFrameBytes);
    if (work > kSmallFrameBytes) break;
    work_bytes_ += work;
    frames_.push_back({header, bytes});
    at += kSection + header.length;
  }
  if (frames_.size() < 2) return false;
  channel_.skip(at);
  channel_.count_requests(frames_.size());
  return true;
}

void FrameBatch::call_help(Server& server) {
  const auto threads = static_cast<size_t>(server.threads());
  if (threads < 2 || work_bytes_ < kSharedBytes) return;
  server.crew().post(Ref<Counted>(this), this, std::min(threads - 1, frames_.size() / kAtOnce));
}

void FrameBatch::help() {
  helpers_.fetch_add(1, std::memory_order_acq_rel);
  try {
    Answers answers(channel_, frames_[0].header, &t_answers);
    Freed freed;
    for (size_t i; (i = next_.fetch_add(kAtOnce, std::memory_order_relaxed)) < frames_.size();) {
      const size_t end = std::min(i + kAtOnce, frames_.size());
      for (; i < end; ++i) {
        const Status status = serve(frames_[i], &answers, &freed);
        if (status.ok()) continue;
        std::lock_guard lock(mutex_);
        if (status_.ok()) status_ = status;
      }
      if (answers.bytes() >= kLeaveBytes) answers.flush();
    }
    answers.flush();
    deliver(&freed);
    t_answers.shrink(kKeptBytes);
  } catch (const std::bad_alloc&) {
    std::lock_guard lock(mutex_);
    status_ = Status(Code::kResourceExhausted, "no memory for a request");
  }
  if (helpers_.fetch_sub(1, std::memory_order_acq_rel) == 1) os::wake_all(helpers_);
}

Status FrameBatch::serve(const Frame& frame, Answers* answers, Freed* freed) {
  Request request(from_, frame.header);
  std::byte* at = frame.bytes;
  uint64_t left = frame.header.length;
  answers->begin(frame.header);
  for (uint32_t i = 0; i < frame.header.blocks; ++i) {
    Request::Taken taken;
    if (left < kSection) return Status(Code::kProtocolError, "frame: shorter than its blocks");
    WL_RETURN_IF_ERROR(wire::decode(at, &taken.block));
    left -= kSection;
    const uint64_t bytes = taken.block.bytes();
    if (bytes > left)
      return Status(Code::kProtocolError, "block: " + std::to_string(bytes) + " bytes, more than its frame has");
    taken.bytes = at + kSection;
    request.take(&taken);
    request.serve(&taken, 1, answers, freed);
    at += kSection + bytes;
    left -= bytes;
  }
  if (left == 0) return {};
  return Status(Code::kProtocolError, "frame: " + std::to_string(left) + " bytes more than its blocks have");
}

Status FrameBatch::finish() {
  for (uint32_t n; (n = helpers_.load(std::memory_order_acquire)) != 0;) os::wait(helpers_, n, 10'000'000);
  std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace windlass
