#include "bench/rules.h"

#include <algorithm>

namespace windlass {

bool bare_dense(RuleKind kind, const Hyper& hyper, float* w, float* const* state, const float* g, size_t at, size_t n,
                size_t row, bool looks) {
  const RuleKernels& rule = kernels(kind);
  Dense d;
  d.w = w + at;
  for (int v = 0; v < rule.layout.vectors; ++v) d.state[v] = state[v] + at;
  if (rule.layout.row_scalars != 0) d.scalars = state[rule.layout.vectors] + at / row * rule.layout.row_scalars;
  d.g = g + at;
  d.n = n;
  d.row = row;
  const Step step = rule.prepare(hyper, kBareCount);
  if (looks) return rule.looking(step, d) == n;
  rule.dense(step, d);
  return true;
}

bool bare_rows(RuleKind kind, const Hyper& hyper, const BareRows& r) {
  constexpr size_t kBlock = 512;
  const RuleKernels& rule = kernels(kind);
  const size_t state_stride = rule.layout.vectors * size_t{r.dim};
  float* w[kBlock];
  float* state[kBlock];
  RowHead* heads[kBlock];
  const float* g[kBlock];
  for (size_t at = 0; at < r.n; at += kBlock) {
    const size_t n = std::min(kBlock, r.n - at);
    for (size_t i = 0; i < n; ++i) {
      const size_t row = r.numbers[at + i];
      w[i] = r.w + row * r.dim;
      state[i] = state_stride != 0 ? r.state + row * state_stride : nullptr;
      heads[i] = reinterpret_cast<RowHead*>(r.heads + row * r.head_bytes);
      g[i] = r.g + (at + i) * r.dim;
    }
    const Rows some{w, state, heads, g, n, r.dim, 1};
    if (r.looks && rule.looking_rows(hyper, some) != n) return false;
    if (!r.looks) rule.rows(hyper, some);
  }
  return true;
}

}  // namespace windlass
