// Exact sums in gradkit._cpu.compiled.

#pragma once

#include <nanobind/nanobind.h>

void bind_exact_sums(nanobind::module_& module);
