// What the binding files of windlass.bench._native share: the limits of `windlass bench`, in a module that only the
// benchmarks load.
//
// It links the same objects as windlass._core and so has its own copy of their globals. It therefore calls only what
// shares nothing between calls: kernels and loops, a gate of its own, pages and the time. Both copies read the same
// environment (WINDLASS_ISA, WINDLASS_BREAK), and this one's fork hook (base/os_linux.cc) has nothing to close.
// tests/test_layers.py has the folders it may use.
//
// It shares no types with windlass._core either: a rule's kind comes as a number, and errors are Python's own.
#pragma once

#include <nanobind/nanobind.h>

namespace windlass::bind {

namespace nb = nanobind;

void bind_limits(nb::module_& m);
void bind_wire_limits(nb::module_& m);

}  // namespace windlass::bind
