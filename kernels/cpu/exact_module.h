// Exact sums in gradkit._cpu.compiled.

#pragma once

#include <nanobind/nanobind.h>

#include "exact_sums.h"

// The kernel of the instruction set that was chosen.
AddExactly exact_kernel();

void bind_exact_sums(nanobind::module_& module);
