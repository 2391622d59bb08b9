"""gradkit's kernels as PTX: each is read whole, and is what CuPy would get."""

import re

import pytest

from gradkit._cuda.launch.kernels import options_of, source_of
from testbed.nvrtc import compile_ptx, cupy_options
from testbed.ptx import ARCHITECTURES, Module, translate
from testbed.ptx.compiler import compile_module
from testbed.ptx.contract import may_be_contracted
from tests.combinations import combinations, compiles_for

pytestmark = pytest.mark.ptx

# What `make test-ptx` runs with every fusion.
LISTS = (
    *("accumulate_grads", "clip_by_norm", "clip_coefficient", "clip_units", "grad_stats", "norm"),
    *("norm_of_ranks", "norms", "scale", "unit_norms"),
)


def listed(every):
    """Each file's first combination of macros, and then every n-th of all."""
    found = list(combinations())
    first = {file: (file, macros) for file, macros in reversed(found)}
    return [*first.values(), *found[::every]]


def check_description(file, macros, architecture):
    """The code is the one that CuPy would get, and leaves ptxas nothing to fuse.

    What is added to the source, to know what kernels take, changes none of it.
    """
    source, options = source_of(file), options_of(macros)
    plain = Module.of(compile_ptx(source, cupy_options(options, architecture)))
    described, _ = compile_module(source, options, architecture)
    assert list(plain.functions) == list(described.functions)
    for name, text in plain.functions.items():
        assert _instructions(text) == _instructions(described.functions[name])
        assert not may_be_contracted(text.content) or file in LISTS
        if ".entry" in text.text.partition("(")[0]:
            assert translate(plain, name).opcodes
            fused = translate(plain, name, contracted=True).contracted
            has_pow = macros.get("ORDER") == "SumOfPowers"
            assert not fused or has_pow  # which is NVIDIA's
            # A sign is taken off or turned without flushing a subnormal.
            assert has_pow or not re.search(r"\b(abs|neg)\.ftz", text.content)


def _instructions(text):
    """Its lines, without the label that -lineinfo puts at the end of a function."""
    lines = (line for line in text.content.split("\n") if line.strip())
    return [line for line in lines if not line.startswith("$L__func_end")]


def test_what_describes_kernels_changes_no_code():
    kernels = [each for each in listed(1 << 20) if compiles_for(80, *each)]
    for file, macros in kernels[:3]:
        check_description(file, macros, 80)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_can_be_translated(architecture):
    for file, macros in listed(9):
        if compiles_for(architecture, file, macros):
            check_description(file, macros, architecture)


@pytest.mark.parametrize("file", ["norm", "unit_norms", "grad_stats"])
def test_the_largest_magnitude_is_taken_without_flushing(file):
    """NVRTC makes an absolute value of a mask that takes off a float's sign: on sm_120 alone."""
    capacity = max(macros["CAPACITY"] for name, macros in combinations() if name == file)
    order = {} if file == "grad_stats" else {"ORDER": "Largest"}
    options = options_of({"CAPACITY": capacity} | order)
    text = Module.of(compile_ptx(source_of(file), cupy_options(options, 120))).functions
    assert not any(re.search(r"\babs\.ftz", function.content) for function in text.values())
