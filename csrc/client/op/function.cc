// Calls of the user's functions that read shards: Handle::call_shards.
#include "server/object/function.h"

#include <numeric>

#include "client/op/table.h"
#include "client/op/tensor.h"

namespace windlass {
namespace {

constexpr uint32_t kAtOnce = 16;  // shards that are asked at once

}  // namespace

Status Handle::call_shards(const What& what, uint32_t shards, const wire::CallItem& item, int64_t deadline_ns,
                           std::vector<std::string>* results) {
  const std::string body = wire::encode(item);
  if (item.name.size() > limits::kForeignNameBytesMax || body.size() > limits::kCallBytesMax) {
    return Status(Code::kInvalidArgument, what.text() + ": a name and arguments of " + std::to_string(body.size()) +
                                              " bytes, at most " + std::to_string(limits::kCallBytesMax));
  }
  uint64_t bytes = 0;
  const auto take = [&](Answer* answer) {
    if (answer->call != nullptr) {
      WL_RETURN_IF_ERROR(run_part(session_->engine().server().user_code(), answer->call));
      answer->body = std::move(answer->call->result);
    }
    bytes += answer->body.size();
    if (bytes > limits::kResultsBytesMax) {
      return Status(Code::kResourceExhausted, what.text() + ": the results are more than " +
                                                  std::to_string(limits::kResultsBytesMax) + " bytes together");
    }
    results->push_back(std::move(answer->body));
    return Status();
  };
  // Inside the process a shard is copied for its call: one at a time.
  const uint32_t at_once = remote() ? kAtOnce : 1;
  for (uint32_t first = 0; first < shards; first += at_once) {
    std::vector<uint32_t> some(std::min(at_once, shards - first));
    std::iota(some.begin(), some.end(), first);
    std::vector<Answer> answers;
    WL_RETURN_IF_ERROR(ask_shards(what, wire::Op::kCall, some, 0, body, deadline_ns, &answers));
    for (size_t i = 0; i < some.size(); ++i) {
      WL_RETURN_IF_ERROR(take(&answers[i]));
      while ((answers[i].flags & wire::kMore) != 0) {  // a table's shard may take several calls
        std::vector<Answer> next;
        WL_RETURN_IF_ERROR(ask_shards(what, wire::Op::kCall, {some[i]}, answers[i].value, body, deadline_ns, &next));
        answers[i] = std::move(next[0]);
        WL_RETURN_IF_ERROR(take(&answers[i]));
      }
    }
  }
  return {};
}

Status TensorClient::call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results) {
  return call_shards({"call", "tensor", name_}, cut_.shards, item, deadline_ns, results);
}

Status TableClient::call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results) {
  return call_shards({"call", "table", name_}, limits::kTableShards, item, deadline_ns, results);
}

}  // namespace windlass
