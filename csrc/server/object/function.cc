#include "server/object/function.h"

#include <algorithm>
#include <cstring>

namespace windlass {

UserCode::Ref read_part(const std::string& what, const wire::CallItem& item, const Target& target, uint64_t* from,
                        bool* more) {
  auto call = std::make_shared<UserCode::Call>();
  call->kind = UserCode::Call::kRead;
  call->text = item.name;
  call->what = what;
  UserCode::Part& part = call->part;
  part.arguments = item.arguments;
  part.shard = target.shard;
  part.is_table = target.table != nullptr;
  *more = false;
  if (target.table != nullptr) {
    const size_t row_bytes = target.table->spec().dim * sizeof(float);
    std::vector<float> rows;
    *more = target.table->scan(target.shard, from, std::max<size_t>(limits::kCallRowsBytes / row_bytes, 1), &part.keys,
                               &rows);
    part.row = target.table->spec().dim;
    part.numbers.resize(rows.size() * sizeof(float));
    if (!rows.empty()) std::memcpy(part.numbers.data(), rows.data(), part.numbers.size());
    return call;
  }
  const Tensor::Piece weights = target.tensor->pieces_of(target.shard)[0];
  const Cut& cut = target.tensor->cut();
  part.dtype = target.tensor->spec().dtype;
  part.row = cut.whole_rows ? cut.row : 1;
  part.first = cut.first_of(target.shard);
  part.numbers.assign(weights.data, weights.data + weights.bytes);
  return call;
}

Status run_part(UserCode* code, const UserCode::Ref& call) {
  if (code == nullptr)
    return Status(Code::kAccessDenied, call->what + ": function '" + call->text +
                                           "' is not one of Windlass, and this server allows no others; start servers "
                                           "with --allow MODULE (WINDLASS_ALLOW)");
  WL_RETURN_IF_ERROR(code->run(call));
  if (call->result.size() > limits::kResultBytesMax)
    return Status(Code::kResourceExhausted, call->what + ": function '" + call->text + "' returned " +
                                                std::to_string(call->result.size()) + " bytes, at most " +
                                                std::to_string(limits::kResultBytesMax));
  return {};
}

}  // namespace windlass
