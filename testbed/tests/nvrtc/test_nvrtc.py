"""The compile checker itself, on kernels whose needs are known."""

import json

import pytest

from testbed.nvrtc import table
from testbed.nvrtc.nvrtc import NvrtcCompileError, version
from testbed.nvrtc.report import KernelUse, compile_report, cupy_options, parse_log
from testbed.nvrtc.table import (
    ARCHITECTURES,
    Row,
    SpillError,
    checked_table,
    compile_table,
    format_table,
    spills,
)

SMALL = """
template <class T> struct alignas(16) Pack { T at[16 / sizeof(T)]; };
extern "C" __global__ void __launch_bounds__(128) reverse(const TYPE* x, TYPE* out, long long n) {
  __shared__ TYPE s[128];
  extern __shared__ __align__(16) unsigned char raw[];
  ((TYPE*)raw)[threadIdx.x] = x[threadIdx.x];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[127 - threadIdx.x] + ((TYPE*)raw)[127 - threadIdx.x];
}
extern "C" __global__ void copy(const TYPE* x, TYPE* out) {
  ((Pack<TYPE>*)out)[threadIdx.x] = ((const Pack<TYPE>*)x)[threadIdx.x];
}
"""
# 1024 threads leave 64 registers to each: 200 values cannot all stay in them.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spill(const float* x, float* out) {
  float v[200];
  #pragma unroll
  for (int i = 0; i < 200; ++i) v[i] = x[threadIdx.x + i * 1024];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 200; ++i) out[threadIdx.x + i * 1024] = v[i] * v[199 - i];
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep reports apart from those of other runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_small_kernels_on_every_architecture(arch):
    report = compile_report(SMALL, ("-DTYPE=double",), arch)
    assert report.arch == arch
    assert set(report.kernels) == {"reverse", "copy"}
    assert report.kernels["reverse"].shared_bytes == 128 * 8
    assert report.kernels["copy"].shared_bytes == 0
    for use in report.kernels.values():
        assert 4 <= use.registers <= 40
        assert (use.stack_bytes, use.spill_stores, use.spill_loads) == (0, 0, 0)
        assert not use.spills


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spilling_kernel_is_found(arch):
    use = compile_report(SPILLING, (), arch).kernels["spill"]
    assert use.spills
    assert use.registers == 64
    assert use.spill_stores >= 4
    assert use.spill_loads >= 4
    assert use.stack_bytes > 0


def test_compile_error_shows_the_log():
    with pytest.raises(NvrtcCompileError) as caught:
        compile_report('extern "C" __global__ void k() {\n  nothing();\n}', (), 90)
    assert 'kernel.cu(2): error: identifier "nothing" is undefined' in str(caught.value)
    assert "-arch=sm_90" in str(caught.value)


def test_macro_that_nvrtc_uses_itself():
    # Why the emulator refuses these names: it would compile what no GPU's compiler does.
    source = 'extern "C" __global__ void k() {}'
    for name in ("T", "size", "x"):
        with pytest.raises(NvrtcCompileError, match="nvrtc_builtin_header"):
            compile_report(source, (f"-D{name}=double",), 90)
    compile_report(source, ("-DTYPE=double", "-DU=double"), 90)


def test_options_are_those_of_cupy():
    assert cupy_options(("-DA=1",), 86) == (
        "-DA=1",
        "-std=c++17",
        "-ftz=true",
        "-arch=sm_86",
        "--device-as-default-execution-space",
    )
    assert cupy_options(("--std=c++20",), 90)[:2] == ("--std=c++20", "-ftz=true")


def test_version_that_the_table_is_made_for():
    assert version()[0] == 12
    assert version()[1] >= 9


def test_log_of_a_kernel_that_calls_a_function_which_spills():
    log = """
ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 368 bytes cmem[0]
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'l' for 'sm_90'
ptxas info    : Function properties for l
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
"""
    assert parse_log(log) == {"k": KernelUse(40, 128, 24, 12, 4), "l": KernelUse(255, 0, 0, 0, 0)}


def test_table_lists_every_kernel_and_finds_the_spilling_one():
    sources = {"small f32": (SMALL, ("-DTYPE=float",)), "large": (SPILLING, ())}
    rows = compile_table(sources, (70, 90))
    assert [(row.source, row.arch, row.kernel) for row in rows if row.source == "large"] == [
        ("large", 70, "spill"),
        ("large", 90, "spill"),
    ]
    assert len(rows) == 6
    assert {row.kernel for row in spills(rows)} == {"spill"}
    assert len(spills(rows)) == 2


def test_checked_table_fails_on_any_spill():
    small = {"small": (SMALL, ("-DTYPE=float",))}
    assert checked_table(small, (80,)).splitlines()[1].split()[:3] == ["small", "copy", "80"]
    with pytest.raises(SpillError, match=r"1 kernels spill registers:\n.*\nlarge +spill +80 +64"):
        checked_table({**small, "large": (SPILLING, ())}, (80,))


def test_table_is_kept_on_disk(monkeypatch, tmp_path):
    sources = {"small": (SMALL, ("-DTYPE=float",))}
    rows = compile_table(sources, (80,))
    (kept,) = (tmp_path / "gradkit-nvrtc").iterdir()
    assert set(json.loads(kept.read_text())) == {"reverse", "copy"}
    monkeypatch.setattr(table, "compile_report", None)  # a second compilation would call it
    assert compile_table(sources, (80,)) == rows
    with pytest.raises(TypeError):
        compile_table({"small": (SMALL, ("-DTYPE=double",))}, (80,))


def test_table_without_a_place_to_keep_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    assert len(compile_table({"small": (SMALL, ("-DTYPE=float",))}, (80,))) == 2


def test_layout():
    rows = [
        Row("a", "kernel", 70, KernelUse(12, 128)),
        Row("bc", "k", 120, KernelUse(255, 0, 8, 4, 4)),
    ]
    assert format_table(rows).splitlines() == [
        "source  kernel   sm  registers  shared  stack  spilled  reloaded",
        "a       kernel   70         12     128      0        0         0",
        "bc      k       120        255       0      8        4         4",
    ]
