// Rule: what a server does with a push. This header is what the rest of the core sees of rules; to add one, open
// rule/sgd.h for the pattern, then list it in rule/rules.def.
//
// A rule is (state layout, prepare, apply, combine) over plain arrays:
//
//   layout    how many state arrays it keeps beside the weights (one number per weight each), how many numbers per
//             row, and whether it needs to know how often it was applied
//   prepare   turns hyperparameters and the count of updates into the few numbers of a Step
//   apply     w, state = f(Step, w, state, g), in place; one loop, the same for dense arrays and for rows
//   combine   how two gradients of one update become one (see Combine)
//
// Hyperparameters travel with the push, so a rule here has no settings, only structure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/limits.h"
#include "base/status.h"

namespace windlass {

enum class RuleKind : uint8_t {
#define WL_RULE(enum_name, text, type) enum_name,
#include "rule/rules.def"
#undef WL_RULE
  kCount
};

// All rules but the user's.
inline std::vector<RuleKind> our_rules() {
  std::vector<RuleKind> all;
  for (uint8_t i = 0; i < static_cast<uint8_t>(RuleKind::kCount); ++i) {
    if (static_cast<RuleKind>(i) != RuleKind::kForeign) all.push_back(static_cast<RuleKind>(i));
  }
  return all;
}

// How several gradients for one weight within one update become one, in order of occurrence. A mean is their sum,
// divided at the end by how many there were.
enum class Combine : uint8_t { kAdd, kMax, kLast, kMean, kMin };

// The numbers that travel with a push; each rule's `enum Number` says which is which.
struct Hyper {
  double v[limits::kRuleHyperMax] = {};

  // The first number of every optimizer is the step size, the last the power of the staleness correction: if the
  // gradient's weights have had `updates` updates since, its step size is divided by (1 + updates)^power.
  static constexpr int kStepSize = 0, kStalePower = limits::kRuleHyperMax - 1;
  Hyper corrected(uint64_t updates) const;
};

// What prepare() leaves for apply(): the scalars of one update, in the precision they are used in.
struct Step {
  float f[8] = {};
  uint32_t flags = 0;
};

struct Layout {
  uint8_t vectors = 0;      // state arrays with one number per weight
  uint8_t row_scalars = 0;  // state numbers per row
  bool counts = false;      // prepare() depends on the count of updates
  bool by_row = false;      // works on whole rows, as all with row_scalars do
  bool any_dtype = false;   // also for float64 and int64; workers' pushes are combined, not averaged
  Combine combine = Combine::kAdd;
  uint8_t hypers = 0;          // how many numbers of Hyper it reads
  uint32_t shard_scalars = 0;  // state numbers per shard of a tensor
};

// The head of a table row: how often the row was updated, and the low bits of the shard's version when it last was. The
// rule's numbers per row follow.
struct RowHead {
  uint32_t count = 0;
  uint32_t touched = 0;
  // Whether the row holds more than the initialiser gave it: it was updated or put. A put row that counts no update is
  // touched by a version above 0.
  bool is_changed() const { return count != 0 || touched != 0; }
  float* scalars() { return reinterpret_cast<float*>(this + 1); }
  const float* scalars() const { return reinterpret_cast<const float*>(this + 1); }
};

const Layout& layout_of(RuleKind kind);
const char* name_of(RuleKind kind);

// What the step size is multiplied by, from the count of updates.
struct Schedule {
  enum Kind : uint8_t { kConstant, kLinear, kCosine, kInverseRoot, kSteps, kKinds } kind = kConstant;
  uint64_t warmup = 0;   // updates over which it grows from 0
  uint64_t updates = 0;  // over which it then falls; for kSteps, the length of a step
  double end = 0.0;      // what it falls to; for kSteps, the factor of a step
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

// A user's rule (rule/foreign.h): its name and its state.
struct Foreign {
  std::string name;  // "module:name", then after a space whatever else its maker needs
  uint8_t vectors = 0, row_scalars = 0;
  uint32_t shard_scalars = 0;
  bool whole = false;   // needs the whole tensor: there is one shard
  bool by_row = false;  // needs whole rows
  bool begins = false;  // wants to be called before the first update of a shard
  friend bool operator==(const Foreign&, const Foreign&) = default;
};

// What is fixed when an object is created and compared when it is opened.
struct RuleSpec {
  RuleKind kind = RuleKind::kSgd;
  float initial_state = 0.0f;                              // of every state number (Adagrad's initial accumulator)
  float clip = 0.0f;                                       // gradients are clipped to +-clip; 0: they are not
  float lowest = -std::numeric_limits<float>::infinity();  // and weights within these two
  float highest = std::numeric_limits<float>::infinity();
  Schedule schedule = {};
  Foreign foreign = {};  // of kForeign
  friend bool operator==(const RuleSpec&, const RuleSpec&) = default;
};

Layout layout_of(const RuleSpec& rule);
Status check_rule(const std::string& what, const RuleSpec& rule);  // ok when the rule is valid

}  // namespace windlass
