// buffers += scale * grads, or buffers = scale * grads, rounded up or down by random bits.
//
// Sources are gradients (dtype -DGRAD), targets 16-bit buffers (-DBUFFER), which may be the gradients
// themselves; with a scale of 0 gradients are left out. Products and sums are rounded to double, then
// by random_rounding.cuh. The further array is none in memory: its addresses are the counters that the
// random bits of elements come from.
// Flags, scale and seed are read on the device. Deterministic: elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "accumulation.cuh"
#include "further_arrays.cuh"
#include "random_rounding.cuh"

struct AccumulateAtRandom : FurtherOp<1> {
    double scale;
    bool fresh;
    u64 key;
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T* buffer) {
        held.source = load<N>(grad);
        held.target = load_unless<N>(fresh, buffer);
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* buffer) {
        Raw<T, N> results;
        const Raw<S, N> source = none_if(scale == 0, held.source);
        const u64 counter = further_of<0>(buffer);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double term = __dmul_rn(to_double(source.at(i)), scale);
            const double sum = __dadd_rn(to_double(held.target.at(i)), term);
            const u32 bits = random_bits(key, counter + i);
            results.put(i, T{rounded_at_random<T>(__double_as_longlong(sum), bits)});
        }
        write<N>(buffer, results);
    }
};

// Each flag is read from its array, or is the number behind it if that is null; so are scale and seed.
extern "C" __global__ void __launch_bounds__(256, 2)
accumulate_at_random(const __grid_constant__ TensorList list, const unsigned char* do_update, u32 updates,
                     const unsigned char* overwrite, u32 overwrites, const double* scale, double number,
                     const u64* seed, u64 seed_number) {
    if (!flag_of(do_update, updates)) return;
    AccumulateAtRandom op;
    const double by = number_of(scale, number);
    op.scale = by == 0 ? 0 : by;  // a product of +0 with it is what is left out
    op.fresh = flag_of(overwrite, overwrites);
    op.key = mixed(seed ? load<1>(seed).at(0) : seed_number);
    if (op.scale == 0 && !op.fresh) return;
    for (u32 chunk = first_warp(); chunk < chunks_of<AccumulateAtRandom>(list); chunk += warps_in_grid())
        walk_with_further<GRAD, BUFFER>(list, chunk, op);
}
