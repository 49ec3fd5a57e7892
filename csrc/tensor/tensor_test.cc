#include "tensor/tensor.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "rule/kernels_test.h"

namespace windlass::tensor_test {
namespace {

using test::same_bits;

struct Held {
  Budget budget;
  std::unique_ptr<Tensor> tensor;
  explicit Held(const TensorSpec& spec, const std::string& name = "w") {
    CHECK_OK(Tensor::create(name, spec, &budget, &tensor));
  }
  uint64_t elements() const { return tensor->spec().elements(); }

  // The spans of a shard, cut at random multiples of `unit`.
  std::vector<Span> spans(uint32_t shard, uint64_t unit, test::Random* random) const {
    std::vector<Span> all;
    const uint64_t end = tensor->cut().end_of(shard);
    for (uint64_t at = tensor->cut().first_of(shard); at < end;) {
      const uint64_t n = random == nullptr ? end - at : std::min(end - at, unit * (1 + random->below(2000 / unit + 1)));
      all.push_back({at, n, at});
      at += n;
    }
    return all;
  }
  void apply(const Hyper& hyper, const Arrays& arrays, uint64_t unit = 1, test::Random* random = nullptr) {
    for (uint32_t s = 0; s < tensor->cut().shards; ++s) {
      const std::vector<Span> cut = spans(s, unit, random);
      CHECK_OK(tensor->apply(s, hyper, cut.data(), cut.size(), arrays));
    }
  }
  template <class T>
  std::vector<T> read(Dtype dtype, bool stream = false) const {
    std::vector<T> out(elements());
    for (uint32_t s = 0; s < tensor->cut().shards; ++s) {
      const std::vector<Span> all = spans(s, 1, nullptr);
      tensor->read(all.data(), all.size(), Arrays{nullptr, out.data(), dtype, dtype, stream});
    }
    return out;
  }
  std::vector<float> read() const { return read<float>(Dtype::kFloat32); }
  uint64_t fingerprint() const {
    uint64_t sum = 0;
    for (uint32_t s = 0; s < tensor->cut().shards; ++s) sum += tensor->fingerprint(s);
    return sum;
  }
};

TensorSpec spec_of(std::vector<uint64_t> shape, RuleKind rule, float initial_state = 0.0f) {
  return {.shape = std::move(shape), .rule = {rule, initial_state}, .init = {InitKind::kNormal, 0, 1}, .seed = 3};
}

std::vector<float> random_floats(test::Random& random, size_t n) {
  std::vector<float> v(n);
  for (float& x : v) x = random.unit() - 0.5f;
  return v;
}

}  // namespace

TEST(a_weight_starts_with_a_value_of_seed_name_and_position_alone) {
  const std::vector<float> all = Held(spec_of({100, 700}, RuleKind::kSgd)).read();
  const std::vector<float> flat = Held(spec_of({70'000}, RuleKind::kAdam)).read();
  const std::vector<float> part = Held(spec_of({500}, RuleKind::kSgd)).read();
  CHECK(same_bits(all, flat));
  CHECK(same_bits(part, std::vector<float>(all.begin(), all.begin() + 500)));
  CHECK(!same_bits(part, Held(spec_of({500}, RuleKind::kSgd), "v").read()));
  TensorSpec seeded = spec_of({500}, RuleKind::kSgd);
  seeded.seed = 4;
  CHECK(!same_bits(part, Held(seeded).read()));
}

TEST(updates_do_not_depend_on_the_spans) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    for (const uint64_t row : {1u, 7u, 64u, 1500u}) {
      const TensorSpec spec = spec_of({60'000 / row, row}, kind, kind == RuleKind::kAdagrad ? 0.1f : 0.0f);
      Held whole(spec), pieces(spec);
      CHECK(whole.tensor->cut().shards > 1);
      for (int step = 0; step < 3; ++step) {
        const std::vector<float> g = random_floats(random, whole.elements());
        std::vector<float> out(g.size());
        const Hyper hyper = test::hyper_of(kind, step);
        whole.apply(hyper, Arrays{.in = g.data()});
        pieces.apply(hyper, Arrays{.in = g.data(), .out = out.data(), .stream = step == 1}, row, &random);
        CHECK(same_bits(out, whole.read()));
      }
      CHECK(same_bits(pieces.read(), whole.read()));
      CHECK_EQ(pieces.fingerprint(), whole.fingerprint());
    }
  }
}

TEST(lent_numbers_that_must_be_finite_give_the_same_bits_and_others_are_not_applied) {
  test::Random random(test::seed());
  const float bad[] = {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  for (const RuleKind kind : our_rules()) {
    for (const uint64_t row : {1u, 7u, 1500u}) {
      TensorSpec spec = spec_of({60'000 / row, row}, kind);
      Held plain(spec);
      spec.reject_nonfinite = true;
      Held checked(spec);
      std::vector<float> g = random_floats(random, plain.elements()), out(g.size());
      for (int step = 0; step < 2; ++step) {
        const Hyper hyper = test::hyper_of(kind, step);
        plain.apply(hyper, Arrays{.in = g.data()});
        checked.apply(hyper, Arrays{.in = g.data(), .out = out.data(), .stream = step == 1, .lent = true});
        CHECK(same_bits(out, plain.read()));
      }
      CHECK_EQ(checked.fingerprint(), plain.fingerprint());
      const std::vector<Span> all = checked.spans(0, 1, nullptr);
      const Arrays lent{.in = g.data(), .lent = true};
      g[0] = bad[row % 2];
      CHECK_CODE(checked.tensor->apply(0, test::hyper_of(kind, 2), all.data(), all.size(), lent), Code::kNonFinite);
      CHECK_EQ(checked.fingerprint(), plain.fingerprint());
      g[0] = 0;
      g[all[0].n - 1] = bad[row % 2];
      CHECK_CODE(checked.tensor->apply(0, test::hyper_of(kind, 2), all.data(), all.size(), lent), Code::kBufferInUse);
      const std::vector<float> weights = checked.read();
      CHECK(kernels().finite(Dtype::kFloat32, weights.data(), weights.size()));
    }
  }
}

TEST(spans_say_which_weights_and_where_they_are_in_the_array) {
  Held t(spec_of({1000}, RuleKind::kAssign));
  std::vector<float> want = t.read();
  const std::vector<float> g = {1, 2, 3, 4, 5};
  const Span spans[] = {{900, 2, 3}, {10, 3, 0}};
  std::vector<float> out(5);
  CHECK_OK(t.tensor->apply(0, {}, spans, 2, Arrays{.in = g.data(), .out = out.data()}));
  want[900] = 4, want[901] = 5, want[10] = 1, want[11] = 2, want[12] = 3;
  CHECK(same_bits(t.read(), want));
  CHECK(same_bits(out, g));
}

TEST(a_gradient_and_the_new_weights_may_share_one_array) {
  test::Random random(test::seed());
  for (const RuleKind kind : our_rules()) {
    for (const bool stream : {false, true}) {
      Held apart(spec_of({300, 100}, kind)), shared(spec_of({300, 100}, kind));
      std::vector<float> both = random_floats(random, 30'000);
      apart.apply(test::hyper_of(kind, 1), Arrays{.in = both.data()});
      shared.apply(test::hyper_of(kind, 1), Arrays{.in = both.data(), .out = both.data(), .stream = stream});
      CHECK(same_bits(both, apart.read()));
      CHECK_EQ(shared.fingerprint(), apart.fingerprint());
    }
  }
}

TEST(short_dtypes_travel_and_the_weights_stay_float32) {
  test::Random random(test::seed());
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    for (const RuleKind kind : {RuleKind::kAdam, RuleKind::kRowAdagrad}) {
      const TensorSpec spec = spec_of({200, 333}, kind);
      Held narrow(spec), plain(spec);
      for (int step = 0; step < 3; ++step) {
        std::vector<float> wide = random_floats(random, narrow.elements());
        std::vector<uint16_t> g(wide.size()), want(wide.size());
        kernels().from_f32(dtype, wide.data(), g.data(), g.size());
        kernels().to_f32(dtype, g.data(), wide.data(), g.size());
        plain.apply(test::hyper_of(kind, step), Arrays{.in = wide.data()});
        // The answer replaces the gradient, or is of another type than it.
        narrow.apply(test::hyper_of(kind, step), Arrays{g.data(), step == 0 ? nullptr : g.data(), dtype, dtype, false});
        kernels().from_f32(dtype, plain.read().data(), want.data(), want.size());
        if (step != 0) CHECK(same_bits(g, want));
        CHECK(same_bits(narrow.read<uint16_t>(dtype), want));
        CHECK(same_bits(narrow.read(), plain.read()));
      }
      std::vector<float> g = random_floats(random, narrow.elements());
      std::vector<uint16_t> half(g.size()), out(g.size());
      narrow.apply(test::hyper_of(kind, 0), Arrays{g.data(), out.data(), Dtype::kFloat32, dtype, true});
      CHECK(same_bits(out, narrow.read<uint16_t>(dtype)));
      kernels().from_f32(dtype, g.data(), half.data(), g.size());
      narrow.apply(test::hyper_of(kind, 0), Arrays{half.data(), g.data(), dtype, Dtype::kFloat32, true});
      CHECK(same_bits(g, narrow.read()));
    }
  }
}

TEST(wide_dtypes_are_kept_exactly) {
  for (const bool stream : {false, true}) {
    TensorSpec spec{
        .shape = {40'000}, .dtype = Dtype::kInt64, .rule = {RuleKind::kSum, 0}, .init = {InitKind::kConstant, 5, 0}};
    Held ints(spec);
    std::vector<int64_t> g(40'000), out(40'000), want(40'000);
    for (size_t i = 0; i < g.size(); ++i) g[i] = (int64_t{1} << 60) + static_cast<int64_t>(i), want[i] = 5 + 2 * g[i];
    const Arrays arrays{g.data(), out.data(), Dtype::kInt64, Dtype::kInt64, stream};
    ints.apply({}, arrays);
    ints.apply({}, arrays);
    CHECK(same_bits(out, want));
    CHECK(same_bits(ints.read<int64_t>(Dtype::kInt64, stream), want));

    spec.dtype = Dtype::kFloat64;
    spec.init.a = 0.1;
    spec.rule.kind = RuleKind::kMax;
    Held doubles(spec);
    std::vector<double> x(40'000), larger(40'000);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = 0.1 + (static_cast<double>(i) - 20'000) * 1e-12, larger[i] = std::max(x[i], 0.1);
    doubles.apply({}, Arrays{x.data(), x.data(), Dtype::kFloat64, Dtype::kFloat64, stream});
    CHECK(same_bits(x, larger));
    CHECK(same_bits(doubles.read<double>(Dtype::kFloat64, stream), larger));
  }
}

TEST(row_adagrad_keeps_one_accumulator_per_row) {
  test::Random random(test::seed());
  for (const uint64_t row : {1u, 3u, 16u, 17u, 5000u}) {
    Held t(spec_of({50, row}, RuleKind::kRowAdagrad, 0.1f));
    std::vector<float> w = t.read(), scalars(50, 0.1f);
    const Hyper hyper = test::hyper_of(RuleKind::kRowAdagrad, 0);
    const RuleKernels& rule = kernels(RuleKind::kRowAdagrad);
    for (uint64_t step = 1; step <= 3; ++step) {
      const std::vector<float> g = random_floats(random, w.size());
      t.apply(hyper, Arrays{.in = g.data()}, row, &random);
      for (size_t r = 0; r < 50; ++r) {
        Dense d;
        d.w = &w[r * row];
        d.scalars = &scalars[r];
        d.g = &g[r * row];
        d.n = d.row = row;
        rule.dense(rule.prepare(hyper, step), d);
      }
    }
    CHECK(same_bits(t.read(), w));
  }
}

TEST(the_fingerprint_sees_weights_state_and_count) {
  const std::vector<float> zero(100), one(100, 1.0f), two(100, 2.0f);
  Held a(spec_of({100}, RuleKind::kMomentum)), b(spec_of({100}, RuleKind::kMomentum));
  CHECK_EQ(a.fingerprint(), b.fingerprint());
  a.apply({{0.0, 0, 0.9}}, Arrays{.in = one.data()});
  b.apply({{0.0, 0, 0.9}}, Arrays{.in = two.data()});
  CHECK(same_bits(a.read(), b.read()));
  CHECK(a.fingerprint() != b.fingerprint());
  Held c(spec_of({100}, RuleKind::kAdam)), d(spec_of({100}, RuleKind::kAdam));
  c.apply({{0.001, 0.9, 0.999, 1e-8}}, Arrays{.in = zero.data()});
  CHECK(same_bits(c.read(), d.read()));
  CHECK(c.fingerprint() != d.fingerprint());
  CHECK(Held(spec_of({100}, RuleKind::kAdam), "v").fingerprint() != d.fingerprint());
}

TEST(the_fingerprint_leaves_out_a_count_that_the_rule_does_not_use) {
  const std::vector<float> zero(100);
  Held a(spec_of({100}, RuleKind::kSum)), b(spec_of({100}, RuleKind::kSum));
  a.apply({}, Arrays{.in = zero.data()});
  CHECK_EQ(a.fingerprint(), b.fingerprint());
}

}  // namespace windlass::tensor_test
