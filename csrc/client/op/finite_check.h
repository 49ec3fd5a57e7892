// FiniteCheck: the first look at a gradient that must be finite, before any of it is applied, so that a push that is
// refused has changed nothing.
//
// That is one more read of all of it. It begins at the end of the array: what it reads last is what the push reads
// first, and is still in the cache then.
//
//     look   8 7 6 5 4 3 2 1         push   1 2 3 4 5 6 7 8
//
// Thread safety: none; one caller's. Threads of the crew help where there is much to read.
#pragma once

#include "base/dtype.h"

namespace windlass {

class Crew;

// Whether n numbers are finite. helpers: may be nullptr.
bool are_finite(Dtype dtype, const void* numbers, uint64_t n, Crew* helpers);

}  // namespace windlass
