"""Clusters of blocks on both machines: their shape, shared memory, barrier, and planted faults."""

import numpy as np
import pytest

from testbed.emulator import SCHEDULES, EmulatedDevice, EmulatorFault
from testbed.ptx import PtxDevice

THREADS = 64  # of a block


def emulated(**options):
    return EmulatedDevice(**{"clusters": True} | options)


def compiled(**options):
    return PtxDevice(architecture=90, **options)


@pytest.fixture(
    params=[
        pytest.param(emulated, id="emulated"),
        pytest.param(compiled, id="ptx"),
    ]
)
def machine(request):
    return request.param


WHERE = """
struct Index { unsigned x, y, z; };
template <class D> __device__ Index index(const D& d) { return {d.x, d.y, d.z}; }
struct Seen { Index cluster, size, own, grid; unsigned rank, blocks; };
extern "C" __global__ void __cluster_dims__(2, 1, 3) where(Seen* seen) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  seen[block] = {
      index(__clusterIdx()), index(__clusterDim()), index(__clusterRelativeBlockIdx()),
      index(__clusterGridDimInClusters()), __clusterRelativeBlockRank(), __clusterSizeInBlocks(),
  };
}
extern "C" __global__ void alone(unsigned* seen) {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  seen[blockIdx.x] = 10 * __clusterRelativeBlockRank() + __clusterSizeInBlocks();
}
extern "C" __global__ void __cluster_dims__(3, 3, 1) nine(unsigned* seen) { *seen = 1; }
"""


def test_blocks_know_their_place(machine):
    device = machine()
    seen = device.xp.empty((6, 2, 4, 14), np.uint32)
    device.compile(WHERE).get_function("where")((4, 2, 6), (1,), (seen,))
    seen = seen.reshape(-1, 14)
    z, y, x = np.unravel_index(np.arange(48), (6, 2, 4))
    cluster, own = np.stack([x // 2, y, z // 3]), np.stack([x % 2, 0 * y, z % 3])
    rank = own[0] + 2 * own[2]
    expected = [*cluster, 2 + 0 * x, 1 + 0 * x, 3 + 0 * x, *own, 2 + 0 * x, 2 + 0 * x, 2 + 0 * x]
    np.testing.assert_array_equal(seen, np.stack([*expected, rank, 6 + 0 * x], axis=1))


def test_a_block_of_its_own_is_a_cluster(machine):
    device = machine()
    seen = device.xp.empty(3, np.uint32)
    device.compile(WHERE).get_function("alone")((3,), (1,), (seen,))
    assert seen.tolist() == [1, 1, 1]


@pytest.mark.parametrize("grid", [(3, 1, 3), (2, 1, 4)])
def test_grids_that_are_no_multiple_of_the_cluster(machine, grid):
    device = machine()
    seen = device.xp.zeros((100, 14), np.uint32)
    with pytest.raises(EmulatorFault, match=r"no multiple of the cluster \(2, 1, 3\)") as caught:
        device.compile(WHERE).get_function("where")(grid, (1,), (seen,))
    assert caught.value.kind == "launch"
    assert not seen.any()


def test_a_device_without_clusters(machine):
    with pytest.raises(EmulatorFault, match="launch: kernel sums: the device has no clusters"):
        row_sums(machine(clusters=False))
    row_sums(machine(clusters=False), blocks=1)


def test_clusters_that_no_device_has_to_take(machine):
    with pytest.raises(EmulatorFault, match="9 blocks in a cluster; 1 to 8 can be"):
        machine().compile(WHERE).get_function("nine")


# Each cluster adds a row up: every warp tells all blocks its sum, in slots that take turns.
SUMS = """
extern "C" __global__ void __cluster_dims__(BLOCKS) sums(
    const int* x, int* out, int rows, int width, int stride
) {
  __shared__ int fixed[2][2 * BLOCKS];
#ifdef DYNAMIC
  DYNAMIC_SHARED(int, room);
  int* const slots = room;
#else
  int* const slots = fixed[0];
#endif
  const unsigned rank = __clusterRelativeBlockRank();
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  START;
  int turn = 0;
  for (int row = blockIdx.x / BLOCKS; row < rows; row += gridDim.x / BLOCKS, ++turn) {
    int sum = 0;
    for (int i = rank * blockDim.x + threadIdx.x; i < width; i += BLOCKS * blockDim.x)
      sum += x[row * stride + i];
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    int* const own = slots + (SLOT) * 2 * BLOCKS;
    if (lane < TOLD) {
      int* const there = static_cast<int*>(__cluster_map_shared_rank(MAPPED, TARGET));
      there[2 * rank + warp] = sum;
    }
    BARRIER;
    sum = own[lane % (2 * BLOCKS)];
    for (int lanes = BLOCKS; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x == 0) out[row * BLOCKS + rank] = sum;
  }
}
"""
DYNAMIC = """
#ifndef GRADKIT_EMULATED
#define DYNAMIC_SHARED(T, name) extern __shared__ T name[]
#endif
"""
ARRIVE_AND_WAIT = "__cluster_barrier_arrive(); __cluster_barrier_wait()"
USUAL = {
    "START": ARRIVE_AND_WAIT,
    "BARRIER": ARRIVE_AND_WAIT,
    "TOLD": "BLOCKS",
    "MAPPED": "own",
    "TARGET": "lane",
    "SLOT": "turn & 1",
}


def row_sums(device, *, blocks=4, rows=5, clusters=2, shared=0, **changed):
    """Return the sum that each block of a cluster computed, and the rows' sums."""
    x = np.random.default_rng(0).integers(-(2**20), 2**20, (rows, 999), dtype=np.int32)
    out = device.xp.empty((rows, blocks), np.int32)
    macros = {"BLOCKS": blocks} | USUAL | changed
    options = tuple(f"-D{name}={text}" for name, text in macros.items())
    kernel = device.compile(DYNAMIC + SUMS, options).get_function("sums")
    sizes = np.int32(rows), np.int32(900), np.int32(999)
    kernel((clusters * blocks,), (THREADS,), (device.xp.asarray(x), out, *sizes), shared)
    return out, x[:, :900].sum(axis=1, dtype=np.int32)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_sums_over_a_cluster(machine, schedule, blocks):
    found, sums = row_sums(machine(schedule=schedule, seed=2), blocks=blocks)
    np.testing.assert_array_equal(found, np.repeat(sums[:, None], blocks, axis=1))


def test_dynamic_shared_memory(machine):
    found, sums = row_sums(machine(schedule="shuffled"), DYNAMIC=1, shared=64)
    np.testing.assert_array_equal(found, np.repeat(sums[:, None], 4, axis=1))


def test_grid_limit_leaves_whole_clusters(machine):
    found, sums = row_sums(machine(grid_limit=1), clusters=3)
    np.testing.assert_array_equal(found[:, 0], sums)


def test_the_clusters_of_chosen_blocks_run(machine):
    device = machine()
    with device.only_blocks([6, 5]):  # both in the second cluster
        found, sums = row_sums(device)
    np.testing.assert_array_equal(found[1::2, 0], sums[1::2])
    assert (found[::2] == -1).all()


FAULTS = {
    "a barrier of each block alone": ("race|cluster|uninitialised", {"BARRIER": "__syncthreads()"}),
    "no start": (
        "cluster: .* the shared memory of another block, before a barrier",
        {"START": ""},
    ),
    "slots that take no turns": ("race", {"SLOT": 0}),
    "all blocks but the last": ("uninitialised", {"TOLD": "BLOCKS - 1"}),
    "the next block alone": ("race", {"TARGET": "(rank + 1) % BLOCKS"}),
    "a rank too high": ("cluster: write .* mapped to a rank that no block", {"TARGET": "lane + 1"}),
    "memory that is not shared": (
        "at an address mapped to another block from outside this block's shared memory",
        {"MAPPED": "&sum"},
    ),
    "a wait without an arrival": (
        "cluster: waits at the cluster's barrier without having arrived",
        {"BARRIER": "__cluster_barrier_wait()"},
    ),
    "two arrivals": (
        "cluster: arrives at the cluster's barrier again",
        {"BARRIER": "__cluster_barrier_arrive(); __cluster_barrier_arrive()"},
    ),
    "a block that leaves": (
        "barrier: .* for thread .* of block .*, which has returned|cluster: .*, which has ended",
        {"START": f"{ARRIVE_AND_WAIT}; if (rank == 2) return"},
    ),
    "some threads that arrive": (
        "cluster: a block's barrier after some of its threads",
        {
            "START": "if (warp) __cluster_barrier_arrive(); __syncthreads();"
            "if (!warp) __cluster_barrier_arrive(); __cluster_barrier_wait()"
        },
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAULTS)
def test_planted(machine, schedule, name):
    message, changed = FAULTS[name]
    with pytest.raises(EmulatorFault, match=message):
        row_sums(machine(schedule=schedule, seed=1), **changed)


# Two blocks of two warps; s has a word for each thread of both, in shared memory and in out.
STEPS = """
#define ARRIVE __cluster_barrier_arrive()
#define WAIT __cluster_barrier_wait()
#define MEET ARRIVE; WAIT
extern "C" __global__ void __cluster_dims__(2) steps(int* out) {
  __shared__ int s[128];
  const int rank = __clusterRelativeBlockRank(), t = threadIdx.x, me = 64 * rank + t;
  int* const other = static_cast<int*>(__cluster_map_shared_rank(s, 1 - rank));
  s[t] = t;
  MEET;
  STEPS;
}
"""
RIGHT = {
    "reads of all, then a write": "int a = other[t ^ 1] + s[t ^ 32]; MEET; s[t ^ 2] = a",
    "work between arrival and wait": "other[64 + t] = 1; ARRIVE; s[t] = 2; WAIT;"
    "int a = s[64 + t ^ 32]; out[me] = a + s[t]; ARRIVE; __syncthreads();"
    "out[me ^ 5] = 3; WAIT; s[t] = 1",
    "memory of the device": "out[me] = rank; MEET; int a = out[me ^ 64]; MEET; out[me ^ 71] = a",
    "barriers of one block": "if (rank) for (int k = 0; k < 9; ++k) {"
    "s[t ^ k] = k; __syncthreads(); } other[64 + t] = 1; MEET; s[64 + t ^ 1] = 2",
    "a turn for each block": "if (rank) s[t ^ 1] = 4; MEET; if (!rank) other[t] = 5; MEET;"
    "out[me] = s[t]",
    "reads again and again": "for (int k = 0; k < 3; ++k) { int a = other[t ^ k]; __syncthreads();"
    "out[me] = a + s[t]; MEET; } s[t] = 0",
}
WRONG = {
    "a read before the write": ("race", "int a = other[t]; __syncthreads(); s[t] = a"),
    "reads of all blocks before one's write": (
        "race: write .* conflicts with the read",
        "int a = other[t] + s[t ^ 1]; __syncthreads(); if (rank) s[t] = a; MEET",
    ),
    "a write after the arrival": ("race", "ARRIVE; other[64 + t] = 1; WAIT; out[me] = s[64 + t]"),
    "a read after the arrival": ("race", "ARRIVE; out[me] = other[t]; WAIT; s[t] = 1"),
    "a read before the wait": (
        "race|uninitialised",
        "other[64 + t] = 1; ARRIVE; out[me] = s[64 + t]; WAIT",
    ),
    "another thread's, before the wait": ("race", "s[t] = 5; ARRIVE; out[me] = s[t ^ 1]; WAIT"),
    "memory of the device": (
        "race: .* of block .*: no barrier of the cluster lies between them",
        "out[me] = 1; __syncthreads(); out[me ^ 64] = 2",
    ),
    "a block's barrier alone": ("race", "other[64 + t] = 1; __syncthreads(); out[me] = s[64 + t]"),
    "a write behind the last barrier": ("cluster: ends while|, which has ended", "other[t] = 1"),
    "a read behind it": ("cluster: ends while|, which has ended", "out[me] = other[t]"),
}


def run_steps(device, steps):
    out = device.xp.empty(128, np.int32)
    device.compile(STEPS, (f"-DSTEPS={steps}",)).get_function("steps")((2,), (64,), (out,))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RIGHT)
def test_what_the_barrier_orders(machine, schedule, name):
    run_steps(machine(schedule=schedule, seed=3), RIGHT[name])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", WRONG)
def test_what_it_does_not_order(machine, schedule, name):
    message, steps = WRONG[name]
    with pytest.raises(EmulatorFault, match=message):
        run_steps(machine(schedule=schedule, seed=3), steps)


def test_clusters_race_with_each_other(machine):
    source = """
    extern "C" __global__ void __cluster_dims__(2) store(int* out) {
      if (blockIdx.x & 1) out[blockIdx.x & 3] = 1;
      __cluster_barrier_arrive();
      __cluster_barrier_wait();
    }"""
    device = machine()
    with pytest.raises(EmulatorFault, match=r"block-race: .* of block \(1, 0, 0\)") as caught:
        device.compile(source).get_function("store")((6,), (1,), (device.xp.zeros(4, np.int32),))
    assert caught.value.block == (5, 0, 0)


def test_a_launch_that_failed_at_the_barrier_is_over(machine):
    """The next one's accesses do not conflict with those that followed an arrival."""
    source = """
    extern "C" __global__ void __cluster_dims__(2) fails(int* out) {
      __cluster_barrier_arrive();
      if (!__clusterRelativeBlockRank()) out[threadIdx.x] = 1;
      __cluster_barrier_arrive();
    }
    extern "C" __global__ void reverses(int* out) { out[blockDim.x - 1 - threadIdx.x] = 2; }
    """
    device = machine()
    module, out = device.compile(source), device.xp.zeros(THREADS, np.int32)
    with pytest.raises(EmulatorFault, match="arrives at the cluster's barrier again"):
        module.get_function("fails")((2,), (THREADS,), (out,))
    module.get_function("reverses")((1,), (THREADS,), (out,))
    assert (out == 2).all()
