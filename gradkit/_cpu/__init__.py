"""The compiled CPU backend: norms and lists in C++, all else as ``gradkit._numpy`` has it.

The module is a ``gradkit._calls.backend.Backend``. It cannot be imported if gradkit was installed
without compiled code. ``kernels/cpu`` has the source of ``compiled``.
"""

import os

import gradkit._cpu.compiled as compiled
from gradkit import _numpy
from gradkit._calls.backend import OPERATIONS, Services, names_in
from gradkit._cpu.channels import *
from gradkit._cpu.exact import *
from gradkit._cpu.gated_norm import *
from gradkit._cpu.lists import *
from gradkit._cpu.rows import *

# What is not compiled. Not by `__getattr__`, which takes half a microsecond of each call.
for _name in {*names_in(Services), *OPERATIONS}.difference(globals()):
    globals()[_name] = getattr(_numpy, _name)

if _wanted := os.environ.get("GRADKIT_CPU_ISA"):
    if _wanted not in compiled.instruction_sets():
        raise ValueError(
            f"GRADKIT_CPU_ISA is {_wanted!r}; this processor has {compiled.instruction_sets()}"
        )
    compiled.use_instruction_set(_wanted)
