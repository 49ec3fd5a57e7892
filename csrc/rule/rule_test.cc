// Every rule against its formula, in double precision and without a thought of speed.
#include "rule/rule.h"

#include <cmath>

#include "rule/kernels_test.h"

namespace windlass::rule_test {
namespace {

struct Exact {
  std::vector<double> w, m, v, x;  // v and x: the second and third state array
  std::vector<bool> doubtful;      // a sign that float32 may have seen differently
  double row = 0;                  // RowAdagrad's accumulator
  double product = 1;              // NAdam's
};

void step(RuleKind kind, const Hyper& hyper, int count, const std::vector<float>& g, Exact* x) {
  const double* h = hyper.v;
  const double n = static_cast<double>(g.size());
  if (kind == RuleKind::kRowAdagrad) {
    for (const float gi : g) x->row += static_cast<double>(gi) * gi / n;
  }
  const auto mu = [&](int t) { return h[1] * (1 - 0.5 * std::pow(0.96, t * h[5])); };
  if (kind == RuleKind::kNAdam) x->product *= mu(count);
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
      case RuleKind::kRmsProp:
      case RuleKind::kRmsPropMomentum:
      case RuleKind::kRmsPropCentered:
      case RuleKind::kRmsPropCenteredMomentum: {
        const bool centered = kind == RuleKind::kRmsPropCentered || kind == RuleKind::kRmsPropCenteredMomentum;
        const bool momentum = kind == RuleKind::kRmsPropMomentum || kind == RuleKind::kRmsPropCenteredMomentum;
        const double d = g[i] + h[3] * w;
        m = h[1] * m + (1 - h[1]) * d * d;
        if (centered) v = h[1] * v + (1 - h[1]) * d;
        const double ratio = d / (std::sqrt(centered ? m - v * v : m) + h[2]);
        if (momentum) x->x[i] = h[4] * x->x[i] + ratio;
        w -= h[0] * (momentum ? x->x[i] : ratio);
        break;
      }
      case RuleKind::kAdadelta: {
        const double d = g[i] + h[3] * w;
        m = h[1] * m + (1 - h[1]) * d * d;
        const double delta = std::sqrt(v + h[2]) / std::sqrt(m + h[2]) * d;
        v = h[1] * v + (1 - h[1]) * delta * delta;
        w -= h[0] * delta;
        break;
      }
      case RuleKind::kAdamax: {
        const double d = g[i] + h[4] * w;
        m = h[1] * m + (1 - h[1]) * d;
        v = std::max(h[2] * v, std::abs(d) + h[3]);
        w -= h[0] / (1 - std::pow(h[1], count)) * m / v;
        break;
      }
      case RuleKind::kNAdam: {
        const double d = h[6] != 0 ? g[i] : g[i] + h[4] * w;
        if (h[6] != 0) w *= 1 - h[0] * h[4];
        m = h[1] * m + (1 - h[1]) * d;
        v = h[2] * v + (1 - h[2]) * d * d;
        const double root = std::sqrt(v / (1 - std::pow(h[2], count))) + h[3], next = mu(count + 1);
        w -= h[0] * ((1 - mu(count)) / (1 - x->product) * d + next / (1 - x->product * next) * m) / root;
        break;
      }
      case RuleKind::kLion: {
        const double c = h[1] * m + (1 - h[1]) * g[i];
        if (std::abs(c) < 1e-6) x->doubtful[i] = true;
        w = w * (1 - h[0] * h[3]) - h[0] * (c > 0 ? 1 : c < 0 ? -1 : 0);
        m = h[2] * m + (1 - h[2]) * g[i];
        break;
      }
      case RuleKind::kFtrl: {
        const double squares = v + static_cast<double>(g[i]) * g[i];
        m += g[i] - (std::sqrt(squares) - std::sqrt(v)) / h[0] * w;
        v = squares;
        w = std::abs(m) <= h[2] ? 0 : -(m - std::copysign(h[2], m)) / ((h[1] + std::sqrt(v)) / h[0] + h[3]);
        break;
      }
      case RuleKind::kMin: w = std::min<double>(w, g[i]); break;
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
      for (const Kernels* k : every_kernels()) {
        const RuleKernels& kernels = k->rules[static_cast<size_t>(kind)];
        std::vector<float> w(kNumbers), state[limits::kRuleVectorsMax] = {w, w, w}, scalars(1);
        for (float& x : w) x = random.unit() - 0.5f;
        const std::vector<double> none(kNumbers);
        Exact exact{{w.begin(), w.end()}, none, none, none, std::vector<bool>(kNumbers)};
        for (int count = 1; count <= 200; ++count) {
          std::vector<float> g(kNumbers);
          for (float& x : g) x = (random.unit() - 0.5f) * 0.1f;
          step(kind, hyper, count, g, &exact);
          Dense d;
          d.w = w.data();
          for (int v = 0; v < limits::kRuleVectorsMax; ++v) d.state[v] = state[v].data();
          d.scalars = scalars.data();
          d.g = g.data();
          d.n = d.row = kNumbers;
          kernels.dense(kernels.prepare(hyper, static_cast<uint64_t>(count)), d);
        }
        for (size_t i = 0; i < kNumbers; ++i)
          CHECK(exact.doubtful[i] || std::abs(w[i] - exact.w[i]) < 1e-6 + 2e-5 * std::abs(exact.w[i]));
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

// Whatever beta1 and momentum_decay are, and from the first update on: the closed form is the product.
TEST(nadams_products_are_those_of_all_its_factors) {
  for (const double beta1 : {0.0, 0.5, 0.9, 0.999, 0.99999}) {
    for (const double decay : {0.0, 1e-12, 1e-6, 0.004, 0.5, 30.0, 1e9}) {
      double product = 1;
      const auto mu = [&](int t) { return beta1 * (1 - 0.5 * std::pow(0.96, t * decay)); };
      for (int t = 1; t <= 3000; ++t) {
        product *= mu(t);
        for (const Kernels* k : every_kernels()) {
          const Step step = k->rules[static_cast<size_t>(RuleKind::kNAdam)].prepare(
              {{1.0, beta1, 0.999, 0.0, 0.0, decay}}, static_cast<uint64_t>(t));
          const double of_d = (1 - mu(t)) / (1 - product), of_m = mu(t + 1) / (1 - product * mu(t + 1));
          CHECK(std::abs(step.f[0] - of_d) <= 1e-7 * of_d && std::abs(step.f[1] - of_m) <= 1e-7 * of_m);
        }
      }
    }
  }
}

TEST(numbers_that_make_no_sense_end_nothing) {
  const double odd[] = {0.0, -1.0, 1.0, 2.0, NAN, INFINITY, -INFINITY, 1e308, 5e-324};
  for (const RuleKind kind : our_rules()) {
    const RuleKernels& rule = kernels(kind);
    for (const double a : odd) {
      for (const double b : odd) {
        for (const uint64_t count : {uint64_t{1}, uint64_t{2}, ~uint64_t{0}}) {
          const Step step = rule.prepare({{a, b, a, b, a, b, a, b}}, count);
          float w = 1.0f, state[3] = {}, scalar = 0.0f, g = 2.0f;
          Dense d{.w = &w, .state = {&state[0], &state[1], &state[2]}, .scalars = &scalar, .g = &g, .n = 1};
          rule.dense(step, d);
        }
      }
    }
  }
}

TEST(integers_wrap_around_and_a_nan_wins_the_maximum_and_the_minimum) {
  int64_t w = INT64_MAX, one = 1;
  for (const Kernels* k : every_kernels()) {
    w = INT64_MAX;
    k->rules[static_cast<size_t>(RuleKind::kSum)].dense_i64({}, Dense{.w = &w, .g = &one, .n = 1});
    CHECK_EQ(w, INT64_MIN);
    k->rules[static_cast<size_t>(RuleKind::kMax)].dense_i64({}, Dense{.w = &w, .g = &one, .n = 1});
    CHECK_EQ(w, 1);
    int64_t least = INT64_MIN;
    k->rules[static_cast<size_t>(RuleKind::kMin)].dense_i64({}, Dense{.w = &w, .g = &least, .n = 1});
    CHECK_EQ(w, INT64_MIN);
    for (const RuleKind kind : {RuleKind::kMax, RuleKind::kMin}) {
      float a = 1.0f, nan = NAN, large = 5.0f, small = -5.0f;
      const RuleKernels& rule = k->rules[static_cast<size_t>(kind)];
      rule.dense({}, Dense{.w = &a, .g = &nan, .n = 1});
      CHECK(std::isnan(a));
      rule.dense({}, Dense{.w = &a, .g = &large, .n = 1});
      rule.dense({}, Dense{.w = &a, .g = &small, .n = 1});
      CHECK(std::isnan(a));
    }
  }
}

TEST(only_an_optimizer_adds_and_the_plain_rules_combine_as_they_are_named) {
  CHECK(layout_of(RuleKind::kAdam).combine == Combine::kAdd);
  CHECK(layout_of(RuleKind::kSum).combine == Combine::kAdd);
  CHECK(layout_of(RuleKind::kMax).combine == Combine::kMax);
  CHECK(layout_of(RuleKind::kMin).combine == Combine::kMin);
  CHECK(layout_of(RuleKind::kAssign).combine == Combine::kLast);
  CHECK(layout_of(RuleKind::kAverage).combine == Combine::kMean);
}

}  // namespace windlass::rule_test
