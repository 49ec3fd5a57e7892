// Rows that lie apart, copied or added up; and copies that bypass the cache, for outputs that are larger than it.
#pragma once

#include "rule/vector.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace windlass::WL_ISA {

#if defined(__AVX512F__)
inline constexpr size_t kStore = 64;
inline void store_past_cache(void* out, const void* in) {
  _mm512_stream_si512(static_cast<__m512i*>(out), _mm512_loadu_si512(in));
}
#elif defined(__AVX2__)
inline constexpr size_t kStore = 32;
inline void store_past_cache(void* out, const void* in) {
  _mm256_stream_si256(static_cast<__m256i*>(out), _mm256_loadu_si256(static_cast<const __m256i*>(in)));
}
#elif defined(__SSE2__)
inline constexpr size_t kStore = 16;
inline void store_past_cache(void* out, const void* in) {
  _mm_stream_si128(static_cast<__m128i*>(out), _mm_loadu_si128(static_cast<const __m128i*>(in)));
}
#else
inline constexpr size_t kStore = 16;
inline void store_past_cache(void* out, const void* in) { std::memcpy(out, in, kStore); }
#endif

inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline void stream(void* out, const void* in, size_t bytes) {
  char* o = static_cast<char*>(out);
  const char* i = static_cast<const char*>(in);
  const size_t lead = (kStore - reinterpret_cast<uintptr_t>(o) % kStore) % kStore;
  if (bytes < lead + kStore) {
    std::memcpy(o, i, bytes);
    return;
  }
  std::memcpy(o, i, lead);
  size_t at = lead;
  for (; at + kStore <= bytes; at += kStore) store_past_cache(o + at, i + at);
  std::memcpy(o + at, i + at, bytes - at);
}

template <uint32_t kDim>
void copy_rows_of(const float* const* in, float* const* out, size_t n, uint32_t dim, bool past_cache) {
  const size_t bytes = (kDim != 0 ? kDim : dim) * sizeof(float);
  for (size_t r = 0; r < n && r < kFar; ++r) ask_far(in[r], bytes);
  for (size_t r = 0; r < n; ++r) {
    if (r + kFar < n) ask_far(in[r + kFar], bytes);
    if (r + kNear < n) ask_near(in[r + kNear], bytes);
    const char* from = reinterpret_cast<const char*>(in[r]);
    char* to = reinterpret_cast<char*>(out[r]);
    if (kDim != 0 && past_cache && reinterpret_cast<uintptr_t>(to) % kStore == 0) {
      for (size_t at = 0; at < kDim * sizeof(float); at += kStore) store_past_cache(to + at, from + at);
    } else {
      std::memcpy(to, from, bytes);
    }
  }
}

template <uint32_t kDim>
void add_rows_of(const float* const* g, float* const* into, const bool* first, size_t n, uint32_t dim) {
  const size_t row = kDim != 0 ? kDim : dim, bytes = row * sizeof(float);
  for (size_t r = 0; r < n && r < kFar; ++r) ask_far(into[r], bytes);
  for (size_t r = 0; r < n; ++r) {
    if (r + kFar < n) ask_far(into[r + kFar], bytes);
    if (r + kNear < n) {
      ask_near(into[r + kNear], bytes);
      ask_near(g[r + kNear], bytes);
    }
    const float* const WL_RESTRICT from = g[r];
    float* const WL_RESTRICT to = into[r];
    if (first[r]) {
      std::memcpy(to, from, bytes);
    } else {
      for (size_t i = 0; i < row; ++i) to[i] += from[i];
    }
  }
}

inline void add_rows(const float* const* g, float* const* into, const bool* first, size_t n, uint32_t dim) {
  switch (dim) {
    case 16: return add_rows_of<16>(g, into, first, n, dim);
    case 32: return add_rows_of<32>(g, into, first, n, dim);
    case 64: return add_rows_of<64>(g, into, first, n, dim);
    case 128: return add_rows_of<128>(g, into, first, n, dim);
    default: return add_rows_of<0>(g, into, first, n, dim);
  }
}

inline void copy_rows(const float* const* in, float* const* out, size_t n, uint32_t dim, bool past_cache) {
  switch (dim) {
    case 16: return copy_rows_of<16>(in, out, n, dim, past_cache);
    case 32: return copy_rows_of<32>(in, out, n, dim, past_cache);
    case 64: return copy_rows_of<64>(in, out, n, dim, past_cache);
    case 128: return copy_rows_of<128>(in, out, n, dim, past_cache);
    default: return copy_rows_of<0>(in, out, n, dim, past_cache);
  }
}

}  // namespace windlass::WL_ISA
