// Chooses the kernels for this machine. WL_WIDE_ISAS: this build has those for AVX2 and AVX-512 (CMakeLists.txt).
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "rule/kernels.h"

namespace windlass {

Hyper Hyper::corrected(uint64_t updates) const {
  Hyper h = *this;
  if (h.v[kStalePower] != 0 && updates != 0)
    h.v[kStepSize] /= std::pow(1.0 + static_cast<double>(updates), h.v[kStalePower]);
  return h;
}

namespace baseline {
extern const Kernels kKernels;
}
#if defined(WL_WIDE_ISAS)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

struct Candidate {
  const char* name;
  const Kernels* kernels;
  bool here;
};

// Best last.
const Candidate* candidates(size_t* count) {
  static const Candidate all[] = {
      {"baseline", &baseline::kKernels, true},
#if defined(WL_WIDE_ISAS)
      {"avx2", &avx2::kKernels, __builtin_cpu_supports("avx2") != 0},
      {"avx512", &avx512::kKernels,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw")},
#endif
  };
  *count = sizeof all / sizeof all[0];
  return all;
}

const Candidate& choose() {
  const char* forced = std::getenv("WINDLASS_ISA");
  size_t n = 0;
  const Candidate* all = candidates(&n);
  const Candidate* best = &all[0];
  for (size_t i = 0; i < n; ++i) {
    if (!all[i].here) continue;
    if (forced == nullptr || *forced == 0 || std::string_view(forced) == all[i].name) best = &all[i];
  }
  return *best;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = [] {
    const Candidate& best = choose();
    Kernels k = *best.kernels;
    k.isa = best.name;
    return k;
  }();
  return chosen;
}

std::vector<const Kernels*> every_kernels() {
  size_t n = 0;
  const Candidate* all = candidates(&n);
  std::vector<const Kernels*> here;
  for (size_t i = 0; i < n; ++i) {
    if (all[i].here) here.push_back(all[i].kernels);
  }
  return here;
}

const RuleKernels& kernels(RuleKind kind) { return kernels().rules[static_cast<size_t>(kind)]; }
const Layout& layout_of(RuleKind kind) { return kernels(kind).layout; }

namespace {

Status check_schedule(const std::string& what, const RuleSpec& r) {
  const Schedule& s = r.schedule;
  const auto wrong = [&](const std::string& why) { return Status(Code::kInvalidArgument, what + ": " + why); };
  const bool falls = s.kind == Schedule::kLinear || s.kind == Schedule::kCosine || s.kind == Schedule::kSteps;
  if (s == Schedule{}) return {};
  if (!(s.end >= 0.0) || s.end > (s.kind == Schedule::kSteps ? 1.0 : 1e30))
    return wrong("the end of a schedule must be at least 0, and of steps at most 1, not " + std::to_string(s.end));
  if (falls && s.updates == 0) return wrong("a schedule that falls needs a number of updates of at least 1, not 0");
  if (r.kind == RuleKind::kFtrl)
    return wrong("the weights of FTRL are a function of its lr, which therefore has no schedule");
  if (r.kind != RuleKind::kForeign && layout_of(r.kind).hypers == 0)
    return wrong(std::string("rule ") + name_of(r.kind) + " has no step size, and therefore no schedule");
  return {};
}

}  // namespace

Status check_rule(const std::string& what, const RuleSpec& r) {
  const auto wrong = [&](const std::string& why) { return Status(Code::kInvalidArgument, what + ": " + why); };
  if (!(r.clip >= 0.0f)) return wrong("the bound of gradients must be at least 0, not " + std::to_string(r.clip));
  if (!(r.lowest <= r.highest)) {
    return wrong("the bounds of weights must be in order, not " + std::to_string(r.lowest) + " and " +
                 std::to_string(r.highest));
  }
  WL_RETURN_IF_ERROR(check_schedule(what, r));
  if (r.kind != RuleKind::kForeign) {
    return r.foreign == Foreign{} ? Status() : wrong("only a rule of the user's has a name and state of its own");
  }
  const Foreign& f = r.foreign;
  if (f.name.empty() || f.name.size() > limits::kForeignNameBytesMax || f.vectors > limits::kForeignVectorsMax ||
      f.row_scalars > limits::kForeignRowScalarsMax || f.shard_scalars > limits::kForeignShardScalarsMax) {
    return wrong("rule '" + f.name + "' keeps " + std::to_string(f.vectors) + " arrays, " +
                 std::to_string(f.row_scalars) + " numbers per row and " + std::to_string(f.shard_scalars) +
                 " per shard; at most " + std::to_string(limits::kForeignVectorsMax) + ", " +
                 std::to_string(limits::kForeignRowScalarsMax) + " and " +
                 std::to_string(limits::kForeignShardScalarsMax));
  }
  return {};
}

Layout layout_of(const RuleSpec& rule) {
  Layout layout = layout_of(rule.kind);
  if (rule.kind != RuleKind::kForeign) return layout;
  layout.vectors = rule.foreign.vectors;
  layout.row_scalars = rule.foreign.row_scalars;
  layout.by_row = rule.foreign.by_row || layout.row_scalars != 0;
  layout.shard_scalars = rule.foreign.shard_scalars;
  return layout;
}

const char* name_of(RuleKind kind) { return kernels(kind).name; }

std::string isa_complaint() {
  const char* forced = std::getenv("WINDLASS_ISA");
  if (forced == nullptr || *forced == 0) return "";
  size_t n = 0;
  const Candidate* all = candidates(&n);
  std::string here;
  for (size_t i = 0; i < n; ++i) {
    if (!all[i].here) continue;
    if (std::string_view(forced) == all[i].name) return "";
    here += std::string(here.empty() ? "" : ", ") + all[i].name;
  }
  return std::string("WINDLASS_ISA=") + forced + ": this machine has " + here;
}

}  // namespace windlass
