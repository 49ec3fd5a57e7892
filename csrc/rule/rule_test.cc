// Every rule against its formula, in double precision and without a thought of speed.
#include "rule/rule.h"

#include <cmath>

#include "rule/kernels_test.h"

namespace windlass {
namespace {

struct Exact {
  std::vector<double> w, m, v;  // v: the second state array
  double row = 0;               // RowAdagrad's accumulator
};

void step(RuleKind kind, const Hyper& hyper, int count, const std::vector<float>& g, Exact* x) {
  const double* h = hyper.v;
  const double n = static_cast<double>(g.size());
  if (kind == RuleKind::kRowAdagrad) {
    for (const float gi : g) x->row += static_cast<double>(gi) * gi / n;
  }
  for (size_t i = 0; i < g.size(); ++i) {
    double &w = x->w[i], &m = x->m[i], &v = x->v[i];
    switch (kind) {
      case RuleKind::kSgd: w -= h[0] * (g[i] + h[1] * w); break;
      case RuleKind::kMomentum: {
        const double d = g[i] + h[1] * w;
        m = count == 1 ? d : h[2] * m + (1 - h[3]) * d;
        w -= h[0] * (h[4] != 0 ? d + h[2] * m : m);
        break;
      }
      case RuleKind::kAdagrad: {
        const double d = g[i] + h[2] * w;
        m += d * d;
        w -= h[0] / (1 + (count - 1) * h[1]) * d / (std::sqrt(m) + h[3]);
        break;
      }
      case RuleKind::kRowAdagrad: w -= h[0] * g[i] / (std::sqrt(x->row) + h[1]); break;
      case RuleKind::kAdam:
      case RuleKind::kAdamW: {
        const bool decoupled = kind == RuleKind::kAdamW;
        const double d = decoupled ? g[i] : g[i] + h[4] * w;
        if (decoupled) w *= 1 - h[0] * h[4];
        m = h[1] * m + (1 - h[1]) * d;
        v = h[2] * v + (1 - h[2]) * d * d;
        const double corrected = std::sqrt(v / (1 - std::pow(h[2], count)));
        w -= h[0] / (1 - std::pow(h[1], count)) * m / (corrected + h[3]);
        break;
      }
      case RuleKind::kSum: w += g[i]; break;
      case RuleKind::kAssign:
      case RuleKind::kAverage: w = g[i]; break;
      case RuleKind::kMax: w = std::max<double>(w, g[i]); break;
      case RuleKind::kForeign:
      case RuleKind::kCount: break;
    }
  }
}

}  // namespace

TEST(every_rule_follows_its_formula) {
  test::Random random(test::seed());
  constexpr size_t kNumbers = 37;
  for (const RuleKind kind : our_rules()) {
    for (int variant = 0; variant < test::kVariants; ++variant) {
      const Hyper hyper = test::hyper_of(kind, variant);
      for (const Kernels* k : test::every_isa()) {
        const RuleKernels& kernels = k->rules[static_cast<size_t>(kind)];
        std::vector<float> w(kNumbers), state[2] = {w, w}, scalars(1);
        for (float& x : w) x = random.unit() - 0.5f;
        Exact exact{{w.begin(), w.end()}, std::vector<double>(kNumbers), std::vector<double>(kNumbers)};
        for (int count = 1; count <= 200; ++count) {
          std::vector<float> g(kNumbers);
          for (float& x : g) x = (random.unit() - 0.5f) * 0.1f;
          step(kind, hyper, count, g, &exact);
          Dense d;
          d.w = w.data();
          d.state[0] = state[0].data();
          d.state[1] = state[1].data();
          d.scalars = scalars.data();
          d.g = g.data();
          d.n = d.row = kNumbers;
          kernels.dense(kernels.prepare(hyper, static_cast<uint64_t>(count)), d);
        }
        for (size_t i = 0; i < kNumbers; ++i) CHECK(std::abs(w[i] - exact.w[i]) < 1e-6 + 2e-5 * std::abs(exact.w[i]));
      }
    }
  }
}

TEST(momentum_starts_with_the_gradient_itself) {
  const RuleKernels& rule = kernels(RuleKind::kMomentum);
  float w = 1.0f, m = 0.0f, g = 2.0f;
  Dense d;
  d.w = &w;
  d.state[0] = &m;
  d.g = &g;
  d.n = 1;
  rule.dense(rule.prepare({{0.5, 0.0, 0.9, 0.9, 0.0}}, 1), d);  // dampening does not count the first time
  CHECK(m == 2.0f && w == 0.0f);
}

TEST(integers_wrap_around_and_a_nan_wins_the_maximum) {
  int64_t w = INT64_MAX, one = 1;
  for (const Kernels* k : test::every_isa()) {
    w = INT64_MAX;
    k->rules[static_cast<size_t>(RuleKind::kSum)].dense_i64({}, Dense{.w = &w, .g = &one, .n = 1});
    CHECK_EQ(w, INT64_MIN);
    k->rules[static_cast<size_t>(RuleKind::kMax)].dense_i64({}, Dense{.w = &w, .g = &one, .n = 1});
    CHECK_EQ(w, 1);
    float a = 1.0f, nan = NAN, large = 5.0f;
    const RuleKernels& max = k->rules[static_cast<size_t>(RuleKind::kMax)];
    max.dense({}, Dense{.w = &a, .g = &nan, .n = 1});
    CHECK(std::isnan(a));
    max.dense({}, Dense{.w = &a, .g = &large, .n = 1});
    CHECK(std::isnan(a));
  }
}

TEST(only_an_optimizer_adds_and_the_plain_rules_combine_as_they_are_named) {
  CHECK(layout_of(RuleKind::kAdam).combine == Combine::kAdd);
  CHECK(layout_of(RuleKind::kSum).combine == Combine::kAdd);
  CHECK(layout_of(RuleKind::kMax).combine == Combine::kMax);
  CHECK(layout_of(RuleKind::kAssign).combine == Combine::kLast);
  CHECK(layout_of(RuleKind::kAverage).combine == Combine::kMean);
}

}  // namespace windlass
