#include "server/several.h"

#include <algorithm>

#include "exec/crew.h"

namespace windlass {
namespace {

constexpr size_t kSection = limits::kSectionBytes;
constexpr uint64_t kSmallBytes = uint64_t{256} << 10;  // what is larger is shared part by part
constexpr uint64_t kSharedBytes = uint64_t{256} << 10;
constexpr size_t kAtOnce = 4;
constexpr size_t kLeaveBytes = size_t{4} << 10;  // the client begins with these while the rest is being served

thread_local Buffer t_answers;

}  // namespace

Several::Several(std::shared_ptr<Connection> from) : from_(std::move(from)), channel_(from_->channel()) {}

bool Several::take() {
  size_t at = 0;
  for (;;) {
    std::byte* const head = channel_.ahead(at, kSection);
    wire::Header header;
    // Whatever is not plain is left: who serves one frame says what is wrong with it.
    if (head == nullptr || !wire::decode(head, &header).ok() || !from_->expects(header)) break;
    const OpTraits* const op = traits_of(header.operation());
    if (op != nullptr && op->walks) break;  // few bytes, which say nothing of the work
    std::byte* const bytes = channel_.ahead(at + kSection, header.length);
    if (bytes == nullptr) break;
    uint64_t work = header.length;
    if ((header.flags & wire::kInArenas) != 0) {
      double hyper[limits::kPushNumbersMax];
      size_t hypers = 0;
      wire::Places places;
      if (!wire::read_extensions(bytes, header.extension_bytes, hyper, &hypers, &places).ok()) break;
      work += std::max(places.in_bytes, places.out_bytes);
    }
    if (work > kSmallBytes) break;
    work_bytes_ += work;
    frames_.push_back({header, bytes});
    at += kSection + header.length;
  }
  if (frames_.size() < 2) return false;
  channel_.skip(at);
  channel_.count_requests(frames_.size());
  return true;
}

void Several::call_help(Server& server) {
  const auto threads = static_cast<size_t>(server.threads());
  if (threads < 2 || work_bytes_ < kSharedBytes) return;
  server.crew().post(Ref<Counted>(this), this, std::min(threads - 1, frames_.size() / kAtOnce));
}

void Several::help() {
  helpers_.fetch_add(1, std::memory_order_acq_rel);
  {
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
  }
  if (helpers_.fetch_sub(1, std::memory_order_acq_rel) == 1) os::wake_all(helpers_);
}

Status Several::serve(const Frame& frame, Answers* answers, Freed* freed) {
  Request request(from_, frame.header);
  std::byte* at = frame.bytes;
  if (frame.header.extension_bytes != 0) WL_RETURN_IF_ERROR(request.read_extensions(at));
  at += frame.header.extension_bytes;
  uint64_t left = frame.header.length - frame.header.extension_bytes;
  answers->begin(frame.header);
  for (uint32_t i = 0; i < frame.header.parts; ++i) {
    wire::Part part;
    if (left < kSection) return Status(Code::kProtocolError, "frame: shorter than its parts");
    WL_RETURN_IF_ERROR(wire::decode(at, &part));
    left -= kSection;
    if (part.bytes() > left)
      return Status(Code::kProtocolError, "part: " + std::to_string(part.bytes()) + " bytes, more than its frame has");
    const Request::Taken taken{part, at + kSection};
    request.serve(&taken, 1, answers, freed);
    at += kSection + part.bytes();
    left -= part.bytes();
  }
  if (left == 0) return {};
  return Status(Code::kProtocolError, "frame: " + std::to_string(left) + " bytes more than its parts have");
}

Status Several::finish() {
  for (uint32_t n; (n = helpers_.load(std::memory_order_acquire)) != 0;) os::wait(helpers_, n, 10'000'000);
  std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace windlass
