"""Correct kernels raise no alarm under any schedule, and give the same right bits under each."""

import numpy as np
import pytest

from testbed.emulator.device import EmulatedDevice
from testbed.emulator.faults import EmulatorFault
from testbed.emulator.runtime import SCHEDULES

WARP_SUM = """
__device__ __forceinline__ float warp_sum(float v) {
  #pragma unroll
  for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
  return v;
}
"""

ROWS = (
    WARP_SUM
    + """
// Each row less its mean. BARRIER_n can be dropped.
extern "C" __global__ void __launch_bounds__(128)
centre_rows(const float* __restrict__ x, float* __restrict__ out, long long rows, long long n) {
  DYNAMIC_SHARED(float, partial);
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0;
    for (long long j = threadIdx.x; j < n; j += blockDim.x) sum += x[row * n + j];
    sum = warp_sum(sum);
    if (lane == 0) partial[warp] = sum;
    BARRIER_1;
    float total = 0;
    for (unsigned w = 0; w < warps; ++w) total += partial[w];
    for (long long j = threadIdx.x; j < n; j += blockDim.x)
      out[row * n + j] = x[row * n + j] - total / n;
    BARRIER_2;
  }
}
"""
)
WITH_BARRIERS = ("-DBARRIER_1=__syncthreads()", "-DBARRIER_2=__syncthreads()")


def centre_rows(device, x, options=WITH_BARRIERS, out=None):
    if out is None:
        out = device.xp.empty(x.shape, np.float32)
    kernel = device.compile(ROWS, options).get_function("centre_rows")
    kernel((device.multiprocessors,), (128,), (x, out, *map(np.int64, x.shape)), shared_mem=16)
    return out


def on_every_schedule(run):
    """Return what ``run(device)`` gives, which must be the same bits under every schedule."""
    results = []
    for schedule in SCHEDULES:
        for seed in (0, 1):
            results.append(run(EmulatedDevice(schedule=schedule, seed=seed)).tobytes())
    assert len(set(results)) == 1
    return run(EmulatedDevice())


@pytest.mark.parametrize(("rows", "sm"), [(1, 1), (2, 3), (5, 2), (7, 3)])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 127, 128, 129, 300])
def test_row_loop(rows, n, sm):
    x = (np.arange(rows * n, dtype=np.float32) * 37 % 101).reshape(rows, n)

    def run(device):
        device.multiprocessors = sm
        return centre_rows(device, device.xp.asarray(x))

    expected = x - x.astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(on_every_schedule(run), expected, atol=1e-4)


def test_rows_in_place(device):
    # Every element is read in two barrier intervals before it is written.
    x = np.arange(5 * 150, dtype=np.float32).reshape(5, 150)
    on_device = device.xp.asarray(x)
    centre_rows(device, on_device, out=on_device)
    np.testing.assert_array_equal(on_device, x - x.mean(axis=1, keepdims=True))


@pytest.mark.parametrize("dropped", [0, 1])
def test_missing_barrier(device, dropped):
    options = list(WITH_BARRIERS)
    options[dropped] = f"-DBARRIER_{dropped + 1}="
    x = device.xp.asarray(np.ones((5, 40), np.float32))
    with pytest.raises(EmulatorFault) as caught:
        centre_rows(device, x, tuple(options))
    assert caught.value.kind == ("race" if dropped else "uninitialised")
    assert caught.value.array == "dynamic shared memory"


def test_double_buffer_with_one_barrier_per_round(device):
    source = """
    extern "C" __global__ void scan(const float* x, float* out) {
      __shared__ float buffer[2][64];
      int t = threadIdx.x, from = 0;
      buffer[0][t] = x[t];
      for (int d = 1; d < 64; d *= 2, from ^= 1) {
        __syncthreads();
        buffer[from ^ 1][t] = buffer[from][t] + (t >= d ? buffer[from][t - d] : 0);
      }
      out[t] = buffer[from][t];
    }"""
    x = np.arange(64, dtype=np.float32)
    out = device.xp.empty(64, np.float32)
    device.compile(source).get_function("scan")((1,), (64,), (device.xp.asarray(x), out))
    np.testing.assert_array_equal(out, np.cumsum(x))


@pytest.mark.parametrize("count", [40, 63, 64])
def test_shuffles_with_a_partial_last_warp(device, count):
    source = """
    extern "C" __global__ void tail_sum(const int* x, int* out) {
      unsigned t = threadIdx.x, lane = t % 32, left = blockDim.x - (t - lane);
      unsigned lanes = left < 32 ? left : 32;
      unsigned mask = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
      int v = x[t];
      for (unsigned d = 16; d; d /= 2) {
        int other = __shfl_sync(mask, v, lane + d < lanes ? lane + d : lane);
        if (lane + d < lanes) v += other;
      }
      if (lane == 0) out[t / 32] = v;
    }"""
    x = np.arange(count, dtype=np.int32) ** 2
    out = device.xp.empty(2, np.int32)
    device.compile(source).get_function("tail_sum")((1,), (count,), (device.xp.asarray(x), out))
    np.testing.assert_array_equal(out, [x[:32].sum(), x[32:].sum()])


def test_partials_of_one_kernel_summed_by_the_next(device):
    source = """
    extern "C" __global__ void partial(const float* x, float* partials, int n) {
      float sum = 0;
      for (int i = blockIdx.x; i < n; i += gridDim.x) sum += x[i];
      partials[blockIdx.x] = sum;
    }
    extern "C" __global__ void combine(const float* partials, float* out, int count) {
      float sum = 0;
      for (int i = 0; i < count; ++i) sum += partials[i];
      *out = sum;
    }"""
    module = device.compile(source)
    xp = device.xp
    x, partials, out = (
        xp.asarray(np.ones(10, np.float32)),
        xp.empty(4, np.float32),
        xp.empty(1, "f4"),
    )
    module.get_function("partial")((3,), (1,), (x, partials, np.int32(10)))
    combine = module.get_function("combine")
    combine((1,), (1,), (partials, out, np.int32(3)))
    assert out[0] == 10
    with pytest.raises(EmulatorFault, match="uninitialised") as caught:
        combine((1,), (1,), (partials, out, np.int32(4)))
    assert (caught.value.array, caught.value.index) == ("partials", 3)


def test_vectors_of_16_bytes(device):
    source = """
    struct alignas(16) Eight { unsigned short v[8]; };
    extern "C" __global__ void swap_halves(const unsigned short* x, unsigned short* out, int n) {
      for (int i = threadIdx.x; i < n / 8; i += blockDim.x) {
        Eight e = __ldcs((const Eight*)x + i);
        for (int k = 0; k < 4; ++k) {
          unsigned short keep = e.v[k];
          e.v[k] = e.v[7 - k];
          e.v[7 - k] = keep;
        }
        __stcs((Eight*)out + i, e);
      }
      for (int i = n / 8 * 8 + threadIdx.x; i < n; i += blockDim.x) out[i] = x[i];
    }"""
    x = np.arange(43, dtype=np.uint16)
    out = device.xp.empty(43, np.uint16)
    kernel = device.compile(source).get_function("swap_halves")
    kernel((1,), (4,), (device.xp.asarray(x), out, np.int32(43)))
    np.testing.assert_array_equal(out[:40].reshape(5, 8), x[:40].reshape(5, 8)[:, ::-1])
    np.testing.assert_array_equal(out[40:], x[40:])
    # Each vector is one access: 5 of them and 3 single elements, read and written.
    assert device.traffic.accesses == 2 * (5 + 3)
    assert (device.traffic.read, device.traffic.written) == (86, 86)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("space", ["out", "s"])
def test_neighbours_of_any_size_are_no_conflict(device, dtype, space):
    source = f"""
    extern "C" __global__ void neighbours(TYPE* out) {{
      __shared__ TYPE s[64];
      int t = threadIdx.x;
      {space}[t] = t;
      {space}[t] += 1;
      if ({space} != out) out[t] = {space}[t];
    }}"""
    names = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
    out = device.xp.empty(64, dtype)
    options = (f"-DTYPE={names[np.dtype(dtype).itemsize]}",)
    device.compile(source, options).get_function("neighbours")((1,), (64,), (out,))
    np.testing.assert_array_equal(out, np.arange(1, 65))


def test_shared_arrays_of_a_template_and_constant_tables(device):
    source = """
    template <class T> __device__ T reverse(T v) {
      __shared__ T s[32];
      s[threadIdx.x] = v;
      __syncwarp();
      return s[31 - threadIdx.x];
    }
    extern "C" __global__ void both(double* d, float* f) {
      static const int primes[4] = {2, 3, 5, 7};
      d[threadIdx.x] = reverse<double>(threadIdx.x) + primes[threadIdx.x % 4];
      f[threadIdx.x] = reverse<float>(threadIdx.x);
    }"""
    d, f = device.xp.empty(32, np.float64), device.xp.empty(32, np.float32)
    device.compile(source).get_function("both")((2, 1)[1:], (32,), (d, f))
    np.testing.assert_array_equal(d, np.arange(31, -1, -1) + np.resize([2, 3, 5, 7], 32))
    np.testing.assert_array_equal(f, np.arange(31, -1, -1))


def test_barriers_that_count(device):
    source = """
    extern "C" __global__ void votes(const int* x, int* out) {
      int a = __syncthreads_count(x[threadIdx.x] > 0);
      int b = __syncthreads_or(x[threadIdx.x] > 98);
      int c = __syncthreads_and(x[threadIdx.x] < 99);
      out[threadIdx.x] = a * 100 + b * 10 + c;
    }"""
    x = np.arange(100, dtype=np.int32)
    out = device.xp.empty(100, np.int32)
    device.compile(source).get_function("votes")((1,), (100,), (device.xp.asarray(x), out))
    np.testing.assert_array_equal(out, 9910)


SHUFFLES = """
extern "C" __global__ void shuffles(const TYPE* x, TYPE* out, int operand, int width) {
  const unsigned all = 0xffffffffu;
  int t = threadIdx.x;
  out[t] = __shfl_sync(all, x[t], operand + t, width);
  out[32 + t] = __shfl_up_sync(all, x[t], operand, width);
  out[64 + t] = __shfl_down_sync(all, x[t], operand, width);
  out[96 + t] = __shfl_xor_sync(all, x[t], operand, width);
}
"""


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "float"),
        ("float64", "double"),
        ("int32", "int"),
        ("uint64", "unsigned long long"),
    ],
)
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_shuffle_lanes_as_ptx_defines_them(dtype, name, width, device):
    x = np.random.default_rng(1).integers(0, 1 << 30, 32).astype(dtype)
    on_device, out = device.xp.asarray(x), device.xp.empty((4, 32), dtype)
    kernel = device.compile(SHUFFLES, (f"-DTYPE={name}",)).get_function("shuffles")
    lane = np.arange(32)
    first = lane - lane % width
    last = first + width - 1
    for operand in range(32):
        kernel((1,), (32,), (on_device, out, np.int32(operand), np.int32(width)))
        up, down, across = lane - operand, lane + operand, lane ^ operand
        expected = [
            x[first + (operand + lane) % width],
            x[np.where(up < first, lane, up)],
            x[np.where(down > last, lane, down) % 32],
            x[np.where(across > last, lane, across)],
        ]
        np.testing.assert_array_equal(out, expected)


def test_running_ahead_shows_a_missing_trailing_barrier_in_the_values():
    # Atomics throughout, so that the checker stays silent and only the schedule can show it.
    source = """
    extern "C" __global__ void rows(const int* x, int* out) {
      __shared__ int s[2];
      int t = threadIdx.x;
      if (t < 2) s[t] = 0;
      __syncthreads();
      for (int row = 0; row < 4; ++row) {
        if (t % 32 == 0) atomicExch(&s[t / 32], x[2 * row + t / 32]);
        __syncthreads();
        out[row * 64 + t] = atomicAdd(&s[0], 0) + atomicAdd(&s[1], 0);
        if (TRAILING) __syncthreads();
      }
    }"""
    x = np.arange(8, dtype=np.int32) ** 3

    def wrong(schedule, seed, trailing):
        device = EmulatedDevice(schedule=schedule, seed=seed)
        out = device.xp.empty((4, 64), np.int32)
        kernel = device.compile(source, (f"-DTRAILING={trailing}",)).get_function("rows")
        kernel((1,), (64,), (device.xp.asarray(x), out))
        return bool((out != x.reshape(4, 2).sum(axis=1, keepdims=True)).any())

    assert all(wrong("run-ahead", seed, 0) for seed in range(10))
    assert not any(wrong(schedule, seed, 1) for schedule in SCHEDULES for seed in range(3))
