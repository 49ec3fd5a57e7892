// The promise of kernels.h: every copy of a kernel gives the same bits.
#include "rule/kernels.h"

#include <algorithm>
#include <cmath>

#include "rule/kernels_test.h"

namespace windlass::kernels_test {
namespace {

using test::any_numbers;
using test::same_bits;

// One dense object and what a few updates make of it.
struct Object {
  std::vector<float> w, g, state[limits::kRuleVectorsMax], scalars, out;
  size_t row = 1;

  Object(test::Random& random, size_t n, size_t row)
      : w(any_numbers(random, n)), g(any_numbers(random, n)), scalars(n / row), out(n), row(row) {
    for (auto& s : state) s.assign(n, 0.0f);
  }
  bool same(const Object& o) const {
    bool all = same_bits(w, o.w) && same_bits(scalars, o.scalars) && same_bits(out, o.out);
    for (int v = 0; v < limits::kRuleVectorsMax; ++v) all = all && same_bits(state[v], o.state[v]);
    return all;
  }
};

enum class Output { kNone, kCached, kStreamed, kOverGradient };

// Three updates of the numbers from `skip` on, so that arrays start at any multiple of four bytes.
void update(const Kernels& k, RuleKind kind, const Hyper& hyper, size_t skip, Output output, Object* o) {
  const RuleKernels& rule = k.rules[static_cast<size_t>(kind)];
  std::vector<float> g = o->g;
  for (uint64_t count = 1; count <= 3; ++count) {
    if (output == Output::kOverGradient) o->out = g;
    Dense d;
    d.w = o->w.data() + skip;
    for (int v = 0; v < limits::kRuleVectorsMax; ++v) d.state[v] = o->state[v].data() + skip;
    d.scalars = o->scalars.data() + skip / o->row;
    d.g = output == Output::kOverGradient ? o->out.data() + skip : g.data() + skip;
    d.n = o->w.size() - skip;
    d.row = o->row;
    if (output != Output::kNone) d.out = o->out.data() + skip;
    d.stream = output == Output::kStreamed;
    rule.dense(rule.prepare(hyper, count), d);
    k.fence();
  }
}

// Rows of a table as Rows wants them, each with a head of its own age.
struct Some {
  std::vector<std::vector<float>> w, state, g;
  std::vector<std::vector<float>> heads;  // two numbers for RowHead, one for a scalar

  Some(test::Random& random, size_t n, uint32_t dim) {
    for (size_t r = 0; r < n; ++r) {
      w.push_back(any_numbers(random, dim));
      g.push_back(any_numbers(random, dim));
      state.emplace_back(limits::kRuleVectorsMax * dim);
      heads.emplace_back(3);
      head(r)->count = random.below(4) == 0 ? 0xFFFFFFFFu - static_cast<uint32_t>(random.below(3))
                                            : static_cast<uint32_t>(random.below(200));
    }
  }
  RowHead* head(size_t r) { return reinterpret_cast<RowHead*>(heads[r].data()); }
  // looks: at every gradient before it is used; returns how many rows were updated, of the first `most`.
  size_t update(const Kernels& k, RuleKind kind, const Hyper& hyper, uint32_t dim, bool looks = false,
                size_t most = ~size_t{0}) {
    std::vector<float*> ws, states;
    std::vector<const float*> gs;
    std::vector<RowHead*> hs;
    for (size_t r = 0; r < w.size(); ++r) {
      ws.push_back(w[r].data());
      gs.push_back(g[r].data());
      states.push_back(state[r].data());
      hs.push_back(head(r));
    }
    const RuleKernels& rule = k.rules[static_cast<size_t>(kind)];
    const Rows rows{ws.data(), states.data(), hs.data(), gs.data(), std::min(ws.size(), most), dim, 77};
    if (looks) return rule.looking_rows(hyper, rows);
    rule.rows(hyper, rows);
    return rows.n;
  }
  bool same(const Some& o) const {
    bool all = true;
    for (size_t r = 0; r < w.size(); ++r)
      all = all && same_bits(w[r], o.w[r]) && same_bits(state[r], o.state[r]) && same_bits(heads[r], o.heads[r]);
    return all;
  }
};

}  // namespace

TEST(dense_updates_give_the_same_bits_on_every_instruction_set) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    for (int variant = 0; variant < test::kVariants; ++variant) {
      for (const size_t n : {1, 3, 16, 17, 31, 64, 65, 127, 193, 1029}) {
        const size_t row = layout_of(kind).row_scalars != 0 && n % 3 == 0 ? n / 3 : 1;
        const size_t skip = row * random.below(std::min<size_t>(n / row, 17));
        const Object fresh(random, n, row);
        Object first = fresh;
        for (const Output output : {Output::kNone, Output::kCached, Output::kStreamed, Output::kOverGradient}) {
          for (const Kernels* k : every_kernels()) {
            Object o = fresh;
            update(*k, kind, test::hyper_of(kind, variant), skip, output, &o);
            if (k == every_kernels()[0]) first = o;
            CHECK(o.same(first));
            if (output == Output::kNone) continue;
            for (size_t i = skip; i < n; ++i) CHECK(std::memcmp(&o.out[i], &o.w[i], 4) == 0);
          }
        }
      }
    }
  }
}

TEST(an_output_changes_no_weight) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    const Object fresh(random, 300, 1);
    for (const Kernels* k : every_kernels()) {
      Object without = fresh, with = fresh;
      update(*k, kind, test::hyper_of(kind, 1), 5, Output::kNone, &without);
      for (const Output output : {Output::kCached, Output::kStreamed}) {
        with = fresh;
        update(*k, kind, test::hyper_of(kind, 1), 5, output, &with);
        CHECK(same_bits(with.w, without.w) && same_bits(with.state[0], without.state[0]));
      }
    }
  }
}

TEST(row_updates_give_the_same_bits_on_every_instruction_set) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    for (int variant = 0; variant < test::kVariants; ++variant) {
      for (const uint32_t dim : {1, 3, 16, 17, 32, 64, 128}) {
        const Some fresh(random, 1 + random.below(60), dim);
        Some first = fresh;
        for (const Kernels* k : every_kernels()) {
          Some some = fresh;
          some.update(*k, kind, test::hyper_of(kind, variant), dim);
          some.update(*k, kind, test::hyper_of(kind, variant), dim);
          if (k == every_kernels()[0]) first = some;
          CHECK(some.same(first));
          for (size_t r = 0; r < some.w.size(); ++r) CHECK_EQ(some.head(r)->touched, 77u);
        }
      }
    }
  }
}

// A row is a dense piece with a count of its own: both forms of a rule are one.
TEST(a_row_update_is_the_dense_update_of_its_count) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    const Hyper hyper = test::hyper_of(kind, 3);
    for (const uint32_t dim : {1, 3, 16, 17, 32, 64, 128}) {
      for (const Kernels* k : every_kernels()) {
        Some rows(random, 20, dim);
        Some dense = rows;
        rows.update(*k, kind, hyper, dim);
        for (size_t r = 0; r < 20; ++r) {
          RowHead* head = dense.head(r);
          head->count += head->count != 0xFFFFFFFFu;  // the count stays at its end
          head->touched = 77;
          Dense d;
          d.w = dense.w[r].data();
          for (uint32_t v = 0; v < limits::kRuleVectorsMax; ++v) d.state[v] = dense.state[r].data() + v * dim;
          d.scalars = head->scalars();
          d.g = dense.g[r].data();
          d.n = d.row = dim;
          const RuleKernels& kernels = k->rules[static_cast<size_t>(kind)];
          kernels.dense(kernels.prepare(hyper, head->count), d);
        }
        CHECK(rows.same(dense));
      }
    }
  }
}

// A kernel that looks at its gradient changes the same bits, up to the piece that has NaN or infinity and no further.
TEST(a_pass_that_looks_gives_the_same_bits_and_stops_before_what_is_not_finite) {
  test::Random random(test::seed());
  const auto finite = [&](std::vector<float>* g) {
    for (float& x : *g) x = std::isfinite(x) ? x : 1.0f;
  };
  const auto bad = [&] { return random.below(2) == 0 ? NAN : -INFINITY; };
  for (const RuleKind kind : our_rules()) {
    const Hyper hyper = test::hyper_of(kind, 1);
    const bool by_row = layout_of(kind).row_scalars != 0;
    for (const Kernels* k : every_kernels()) {
      const RuleKernels& rule = k->rules[static_cast<size_t>(kind)];
      for (const size_t row : {1, 5, 16, 32, 64, 128}) {
        const size_t n = 7 * row;
        for (const bool spoilt : {false, true}) {
          Object looks(random, n, row);
          finite(&looks.g);
          const size_t at = random.below(n);
          if (spoilt) looks.g[at] = bad();
          Object plain = looks;
          const auto dense_of = [&](Object* o, size_t some) {
            Dense d;
            d.w = o->w.data();
            for (int v = 0; v < limits::kRuleVectorsMax; ++v) d.state[v] = o->state[v].data();
            d.scalars = o->scalars.data();
            d.g = o->g.data();
            d.out = random.below(2) == 0 ? o->out.data() : nullptr;
            d.n = some;
            d.row = row;
            return d;
          };
          const size_t done = rule.looking(rule.prepare(hyper, 3), dense_of(&looks, n));
          CHECK(spoilt ? done <= at && at - done < std::max<size_t>(by_row ? row : 64, 64) : done == n);
          Dense before = dense_of(&plain, done);
          before.out = nullptr;
          if (done != 0) rule.dense(rule.prepare(hyper, 3), before);
          for (float& x : looks.out) x = 0;  // checked above, in tests of outputs
          plain.out = looks.out;
          CHECK(looks.same(plain));
        }
      }
      for (const uint32_t dim : {1, 3, 16, 17, 32, 64, 128}) {
        Some looks(random, 20, dim);
        for (auto& g : looks.g) finite(&g);
        const size_t at = random.below(40);  // often in none of the rows
        if (at < 20) looks.g[at][random.below(dim)] = bad();
        Some plain = looks;
        CHECK_EQ(looks.update(*k, kind, hyper, dim, true), std::min<size_t>(at, 20));
        plain.update(*k, kind, hyper, dim, false, std::min<size_t>(at, 20));
        CHECK(looks.same(plain));
      }
    }
  }
}

TEST(wide_dtypes_give_the_same_bits_on_every_instruction_set) {
  test::Random random(test::seed());
  for (const RuleKind kind : {RuleKind::kSum, RuleKind::kAssign, RuleKind::kMax, RuleKind::kMin}) {
    for (const size_t n : {1, 2, 7, 16, 33, 130}) {
      std::vector<uint64_t> w(n), g(n);
      for (uint64_t& x : w) x = random.next();
      for (uint64_t& x : g) x = random.next();
      std::vector<double> wide_w(n), wide_g(n);
      for (size_t i = 0; i < n; ++i) wide_w[i] = test::any_number(random), wide_g[i] = test::any_number(random);
      const RuleKernels& first = every_kernels()[0]->rules[static_cast<size_t>(kind)];
      for (const Kernels* k : every_kernels()) {
        const RuleKernels& rule = k->rules[static_cast<size_t>(kind)];
        std::vector<uint64_t> a = w, b = w;
        rule.dense_i64({}, Dense{.w = a.data() + 1, .g = g.data() + 1, .n = n - 1});
        first.dense_i64({}, Dense{.w = b.data() + 1, .g = g.data() + 1, .n = n - 1});
        CHECK(same_bits(a, b));
        std::vector<double> c = wide_w, d = wide_w;
        rule.dense_f64({}, Dense{.w = c.data() + 1, .g = wide_g.data() + 1, .n = n - 1});
        first.dense_f64({}, Dense{.w = d.data() + 1, .g = wide_g.data() + 1, .n = n - 1});
        CHECK(same_bits(c, d));
      }
    }
  }
}

TEST(gradients_combine_the_same_on_every_instruction_set) {
  test::Random random(test::seed());
  for (const Combine how : {Combine::kAdd, Combine::kMax, Combine::kLast, Combine::kMean, Combine::kMin}) {
    for (const size_t n : {1, 3, 16, 17, 64, 128, 1001}) {
      const std::vector<float> into = any_numbers(random, n + 1), g = any_numbers(random, n + 1);
      std::vector<float> want = into;
      for (size_t i = 1; i <= n; ++i) {
        if (how == Combine::kAdd || how == Combine::kMean) want[i] = into[i] + g[i];
        if (how == Combine::kMax) want[i] = g[i] > into[i] ? g[i] : into[i];
        if (how == Combine::kMin) want[i] = g[i] < into[i] ? g[i] : into[i];
        if (how == Combine::kLast) want[i] = g[i];
      }
      for (const Kernels* k : every_kernels()) {
        std::vector<float> got = into;
        k->combine(how, got.data() + 1, g.data() + 1, n);
        CHECK(same_bits(got, want));
      }
    }
  }
}

TEST(a_mean_divides_the_same_on_every_instruction_set) {
  test::Random random(test::seed());
  for (const size_t n : {1, 3, 16, 17, 64, 128, 1001}) {
    const std::vector<float> into = any_numbers(random, n + 1);
    const float by = static_cast<float>(1 + random.below(1000));
    std::vector<float> want = into;
    for (size_t i = 1; i <= n; ++i) want[i] = into[i] / by;
    for (const Kernels* k : every_kernels()) {
      std::vector<float> got = into;
      k->divide(got.data() + 1, by, n);
      CHECK(same_bits(got, want));
    }
  }
}

TEST(a_mean_at_once_is_the_same_as_one_in_steps) {
  test::Random random(test::seed());
  for (size_t rule = 0; rule < test::kRules; ++rule) {
    if (every_kernels()[0]->rules[rule].mean == nullptr) continue;
    for (const size_t n : {1, 3, 17, 64, 128, 1001}) {
      for (const size_t n_terms : {1, 2, 3, 5}) {
        std::vector<std::vector<float>> gradients;
        std::vector<Weighed> terms;
        for (size_t t = 0; t < n_terms; ++t) gradients.push_back(any_numbers(random, n + 1));
        for (size_t t = 0; t < n_terms; ++t)
          terms.push_back({gradients[t].data() + 1, static_cast<float>(1 + random.below(4)) / 2});
        const std::vector<float> w = any_numbers(random, n);
        const std::vector<std::vector<float>> state = {any_numbers(random, n), any_numbers(random, n),
                                                       any_numbers(random, n)};
        Hyper hyper;
        for (double& v : hyper.v) v = static_cast<double>(1 + random.below(9)) / 10;
        for (const float by : {1.0f, 2.0f, 0.25f, 3.0f, 0.7f, 1e-38f, 0x1p-126f, 0x1p127f, 0.0f}) {
          std::vector<float> sum(n);
          for (size_t i = 0; i < n; ++i) {
            sum[i] = terms[0].weight * terms[0].g[i];
            for (size_t t = 1; t < n_terms; ++t) sum[i] += terms[t].weight * terms[t].g[i];
            sum[i] /= by;
          }
          for (const Kernels* k : every_kernels()) {
            const RuleKernels& r = k->rules[rule];
            const Step step = r.prepare(hyper, 3);
            std::vector<float> steps(n);
            for (size_t t = 0; t < n_terms; ++t) k->weigh(steps.data(), terms[t].g, terms[t].weight, t != 0, n);
            k->divide(steps.data(), by, n);
            CHECK(same_bits(steps, sum));
            std::vector<float> w1 = w, w2 = w, copies[3];
            std::vector<std::vector<float>> state1 = state, state2 = state;
            Dense d;
            d.w = w1.data();
            for (size_t v = 0; v < state1.size(); ++v) d.state[v] = state1[v].data();
            d.g = sum.data();
            d.n = n;
            r.dense(step, d);
            Mean m;
            m.w = w2.data();
            for (size_t v = 0; v < state2.size(); ++v) m.state[v] = state2[v].data();
            m.terms = terms.data();
            m.n_terms = n_terms;
            m.by = by;
            m.n = n;
            for (auto& c : copies) c.resize(n + 32);
            // Two that may go past the cache, of which one is not where it could; and one that may not.
            auto* const aligned =
                reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(copies[0].data()) + 63) & ~63ul);
            const Mean::Copy to[] = {{aligned, true}, {copies[1].data() + 1, true}, {copies[2].data(), false}};
            m.copies = to;
            m.n_copies = 3;
            r.mean(step, m);
            k->fence();
            CHECK(same_bits(w2, w1));
            for (size_t v = 0; v < state1.size(); ++v) CHECK(same_bits(state2[v], state1[v]));
            for (const Mean::Copy& c : to) CHECK(same_bits(std::vector<float>(c.to, c.to + n), w1));
          }
        }
      }
    }
  }
}

TEST(layouts_and_names_do_not_depend_on_the_instruction_set) {
  for (const Kernels* k : every_kernels()) {
    for (size_t rule = 0; rule < test::kRules; ++rule) {
      const RuleKernels &a = k->rules[rule], &b = every_kernels()[0]->rules[rule];
      CHECK(std::strcmp(a.name, b.name) == 0);
      CHECK(std::memcmp(&a.layout, &b.layout, sizeof a.layout) == 0);
      CHECK_EQ(a.dense_f64 != nullptr, a.layout.any_dtype);
      CHECK_EQ(a.dense_i64 != nullptr, a.layout.any_dtype);
      CHECK(a.layout.vectors <= limits::kRuleVectorsMax && a.layout.hypers <= limits::kRuleHyperMax);
    }
  }
  CHECK(isa_complaint().empty());
  CHECK(kernels().isa != nullptr);
}

}  // namespace windlass::kernels_test
