// What the bindings of all families share.

#pragma once

#include <nanobind/nanobind.h>

#include "lists.h"

// Those of the instruction set that was chosen.
const ListKernels& list_kernels();

// Whether Python's signal handlers raised: KeyboardInterrupt, say.
bool interrupted();

void define_lists(nanobind::module_& module);
