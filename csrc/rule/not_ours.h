// Stands for a user's rule among ours; it has no kernels.
#pragma once

#include "rule/rule.h"

namespace windlass::WL_ISA {

struct NotOurs {
  static constexpr Layout kLayout{.counts = true};
  static Step prepare(const Hyper&, uint64_t) { return {}; }
};

}  // namespace windlass::WL_ISA
