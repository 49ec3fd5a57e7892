// One copy of every kernel for one instruction set. CMake compiles this file once per set, with -DWL_ISA.
#include "rule/kernels.h"

#include "rule/adadelta.h"
#include "rule/adagrad.h"
#include "rule/adam.h"
#include "rule/adamax.h"
#include "rule/average.h"
#include "rule/convert.h"
#include "rule/copy.h"
#include "rule/fill.h"
#include "rule/fingerprint.h"
#include "rule/ftrl.h"
#include "rule/lion.h"
#include "rule/nadam.h"
#include "rule/not_ours.h"
#include "rule/plain.h"
#include "rule/reduce.h"
#include "rule/rmsprop.h"
#include "rule/sgd.h"
#include "rule/vector.h"
#include "rule/vector_ops.h"

namespace windlass::WL_ISA {
namespace {

constexpr bool has_rows(const Layout& l) { return l.row_scalars != 0; }
constexpr size_t kMeanPiece = 64, kPiece = 64;

// Copies a gradient that others may change meanwhile, and looks at the copy; false if it has NaN or infinity.
template <size_t kMost>
inline __attribute__((always_inline)) bool take(const float* g, float (&own)[kMost], size_t n) {
  std::memcpy(own, g, n * sizeof(float));
  asm volatile("" : "+m"(own));  // or the compiler could read the gradient again
  return finite(Dtype::kFloat32, own, n);
}

// Weights [at, at + n), then their copy. With a constant n both are unrolled, and the copy comes from registers.
// kLooks: takes the gradient first; false if it may not be used.
template <class R, bool kLooks>
inline __attribute__((always_inline)) bool piece(const Step& step, const Dense& d, size_t at, size_t n,
                                                 bool past_cache) {
  const float* g = static_cast<const float*>(d.g) + at;
  alignas(64) float own[kLooks ? kPiece : 1];
  if constexpr (kLooks) {
    if (!take(g, own, n)) return false;
    g = own;
  }
  float* w = static_cast<float*>(d.w) + at;
  float* const state[3] = {R::kLayout.vectors > 0 ? d.state[0] + at : nullptr,
                           R::kLayout.vectors > 1 ? d.state[1] + at : nullptr,
                           R::kLayout.vectors > 2 ? d.state[2] + at : nullptr};
  R::apply(step, w, state, g, n);
  if (past_cache) {
    for (size_t i = 0; i < n; i += kStore / sizeof(float)) store_past_cache(d.out + at + i, w + i);
  } else if (!kLooks || d.out != nullptr) {
    std::memcpy(d.out + at, w, n * sizeof(float));
  }
  return true;
}

// The fused pass: small pieces, so that reading and writing overlap. Returns how many weights it has come to.
template <class R, bool kPast, bool kLooks>
size_t dense_out(const Step& step, const Dense& d) {
  const size_t off = reinterpret_cast<uintptr_t>(d.out) % kStore / sizeof(float);
  size_t at = off == 0 ? 0 : kStore / sizeof(float) - off;
  if (at >= d.n) return piece<R, kLooks>(step, d, 0, d.n, false) ? d.n : 0;
  if (at != 0 && !piece<R, kLooks>(step, d, 0, at, false)) return 0;
  for (; at + kPiece <= d.n; at += kPiece) {
    if (!piece<R, kLooks>(step, d, at, kPiece, kPast)) return at;
  }
  return at < d.n && !piece<R, kLooks>(step, d, at, d.n - at, false) ? at : d.n;
}

template <class R>
void dense(const Step& step, const Dense& d) {
  float* w = static_cast<float*>(d.w);
  const float* g = static_cast<const float*>(d.g);
  if constexpr (has_rows(R::kLayout)) {
    for (size_t at = 0, r = 0; at < d.n; at += d.row, ++r) {
      R::apply_row(step, w + at, d.scalars + r * R::kLayout.row_scalars, g + at, d.row);
      if (d.out != nullptr)
        d.stream ? stream(d.out + at, w + at, d.row * 4) : (void)std::memcpy(d.out + at, w + at, d.row * 4);
    }
  } else if (d.out == nullptr) {
    R::apply(step, w, d.state, g, d.n);
  } else {
    d.stream ? dense_out<R, true, false>(step, d) : dense_out<R, false, false>(step, d);
  }
}

// By rows. With a constant row the loops of apply_row() are unrolled.
template <class R, size_t kRow>
size_t looking_by_row(const Step& step, const Dense& d) {
  const size_t row = kRow != 0 ? kRow : d.row;
  alignas(64) float own[kRow != 0 ? kRow : kLookingRowMax];
  float* const w = static_cast<float*>(d.w);
  const float* const g = static_cast<const float*>(d.g);
  for (size_t at = 0, r = 0; at < d.n; at += row, ++r) {
    if (!take(g + at, own, row)) return at;
    R::apply_row(step, w + at, d.scalars + r * R::kLayout.row_scalars, own, row);
    if (d.out != nullptr)
      d.stream ? stream(d.out + at, w + at, row * 4) : (void)std::memcpy(d.out + at, w + at, row * 4);
  }
  return d.n;
}

template <class R>
size_t looking(const Step& step, const Dense& d) {
  if constexpr (has_rows(R::kLayout)) {
    switch (d.row) {
      case 16: return looking_by_row<R, 16>(step, d);
      case 32: return looking_by_row<R, 32>(step, d);
      case 64: return looking_by_row<R, 64>(step, d);
      case 128: return looking_by_row<R, 128>(step, d);
      default: return looking_by_row<R, 0>(step, d);
    }
  } else {
    return d.stream && d.out != nullptr ? dense_out<R, true, true>(step, d) : dense_out<R, false, true>(step, d);
  }
}

// The inverse if that is exact, else 0. Multiplying by it gives the same bits as dividing, in a fraction of the time.
float exact_inverse(float by) {
  uint32_t bits;
  std::memcpy(&bits, &by, sizeof bits);
  const uint32_t exponent = bits >> 23, fraction = bits & 0x7fffff;
  return fraction == 0 && exponent > 1 && exponent < 253 ? 1 / by : 0;
}

// Weights [at, at + n) of a mean's pass. With a constant n everything stays in registers.
template <class R>
inline __attribute__((always_inline)) void mean_piece(const Step& step, const Mean& m, float inverse, size_t at,
                                                      size_t n, bool past_cache) {
  alignas(64) float g[kMeanPiece];
  const Weighed &first = m.terms[0], &second = m.terms[m.n_terms > 1 ? 1 : 0];
  if (m.n_terms == 2) {
    for (size_t i = 0; i < n; ++i) g[i] = first.weight * first.g[at + i] + second.weight * second.g[at + i];
  } else {
    for (size_t i = 0; i < n; ++i) g[i] = first.weight * first.g[at + i];
    for (size_t t = 1; t < m.n_terms; ++t) {
      for (size_t i = 0; i < n; ++i) g[i] += m.terms[t].weight * m.terms[t].g[at + i];
    }
  }
  if (inverse != 0) {
    for (size_t i = 0; i < n; ++i) g[i] *= inverse;
  } else {
    for (size_t i = 0; i < n; ++i) g[i] /= m.by;
  }
  float* const w = m.w + at;
  float* const state[3] = {R::kLayout.vectors > 0 ? m.state[0] + at : nullptr,
                           R::kLayout.vectors > 1 ? m.state[1] + at : nullptr,
                           R::kLayout.vectors > 2 ? m.state[2] + at : nullptr};
  R::apply(step, w, state, g, n);
  for (size_t c = 0; c < m.n_copies; ++c) {
    float* const to = m.copies[c].to + at;
    if (past_cache && m.copies[c].stream && reinterpret_cast<uintptr_t>(to) % kStore == 0) {
      for (size_t i = 0; i < n; i += kStore / sizeof(float)) store_past_cache(to + i, w + i);
    } else {
      std::memcpy(to, w, n * sizeof(float));
    }
  }
}

template <class R>
void mean(const Step& step, const Mean& m) {
  const float inverse = exact_inverse(m.by);
  // Shards begin anywhere, so a short piece comes first, up to where copies can go past the cache. That is the same
  // place for all copies whose arrays begin on a cache line.
  size_t at = 0;
  if (m.n_copies != 0) {
    const size_t off = reinterpret_cast<uintptr_t>(m.copies[0].to) % kStore;
    at = off % sizeof(float) == 0 && off != 0 ? std::min((kStore - off) / sizeof(float), m.n) : 0;
    if (at != 0) mean_piece<R>(step, m, inverse, 0, at, false);
  }
  for (; at + kMeanPiece <= m.n; at += kMeanPiece) mean_piece<R>(step, m, inverse, at, kMeanPiece, true);
  if (at < m.n) mean_piece<R>(step, m, inverse, at, m.n - at, false);
}

template <class R, class T>
void dense_as(const Step& step, const Dense& d) {
  R::apply(step, static_cast<T*>(d.w), d.state, static_cast<const T*>(d.g), d.n);
}

// Updates rows of one dim, and returns how many. With a constant dim the loops of apply() are unrolled. kLooks: as in
// piece().
template <class R, uint32_t kDim, bool kLooks>
size_t rows_of(const Hyper& hyper, const Rows& rows) {
  const uint32_t dim = kDim != 0 ? kDim : rows.dim;
  // Rules that count need another Step for every count: remember recent ones.
  constexpr uint32_t kRemember = R::kLayout.counts ? 64 : 1;
  Step steps[kRemember];
  uint32_t counts[kRemember] = {};  // 0: nothing remembered, since a count starts at 1
  if constexpr (!R::kLayout.counts) steps[0] = R::prepare(hyper, 1);
  const size_t bytes = dim * sizeof(float);
  const size_t head_bytes = sizeof(RowHead) + R::kLayout.row_scalars * sizeof(float);
  const auto ask = [&](size_t r, auto how) {
    how(rows.w[r], bytes);
    if (R::kLayout.vectors != 0) how(rows.state[r], R::kLayout.vectors * bytes);
    how(rows.head[r], 1);
    if (R::kLayout.row_scalars != 0) how(reinterpret_cast<const char*>(rows.head[r]) + head_bytes - 1, 1);
    how(rows.g[r], bytes);
  };
  for (size_t r = 0; r < rows.n && r < kFar; ++r) ask(r, ask_far);
  for (size_t r = 0; r < rows.n; ++r) {
    if (r + kFar < rows.n) ask(r + kFar, ask_far);
    if (r + kNear < rows.n) ask(r + kNear, ask_near);
    const float* g = rows.g[r];
    alignas(64) float own[!kLooks ? 1 : kDim != 0 ? kDim : kLookingRowMax];
    if constexpr (kLooks) {
      if (!take(g, own, dim)) return r;
      g = own;
    }
    RowHead* head = rows.head[r];
    const uint32_t count = head->count == 0xFFFFFFFFu ? head->count : head->count + 1;
    head->count = count;
    head->touched = rows.touched;
    const Step* step = &steps[0];
    if constexpr (R::kLayout.counts) {
      const uint32_t slot = count % kRemember;
      if (counts[slot] != count) {
        counts[slot] = count;
        steps[slot] = R::prepare(hyper, count);
      }
      step = &steps[slot];
    }
    if constexpr (has_rows(R::kLayout)) {
      R::apply_row(*step, rows.w[r], head->scalars(), g, dim);
    } else {
      float* const base = R::kLayout.vectors != 0 ? rows.state[r] : nullptr;
      float* const state[3] = {base, R::kLayout.vectors > 1 ? base + dim : nullptr,
                               R::kLayout.vectors > 2 ? base + 2 * dim : nullptr};
      R::apply(*step, rows.w[r], state, g, dim);
    }
  }
  return rows.n;
}

template <class R, bool kLooks>
size_t rows(const Hyper& hyper, const Rows& r) {
  switch (r.dim) {
    case 16: return rows_of<R, 16, kLooks>(hyper, r);
    case 32: return rows_of<R, 32, kLooks>(hyper, r);
    case 64: return rows_of<R, 64, kLooks>(hyper, r);
    case 128: return rows_of<R, 128, kLooks>(hyper, r);
    default: return rows_of<R, 0, kLooks>(hyper, r);
  }
}

template <class R>
constexpr RuleKernels kernels_of(const char* name) {
  RuleKernels k{};
  k.name = name;
  k.layout = R::kLayout;
  k.prepare = R::prepare;
  if constexpr (!std::is_same_v<R, NotOurs>) {
    k.dense = dense<R>;
    k.looking = looking<R>;
    k.rows = [](const Hyper& hyper, const Rows& r) { (void)rows<R, false>(hyper, r); };
    k.looking_rows = rows<R, true>;
    if constexpr (R::kLayout.any_dtype) {
      k.dense_f64 = dense_as<R, double>;
      k.dense_i64 = dense_as<R, int64_t>;
    } else if constexpr (!has_rows(R::kLayout)) {
      k.mean = mean<R>;
    }
  }
  return k;
}

void combine(Combine how, float* WL_RESTRICT into, const float* WL_RESTRICT g, size_t n) {
  switch (how) {
    case Combine::kAdd:
    case Combine::kMean: return Sum::apply<float>({}, into, nullptr, g, n);
    case Combine::kMax: return Max::apply<float>({}, into, nullptr, g, n);
    case Combine::kMin: return Min::apply<float>({}, into, nullptr, g, n);
    case Combine::kLast: return Assign::apply<float>({}, into, nullptr, g, n);
  }
}

void weigh(float* WL_RESTRICT into, const float* WL_RESTRICT g, float weight, bool add, size_t n) {
  if (add) {
    for (size_t i = 0; i < n; ++i) into[i] += weight * g[i];
  } else {
    for (size_t i = 0; i < n; ++i) into[i] = weight * g[i];
  }
}

void scale(float* into, float by, size_t n) {
  for (size_t i = 0; i < n; ++i) into[i] *= by;
}

void divide(float* into, float by, size_t n) {
  if (const float inverse = exact_inverse(by); inverse != 0) return scale(into, inverse, n);
  for (size_t i = 0; i < n; ++i) into[i] /= by;
}

inline float clamped(float x, float lowest, float highest) {
  const float above = x < lowest ? lowest : x;
  return above > highest ? highest : above;
}
void clamp_to(const float* WL_RESTRICT in, float* WL_RESTRICT out, float lowest, float highest, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = clamped(in[i], lowest, highest);
}
void clamp(const float* in, float* out, float lowest, float highest, size_t n) {
  if (in != out) return clamp_to(in, out, lowest, highest, n);
  for (size_t i = 0; i < n; ++i) out[i] = clamped(out[i], lowest, highest);
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    .isa = nullptr,
    .rules =
        {
#define WL_RULE(enum_name, text, type) kernels_of<type>(text),
#include "rule/rules.def"
#undef WL_RULE
        },
    .fill = fill,
    .to_f32 = to_f32,
    .from_f32 = from_f32,
    .combine = combine,
    .weigh = weigh,
    .scale = scale,
    .divide = divide,
    .clamp = clamp,
    .finite = finite,
    .stream = stream,
    .copy_rows = copy_rows,
    .add_rows = add_rows,
    .fence = fence,
    .reduce = reduce,
    .vector = vector,
    .dot = dot,
    .fingerprint = fingerprint,
};

}  // namespace windlass::WL_ISA
