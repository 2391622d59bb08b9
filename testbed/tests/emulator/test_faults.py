"""One planted fault of each kind is caught under every schedule, and the right thread is named."""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from testbed.emulator.device import EmulatedDevice
from testbed.emulator.faults import EmulatorFault

N = 64


def kernel(device, body, parameters="const float* x, float* out", options=()):
    source = f'extern "C" __global__ void k({parameters}) {{\n{body}\n}}'
    return device.compile(source, options).get_function("k")


def run(device, body, *, grid=(1,), block=(N,), shared=0, **named):
    """Launch a kernel over an input ``x`` and an output ``out`` of N floats each."""
    x = device.xp.asarray(np.arange(N, dtype=np.float32))
    out = device.xp.empty(N, np.float32)
    kernel(device, body, **named)(grid, block, (x, out), shared)
    return out


def fault_of(device, body, **named):
    with pytest.raises(EmulatorFault) as caught:
        run(device, body, **named)
    assert caught.value.kernel == "k"
    assert caught.value.line is not None
    return caught.value


class Planted(NamedTuple):
    """A kernel's body, of whose threads one is named, with an element of an array if that is known.

    The body is at fault with the arguments ``wrong`` of `run`; with ``right`` ones it runs.
    """

    body: str
    threads: Container[int] = range(N)
    place: tuple[str, int] | None = None
    wrong: Mapping[str, Any] = {}
    right: Mapping[str, Any] | None = None


def racing(body):
    start = "DYNAMIC_SHARED(float, s); s[t] = out[t] = 0; __syncthreads();"
    return Planted(f"{start} {body}", wrong={"shared": 4 * N})


def misaligned(vector):
    body = f"using V = {vector}; if (t == 5) *(V*)(out + OFFSET) = *(const V*)(x + OFFSET);"
    offsets = ({"options": (f"-DOFFSET={offset}",)} for offset in (1, 4))
    return Planted(body, [5], ("out", 1), *offsets)


RACES = {
    "write, write": "if (t == 3 || t == 40) s[0] = x[t];",
    "write, read": "s[t] = x[t]; if (t == 40) out[0] = s[3];",
    "two lanes of a warp": "if (t == 3 || t == 4) s[0] = x[t];",
    "a lane of the same warp": "s[t] = x[t]; if (t == 4) out[0] = s[3];",
    "global memory": "if (t == 3 || t == 40) out[7] = x[t];",
    "halves of a warp that synchronise apart": """
        if (t < 16) s[t] = x[t];
        if (t < 32) __syncwarp(t < 16 ? 0xffffu : 0xffff0000u);
        if (t >= 16 && t < 32) out[t] = s[t - 16];""",
    "a reader that writes": "if (t == 3 || t == 40) { out[t] = s[0]; if (t == 40) s[0] = 1; }",
    "the other reader": "if (t == 3 || t == 40) { out[t] = s[0]; if (t == 3) s[0] = 1; }",
    "the same lane of two warps": "if (t % 32 == 3) { out[t] = s[0]; if (t == 35) s[0] = 1; }",
    "the other of those": "if (t % 32 == 3) { out[t] = s[0]; if (t == 3) s[0] = 1; }",
    "a reader of one warp": "if (t == 3 || t == 4) { out[t] = s[0]; if (t == 4) s[0] = 1; }",
    "the other of one warp": "if (t == 3 || t == 4) { out[t] = s[0]; if (t == 3) s[0] = 1; }",
    "write and atomic": "int* n = (int*)s; if (t == 3) n[0] = 0; if (t == 40) atomicAdd(n, 1);",
    "read and atomic": "int* n = (int*)s; if (t == 3) out[3] = n[0]; if (t == 40) atomicAdd(n, 1);",
}
EXCHANGE = "s[threadIdx.x] = x[t]; out[t] = s[threadIdx.x];"
FAULTS = {
    "out-of-bounds": {
        "after an input": Planted("out[t] = x[t + 1];", [63], ("x", N)),
        "after an output": Planted("out[t + (t == 63)] = x[t];", [63], ("out", N)),
        "before an input": Planted("out[t] = x[t == 63 ? -3 : t];", [63], ("x", -3)),
        "far away": Planted("out[t] = x[t == 63 ? 1 << 20 : t];", [63]),
        "dynamic shared memory": Planted(
            f"DYNAMIC_SHARED(float, s); {EXCHANGE}",
            [63],
            ("dynamic shared memory", 63),
            {"shared": 4 * (N - 1)},
            {"shared": 4 * N},
        ),
        "static shared memory": Planted(
            f"__shared__ float s[SIZE]; {EXCHANGE}",
            [63],
            None,
            {"options": ("-DSIZE=63",)},
            {"options": ("-DSIZE=64",)},
        ),
    },
    "misaligned": {
        vector: misaligned(vector)
        for vector in ("float4", "uint4", "double2", "float2", "struct alignas(16) { short s[8]; }")
    },
    "read-only": {"input": Planted("if (t == 7) ((float*)x)[3] = out[0] = 1;", [7], ("x", 3))},
    "uninitialised": {"output": Planted("if (t == 9) out[9] += x[9];", [9], ("out", 9))},
    "race": {name: racing(body) for name, body in RACES.items()},
    "barrier": {
        "two places": Planted("if (t < 16) __syncthreads(); else __syncthreads();"),
        "one thread more often": Planted("if (t == 40) __syncthreads(); __syncthreads();"),
        "a thread that returned": Planted("if (t == 40) return; __syncthreads();"),
        "one warp more often": Planted("for (int i = 0; i < t / 32; ++i) __syncthreads();"),
    },
    "shuffle": {
        "a lane that returned": Planted(
            "if (t == 40) return; out[t] = __shfl_xor_sync(~0u, x[t], 1);", [41]
        ),
        "a lane outside of the mask": Planted(
            "if (t < 3) out[t] = __shfl_sync(7u, x[t], t == 2 ? 5 : 0);", [2]
        ),
        "a lane of a partial warp": Planted(
            "out[t] = __shfl_down_sync(~0u, x[t], 1);", [39], wrong={"block": (40,)}
        ),
        "width": Planted("if (t < 32) out[t] = __shfl_xor_sync(~0u, x[t], 1, 12);", range(32)),
        "another place": Planted(
            "if (t % 2) out[t] = __shfl_xor_sync(~0u, x[t], 1);"
            "else out[t] = 1 + __shfl_xor_sync(~0u, x[t], 1);"
        ),
    },
    "mask": {
        "without the caller": Planted(
            "if (t < 32) out[t] = __shfl_xor_sync(0xffffu, x[t], 1);", range(16, 32)
        ),
        "masks that differ": Planted(
            "out[t] = __shfl_xor_sync(t == 3 ? 15u : ~0u, x[t], 1);", range(32)
        ),
        "a lane at a barrier": Planted(
            "if (t % 32 == 5) __syncthreads(); out[t] = __shfl_xor_sync(~0u, x[t], 1);"
            "if (t % 32 != 5) __syncthreads();"
        ),
        "syncwarp in a branch": Planted(
            "if (t < 16) __syncwarp(); else __syncthreads(); out[t] = 1;", range(16)
        ),
    },
    "deadlock": {"spinning": Planted("if (t == 2) while (*(volatile const float*)x == 0);", [2])},
    "trap": {"trap": Planted("if (t == 8) __trap();", [8])},
}
MESSAGES = {"barrier": "waits at a barrier", "race": "no barrier lies between"}
PLANTED = [
    pytest.param(kind, planted, id=f"{kind}-{name}")
    for kind, faults in FAULTS.items()
    for name, planted in faults.items()
]


@pytest.mark.parametrize(("kind", "planted"), PLANTED)
def test_planted(device, kind, planted):
    body = f"int t = threadIdx.x; {planted.body}"
    fault = fault_of(device, body, **planted.wrong)
    assert fault.kind == kind
    assert fault.block == (0, 0, 0)
    assert fault.thread[0] in planted.threads
    assert MESSAGES.get(kind, "") in str(fault)
    if planted.place is not None:
        assert (fault.array, fault.index) == planted.place
        assert "{}[{}]".format(*planted.place) in str(fault)
    if planted.right is not None:
        run(device, body, **planted.right)


def test_block_and_thread_of_a_three_dimensional_launch(device):
    body = """bool here = blockIdx.x == 1 && blockIdx.y == 2 && threadIdx.y == 1 && threadIdx.z == 2
            && threadIdx.x == 3;
        if (here) out[N] = x[0];"""
    fault = fault_of(device, body, grid=(2, 3), block=(4, 2, 3), options=("-DN=64",))
    assert (fault.kind, fault.block, fault.thread) == ("out-of-bounds", (1, 2, 0), (3, 1, 2))


@pytest.mark.parametrize("declaration", ["DYNAMIC_SHARED(float, s)", "__shared__ float s[64]"])
def test_read_of_unwritten_shared_memory_of_every_block(device, declaration):
    # The first block to run writes all of it; the next must not see that.
    body = f"""{declaration};
        if (blockIdx.x == 0) s[threadIdx.x] = 1;
        __syncthreads();
        if (blockIdx.x == 1 && threadIdx.x == 3) out[0] = s[3];"""
    fault = fault_of(device, body, grid=(2,), shared=4 * N)
    assert (fault.kind, fault.block, fault.thread) == ("uninitialised", (1, 0, 0), (3, 0, 0))


def test_race_names_both_threads(device):
    body = "if (threadIdx.x == 3 || threadIdx.x == 40) out[7] = x[0];"
    fault = fault_of(device, body)
    names = {(3, 0, 0), (40, 0, 0)}
    assert fault.thread in names
    (other,) = names - {fault.thread}
    assert f"the write by thread {other}" in str(fault)
    assert (fault.array, fault.index) == ("out", 7)


BLOCK_RACES = {
    "write, write": "out[0] = x[0];",
    "write, read": "if (blockIdx.x == 0) out[0] = 1; else out[1] = out[0];",
    "read by both, then write": "float a = *out; __syncthreads(); if (blockIdx.x == B) *out = a;",
    "plain and atomic": "if (blockIdx.x == 0) atomicAdd((int*)out, 1); else out[0] = 1;",
}


@pytest.mark.parametrize("body", BLOCK_RACES.values(), ids=BLOCK_RACES)
@pytest.mark.parametrize("second", [0, 1])
def test_conflict_between_blocks(device, body, second):
    x = device.xp.asarray(np.ones(N, np.float32))
    out = device.xp.zeros(N, np.float32)
    launch = kernel(device, body, options=(f"-DB={second}",))
    with pytest.raises(EmulatorFault) as caught:
        launch((2,), (1,), (x, out))
    assert caught.value.kind == "block-race"
    assert (caught.value.array, caught.value.thread) == ("out", (0, 0, 0))
    assert "block" in str(caught.value)


def test_barrier_in_a_function_called_from_two_places(device):
    body = """if (threadIdx.x < 32) helper(out); else helper(out);"""
    source = f"""__device__ __noinline__ void helper(float* out) {{
            out[threadIdx.x] = 1; __syncthreads(); }}
        extern "C" __global__ void k(float* out) {{ {body} }}"""
    launch = device.compile(source).get_function("k")
    with pytest.raises(EmulatorFault, match="barrier"):
        launch((1,), (N,), (device.xp.empty(N, np.float32),))


@pytest.mark.parametrize("null", [None, np.uint64(0), np.intp(0)])
def test_null_pointer(device, null):
    launch = kernel(
        device, "if (threadIdx.x == 6 && OFFSET) out[0] = x[OFFSET];", options=("-DOFFSET=5",)
    )
    with pytest.raises(EmulatorFault) as caught:
        launch((1,), (N,), (null, device.xp.empty(N, np.float32)))
    assert (caught.value.kind, caught.value.thread) == ("null-pointer", (6, 0, 0))


def test_stopped_before_the_access(device):
    x = device.xp.asarray(np.arange(N, dtype=np.float32))
    out = device.xp.zeros(N, np.float32)
    launch = kernel(device, "out[threadIdx.x == 1 ? 0 : 0] = 5 + x[threadIdx.x];")
    with pytest.raises(EmulatorFault, match="race"):
        launch((1,), (2,), (x, out))
    assert out[0] in (5, 6)
    # The next launch begins afresh.
    launch((1,), (1,), (x, out))
    assert out[0] == 5


def test_message_names_the_source_line():
    fault = fault_of(EmulatedDevice(), "int t = threadIdx.x;\nout[t] = x[t + 1];")
    assert fault.line == 3
    assert "line 3: out[t] = x[t + 1];" in str(fault)
    assert "0 bytes past the end of x (float32[64])" in str(fault)
