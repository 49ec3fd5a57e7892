#include "client/op/tensor.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "client/client_test.h"
#include "rule/kernels_test.h"

namespace windlass::tensor_test {
namespace {

using test::array_of;
using test::now;
using test::same_bits;
using test::sums;
using test::Worker;

template <class T>
std::vector<T> pulled(TensorClient& t) {
  std::vector<T> out(t.tensor().spec().elements(), T(-7));
  Array a = array_of(out.data(), {});
  for (const uint64_t d : t.tensor().spec().shape) a.shape[a.dims++] = d;
  CHECK_OK(now(t, TensorRequest{.out = &a}));
  return out;
}

}  // namespace

TEST(a_pull_has_what_was_pushed) {
  Worker worker;
  for (const uint64_t n : {1u, 100u, 40'000u, 3'000'000u}) {  // one shard, several, and enough for the crew to help
    const auto t = worker.tensor(std::to_string(n), sums({n}));
    std::vector<float> g(n), out(n), want(n);
    for (size_t i = 0; i < n; ++i) g[i] = static_cast<float>(i % 1000), want[i] = 3 * g[i];
    const Array in = array_of(g.data(), {n}), into = array_of(out.data(), {n});
    CHECK_OK(now(*t, TensorRequest{.in = &in}));
    CHECK_OK(now(*t, TensorRequest{.in = &in}));
    CHECK_OK(now(*t, TensorRequest{.in = &in, .out = &into}));
    CHECK(same_bits(out, want));
    CHECK(same_bits(pulled<float>(*t), want));
  }
}

TEST(a_scalar_and_an_empty_tensor_can_be_pushed_and_pulled) {
  Worker worker;
  const auto scalar = worker.tensor("s", sums({})), empty = worker.tensor("e", sums({0, 5}));
  float one = 1, out = 0;
  const Array in = array_of(&one, {}), into = array_of(&out, {}), none = array_of(&one, {0, 5});
  CHECK_OK(now(*scalar, TensorRequest{.in = &in, .out = &into}));
  CHECK(out == 1);
  CHECK_OK(now(*empty, TensorRequest{.in = &none, .out = &none}));
}

// Against a plain array: rows in any order, repeated ones combined, every answer complete.
TEST(a_request_for_some_rows_touches_those_alone) {
  test::Random random(test::seed());
  Worker worker;
  constexpr uint64_t kRows = 300, kRow = 200;  // int64: 8 shards
  for (const RuleKind kind : {RuleKind::kSum, RuleKind::kMax, RuleKind::kAssign}) {
    TensorSpec spec = sums({kRows, kRow}, Dtype::kInt64);
    spec.rule.kind = kind;
    const auto t = worker.tensor(std::to_string(static_cast<int>(kind)), spec);
    CHECK(t->tensor().cut().shards > 4);
    std::vector<int64_t> want(kRows * kRow);
    for (int step = 0; step < 200; ++step) {
      const bool range = random.below(2) == 0;
      const uint64_t first = random.below(kRows + 1), n = range ? random.below(kRows - first + 1) : random.below(40);
      std::vector<int64_t> list(n), g(n * kRow), out(n * kRow);
      for (uint64_t i = 0; i < n; ++i) {
        list[i] = range ? static_cast<int64_t>(first + i)
                        : static_cast<int64_t>(random.below(2) == 0 ? random.below(5) : random.below(kRows));
      }
      for (int64_t& x : g) x = static_cast<int64_t>(random.below(1000)) - 300;
      const Selection rows = range ? Selection{Selection::kRange, first, first + n, nullptr, 0}
                                   : Selection{Selection::kList, 0, 0, list.data(), n};
      const Array in = array_of(g.data(), {n, kRow});
      Array into = array_of(step % 3 == 0 ? g.data() : out.data(), {n, kRow});  // also in place
      const std::vector<int64_t> pushed = g;
      CHECK_OK(now(*t, TensorRequest{.in = &in, .out = step % 4 == 0 ? nullptr : &into, .rows = rows}));
      std::map<int64_t, int64_t> combined_at;  // row -> the first entry that has it
      std::vector<int64_t> combined = pushed;
      const auto join = [&](int64_t a, int64_t b) {
        return kind == RuleKind::kSum ? a + b : kind == RuleKind::kMax ? std::max(a, b) : b;
      };
      for (uint64_t i = 0; i < n; ++i) {
        const auto [it, fresh] = combined_at.emplace(list[i], static_cast<int64_t>(i));
        for (uint64_t j = 0; j < kRow && !fresh; ++j) {
          int64_t& sum = combined[static_cast<uint64_t>(it->second) * kRow + j];
          sum = join(sum, pushed[i * kRow + j]);
        }
      }
      for (const auto& [row, at] : combined_at) {
        for (uint64_t j = 0; j < kRow; ++j) {
          int64_t& w = want[static_cast<uint64_t>(row) * kRow + j];
          w = join(w, combined[static_cast<uint64_t>(at) * kRow + j]);
        }
      }
      if (step % 4 == 0) CHECK_OK(now(*t, TensorRequest{.out = &into, .rows = rows}));
      const auto* answer = static_cast<const int64_t*>(into.data);
      bool right = true;
      for (uint64_t i = 0; i < n * kRow; ++i)
        right = right && answer[i] == want[static_cast<uint64_t>(list[i / kRow]) * kRow + i % kRow];
      CHECK(right);
    }
    CHECK(same_bits(pulled<int64_t>(*t), want));
  }
}

TEST(repeated_rows_of_a_short_dtype_are_added_in_float32) {
  Worker worker;
  const auto t = worker.tensor("w", sums({4, 3}));
  const std::vector<float> wide = {256, 256, 256, 1, 1, 1, 1, 1, 1};
  std::vector<uint16_t> g(9), out(9);
  kernels().from_f32(Dtype::kBfloat16, wide.data(), g.data(), 9);
  const std::vector<int64_t> rows = {2, 2, 2};
  Array in = array_of(reinterpret_cast<float*>(g.data()), {3, 3}), into = in;
  in.dtype = into.dtype = Dtype::kBfloat16;
  into.data = out.data();
  const Selection list{Selection::kList, 0, 0, rows.data(), 3};
  CHECK_OK(now(*t, TensorRequest{.in = &in, .out = &into, .rows = list}));
  CHECK(same_bits(pulled<float>(*t), std::vector<float>{0, 0, 0, 0, 0, 0, 258, 258, 258, 0, 0, 0}));
  std::vector<float> answer(9);
  kernels().to_f32(Dtype::kBfloat16, out.data(), answer.data(), 9);
  for (const float x : answer) CHECK(x == 258);
}

TEST(a_pull_leaves_out_the_shards_that_have_not_changed) {
  Worker worker;
  const auto t = worker.tensor("w", sums({50'000}));
  const uint32_t shards = t->tensor().cut().shards;
  const uint64_t per_shard = t->tensor().cut().per_shard;
  CHECK(shards >= 3);
  std::vector<float> g(50'000, 1.0f), out(50'000);
  const Array in = array_of(g.data(), {50'000}), into = array_of(out.data(), {50'000});
  CHECK_OK(now(*t, TensorRequest{.in = &in}));

  Ref<TensorCall> call;
  CHECK_OK(t->start(TensorRequest{.out = &into, .versioned = true}, How::kWait, &call));
  CHECK_OK(call->finish(test::soon()));
  CHECK(call->changed());
  const Versions first = call->versions();
  CHECK(first == Versions(shards, 2));  // one update, plus one

  const Array part = array_of(g.data(), {10});
  const Selection rows{Selection::kRange, per_shard + 5, per_shard + 15, nullptr, 0};
  CHECK_OK(now(*t, TensorRequest{.in = &part, .rows = rows}));
  std::fill(out.begin(), out.end(), -7.0f);
  CHECK_OK(t->start(TensorRequest{.out = &into, .versioned = true, .newer_than = &first}, How::kWait, &call));
  CHECK_OK(call->finish(test::soon()));
  CHECK(call->changed());
  Versions second = first;
  second[1] = 3;
  CHECK(call->versions() == second);
  for (size_t i = 0; i < out.size(); ++i) {
    const bool changed = i / per_shard == 1;
    CHECK(out[i] == (!changed ? -7.0f : i >= per_shard + 5 && i < per_shard + 15 ? 2.0f : 1.0f));
  }

  CHECK_OK(t->start(TensorRequest{.out = &into, .versioned = true, .newer_than = &second}, How::kWait, &call));
  CHECK_OK(call->finish(test::soon()));
  CHECK(!call->changed());
  CHECK(call->versions() == second);
}

TEST(what_does_not_fit_is_refused_and_changes_nothing) {
  Worker worker;
  TensorSpec spec = sums({10, 4});
  spec.reject_nonfinite = true;
  const auto t = worker.tensor("w", spec);
  std::vector<float> g(40, 1.0f);
  std::vector<int64_t> wide(40);
  const Array right = array_of(g.data(), {10, 4});
  Array half = array_of(g.data(), {10, 4});
  half.dtype = Dtype::kFloat16;
  for (const Array& wrong : {array_of(g.data(), {4, 10}), array_of(g.data(), {40}), array_of(wide.data(), {10, 4})}) {
    const Status in = now(*t, TensorRequest{.in = &wrong}), out = now(*t, TensorRequest{.out = &wrong});
    CHECK(in.code() == Code::kShapeMismatch && out.code() == Code::kShapeMismatch);
    CHECK(in.message().find("push of tensor 'w', gradient: expected") == 0);
    CHECK(in.message().find("shape (10, 4), saw") != std::string::npos);
    CHECK(out.message().find("pull of tensor 'w', out: expected") == 0);
  }
  CHECK_OK(now(*t, TensorRequest{.out = &half}));
  const Array four = array_of(g.data(), {4, 4});
  for (const Selection& rows :
       {Selection{Selection::kRange, 7, 11, nullptr, 0}, Selection{Selection::kRange, 5, 1, nullptr, 0}})
    CHECK_CODE(now(*t, TensorRequest{.in = &four, .rows = rows}), Code::kInvalidArgument);
  for (const int64_t row : {int64_t{-1}, int64_t{10}, INT64_MIN, INT64_MAX}) {
    const std::vector<int64_t> list = {0, row, 1, 2};
    CHECK_CODE(now(*t, TensorRequest{.in = &four, .rows = {Selection::kList, 0, 0, list.data(), 4}}),
               Code::kInvalidArgument);
  }
  g[39] = INFINITY;
  CHECK_CODE(now(*t, TensorRequest{.in = &right}), Code::kNonFinite);
  g[39] = NAN;
  CHECK_CODE(now(*t, TensorRequest{.in = &right, .out = &right}), Code::kNonFinite);
  CHECK(same_bits(pulled<float>(*t), std::vector<float>(40)));
  CHECK_EQ(t->tensor().shard(0).version, 0u);
  CHECK_CODE(
      now(*worker.tensor("s", sums({})), TensorRequest{.in = &four, .rows = {Selection::kRange, 0, 1, nullptr, 0}}),
      Code::kInvalidArgument);
}

}  // namespace windlass::tensor_test
