// Memory for large results.

#pragma once

#include <nanobind/nanobind.h>

void define_results(nanobind::module_& module);
