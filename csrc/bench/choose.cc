#include <string_view>

#include "bench/loops.h"
#include "rule/kernels.h"

namespace windlass {

namespace baseline {
extern const Loops kLoops;
}
#if defined(WL_WIDE_ISAS)
namespace avx2 {
extern const Loops kLoops;
}
namespace avx512 {
extern const Loops kLoops;
}
#endif

const Loops& loops() {
#if defined(WL_WIDE_ISAS)
  const std::string_view isa = kernels().isa;
  if (isa == "avx512") return avx512::kLoops;
  if (isa == "avx2") return avx2::kLoops;
#endif
  return baseline::kLoops;
}

}  // namespace windlass
