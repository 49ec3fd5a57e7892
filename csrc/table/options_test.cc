// Bounds and schedules hold for rules of the user's as for ours: the same numbers come out, to the bit.
#include <memory>
#include <vector>

#include "base/test.h"
#include "rule/foreign.h"
#include "table/table_test.h"
#include "tensor/tensor.h"

namespace windlass::options_test {
namespace {

// w -= lr * g, as SGD does; before the first update it sets every weight, where it is asked to begin.
struct Descent : ForeignRule {
  Status apply(const Size& size, const std::function<void(ForeignCall&)>& fill,
               const std::function<void(const ForeignCall&)>& take) override {
    std::vector<float> w(size.elements), g(size.elements);
    std::vector<uint32_t> counts(size.elements);
    ForeignCall call;
    call.w = w.data();
    call.g = g.data();
    call.counts = counts.data();
    fill(call);
    for (size_t i = 0; i < w.size(); ++i) {
      if (call.count == 0) {
        w[i] = 100.0f;
      } else {
        w[i] -= static_cast<float>(call.hyper.v[0]) * g[i];
      }
    }
    take(call);
    return {};
  }
};

RuleSpec with_options(RuleKind kind) {
  RuleSpec rule;
  rule.kind = kind;
  rule.clip = 0.5f;
  rule.lowest = -0.75f;
  rule.highest = 0.6f;
  rule.schedule = {Schedule::kLinear, 2, 5, 0.25};
  if (kind == RuleKind::kForeign) rule.foreign.name = "rules:descent";
  return rule;
}

const Hyper kHyper{{0.3}};

std::vector<float> numbers(test::Random& random, size_t n) {
  std::vector<float> v(n);
  for (float& x : v) x = random.unit() * 4 - 2;
  return v;
}

}  // namespace

TEST(options_hold_for_a_tensor_under_a_rule_of_the_users) {
  test::Random random(test::seed());
  Budget budget;
  TensorSpec spec;
  spec.shape = {40, 3};
  std::unique_ptr<Tensor> tensors[2];
  for (const bool foreign : {false, true}) {
    spec.rule = with_options(foreign ? RuleKind::kForeign : RuleKind::kSgd);
    CHECK_OK(Tensor::create("w", spec, &budget, &tensors[foreign]));
  }
  tensors[1]->set_foreign(std::make_shared<Descent>());
  const Span spans[] = {{0, 60, 0}, {90, 30, 60}};
  for (int step = 0; step < 10; ++step) {
    const std::vector<float> g = numbers(random, 90);
    std::vector<float> out[2] = {std::vector<float>(90), std::vector<float>(90)};
    for (const bool foreign : {false, true}) {
      Arrays arrays;
      arrays.in = g.data();
      arrays.out = out[foreign].data();
      CHECK_OK(tensors[foreign]->apply(0, kHyper, spans, 2, arrays));
    }
    CHECK(out[0] == out[1]);
    CHECK(*std::max_element(out[1].begin(), out[1].end()) <= 0.6f);
  }
  CHECK_EQ(tensors[1]->shard(0).count, 10u);
}

TEST(a_rule_that_begins_sets_weights_as_it_likes) {
  Budget budget;
  TensorSpec spec;
  spec.shape = {3};
  spec.rule = with_options(RuleKind::kForeign);
  spec.rule.foreign.begins = true;
  std::unique_ptr<Tensor> tensor;
  CHECK_OK(Tensor::create("w", spec, &budget, &tensor));
  tensor->set_foreign(std::make_shared<Descent>());
  const float g[3] = {};
  const Span first{0, 2, 0};
  Arrays arrays;
  arrays.in = g;
  CHECK_OK(tensor->apply(0, kHyper, &first, 1, arrays));
  const auto* const w = reinterpret_cast<const float*>(tensor->weights_of(0));
  CHECK(w[0] == 0.6f && w[1] == 0.6f && w[2] == 100.0f);  // what was updated is within bounds
}

TEST(options_hold_for_a_table_under_a_rule_of_the_users) {
  test::Random random(test::seed());
  test::Tabled ours({.dim = 3, .rule = with_options(RuleKind::kSgd), .init = {}, .seed = 0});
  test::Tabled theirs({.dim = 3, .rule = with_options(RuleKind::kForeign), .init = {}, .seed = 0});
  theirs.table->set_foreign(std::make_shared<Descent>());
  for (int step = 0; step < 10; ++step) {
    std::vector<uint64_t> keys(200);
    for (uint64_t& k : keys) k = random.below(150);  // some repeat
    const std::vector<float> g = numbers(random, keys.size() * 3);
    ours.apply(keys, kHyper, g);
    theirs.apply(keys, kHyper, g);
    CHECK(ours.read(keys) == theirs.read(keys));
  }
}

TEST(an_update_of_a_table_has_the_step_size_of_its_shards_count) {
  TableSpec spec{.dim = 1, .rule = {}, .init = {}, .seed = 0};
  spec.rule.schedule = {Schedule::kConstant, 4, 0, 0.0};
  test::Tabled t(spec);
  const std::vector<float> one = {1.0f};
  float want = 0.0f;
  for (const float factor : {0.25f, 0.5f, 0.75f, 1.0f, 1.0f}) {
    t.apply({7}, {{1.0}}, one);
    want -= factor;
    CHECK(t.read({7}) == std::vector<float>{want});
  }
}

}  // namespace windlass::options_test
