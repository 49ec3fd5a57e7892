// What Tensor::create() accepts, what it refuses, and what it costs.
#include "base/test.h"
#include "tensor/tensor.h"

namespace windlass::create_test {
namespace {

TensorSpec plain(std::vector<uint64_t> shape) { return {.shape = std::move(shape)}; }

void check_refused(const TensorSpec& spec, const char* why) {
  Budget budget;
  std::unique_ptr<Tensor> tensor;
  const Status status = Tensor::create("w", spec, &budget, &tensor);
  CHECK(status.code() == Code::kInvalidArgument);
  if (status.message().find(why) == std::string::npos) test::fail(__FILE__, __LINE__, status.message());
  CHECK(status.message().find("tensor 'w'") == 0);
  CHECK(tensor == nullptr);
  CHECK_EQ(budget.used(), 0u);
}

}  // namespace

TEST(what_a_tensor_cannot_be_is_refused_by_name) {
  TensorSpec spec = plain({10});
  spec.dtype = Dtype::kBfloat16;
  check_refused(spec, "bfloat16");
  spec.dtype = Dtype::kFloat64;
  check_refused(spec, "SGD works on float32");
  spec.rule.kind = RuleKind::kSum;
  spec.init = {InitKind::kNormal, 0, 1};
  check_refused(spec, "starts with Zeros or Constant");
  check_refused(plain({1, 1, 1, 1, 1, 1, 1, 1, 1}), "at most 8 dimensions");
  check_refused(plain({uint64_t{1} << 20, uint64_t{1} << 20, 2}), "2^40");
  check_refused(plain({~uint64_t{0}, ~uint64_t{0}}), "2^40");
  check_refused(plain({uint64_t{1} << 32, uint64_t{1} << 32, 0x10000}), "2^40");  // the product wraps around to 0
  spec = plain({3, (4 << 20) / 4 + 1});
  spec.rule.kind = RuleKind::kRowAdagrad;
  check_refused(spec, "needs rows of at most 4194304 bytes, not 4194308");
}

TEST(scalars_and_empty_tensors_are_tensors) {
  Budget budget;
  std::unique_ptr<Tensor> tensor;
  CHECK_OK(Tensor::create("s", plain({}), &budget, &tensor));
  CHECK_EQ(tensor->cut().shards, 1u);
  CHECK_EQ(tensor->spec().elements(), 1u);
  for (const std::vector<uint64_t>& shape :
       {std::vector<uint64_t>{0}, {5, 0}, {0, uint64_t{1} << 40, uint64_t{1} << 40}, {uint64_t{1} << 40, 0}}) {
    CHECK_OK(Tensor::create("e", plain(shape), &budget, &tensor));
    CHECK_EQ(tensor->cut().shards, 0u);
    CHECK_EQ(tensor->bytes(), 0u);
  }
  tensor.reset();
  CHECK_EQ(budget.used(), 0u);
}

TEST(a_tensor_is_charged_while_it_lives) {
  Budget budget(1 << 20);
  std::unique_ptr<Tensor> tensor, second;
  TensorSpec spec = plain({(1 << 20) / 4 / 2});
  CHECK_OK(Tensor::create("a", spec, &budget, &tensor));
  CHECK_EQ(budget.used(), 1u << 19);
  CHECK_EQ(tensor->bytes(), 1u << 19);
  spec.rule.kind = RuleKind::kAdam;  // three times as much
  const Status refused = Tensor::create("b", spec, &budget, &second);
  CHECK(refused.code() == Code::kResourceExhausted);
  CHECK(refused.message().find("tensor 'b'") != std::string::npos);
  CHECK(second == nullptr);
  CHECK_EQ(budget.used(), 1u << 19);
  tensor.reset();
  CHECK_EQ(budget.used(), 0u);
}

TEST(specs_are_equal_when_all_that_counts_is) {
  const TensorSpec a = plain({2, 3});
  TensorSpec b = a;
  CHECK(a == b);
  b.shape = {3, 2};
  CHECK(!(a == b));
  b = a;
  b.seed = 1;
  CHECK(!(a == b));
  b = a;
  b.rule.initial_state = 0.5f;
  CHECK(!(a == b));
  CHECK(describe(a) != describe(b));
  CHECK(describe_shape(a.shape.data(), 1) == "(2,)");
  CHECK(describe_shape(a.shape.data(), 2) == "(2, 3)");
}

}  // namespace windlass::create_test
