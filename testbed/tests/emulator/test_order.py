"""Order that no block-wide barrier makes: parts of a warp, atomics, fences with tickets."""

import numpy as np
import pytest

from testbed.emulator.device import EmulatedDevice
from testbed.emulator.faults import EmulatorFault


def test_half_warps_that_go_their_own_ways(device):
    source = """
    extern "C" __global__ void halves(const int* x, int* out) {
      __shared__ int s[32];
      int t = threadIdx.x;
      unsigned mask = t < 16 ? 0xffffu : 0xffff0000u;
      if (t < 16) {
        for (int i = 0; i < 3; ++i) {
          s[t] = x[t] + i;
          __syncwarp(mask);
          out[t] = s[15 - t];
          __syncwarp(mask);
        }
      } else {
        s[t] = __shfl_xor_sync(mask, x[t], 8);
        out[t] = s[t];
      }
    }"""
    x = np.arange(32, dtype=np.int32) * 3
    out = device.xp.empty(32, np.int32)
    device.compile(source).get_function("halves")((1,), (32,), (device.xp.asarray(x), out))
    np.testing.assert_array_equal(out[:16], x[15::-1] + 2)
    np.testing.assert_array_equal(out[16:], x[16:].reshape(2, 8)[::-1].ravel())


def test_order_through_a_chain_of_partial_barriers(device):
    # Lane 2 never meets lane 0, yet its write comes after lane 0's read: lane 1 met both.
    source = """
    extern "C" __global__ void chain(int* cell, int* out) {
      int t = threadIdx.x;
      if (t == 0) out[0] = *cell;
      if (t < 2) __syncwarp(3u);
      if (t == 1) out[1] = *cell;
      if (t == 1 || t == 2) __syncwarp(6u);
      if (t == 2) *cell = 9;
    }"""
    cell, out = device.xp.asarray(np.array([5], np.int32)), device.xp.empty(2, np.int32)
    kernel = device.compile(source).get_function("chain")
    kernel((1,), (32,), (cell, out))
    assert (out.tolist(), cell[0]) == ([5, 5], 9)
    broken = device.compile(source.replace("(t == 1 || t == 2)", "(t == 99)")).get_function("chain")
    with pytest.raises(EmulatorFault, match="race"):
        broken((1,), (32,), (cell, out))


def test_lanes_that_returned_early_do_not_hold_up_the_others(device):
    source = """
    extern "C" __global__ void early(const int* x, int* out) {
      if (threadIdx.x >= 20) return;
      out[threadIdx.x] = __shfl_xor_sync(0xfffffu, x[threadIdx.x], 1);
      __syncwarp();
      if (threadIdx.x == 0) out[20] = __popc(__ballot_sync(1u, 1)) + out[19];
    }"""
    x = np.arange(20, dtype=np.int32)
    out = device.xp.empty(21, np.int32)
    device.compile(source).get_function("early")((1,), (32,), (device.xp.asarray(x), out))
    np.testing.assert_array_equal(out[:20], x ^ 1)
    assert out[20] == 1 + 18


def test_integer_atomics(device):
    source = """
    extern "C" __global__ void histogram(const int* x, unsigned* bins, int* extremes,
                                         unsigned long long* total, unsigned n) {
      DYNAMIC_SHARED(unsigned, mine);
      for (unsigned i = threadIdx.x; i < 8; i += blockDim.x) mine[i] = 0;
      __syncthreads();
      for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&mine[x[i] & 7], 1u);
        atomicMax(&extremes[0], x[i]);
        atomicMin(&extremes[1], x[i]);
        atomicAdd(total, 1ull << 33);
      }
      __syncthreads();
      for (unsigned i = threadIdx.x; i < 8; i += blockDim.x) atomicAdd(&bins[i], mine[i]);
    }"""
    x = np.random.default_rng(0).integers(-(2**31), 2**31, 1000, dtype=np.int32)
    xp = device.xp
    bins, total = xp.zeros(8, np.uint32), xp.zeros(1, np.uint64)
    extremes = xp.asarray(np.array([-(2**31), 2**31 - 1], np.int32))
    args = (xp.asarray(x), bins, extremes, total, np.uint32(x.size))
    device.compile(source).get_function("histogram")((3,), (64,), args, 32)
    np.testing.assert_array_equal(bins, np.bincount(x & 7, minlength=8))
    np.testing.assert_array_equal(extremes, [x.max(), x.min()])
    assert total[0] == 1000 << 33


def test_compare_and_swap_exchange_and_wrapping_increment(device):
    source = """
    extern "C" __global__ void swaps(unsigned* a) {
      unsigned long long* wide = (unsigned long long*)(a + 4);
      atomicInc(&a[0], 4u);
      unsigned seen = 0;
      do { seen = a[1] * 0 + atomicCAS(&a[2], 0u, 0u); }
      while (atomicCAS(&a[2], seen, seen + 2) != seen);
      if (threadIdx.x == 9) atomicExch(&a[3], 7u);
      atomicMax(wide, 1ull << (threadIdx.x + 20));
    }"""
    a = device.xp.zeros(6, np.uint32)
    device.compile(source).get_function("swaps")((1,), (33,), (a,))
    np.testing.assert_array_equal(a[:4], [33 % 5, 0, 66, 7])
    assert a[4:].view(np.uint64)[0] == 1 << 52


LAST_BLOCK = """
extern "C" __global__ void total(const float* x, float* partials, unsigned* ticket, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = x[2 * blockIdx.x] + x[2 * blockIdx.x + 1];
    FENCE;
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 40) {
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += partials[b];
    out[0] = sum;
  }
}
"""


def run_last_block(device, fence):
    xp = device.xp
    x, out = xp.asarray(np.arange(12, dtype=np.float32)), xp.empty(1, np.float32)
    kernel = device.compile(LAST_BLOCK, (f"-DFENCE={fence}",)).get_function("total")
    ticket = xp.zeros(1, np.uint32)
    kernel((6,), (64,), (x, xp.empty(6, np.float32), ticket, out))
    assert ticket[0] == 0
    return out


def test_last_block_sums_up_behind_a_fence(device):
    assert run_last_block(device, "__threadfence()")[0] == 66


def test_last_block_without_the_fence(device):
    with pytest.raises(EmulatorFault, match="block-race") as caught:
        run_last_block(device, "")
    assert (caught.value.array, caught.value.thread) == ("partials", (40, 0, 0))


PUBLISH = """
extern "C" __global__ void publish(float* partials, unsigned* ticket, float* out) {
  const int t = threadIdx.x;
  __shared__ bool last;
  if (t == WRITER) partials[blockIdx.x] = 1;
  BEFORE;
  if (t == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == 1;
  }
  AFTER;
  if (t == READER && blockIdx.x == 0) out[blockIdx.x] = partials[blockIdx.x ^ 1];
}
"""


@pytest.mark.parametrize(
    ("writer", "before", "reader", "after", "right"),
    [
        (40, "__syncthreads()", 0, "", True),
        (40, "", 0, "", False),  # the fence is another thread's
        (1, "if (t < 32) __syncwarp()", 0, "", True),
        (1, "", 0, "", False),
        (0, "", 40, "__syncthreads(); if (!last) return", True),
        (0, "", 40, "", False),  # the ticket was another thread's
        (0, "", 1, "if (t < 32) __syncwarp()", True),
    ],
)
@pytest.mark.parametrize("schedule", ["ascending", "descending"])
def test_what_a_fence_and_a_ticket_order(schedule, writer, before, reader, after, right):
    device = EmulatedDevice(schedule=schedule)
    options = [f"-DWRITER={writer}", f"-DBEFORE={before}", f"-DREADER={reader}", f"-DAFTER={after}"]
    launch = device.compile(PUBLISH, tuple(options)).get_function("publish")
    xp = device.xp
    partials, ticket, out = xp.zeros(2, np.float32), xp.zeros(1, np.uint32), xp.zeros(2, np.float32)

    def run():
        # Block 0 runs second and reads: the one that the ticket would choose.
        with device.only_blocks([1, 0] if schedule == "ascending" else [0, 1]):
            launch((2,), (64,), (partials, ticket, out))

    if right:
        run()
        assert out.tolist() == [1, 0]
    else:
        with pytest.raises(EmulatorFault, match="block-race") as caught:
            run()
        assert caught.value.thread == (reader, 0, 0)
