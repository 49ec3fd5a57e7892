#include "bench/loops.h"

#include "rule/copy.h"
#include "rule/vector.h"

namespace windlass::WL_ISA {
namespace {

constexpr size_t kAhead = 16;  // rows, as a plain loop would
constexpr size_t kFloats = kStore / sizeof(float);

// One vector of outputs, past the cache or not.
inline void put(float* out, const float* value, bool past_cache) {
  past_cache ? store_past_cache(out, value) : static_cast<void>(std::memcpy(out, value, kStore));
}

template <bool kPast>
void sgd(float* WL_RESTRICT w, const float* WL_RESTRICT g, float* WL_RESTRICT out, size_t n, float lr) {
  for (size_t i = 0; i + kFloats <= n; i += kFloats) {
    float next[kFloats];
    for (size_t j = 0; j < kFloats; ++j) next[j] = w[i + j] - lr * g[i + j];
    std::memcpy(w + i, next, kStore);
    put(out + i, next, kPast);
  }
  fence();
}

void fused_sgd(float* w, const float* g, float* out, size_t n, float lr, bool past_cache) {
  past_cache ? sgd<true>(w, g, out, n, lr) : sgd<false>(w, g, out, n, lr);
}

template <bool kPast>
void sgd_of_two(float* WL_RESTRICT w, const float* WL_RESTRICT g0, const float* WL_RESTRICT g1, float* WL_RESTRICT out0,
                float* WL_RESTRICT out1, size_t n, float lr) {
  for (size_t i = 0; i + kFloats <= n; i += kFloats) {
    float next[kFloats];
    for (size_t j = 0; j < kFloats; ++j) next[j] = w[i + j] - lr * ((g0[i + j] + g1[i + j]) * 0.5f);
    std::memcpy(w + i, next, kStore);
    put(out0 + i, next, kPast);
    put(out1 + i, next, kPast);
  }
  fence();
}

void fused_sgd_of_two(float* w, const float* g0, const float* g1, float* out0, float* out1, size_t n, float lr,
                      bool past_cache) {
  past_cache ? sgd_of_two<true>(w, g0, g1, out0, out1, n, lr) : sgd_of_two<false>(w, g0, g1, out0, out1, n, lr);
}

void update_sgd(float* WL_RESTRICT w, const float* WL_RESTRICT g, size_t n, float lr) {
  for (size_t i = 0; i < n; ++i) w[i] -= lr * g[i];
}

template <bool kPast>
void adam(float* WL_RESTRICT w, float* WL_RESTRICT m, float* WL_RESTRICT v, const float* WL_RESTRICT g,
          float* WL_RESTRICT out, size_t n, float lr) {
  constexpr float kShare1 = 0.1f, kBeta2 = 0.999f, kShare2 = 0.001f, kEps = 1e-8f, kRoot = 1.5f;
  for (size_t i = 0; i + kFloats <= n; i += kFloats) {
    float next[kFloats];
    for (size_t j = 0; j < kFloats; ++j) {
      const float d = g[i + j];
      const float m1 = m[i + j] + kShare1 * (d - m[i + j]);
      const float v1 = kBeta2 * v[i + j] + kShare2 * (d * d);
      m[i + j] = m1;
      v[i + j] = v1;
      next[j] = w[i + j] - lr * m1 / (sqrt_of(v1) * kRoot + kEps);
    }
    std::memcpy(w + i, next, kStore);
    put(out + i, next, kPast);
  }
  fence();
}

void fused_adam(float* w, float* m, float* v, const float* g, float* out, size_t n, float lr, bool past_cache) {
  past_cache ? adam<true>(w, m, v, g, out, n, lr) : adam<false>(w, m, v, g, out, n, lr);
}

template <uint32_t kDim>
void gather_of(const float* table, size_t stride, const uint32_t* rows, float* out, size_t n, bool past_cache) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) ask_near(table + rows[i + kAhead] * stride, kDim * sizeof(float));
    const float* from = table + rows[i] * stride;
    float* to = out + i * kDim;
    for (size_t at = 0; at < kDim; at += kFloats) put(to + at, from + at, past_cache);
  }
  fence();
}

void gather(const float* table, size_t stride, const uint32_t* rows, float* out, size_t n, uint32_t dim,
            bool past_cache) {
  switch (dim) {
    case 16: return gather_of<16>(table, stride, rows, out, n, past_cache);
    case 64: return gather_of<64>(table, stride, rows, out, n, past_cache);
    case 128: return gather_of<128>(table, stride, rows, out, n, past_cache);
    default: return;
  }
}

template <uint32_t kDim>
void row_adagrad_of(float* table, size_t stride, char* heads, size_t head_bytes, const uint32_t* rows, const float* g,
                    size_t n, float lr, float eps) {
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      ask_near(table + rows[i + kAhead] * stride, kDim * sizeof(float));
      __builtin_prefetch(heads + rows[i + kAhead] * head_bytes);
    }
    auto* head = reinterpret_cast<RowHead*>(heads + rows[i] * head_bytes);
    ++head->count;
    head->touched = static_cast<uint32_t>(i);
    float* w = table + rows[i] * stride;
    const float* d = g + i * kDim;
    float* a = head->scalars();
    a[0] += sum_of_squares(d, kDim) / static_cast<float>(kDim);
    const float rate = lr / (sqrt_of(a[0]) + eps);
    for (size_t j = 0; j < kDim; ++j) w[j] -= rate * d[j];
  }
}

void row_adagrad(float* table, size_t stride, RowHead* heads, size_t head_bytes, const uint32_t* rows, const float* g,
                 size_t n, uint32_t dim, float lr, float eps) {
  char* h = reinterpret_cast<char*>(heads);
  switch (dim) {
    case 16: return row_adagrad_of<16>(table, stride, h, head_bytes, rows, g, n, lr, eps);
    case 64: return row_adagrad_of<64>(table, stride, h, head_bytes, rows, g, n, lr, eps);
    case 128: return row_adagrad_of<128>(table, stride, h, head_bytes, rows, g, n, lr, eps);
    default: return;
  }
}

}  // namespace

extern const Loops kLoops;
const Loops kLoops = {fused_sgd, fused_sgd_of_two, update_sgd, fused_adam, gather, row_adagrad};

}  // namespace windlass::WL_ISA
