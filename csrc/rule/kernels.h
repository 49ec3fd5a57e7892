// Kernels: the loops that touch numbers, once per instruction set, chosen when the process starts.
//
// rule/kernels.cc is compiled several times with different flags (WL_ISA names the namespace) and every copy gives
// the same bits: no FMA contraction, no approximate reciprocals, sums in 16 fixed lanes. WINDLASS_ISA forces one.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/vector_op.h"
#include "rule/init.h"
#include "rule/rule.h"

namespace windlass {

// A dense piece of an object: n weights, their state, the gradient for them.
struct Dense {
  void* w = nullptr;
  float* state[limits::kRuleVectorsMax] = {};
  float* scalars = nullptr;  // one per row, for rules with row_scalars
  const void* g = nullptr;
  size_t n = 0;
  size_t row = 1;        // weights per row; n is a multiple of it where the rule has row_scalars
  float* out = nullptr;  // float32 only: where the new weights go as well
  bool stream = false;   // past the cache; end with fence()
};

// A gradient and its weight.
struct Weighed {
  const float* g;
  float weight;
};

// Like Dense, with the mean of several gradients, and with several copies of the new weights.
struct Mean {
  struct Copy {
    float* to;
    bool stream;  // past the cache; end with fence()
  };
  float* w = nullptr;
  float* state[limits::kRuleVectorsMax] = {};
  const Weighed* terms = nullptr;
  size_t n_terms = 0;
  float by = 1;  // divides their sum
  size_t n = 0;
  const Copy* copies = nullptr;
  size_t n_copies = 0;
};

// Rows of a table, scattered in memory.
struct Rows {
  float* const* w = nullptr;
  float* const* state = nullptr;  // per row: the rule's vectors, `dim` numbers each, contiguous
  RowHead* const* head = nullptr;
  const float* const* g = nullptr;
  size_t n = 0;
  uint32_t dim = 0;
  uint32_t touched = 0;
};

// How the numbers of a row become one float64.
enum class Reduce : uint8_t { kSum, kSquares, kAbsolutes, kNonzero, kMin, kMax, kAbsMax };

inline constexpr size_t kLookingRowMax = 256;

struct RuleKernels {
  const char* name;
  Layout layout;
  Step (*prepare)(const Hyper&, uint64_t count);  // count: updates so far, this one included
  void (*dense)(const Step&, const Dense&);
  // The same of a gradient that others may change meanwhile and that must be finite. Returns how many weights it has
  // come to: all, or those before a piece that has NaN or infinity. Rows of a rule with row_scalars have at most
  // kLookingRowMax numbers.
  size_t (*looking)(const Step&, const Dense&);
  void (*dense_f64)(const Step&, const Dense&);  // nullptr unless any_dtype
  void (*dense_i64)(const Step&, const Dense&);
  void (*mean)(const Step&, const Mean&);  // same bits as weigh() each, divide(), dense(); nullptr: no such kernel
  void (*rows)(const Hyper&, const Rows&);
  size_t (*looking_rows)(const Hyper&, const Rows&);  // likewise; rows of at most kLookingRowMax numbers
};

struct Kernels {
  const char* isa;
  RuleKernels rules[static_cast<size_t>(RuleKind::kCount)];
  void (*fill)(const Init&, uint64_t seed, uint64_t first, float* out, size_t n);
  void (*to_f32)(Dtype from, const void* in, float* out, size_t n);
  void (*from_f32)(Dtype to, const float* in, void* out, size_t n);
  void (*combine)(Combine, float* into, const float* g, size_t n);               // into = into (+) g; kMean adds
  void (*weigh)(float* into, const float* g, float weight, bool add, size_t n);  // into = weight * g, or += of it
  void (*scale)(float* into, float by, size_t n);
  void (*divide)(float* into, float by, size_t n);                                    // ends a mean
  void (*clamp)(const float* in, float* out, float lowest, float highest, size_t n);  // NaN stays; out may be in
  bool (*finite)(Dtype, const void* in, size_t n);
  void (*stream)(void* out, const void* in, size_t bytes);  // a copy that bypasses the cache; end with fence()
  void (*copy_rows)(const float* const* in, float* const* out, size_t n, uint32_t dim, bool stream);
  // into[r] = g[r] where first[r], else += of it, in this order; a row may come several times.
  void (*add_rows)(const float* const* g, float* const* into, const bool* first, size_t n, uint32_t dim);
  void (*fence)();
  // Writes out[i] for row i, `dim` numbers of float32, float64 or int64; a row may be as long as a shard.
  void (*reduce)(Reduce, Dtype, const void* const* rows, size_t n, size_t dim, double* out);
  // On the weights y and x of two shards that are alike; x may be y. `a` and the result of dot are the bits of a
  // float64, or of an int64 where the numbers are int64 (rule/vector_ops.h).
  void (*vector)(VectorOp, Dtype, void* y, const void* x, uint64_t a, size_t n);
  uint64_t (*dot)(Dtype, const void* y, const void* x, size_t n);
  uint64_t (*fingerprint)(uint64_t salt, uint64_t first, const float* values, size_t n);  // as in base/fingerprint.h
};

const Kernels& kernels();  // the chosen ones
const RuleKernels& kernels(RuleKind kind);
std::vector<const Kernels*> every_kernels();  // of this build, those that this machine can run; the baseline first

// "" when WINDLASS_ISA is unset or names a set this machine has, else what is wrong with it.
std::string isa_complaint();

}  // namespace windlass
