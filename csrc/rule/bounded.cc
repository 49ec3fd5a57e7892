#include "rule/bounded.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace windlass {
namespace {

constexpr size_t kPiece = 1024;  // numbers at a time: 4 KiB of them, and the rule's arrays beside them
// Rows at a time, of which the kernel prefetches 48 ahead; fewer where they are long.
constexpr size_t kRows = 64, kRowsNumbers = 16384;

// Scratch memory for a piece, or for whole rows where a rule works on those.
float* room(size_t n) {
  static thread_local std::vector<float> numbers;
  if (numbers.size() < n) numbers.resize(n);
  return numbers.data();
}

void copy_out(float* to, const float* w, size_t n, bool stream) {
  if (stream) {
    kernels().stream(to, w, n * sizeof(float));
  } else {
    std::memcpy(to, w, n * sizeof(float));
  }
}

}  // namespace

Bounds::Bounds(const RuleSpec& rule) : lowest(rule.lowest), highest(rule.highest) {
  if (rule.clip != 0.0f) clip = rule.clip;
}

bool Bounds::any(const RuleSpec& rule) {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  return rule.clip != 0.0f || rule.lowest != -kNone || rule.highest != kNone;
}

void Bounds::dense(const RuleKernels& rule, const Step& step, const Dense& d) const {
  const bool by_row = rule.layout.row_scalars != 0;
  const size_t piece = by_row ? std::max<size_t>(kPiece / d.row, 1) * d.row : kPiece;
  float* const g = room(std::min(piece, d.n));
  for (size_t at = 0; at < d.n; at += piece) {
    Dense p;
    p.w = static_cast<float*>(d.w) + at;
    for (int v = 0; v < rule.layout.vectors; ++v) p.state[v] = d.state[v] + at;
    if (by_row) p.scalars = d.scalars + at / d.row * rule.layout.row_scalars;
    p.g = g;
    p.n = std::min(piece, d.n - at);
    p.row = d.row;
    gradient(static_cast<const float*>(d.g) + at, g, p.n);
    rule.dense(step, p);
    weights(static_cast<float*>(p.w), p.n);
    if (d.out != nullptr) copy_out(d.out + at, static_cast<const float*>(p.w), p.n, d.stream);
  }
}

void Bounds::mean(const RuleKernels& rule, const Step& step, const Mean& m) const {
  float* const g = room(std::min(kPiece, m.n));
  for (size_t at = 0; at < m.n; at += kPiece) {
    const size_t n = std::min(kPiece, m.n - at);
    for (size_t t = 0; t < m.n_terms; ++t) kernels().weigh(g, m.terms[t].g + at, m.terms[t].weight, t != 0, n);
    kernels().divide(g, m.by, n);
    gradient(g, g, n);
    Dense p;
    p.w = m.w + at;
    for (int v = 0; v < rule.layout.vectors; ++v) p.state[v] = m.state[v] + at;
    p.g = g;
    p.n = n;
    rule.dense(step, p);
    weights(m.w + at, n);
    for (size_t c = 0; c < m.n_copies; ++c) copy_out(m.copies[c].to + at, m.w + at, n, m.copies[c].stream);
  }
}

void Bounds::rows(const RuleKernels& rule, const Hyper& hyper, const Rows& r) const {
  const size_t most = std::clamp<size_t>(kRowsNumbers / r.dim, 1, kRows);
  float* const g = room(std::min(most, r.n) * r.dim);
  for (size_t at = 0; at < r.n; at += most) {
    const size_t n = std::min(most, r.n - at);
    const float* clipped[kRows];
    for (size_t i = 0; i < n; ++i) {
      gradient(r.g[at + i], g + i * r.dim, r.dim);
      clipped[i] = g + i * r.dim;
    }
    rule.rows(hyper, Rows{r.w + at, r.state + at, r.head + at, clipped, n, r.dim, r.touched});
    for (size_t i = 0; i < n; ++i) weights(r.w[at + i], r.dim);
  }
}

}  // namespace windlass
