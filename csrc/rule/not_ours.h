// What stands for a rule of the user's among ours: it has no loops.
#pragma once

#include "rule/rule.h"

namespace windlass::WL_ISA {

struct NotOurs {
  static constexpr Layout kLayout{.counts = true};
  static Step prepare(const Hyper&, uint64_t) { return {}; }
};

}  // namespace windlass::WL_ISA
