// Bounds around a rule are the rule on clipped gradients, and its weights clipped, to the bit.
#include "rule/bounded.h"

#include <cmath>

#include "rule/kernels_test.h"

namespace windlass::bounded_test {
namespace {

using test::any_numbers;
using test::same_bits;

float clip(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

RuleSpec spec_of(RuleKind kind) {
  RuleSpec spec;
  spec.kind = kind;
  spec.clip = 0.25f;
  spec.lowest = -0.5f;
  spec.highest = 0.375f;
  return spec;
}

struct Object {
  std::vector<float> w, state[limits::kRuleVectorsMax], scalars;
  Object(test::Random& random, size_t n, size_t rows) : w(any_numbers(random, n)), scalars(rows) {
    for (auto& s : state) s.resize(n);
  }
  Dense dense(const float* g, size_t row) {
    Dense d;
    d.w = w.data();
    for (int v = 0; v < limits::kRuleVectorsMax; ++v) d.state[v] = state[v].data();
    d.scalars = scalars.data();
    d.g = g;
    d.n = w.size();
    d.row = row;
    return d;
  }
  bool same(const Object& o) const {
    bool all = same_bits(w, o.w) && same_bits(scalars, o.scalars);
    for (int v = 0; v < limits::kRuleVectorsMax; ++v) all = all && same_bits(state[v], o.state[v]);
    return all;
  }
};

// The same in steps: all gradients clipped, the update, all weights clipped.
void in_steps(const RuleKernels& rule, const Step& step, const std::vector<float>& g, size_t row, Object* o) {
  std::vector<float> clipped = g;
  for (float& x : clipped) x = clip(x, -0.25f, 0.25f);
  rule.dense(step, o->dense(clipped.data(), row));
  for (float& x : o->w) x = clip(x, -0.5f, 0.375f);
}

}  // namespace

TEST(clamp_is_numpys_clip_on_every_instruction_set) {
  test::Random random(test::seed());
  for (const size_t n : {1, 3, 16, 17, 64, 1001}) {
    std::vector<float> in = any_numbers(random, n);
    in[0] = NAN;
    for (const Kernels* k : every_kernels()) {
      std::vector<float> out(n);
      k->clamp(in.data(), out.data(), -0.25f, 0.5f, n);
      CHECK(std::isnan(out[0]));
      for (size_t i = 1; i < n; ++i) CHECK_EQ(out[i], clip(in[i], -0.25f, 0.5f));
      std::vector<float> in_place = in;
      k->clamp(in_place.data(), in_place.data(), -0.25f, 0.5f, n);
      CHECK(same_bits(in_place, out));
    }
  }
}

TEST(dense_updates_keep_to_their_bounds) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    const RuleKernels& rule = kernels(kind);
    const Bounds bounds(spec_of(kind));
    for (const size_t row : {1, 7, 1500}) {
      for (const size_t rows : {1, 3, 300}) {
        const size_t n = row * rows;
        Object a(random, n, rows);
        Object b = a;
        for (uint64_t count = 1; count <= 3; ++count) {
          const std::vector<float> g = any_numbers(random, n);
          const Step step = rule.prepare(test::hyper_of(kind, 3), count);
          in_steps(rule, step, g, row, &a);
          // Out may be where the gradient is.
          std::vector<float> out = g;
          Dense d = b.dense(out.data(), row);
          if (count != 1) d.out = out.data();
          d.stream = count == 3;
          bounds.dense(rule, step, d);
          kernels().fence();
          CHECK(b.same(a));
          if (count != 1) CHECK(same_bits(out, b.w));
        }
      }
    }
  }
}

TEST(means_are_clipped_after_they_are_taken) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    const RuleKernels& rule = kernels(kind);
    if (rule.mean == nullptr) continue;
    const Bounds bounds(spec_of(kind));
    for (const size_t n : {1, 64, 1024, 5000}) {
      const std::vector<float> g[2] = {any_numbers(random, n), any_numbers(random, n)};
      Object a(random, n, 1);
      Object b = a;
      std::vector<float> mean(n), copies[2] = {std::vector<float>(n), std::vector<float>(n)};
      for (size_t i = 0; i < n; ++i) mean[i] = (0.5f * g[0][i] + 3.0f * g[1][i]) / 3.5f;
      const Step step = rule.prepare(test::hyper_of(kind, 1), 2);
      in_steps(rule, step, mean, n, &a);
      const Weighed terms[] = {{g[0].data(), 0.5f}, {g[1].data(), 3.0f}};
      const Mean::Copy to[] = {{copies[0].data(), false}, {copies[1].data(), true}};
      Mean m;
      m.w = b.w.data();
      for (int v = 0; v < limits::kRuleVectorsMax; ++v) m.state[v] = b.state[v].data();
      m.terms = terms;
      m.n_terms = 2;
      m.by = 3.5f;
      m.n = n;
      m.copies = to;
      m.n_copies = 2;
      bounds.mean(rule, step, m);
      kernels().fence();
      CHECK(b.same(a));
      CHECK(same_bits(copies[0], b.w) && same_bits(copies[1], b.w));
    }
  }
}

TEST(rows_keep_to_their_bounds) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    const RuleKernels& rule = kernels(kind);
    for (const uint32_t dim : {1, 5, 64, 20000}) {
      const size_t n = dim > 1000 ? 3 : 150;
      const Hyper hyper = test::hyper_of(kind, 3);
      std::vector<Object> want;
      std::vector<std::vector<float>> w, state, heads, g;
      std::vector<float*> ws, states;
      std::vector<const float*> gs;
      std::vector<RowHead*> hs;
      for (size_t r = 0; r < n; ++r) {
        want.emplace_back(random, dim, 1);
        w.push_back(want.back().w);
        state.emplace_back(limits::kRuleVectorsMax * dim);
        heads.emplace_back(3);
        g.push_back(any_numbers(random, dim));
        in_steps(rule, rule.prepare(hyper, 1), g.back(), dim, &want.back());
      }
      for (size_t r = 0; r < n; ++r) {
        ws.push_back(w[r].data());
        states.push_back(state[r].data());
        hs.push_back(reinterpret_cast<RowHead*>(heads[r].data()));
        gs.push_back(g[r].data());
      }
      Bounds(spec_of(kind)).rows(rule, hyper, Rows{ws.data(), states.data(), hs.data(), gs.data(), n, dim, 9});
      for (size_t r = 0; r < n; ++r) {
        CHECK(same_bits(w[r], want[r].w));
        CHECK(hs[r]->count == 1 && hs[r]->touched == 9 && hs[r]->scalars()[0] == want[r].scalars[0]);
        for (int v = 0; v < rule.layout.vectors; ++v) {
          const std::vector<float> own(state[r].begin() + v * dim, state[r].begin() + (v + 1) * dim);
          CHECK(same_bits(own, want[r].state[v]));
        }
      }
    }
  }
}

TEST(a_rule_without_options_has_no_bounds) {
  CHECK(!Bounds::any(RuleSpec{}));
  RuleSpec spec;
  spec.clip = 1.0f;
  CHECK(Bounds::any(spec));
  spec = {};
  spec.highest = 1.0f;
  CHECK(Bounds::any(spec));
}

}  // namespace windlass::bounded_test
