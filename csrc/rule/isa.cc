// Chooses the kernels for this machine.
#include <cmath>
#include <cstdlib>
#include <string_view>

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
#if defined(__x86_64__)
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
#if defined(__x86_64__)
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

const RuleKernels& kernels(RuleKind kind) { return kernels().rules[static_cast<size_t>(kind)]; }
const Layout& layout_of(RuleKind kind) { return kernels(kind).layout; }
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
