#include "server/object/op.h"

#include <algorithm>
#include <iterator>

#include "server/object/served_object.h"

namespace windlass {
namespace {

using wire::Op;
using Looks = OpTraits::Looks;
using Served = ServedObject;

constexpr OpTraits kOps[] = {
    {.op = Op::kPush,
     .numbered = true,
     .contributes = true,
     .versioned = true,
     .looks = Looks::kUpdate,
     .check = &Served::check_numbers,
     .change = &Served::apply},
    {.op = Op::kPull,
     .returns = true,
     .versioned = true,
     .looks = Looks::kNow,
     .check = &Served::check_numbers,
     .read = &Served::read_numbers},
    {.op = Op::kPushPull,
     .numbered = true,
     .contributes = true,
     .returns = true,
     .versioned = true,
     .looks = Looks::kNext,
     .check = &Served::check_numbers,
     .change = &Served::apply,
     .read = &Served::read_numbers},
    {.op = Op::kErase,
     .numbered = true,
     .keeps_value = true,
     .of_tensors = false,
     .check = &Served::check_erase,
     .change = &Served::erase},
    {.op = Op::kPut, .numbered = true, .versioned = true, .check = &Served::check_put, .change = &Served::put},
    {.op = Op::kVector,
     .numbered = true,
     .versioned = true,
     .answers_at_length = true,
     .of_tables = false,
     .check = &Served::check_vector,
     .change = &Served::write_vector},
    {.op = Op::kDot,
     .answers_at_length = true,
     .of_tables = false,
     .check = &Served::check_vector,
     .read = &Served::dot},
    {.op = Op::kClose, .closes = true},
    {.op = Op::kSettle},  // answers once its session's earlier pushes have arrived
    {.op = Op::kRows, .of_tensors = false, .read = &Served::count_rows},
    {.op = Op::kFingerprint, .read = &Served::fingerprint},
    {.op = Op::kScan, .answers_at_length = true, .check = &Served::check_scan, .read = &Served::scan_rows},
    {.op = Op::kSnapshot,
     .versioned = true,
     .answers_at_length = true,
     .of_tables = false,
     .check = &Served::check_snapshot,
     .read = &Served::snapshot},
    {.op = Op::kQuery,
     .answers_at_length = true,
     .looks = Looks::kNow,
     .check = &Served::check_query,
     .read = &Served::answer},
    {.op = Op::kCall, .answers_at_length = true, .check = &Served::check_call, .read = &Served::begin_call},
};

}  // namespace

const OpTraits* traits_of(Op op) {
  const auto* const found =
      std::find_if(std::begin(kOps), std::end(kOps), [&](const OpTraits& t) { return t.op == op; });
  return found != std::end(kOps) ? found : nullptr;
}

}  // namespace windlass
