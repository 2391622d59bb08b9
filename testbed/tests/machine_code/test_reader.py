"""The reader of machine code, on kernels whose round trips to memory are known."""

import pytest

from testbed.machine_code import (
    Instruction,
    NvdisasmMissingError,
    disassemble,
    kernels_of,
    loops_of,
    round_trips,
    steady_trips,
)
from testbed.machine_code import sass as reader
from testbed.machine_code.measure import data_loops, double_share, wide_share
from testbed.machine_code.occupancy import resident_threads
from testbed.nvrtc import compile_machine_code, cupy_options

ARCHITECTURES = (80, 90, 120)
KERNELS = """
struct alignas(16) Four { float at[4]; };

// Each load's address is what the one before has brought.
extern "C" __global__ void __launch_bounds__(128) chase(const int* from, int* to) {
    int at = threadIdx.x;
    for (int i = 0; i < STEPS; ++i) at = from[at];
    to[threadIdx.x] = at;
}

// All loads at once.
extern "C" __global__ void gather(const int* __restrict__ from, int* __restrict__ to) {
    int sum = 0;
    #pragma unroll
    for (int i = 0; i < STEPS; ++i) sum += from[threadIdx.x + i * 1024];
    to[threadIdx.x] = sum;
}

// A row's two packs in each turn; the barrier keeps turns apart.
extern "C" __global__ void rows(const Four* from, Four* to, int rows) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        Four a = from[row * 256 + threadIdx.x], b = from[row * 256 + 128 + threadIdx.x];
        for (int k = 0; k < 4; ++k) a.at[k] *= b.at[k];
        __syncthreads();
        to[row * 128 + threadIdx.x] = a;
    }
}

// The same, but the next row is loaded before this one is used.
extern "C" __global__ void ahead(const Four* __restrict__ from, Four* __restrict__ to, int rows) {
    int row = blockIdx.x;
    Four a = from[row * 256 + threadIdx.x], b = from[row * 256 + 128 + threadIdx.x];
    while (row < rows) {
        const int next = row + gridDim.x;
        const Four c = from[next * 256 + threadIdx.x], d = from[next * 256 + 128 + threadIdx.x];
        for (int k = 0; k < 4; ++k) a.at[k] *= b.at[k];
        __syncthreads();
        to[row * 128 + threadIdx.x] = a;
        a = c;
        b = d;
        row = next;
    }
}
"""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request):
    """The instructions of each kernel above."""
    made = compile_machine_code(KERNELS, cupy_options(("-DSTEPS=5",), request.param))
    kernels = kernels_of(made.cubin)
    codes = disassemble([kernel.code for kernel in kernels], request.param)
    return dict(zip([kernel.name for kernel in kernels], codes, strict=True))


def test_each_dependent_load_is_a_trip(compiled):
    assert round_trips(compiled["chase"]) == [1] * 5


def test_independent_loads_are_one_trip(compiled):
    assert round_trips(compiled["gather"]) == [5]


@pytest.mark.parametrize("name", ["rows", "ahead"])
def test_a_row_is_one_trip_prefetched_or_not(compiled, name):
    """Loads that one turn issues and the next waits for count once."""
    outermost = [loop for loop in loops_of(compiled[name]) if loop.depth == 1]
    loaded = [loop for loop in outermost if any(i.is_global_load for i in loop.body)]
    trips = [steady_trips(loop.body) for loop in loaded]
    assert trips
    assert all(turn and set(turn) == {2} for turn in trips)  # more than one turn if unrolled


def test_what_the_last_turn_loaded_is_a_trip_of_this_one():
    body = [line("FADD", waited=[0]), line("LDG.E", 0), line("LDG.E", 0), line("BRA")]
    assert round_trips(body) == []
    assert steady_trips(body) == [2]


def line(opcode, released=None, waited=(), guard=None, operands="", address=0):
    return Instruction(address, guard, opcode, operands, released, frozenset(waited))


def test_what_is_in_flight_arrives_together():
    code = [
        line("LDG.E", 0),
        line("LDG.E.64", 1),
        line("FADD", waited=[0]),
        line("FADD", waited=[1]),
    ]
    assert round_trips(code) == [2]
    assert round_trips([*code[:1], code[2], code[1], code[3]]) == [1, 1]


def test_other_waits_are_no_trips():
    assert round_trips([line("LDG.E", 0), line("LDS", 1), line("FADD", waited=[1])]) == []
    assert round_trips([line("STG.E", None), line("FADD", waited=[0])]) == []


def test_a_barrier_of_loads_may_leave_some_on_their_way():
    loads = [line("LDG.E", 0), line("LDG.E", 0)]
    assert round_trips([*loads, line("DEPBAR.LE", operands="SB0, 0x1")]) == [2]
    assert round_trips([*loads, line("DEPBAR.LE", operands="SB0, 0x2")]) == []


def branching(*rows):
    """Instructions at 0, 16, 32 ...: (opcode, operands, guard)."""
    return [line(o, guard=g, operands=t, address=16 * k) for k, (o, t, g) in enumerate(rows)]


def test_loops_within_loops():
    code = branching(
        ("MOV", "", None),
        ("LDG.E", "", None),  # 0x10: the outer loop
        ("FADD", "", None),  # 0x20: the inner loop
        ("BRA", "0x20", "P0"),
        ("BRA", "P1, 0x10", "!P2"),
        ("EXIT", "", None),
    )
    assert [(loop.start, loop.end, loop.depth) for loop in loops_of(code)] == [
        (0x10, 0x40, 1),
        (0x20, 0x30, 2),
    ]


def test_code_out_of_line_is_no_loop():
    """Its branch leads back into the middle, which is reached without it too."""
    code = branching(
        ("BRA.DIV", "UR4, 0x40", None),
        ("SHFL.BFLY", "", None),
        ("FADD", "", None),  # 0x20
        ("EXIT", "", None),
        ("WARPSYNC.COLLECTIVE", "R1, 0x50", None),
        ("BRA", "0x20", None),
    )
    assert loops_of(code) == []


def test_a_branch_through_a_table_leads_to_what_nothing_else_does():
    code = branching(
        ("BRX", "R2 -0x20", None),
        ("LDG.E", "", None),  # 0x10: a case, with a loop
        ("BRA", "0x10", "P0"),
        ("EXIT", "", None),
    )
    assert [(loop.start, loop.end) for loop in loops_of(code)] == [(0x10, 0x20)]


def test_addresses_of_each_piece_begin_at_0():
    made = compile_machine_code(KERNELS, cupy_options(("-DSTEPS=5",), 90))
    code = {k.name: k.code for k in kernels_of(made.cubin)}["rows"]
    alone, after = disassemble([code], 90)[0], disassemble([code, code], 90)[1]
    assert alone == after
    assert alone[0].address == 0


def test_launch_bounds_are_in_the_cubin():
    made = compile_machine_code(KERNELS, cupy_options(("-DSTEPS=1",), 90))
    bounds = {k.name: k.max_threads for k in kernels_of(made.cubin)}
    assert bounds["chase"] == 128
    with pytest.raises(ValueError, match="not a cubin"):
        kernels_of(b"text")


@pytest.mark.parametrize(
    ("opcode", "size"),
    [("LDG.E.128", 16), ("STG.E.64", 8), ("LDG.E.U16.CONSTANT", 2), ("LD.E", 4), ("LDS.128", 0)],
)
def test_bytes_of_an_access(opcode, size):
    assert line(opcode).global_bytes == size


def test_double_precision_for_each_wide_load():
    """Unrolled or not: the share is the same. Stores count where nothing is loaded."""
    body = [line("LDG.E.128"), line("LDG.E"), line("F2F.F64.F32"), line("DADD"), line("FADD")]
    assert double_share(body) == double_share([*body, *body]) == 2
    assert double_share([line("STG.E.128"), line("DMUL")]) == 1


def test_share_of_wide_accesses_is_by_bytes():
    assert wide_share([line("LDG.E.128"), line("STG.E.128"), line("LDG.E.64")]) == 0.8
    assert wide_share([line("FADD")]) is None


@pytest.mark.parametrize(
    ("arch", "block", "registers", "shared", "threads"),
    [
        (90, 256, 32, 0, 2048),
        (90, 256, 33, 0, 1536),  # 40 registers: 51 warps, which are six blocks
        (90, 512, 128, 0, 512),
        (120, 256, 32, 0, 1536),
        (80, 256, 32, 100 << 10, 256),
        (120, 512, 128, 128 << 10, 0),  # does not fit at all
    ],
)
def test_resident_threads(arch, block, registers, shared, threads):
    assert resident_threads(arch, block, registers, shared) == threads


def test_the_loop_over_the_data():
    code = branching(
        ("LDG.E", "", None),  # 0x00: searches for a tensor
        ("BRA", "0x0", "P0"),
        ("MOV", "", None),  # 0x20: the loop over the data
        ("LDG.E.128", "", None),  # 0x30: its inner loop
        ("BRA", "0x30", "P0"),
        ("LDG.E", "", None),  # 0x50: another
        ("BRA", "0x50", "P0"),
        ("BRA", "0x20", "P0"),
        ("EXIT", "", None),
    )
    data, (inner,) = data_loops(loops_of(code))
    assert (data.start, inner.start) == (0x20, 0x30)
    assert data_loops([]) == (None, [])


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(reader.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(reader.shutil, "which", lambda _: None)
    monkeypatch.delenv("GRADKIT_NVDISASM", raising=False)
    with pytest.raises(NvdisasmMissingError, match="pip install nvidia-cuda-nvdisasm"):
        reader.nvdisasm.__wrapped__()
