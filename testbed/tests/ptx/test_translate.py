"""Objects: what is compiled, what is kept, and what ran."""

import json
from pathlib import Path

import numpy as np
import pytest

from testbed.ptx import (
    ARCHITECTURES,
    Module,
    PtxDevice,
    collect,
    compiler,
    merge,
    summary,
    unreached,
)
from testbed.ptx.compiler import compile_kernel, compile_module, parameters_of
from testbed.ptx.module import PtxModule
from testbed.tests.ptx.programs import HEAD, kernel

TWO = """
struct List { const float* from[2]; int count; };
extern "C" __global__ void first(const List list, float* __restrict__ out) { *out = list.count; }
extern "C" __global__ void second(const double* x, unsigned short n, double* out) {
  if (n > 3) *out = *x; else *out = n;
}
"""


def library(text, name, **options):
    return compile_kernel(Module.of(text), name, **{"contracted": False, **options}).library


def test_only_what_is_asked_for_is_compiled(monkeypatch):
    asked = []
    real = compiler.compile_kernel

    def noted(module, name, **options):
        asked.append(name)
        return real(module, name, **options)

    monkeypatch.setattr("testbed.ptx.module.compile_kernel", noted)
    module = PtxDevice().compile(TWO)
    assert asked == []
    assert module.get_function("second") is module.get_function("second")
    assert asked == ["second"]


def test_objects_are_kept_by_content(monkeypatch):
    text = kernel("kept", ("x",), ".loc 1 5 3\nmov.u32 %r1, 12345;")
    kept = library(text, "kept")
    monkeypatch.setattr(compiler, "_build", None)  # a second compilation would call it
    assert library(text, "kept") == kept
    moved = text.replace(HEAD, f"{HEAD}// a comment\n") + kernel("other", (), "").removeprefix(HEAD)
    assert library(moved, "kept") == kept
    assert library(text.replace(".loc 1 5 3", ".loc 1 77 1"), "kept") == kept
    for changed in (text.replace("12345", "12346"), text.replace(".maxntid 1024", ".maxntid 64")):
        with pytest.raises(TypeError):
            library(changed, "kept")
    assert library(text, "kept", contracted=True) == kept  # there is nothing to contract
    product = text.replace("mov.u32 %r1, 12345", "mul.f32 %f1, %f2, %f3")
    with pytest.raises(TypeError):
        library(product, "kept", contracted=True)


@pytest.mark.parametrize("name", ["parse", "opcodes", "contract", "translate", "compiler"])
def test_objects_are_kept_by_what_makes_them(name):
    assert Path(compiler.__file__).with_name(f"{name}.py").read_text() in compiler._recipe()


def test_a_function_that_is_called_is_part_of_the_object():
    function = ".func f()\n{\n  .reg .b32 %r<2>;\n  mov.u32 %r1, VALUE;\n  ret;\n}\n"
    text = kernel("caller", (), "call.uni f, ();").replace(HEAD, HEAD + function)
    assert library(text.replace("VALUE", "1"), "caller") != library(
        text.replace("VALUE", "2"), "caller"
    )


def test_a_kernel_that_is_not_there():
    with pytest.raises(ValueError, match="no kernel 'third': the PTX defines first, second"):
        PtxDevice().compile(TWO).get_function("third")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_says_what_kernels_take(architecture):
    module, kernels = compile_module(TWO, (), architecture)
    texts = {text.name: text for text in kernels}
    assert texts["second"].parameters == ("x", "n", "out")
    rows = {
        name: [
            (p.size, p.alignment, p.is_pointer, p.is_const, p.is_floating, p.is_integer)
            for p in parameters_of(module, text)
        ]
        for name, text in texts.items()
    }
    assert rows == {
        "first": [(24, 8, 0, 0, 0, 0), (8, 8, 1, 0, 0, 0)],
        "second": [(8, 8, 1, 1, 0, 0), (2, 2, 0, 0, 0, 1), (8, 8, 1, 0, 0, 0)],
    }


def test_devices_share_what_was_compiled(monkeypatch):
    def kernel_of(device):
        return device.compile(TWO, ("-DSHARED",)).get_function("first")

    kernel_of(PtxDevice())
    for name in ("list_kernels", "kept_ptx", "translate"):
        monkeypatch.setattr(compiler, name, None)
    kernel_of(PtxDevice(schedule="shuffled"))
    with pytest.raises(TypeError):
        kernel_of(PtxDevice(architecture=90))


def test_coverage_adds_up():
    lines = [".loc 1 1 1", "ld.param.u64 %rd1, [x]; setp.eq.s64 %p1, %rd1, 0;", "@%p1 bra $L1;"]
    body = "\n".join([*lines, ".loc 1 3 1", "trap;", "$L1:", ".loc 1 2 1", "mov.u64 %rd2, 1;"])
    device = PtxDevice()
    source = "first;\nsecond;\nthird;"
    module = PtxModule(
        device, Module.of(kernel("covered_once", ("x",), body)), source=source, title="80"
    )
    run = module.get_function("covered_once")

    def blocks(*reached):
        return [*zip(("1: first;", "3: third;", "2: second;"), reached, strict=True)]

    assert collect()["covered_once"] == {"80": blocks(0, 0, 0)}
    run((1,), (1,), (None,))
    found = {"covered_once": collect()["covered_once"]}
    assert found == {"covered_once": {"80": blocks(1, 0, 1)}}
    assert unreached(found) == {"covered_once": ["3: third;"]}
    other = {"80": blocks(0, 1, 1), "90": [("one", 0)]}
    merge(found, json.loads(json.dumps({"covered_once": other})))
    assert found == {"covered_once": {"80": blocks(1, 1, 1), "90": [("one", 0)]}}
    assert unreached(found) == {"covered_once": []}  # what did not run at all is not said
    assert summary(found) == "1 kernels with their macros ran, 3 of 3 basic blocks of PTX"


def test_values_of_both_kernels():
    device = PtxDevice()
    module = device.compile(TWO)
    out, x = device.xp.empty(1, np.float64), device.xp.asarray(np.array([2.5]))
    for n, expected in ((3, 3.0), (4, 2.5)):
        module.get_function("second")((1,), (1,), (x, np.uint16(n), out))
        assert out[0] == expected
