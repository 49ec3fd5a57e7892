// Functions of the user's that read shards, called from here.
#include "server/function.h"

#include <numeric>

#include "client/remote.h"
#include "client/table.h"
#include "client/tensor.h"

namespace windlass {
namespace {

constexpr uint32_t kAtOnce = 16;  // shards whose results may be on their way together

}  // namespace

Status Handle::call_shards(const What& what, uint32_t shards, const wire::CallItem& item,
                           const std::function<Target(uint32_t)>& target, const std::shared_ptr<void>& alive,
                           int64_t deadline_ns, std::vector<std::string>* results) {
  WL_RETURN_IF_ERROR(session_->engine().usable());
  WL_RETURN_IF_ERROR(take_unseen());
  const std::string body = wire::encode(item);
  if (item.name.size() > limits::kForeignNameBytesMax || body.size() > limits::kCallBytesMax) {
    return Status(Code::kInvalidArgument, what.text() + ": a name and arguments of " + std::to_string(body.size()) +
                                              " bytes, at most " + std::to_string(limits::kCallBytesMax));
  }
  uint64_t bytes = 0;
  const auto take = [&](std::string result) {
    bytes += result.size();
    if (bytes > limits::kResultsBytesMax) {
      return Status(Code::kResourceExhausted, what.text() + ": the results are more than " +
                                                  std::to_string(limits::kResultsBytesMax) + " bytes together");
    }
    results->push_back(std::move(result));
    return Status();
  };
  const auto ask = [&](const std::vector<uint32_t>& some, uint64_t from, Ref<Exchange>* exchange) {
    *exchange = Ref<Exchange>(new Exchange(links()));
    return (*exchange)->ask_shards(wire::Op::kCall, owners(), some, sent(), from, body, what.text(), deadline_ns);
  };
  for (uint32_t first = 0; remote() && first < shards; first += kAtOnce) {
    std::vector<uint32_t> some(std::min(kAtOnce, shards - first));
    std::iota(some.begin(), some.end(), first);
    Ref<Exchange> all;
    WL_RETURN_IF_ERROR(ask(some, 0, &all));
    for (size_t i = 0; i < some.size(); ++i) {
      Exchange::Answer answer = std::move(all->answers[i]);
      WL_RETURN_IF_ERROR(take(std::move(answer.items)));
      while ((answer.part.flags & wire::kMore) != 0) {  // a table's shard may take several calls
        Ref<Exchange> next;
        WL_RETURN_IF_ERROR(ask({some[i]}, answer.part.value, &next));
        answer = std::move(next->answers[0]);
        WL_RETURN_IF_ERROR(take(std::move(answer.items)));
      }
    }
  }
  for (uint32_t shard = 0; !remote() && shard < shards; ++shard) {
    const Target at = target(shard);
    Shard& there = at.table != nullptr ? at.table->shard(shard) : at.tensor->shard(shard);
    uint64_t from = 0;
    for (bool more = true; more;) {
      UserCode::Ref call;
      WL_RETURN_IF_ERROR(each_shard(
          what, 1, [&](uint32_t) -> Turn& { return there.turn; },
          [&](uint32_t) {
            call = read_part(what.text(), item, at, &from, &more);
            return Status();
          },
          alive, deadline_ns));
      WL_RETURN_IF_ERROR(run_part(session_->engine().server().user_code(), call));
      WL_RETURN_IF_ERROR(take(std::move(call->result)));
    }
  }
  return {};
}

Status TensorClient::call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results) {
  const auto target = [this](uint32_t shard) { return Target{tensor_.get(), nullptr, shard}; };
  return call_shards({"call", "tensor", name_}, cut_.shards, item, target, shared_from_this(), deadline_ns, results);
}

Status TableClient::call(const wire::CallItem& item, int64_t deadline_ns, std::vector<std::string>* results) {
  const auto target = [this](uint32_t shard) { return Target{nullptr, table_.get(), shard}; };
  return call_shards({"call", "table", name_}, limits::kTableShards, item, target, shared_from_this(), deadline_ns,
                     results);
}

}  // namespace windlass
