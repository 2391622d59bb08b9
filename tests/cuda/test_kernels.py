"""The CUDA backend as a whole: its signatures, its errors, and what NVRTC makes of its kernels."""

import functools
import inspect
import itertools
import os
import re
from pathlib import Path

import pytest

from gradkit._calls.backend import OPERATIONS, record_of
from gradkit._calls.lists import ZeroGrad
from gradkit._cuda import CudaBackend, dry_run
from gradkit._cuda.launch.device import Device
from gradkit._cuda.launch.kernels import kernel, options_of, source_of
from gradkit._dtypes import FLOATS
from gradkit.errors import KernelError
from testbed.emulator import EmulatedDevice
from testbed.emulator.compiler import complaints
from testbed.nvrtc import (
    ARCHITECTURES,
    compile_ptx,
    compile_table,
    cupy_options,
    format_table,
    spills,
)
from testbed.tools import missing
from tests.combinations import combinations, compiles_for, what_they_follow_from
from tests.machine_code.cases import Case
from tests.machine_code.tables import CODE
from tests.operations import records

PARAMETERS = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^{]*)\) \{")
ARGUMENTS = {
    name: re.sub(r"^#.*$", ",", parameters, flags=re.MULTILINE)
    for file in (Path(__file__).parents[2] / "kernels").glob("*.cu")
    for name, parameters in PARAMETERS.findall(file.read_text())
}


class RefusedError(Exception):
    """A driver's error."""


@pytest.mark.parametrize("name", sorted({*OPERATIONS} & ARGUMENTS.keys()))
def test_kernels_take_arguments_in_the_order_of_their_record(name):
    """Pointers, and then numbers too; what the record does not know may be between them."""
    fields = [*record_of(name).__annotations__]
    for pointers in (True, False):
        given = [each for each in ARGUMENTS[name].split(",") if ("*" in each) == pointers]
        names = [each.split()[-1].strip("* ") for each in given if each.strip()]
        known = [each for each in names if each in fields]
        assert known == sorted(known, key=fields.index)


class RefusingDevice(EmulatedDevice):
    """Compiles everything and launches nothing."""

    launch_errors = (RefusedError,)

    def compile(self, *_):
        return self

    def get_function(self, _):
        return self

    def __call__(self, *_, **__):
        raise RefusedError("invalid argument")


@pytest.mark.guarantee("a launch is refused")
def test_a_refused_launch_names_kernel_and_grid():
    device = RefusingDevice()
    with pytest.raises(KernelError, match=r"zero_grad on a grid of \(3,\) .*invalid argument"):
        CudaBackend(device).zero_grad(ZeroGrad(grads=[device.xp.zeros(10_000)]))


@pytest.mark.guarantee("a kernel does not compile")
def test_what_does_not_compile_is_named():
    with pytest.raises(KernelError, match=r"kernels/norm.cu .*-DORDER=Nonsense"):
        kernel(EmulatedDevice(), "norm", "norm_finish", CAPACITY=0, ORDER="Nonsense")


def test_device_is_what_launchers_are_written_against():
    device = EmulatedDevice()
    wanted = [*Device.__annotations__, *(name for name in vars(Device) if not name.startswith("_"))]
    assert {"compile", "pointer", "upload", "xp", "multiprocessors"} <= set(wanted)
    assert [name for name in wanted if not hasattr(device, name)] == []
    for name, theirs in inspect.getmembers(Device, inspect.isfunction):
        if not name.startswith("_"):
            parameters = list(inspect.signature(theirs).parameters)[1:]
            assert list(inspect.signature(getattr(device, name)).parameters) == parameters


def by_dtypes():
    """The combinations of macros by what compiles from them: a file, and its dtypes."""
    found = {}
    for file, macros in combinations():
        dtypes = [value for _, value in sorted(macros.items()) if value in FLOATS]
        found.setdefault("-".join([file, *dtypes]), []).append((file, macros))
    return found


KERNELS = by_dtypes()
FILES = {name.partition("-")[0]: name for name in reversed(KERNELS)}  # the first of each
# Of these, a multiprocessor must hold as many threads as `_fewest_threads` says.
COUNTED = {file for file, _ in combinations(*records("rows"))}
# On these every n-th combination of macros is compiled, if `make machine-code` does not compile it.
# On the others one combination of each file's first choice of dtypes and of every n-th, another one
# on each.
EVERY = {90: 19}
EVERY_BETWEEN = 7
EVERYTHING = os.environ.get("GRADKIT_NVRTC") == "all"


def _case(row):
    return Case(row["file"], tuple(row["macros"].split()))


RECORDED = {(_case(row), int(row["sm"])) for row in CODE.read()}


@pytest.fixture
def nvrtc():
    """Skip without NVRTC, but not in CI."""
    if missing("nvrtc") and os.environ.get("CI") != "true":
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")


def check_compiles(chosen, arch):
    """No register goes through memory, and a multiprocessor holds enough threads."""
    chosen = [each for each in chosen if compiles_for(arch, *each)]
    names = {" ".join([file, *options_of(macros)]): (file, macros) for file, macros in chosen}
    sources = {name: (source_of(file), options_of(m)) for name, (file, m) in names.items()}
    rows = compile_table(sources, [arch], workers=1)
    assert {row.source for row in rows} == names.keys()
    assert not spills(rows), "\n" + format_table(spills(rows))
    for row in rows:
        check_registers(*names[row.source], row.use.registers)


def check_registers(file, macros, registers):
    """A multiprocessor, which has 65536 registers, holds enough threads."""
    if file in COUNTED:
        assert registers * _fewest_threads(file, macros) <= 65536, (file, macros)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("file", "arch"), [(f, ARCHITECTURES[k % len(ARCHITECTURES)]) for k, f in enumerate(FILES)]
)
def test_every_file_compiles_without_spills(file, arch):
    """With one choice of dtypes and macros, each for another GPU; the next test has them all."""
    (chosen,) = KERNELS[FILES[file]][:1]
    check_compiles([chosen], arch if compiles_for(arch, *chosen) else max(ARCHITECTURES))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("arch", "macros"),
    [
        (90, {"DATA_T": "float64", "CHUNKS": 4, "VEC": 2, "FROM_OUTPUT": 1}),
        (120, {"DATA_T": "bfloat16", "CHUNKS": 2, "VEC": 8, "ODD": 1}),
        (120, {"DATA_T": "float16", "CHUNKS": 2, "VEC": 8, "ODD": 1}),
    ],
)
def test_gradients_of_elements_at_strides_compile_without_spills(arch, macros):
    """Those with the most addresses, which the sample leaves out."""
    wanted = {"CENTRED": 1, "STRIDED": 1, "PIECE": 1, **macros}
    chosen = [
        (file, found)
        for file, found in itertools.chain(*KERNELS.values())
        if file == "layer_norm_grad" and wanted.items() <= found.items() and "ADDED" not in found
    ]
    assert chosen
    check_compiles(chosen, arch)


def _sampled(name, arch):
    """Of a name in KERNELS, the combinations that are compiled for an architecture."""
    if EVERYTHING:
        return KERNELS[name]
    few = KERNELS[name][:: EVERY.get(arch, len(KERNELS[name]))]
    return [each for each in few if (Case.of(each[0], **each[1]), arch) not in RECORDED]


def _chosen():
    """Each name in KERNELS with the architectures that it is compiled for."""
    for k, name in enumerate(KERNELS):
        for place, arch in enumerate(ARCHITECTURES):
            sampled = name in FILES.values() or (k + place) % EVERY_BETWEEN == 0
            if (EVERYTHING or arch in EVERY or sampled) and _sampled(name, arch):
                yield name, arch


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("name", "arch"), [*_chosen()])
def test_every_combination_compiles_without_spills(name, arch):
    """Each file and dtype combination, with much that macros choose for one architecture.

    GRADKIT_NVRTC=all compiles all of it for every GPU, which takes far longer.
    """
    check_compiles(_sampled(name, arch), arch)


def test_no_recorded_kernel_spills():
    """`make machine-code` compiles these, and fails if one becomes worse than its row."""
    given = {Case.of(file, **macros): (file, macros) for file, macros in combinations()}
    for row in CODE.read():
        assert (row["spilled"], row["stack"]) == ("0", "0"), row
        check_registers(*given[_case(row)], int(row["registers"]))


def _fewest_threads(file, macros):
    """So many threads must be resident; fewer where each holds many columns or addresses."""
    strided = "STRIDED" in macros
    many = file in ("layer_norm_grad_wide", "layer_norm_grad_cluster", "gated_rms_norm_grad")
    many |= file in ("layer_norm", "gated_rms_norm") and macros["CHUNKS"] > 0  # or a row is held
    many |= file == "layer_norm" and strided
    if file == "layer_norm_grad":
        bytes_held = macros["CHUNKS"] * macros["VEC"] * (8 if macros["DATA_T"] == "float64" else 4)
        most = 32 if macros["VEC"] > 1 else 16
        # Beside 1 / scale of as many columns, and a bias or two wide packs, one block is resident.
        inverses = macros["CENTRED"] == 1 or "16" not in macros["DATA_T"]
        inverses &= macros["FROM_OUTPUT"] == 1
        many = bytes_held > most or (inverses and bytes_held == most)
        many |= strided and macros["CENTRED"] == 1 and macros["VEC"] == 8
        many |= "ODD" in macros
    return macros.get("THREADS", 512) if many else 1024


def test_what_is_needed_is_found_anew_where_a_fault_is_planted(monkeypatch):
    before = list(what_they_follow_from())
    monkeypatch.setattr(dry_run.__spec__.loader, "source", "another text", raising=False)
    assert sum(a != b for a, b in zip(before, what_they_follow_from(), strict=True)) == 1


@pytest.mark.emulated
@pytest.mark.parametrize(("file", "macros"), dict(combinations()).items())
def test_no_64_bit_number_is_narrowed(file, macros):
    """Indices and lengths stay 64 bits wide wherever they go."""
    narrowing = re.compile(r"(conversion from|narrowing) .*(64|long)\b.* to .*(32|int)\b")
    lines = complaints(source_of(file), options_of(macros), "-Wconversion")
    assert not [line for line in lines if narrowing.search(line)]


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("file", "kernel_name", "loads", "stores"),
    [
        ("layer_norm", "layer_norm", 2, 1),  # x in each visit
        ("layer_norm_grad", "layer_norm_grad", 2, 1),  # dy, x; dx
        ("layer_norm_grad_cluster", "layer_norm_grad_cluster", 2, 1),
        ("layer_norm_grad_wide", "row_sums_of_gradient", 2, 0),
        ("layer_norm_grad_wide", "apply_gradient", 2, 1),
        ("layer_norm_inverse", "layer_norm_inverse", 1, 1),
        ("batch_norm", "channel_moments", 1, 0),
        ("batch_norm", "normalize", 1, 1),
        ("batch_norm_grad", "sum_channels", 2, 0),
        ("batch_norm_grad", "apply_channels", 2, 1),
        ("batch_norm_inference", "infer", 1, 1),
        ("batch_norm_inference_grad", "infer_gradient", 2, 1),
        ("norm", "norm_partials", 1, 0),
        ("clip_by_norm", "clip_by_norm", 1, 1),
        ("scale", "scale_grads", 1, 1),
        ("clip_value", "clip_grad_value", 1, 1),
        ("accumulate", "accumulate_grad", 2, 1),
        ("accumulate", "accumulate_grad_v2", 1, 1),
        ("accumulate_grads", "accumulate_grads", 2, 1),
        ("zero", "zero_grad", 0, 1),
    ],
)
def test_bfloat16_data_moves_16_bytes_at_a_time(file, kernel_name, loads, stores):
    """At least that many instructions of each kind, and for norms none that moves one element.

    But where a forward pass sums again in double, which is rare.
    """
    wanted = {"VEC": 8, "DATA_T": "bfloat16", "PARAM_T": "float32"}
    wanted |= {"GRAD": "bfloat16", "BUFFER": "bfloat16"}
    macros = next(
        macros
        for of, macros in combinations()
        if of == file
        and "STRIDED" not in macros
        and all(macros.get(name, value) == value for name, value in wanted.items())
    )
    text = _entry(_assembly(file, options_of(macros)), kernel_name)
    # 8 elements of bfloat16 are 4 words; __ldg would make the loads ld.global.nc.
    assert len(re.findall(r"ld\.global(?:\.nc)?\.v4\.[ubs]32", text)) >= loads
    assert len(re.findall(r"st\.global\.v4\.[ubs]32", text)) >= stores
    if "VEC" in macros:
        single = re.findall(r"(?:ld|st)\.global(?:\.nc)?\.[ubs]16", text)
        assert len(single) <= {"layer_norm": 2, "batch_norm": 1}.get(file, 0)


@functools.cache
def _assembly(file, options):
    """A file's assembly; made for a virtual GPU, so that no machine code is made of it."""
    real = cupy_options(options, 90)
    return compile_ptx(source_of(file), [o.replace("=sm_", "=compute_") for o in real])


def _entry(ptx, name):
    """One kernel's part of an assembly."""
    start = ptx.index(f".entry {name}(")
    end = ptx.find(".entry ", start + 1)
    return ptx[start:end]


def test_kernels_and_host_have_the_same_row_for_each_dtype():
    rows = re.findall(r"^ +ROW\((\d+), (\w+), Real<(\w+)>\)", source_of("zero"), re.MULTILINE)
    assert rows == [
        (str(row.code), row.cxx, FLOATS[row.accumulation].cxx) for row in FLOATS.values()
    ]


def test_text_of_a_kernel_holds_its_headers_once():
    text = source_of("norm")
    assert '#include "' not in text
    assert text.count("struct TensorList {") == 1
    assert "#pragma once" not in text
