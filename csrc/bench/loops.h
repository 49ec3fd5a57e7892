// The limits our figures are held against: plain loops that do the same work on the same layout with the same stores,
// without a server, an index or a session. Compiled for every instruction set, like the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rule/rule.h"

namespace windlass {

struct Loops {
  // w = rule(w, g); out = w, over [0, n)
  void (*fused_sgd)(float* w, const float* g, float* out, size_t n, float lr, bool stream);
  // The same with two workers: g = (g0 + g1) / 2; w = rule(w, g); out0 = w; out1 = w
  void (*fused_sgd_of_two)(float* w, const float* g0, const float* g1, float* out0, float* out1, size_t n, float lr,
                           bool stream);
  // w = rule(w, g)
  void (*update_sgd)(float* w, const float* g, size_t n, float lr);
  void (*fused_adam)(float* w, float* m, float* v, const float* g, float* out, size_t n, float lr, bool stream);
  // out[i] = table[rows[i]], rows `stride` floats apart
  void (*gather)(const float* table, size_t stride, const uint32_t* rows, float* out, size_t n, uint32_t dim,
                 bool stream);
  // RowAdagrad on table[rows[i]], with a head per row
  void (*row_adagrad)(float* table, size_t stride, RowHead* heads, size_t head_bytes, const uint32_t* rows,
                      const float* g, size_t n, uint32_t dim, float lr, float eps);
};

const Loops& loops();  // for the same instruction set as kernels()

}  // namespace windlass
