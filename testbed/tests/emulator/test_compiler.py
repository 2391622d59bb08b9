"""Sources in, libraries out: errors, options, names, and a cache that processes share."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testbed.emulator import compiler
from testbed.emulator.compiler import (
    CompilerMissingError,
    KernelCompileError,
    compile_source,
    translate_options,
)
from testbed.emulator.device import EmulatedDevice
from testbed.emulator.signature import KernelText, find_kernels

ROOT = Path(__file__).parents[3]


def test_compile_error_shows_the_compilers_log_and_the_line():
    with pytest.raises(KernelCompileError) as caught:
        EmulatedDevice().compile('extern "C" __global__ void k(float* x) {\n  x[0] = nothing;\n}')
    assert "kernel.cu:2" in str(caught.value)
    assert "‘nothing’ was not declared" in str(caught.value).replace("'", "‘", 1)


@pytest.mark.parametrize(
    "line", ["atomicAdd(x, 1.0f);", "extern __shared__ float s[];", "__constant__ int c;"]
)
def test_outside_of_the_subset(line):
    with pytest.raises(KernelCompileError):
        EmulatedDevice().compile(f'extern "C" __global__ void k(float* x) {{ {line} }}')


def test_kernel_that_is_not_there():
    module = EmulatedDevice().compile(
        'extern "C" __global__ void here() {} __global__ void mangled() {}'
    )
    assert module.get_function("here").name == "here"
    for name in ("gone", "mangled"):
        with pytest.raises(ValueError, match=f"no kernel '{name}': the source defines here"):
            module.get_function(name)


def test_options():
    assert translate_options(("-DA=1", "-DB", "-ftz=true", "-arch=sm_90", "--std=c++20")) == (
        "-std=c++20",
        "#define A 1\n#define B 1\n",
    )
    for refused in ("--whatever", "-DT=float", "-Dsize=3", "-Iinclude"):
        with pytest.raises(ValueError, match=f"compile option '{refused}'"):
            translate_options((refused,))


def test_macros_reach_the_kernel_and_not_the_shim():
    device = EmulatedDevice()
    source = 'extern "C" __global__ void k(A* out) { *out = I; }'
    out = device.xp.empty(1, np.float64)
    device.compile(source, ("-DA=double", "-DI=2.5")).get_function("k")((1,), (1,), (out,))
    assert out[0] == 2.5


def test_another_option_is_another_library():
    source = 'extern "C" __global__ void k(int* out) { *out = VALUE; }'
    first, second = (compile_source(source, (f"-DVALUE={v}",)).library for v in (1, 2))
    assert first != second
    assert compile_source(source, ("-DVALUE=1",)).library == first


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiler, "compiler_path", lambda: None)
    with pytest.raises(CompilerMissingError, match=r"needs g\+\+"):
        compile_source('extern "C" __global__ void never_compiled_before() {}')


def test_processes_that_compile_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = """
import numpy as np
from testbed.emulator import EmulatedDevice
device = EmulatedDevice()
out = device.xp.empty(1, np.int32)
module = device.compile('extern "C" __global__ void k(int* out) { *out = 42; }')
module.get_function("k")((1,), (1,), (out,))
print(out[0])
"""
    command = [sys.executable, "-c", program]
    runs = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    assert [run.communicate()[0].strip() for run in runs] == ["42"] * 2
    kept = sorted(path.suffix for path in (tmp_path / "gradkit-emulator").iterdir())
    assert kept == [".json", ".so", ".so"]


SIGNATURES = {
    "void k(const float* __restrict__ x, float* out, long long n)": ("x", "out", "n"),
    "void k()": (),
    "void k(void)": (),
    "void k(Pair<int, 4> pair, int (*table)[3], const int sizes[], float)": (
        "pair",
        "argument 1",
        "sizes",
        "float",
    ),
}


@pytest.mark.parametrize(("header", "names"), SIGNATURES.items())
def test_parameter_names(header, names):
    assert find_kernels(f'extern "C" __global__ {header} {{ f(1, 2); }}') == [
        KernelText("k", names)
    ]


def test_launch_bounds_on_either_side_and_no_templates():
    text = """
    template <class T> __global__ void generic(T* x) {}
    __global__ void __launch_bounds__(f(2) * 3, 4) a(int x) {}
    __launch_bounds__(8) __global__ void later(int y) {}
    __global__ __launch_bounds__(32) void b(int z) {}
    """
    assert find_kernels(text) == [
        KernelText("a", ("x",), "f(2) * 3, 4"),
        KernelText("later", ("y",), "0"),
        KernelText("b", ("z",), "32"),
    ]
