// What gradkit._cpu.compiled has of exact sums.

#pragma once

#include <nanobind/nanobind.h>

void bind_exact_sums(nanobind::module_& module);
