// The list of tensors of one launch, and the loop over it that all list kernels share.
//
// Each tensor is a pair of arrays of one shape, a source and a target, of any dtypes, strides and
// alignment. In place, or if nothing is written, both are the same memory. The list is divided into
// chunks, each of `chunk_bytes` of one tensor (a tensor's last one may be shorter), and a warp
// processes one chunk at a time. So neither one huge tensor nor thousands of tiny ones leave
// multiprocessors idle, and no barrier is needed. The elements of a chunk depend only on the list,
// never on the grid.

#pragma once

#include "packs.cuh"
#include "reductions.cuh"

// One dimension of a tensor that is not a single run without gaps; strides in bytes.
struct Dim { i64 length, source_stride, target_stride; };

struct Tensor {
    u64 source, target;    // addresses
    i64 count;             // elements
    u32 first_chunk;       // the number of chunks of all tensors before it
    u32 first_dim, dims;   // in the list's dims, innermost first; 0 dims: aligned, without gaps
    u32 dtype;             // of both arrays: its number in FOR_EACH_DTYPE
#ifdef UNITS               // unit_list.cuh
    i64 source_step, target_step;  // from a unit to the next, in bytes
    u32 units, first_unit;         // the number of units of all tensors before it
#endif
};

// CAPACITY tensors in the parameter block; if CAPACITY is 0, any number in device memory.
// `_cuda/list_tables.py` has the same layout.
struct TensorList {
    u32 chunk_bytes;       // a multiple of 16 below 2^31, so an int can count within a chunk
    u32 tensors, chunks, unused;
#if CAPACITY
    Dim dim_at[16];
    Tensor at[CAPACITY];
#else
    const Dim* dim_at;
    const Tensor* at;
#endif
};

// Registers of one lane between `fetch` and `finish` of N elements.
template <typename S, typename T, int N> struct Held { Raw<S, N> source; Raw<T, N> target; };

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % WARP); }
__device__ __forceinline__ u32 first_warp() { return blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP; }
__device__ __forceinline__ u32 warps_in_grid() { return gridDim.x * (blockDim.x / WARP); }

__device__ __forceinline__ unsigned char* bytes_of(void* p) { return static_cast<unsigned char*>(p); }
__device__ __forceinline__ const unsigned char* bytes_of(const void* p) { return static_cast<const unsigned char*>(p); }

// N elements in one access. A single element may be misaligned.
template <int N, typename T> __device__ __forceinline__ Raw<T, N> load(const T* from) {
    if constexpr (N == 1) {
        if (reinterpret_cast<u64>(from) % sizeof(T)) {
            Raw<T, 1> value;
            for (u32 i = 0; i < sizeof(T); ++i) bytes_of(&value)[i] = bytes_of(from)[i];
            return value;
        }
    }
    return fetch<N>(from);
}

template <int N, typename T> __device__ __forceinline__ void write(T* to, const Raw<T, N>& value) {
    if constexpr (N == 1) {
        if (reinterpret_cast<u64>(to) % sizeof(T)) {
            for (u32 i = 0; i < sizeof(T); ++i) bytes_of(to)[i] = bytes_of(&value)[i];
            return;
        }
    }
    store<N>(to, value);
}

// A number that is known to the host, or lies in memory, perhaps misaligned.
__device__ __forceinline__ double number_of(const double* array, double number) {
    return array ? load<1>(array).at(0) : number;
}

// The last tensor for which `reached(tensor)` is true, as it is for all before it; compares 32
// candidates at a time. All lanes of a warp must call it alike.
template <typename F> __device__ __forceinline__ u32 last_tensor(const TensorList& list, F reached) {
    u32 low = 0, high = list.tensors;  // it is in [low, high)
    while (high - low > 1) {
        const u32 step = (high - low + WARP - 1) / WARP;
        const u32 probe = low + lane() * step;
        const u32 hits = __ballot_sync(ALL_LANES, probe < high && reached(list.at[probe]));
        EXPECT(hits & 1);  // it is not before the first tensor
        low += step * (__popc(hits) - 1);
        high = min(high, low + step);
    }
    return low;
}

// The tensor that a chunk belongs to.
__device__ __forceinline__ u32 tensor_of(const TensorList& list, u32 chunk) {
    return last_tensor(list, [=](const Tensor& tensor) { return tensor.first_chunk <= chunk; });
}

// The base of what a kernel does with elements. `fetch` only reads; `finish` may write. `rest` comes
// between the turns of a loop over batches or single elements, TURNS of which are the most without it.
struct Op {
    static constexpr int BYTES = 16;  // bytes per access, if the pointers allow it
    static constexpr int BATCH = 4;   // accesses in flight
    __device__ __forceinline__ void rest() {}
};

// The base of those that read the source alone.
struct ReadsSource : Op {
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* source, const T*) {
        held.source = load<N>(source);
    }
};

// And of those that also read the target.
struct ReadsBoth : Op {
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* source, const T* target) {
        held.source = load<N>(source);
        held.target = load<N>(target);
    }
};

constexpr int TURNS = 8;

// True if a lane rests after a turn, in which all lanes took `step` of the `left` elements from its own
// on: if a multiple of TURNS turns is to come. So short loops have no rest.
__device__ __forceinline__ bool is_time_to_rest(int left, int step) {
    return left > step && (left - 1) / step % TURNS == 0;
}

// Finishes what one lane fetched in a batch; the first `count` packs exist, the rest are zeros.
template <typename S, typename T, int N, int B, typename O>
__device__ __forceinline__ void finish_all(O& op, const Held<S, T, N> (&held)[B], const S* source, T* target, int count) {
#pragma unroll
    for (int b = 0; b < B; ++b)
        if (b < count) op.finish(held[b], source + b * WARP * N, target + b * WARP * N);
}

// One warp over `packs` packs of N elements of two runs. All loads of a batch come before its
// first store: the compiler cannot rule out aliasing and would not move them across it.
template <int N, typename S, typename T, typename O>
__device__ __forceinline__ void walk_packs(const S* source, T* target, int packs, O& op) {
    constexpr int STEP = WARP * N;
    source += lane() * N;
    target += lane() * N;
    for (int left = packs - lane(); left > 0; left -= O::BATCH * WARP) {
        const int count = (left + WARP - 1) / WARP;
        Held<S, T, N> held[O::BATCH] = {};
#pragma unroll
        for (int b = 0; b < O::BATCH; ++b)
            if (b < count) op.fetch(held[b], source + b * STEP, target + b * STEP);
        finish_all(op, held, source, target, count);
        if (is_time_to_rest(left, O::BATCH * WARP)) op.rest();
        source += O::BATCH * STEP;
        target += O::BATCH * STEP;
    }
}

// One warp over two runs without gaps: packs from the first boundary to the last, single elements
// before and after. If the two runs are never aligned at once, single elements throughout.
template <typename S, typename T, typename O>
__device__ __forceinline__ void walk_run(const S* source, T* target, int count, O& op) {
    constexpr int WIDER = sizeof(S) > sizeof(T) ? sizeof(S) : sizeof(T);
    constexpr int N = O::BYTES > WIDER ? O::BYTES / WIDER : 1;
    int head = (N - static_cast<int>(reinterpret_cast<u64>(target) / sizeof(T) % N)) % N;
    if (head > count || reinterpret_cast<u64>(source + head) % (N * sizeof(S))) head = count;
    const int packs = (count - head) / N;
    walk_packs<N>(source + head, target + head, packs, op);
    for (int i = lane(); i < count - packs * N; i += WARP) {
        const int at = i < head ? i : i + packs * N;
        Held<S, T, 1> held;
        op.fetch(held, source + at, target + at);
        op.finish(held, source + at, target + at);
        if (is_time_to_rest(count - packs * N - i, WARP)) op.rest();
    }
}

// The quotient; by the much shorter 32-bit division if that is enough.
__device__ __forceinline__ i64 divide(i64 a, i64 b) {
    if (static_cast<u64>(a | b) >> 32) return a / b;
    return static_cast<u32>(a) / static_cast<u32>(b);
}

// The addresses of an element of a tensor that has dims.
struct Place { u64 source, target; };
__device__ __forceinline__ Place place_of(const TensorList& list, const Tensor& tensor, i64 element) {
    Place at = {tensor.source, tensor.target};
    for (u32 d = tensor.first_dim; d < tensor.first_dim + tensor.dims; ++d) {
        const Dim dim = list.dim_at[d];
        EXPECT(dim.length > 0);
        const i64 next = divide(element, dim.length);
        at.source += (element - next * dim.length) * dim.source_stride;
        at.target += (element - next * dim.length) * dim.target_stride;
        element = next;
    }
    return at;
}

// One element by itself, at any address.
template <typename S, typename T, typename O> __device__ __forceinline__ void walk_one(const Place& at, O& op) {
    Held<S, T, 1> held;
    op.fetch(held, reinterpret_cast<const S*>(at.source), reinterpret_cast<T*>(at.target));
    op.finish(held, reinterpret_cast<const S*>(at.source), reinterpret_cast<T*>(at.target));
}

// One warp over `count` elements of a tensor with any strides and alignment, from element `first`
// on.
template <typename S, typename T, typename O>
__device__ __forceinline__ void walk_strided(const TensorList& list, const Tensor& tensor, i64 first, int count, O& op) {
    for (int i = lane(); i < count; i += WARP) {
        walk_one<S, T>(place_of(list, tensor, first + i), op);
        if (is_time_to_rest(count - i, WARP)) op.rest();
    }
}

// The elements of a chunk of a tensor whose target is of T.
struct Span { i64 first; int count; };
template <typename T> __device__ __forceinline__ Span span_of(const TensorList& list, const Tensor& tensor, u32 chunk) {
    const u32 length = list.chunk_bytes / sizeof(T);
    const i64 first = static_cast<i64>(chunk - tensor.first_chunk) * length;
    const int count = static_cast<int>(min(static_cast<i64>(length), tensor.count - first));
    EXPECT(count > 0);
    return {first, count};
}

// One warp over one chunk of a tensor with a source of S and a target of T.
template <typename S, typename T, typename O>
__device__ __forceinline__ void walk_chunk(const TensorList& list, const Tensor& tensor, u32 chunk, O& op) {
    const Span span = span_of<T>(list, tensor, chunk);
    if (tensor.dims) {
        walk_strided<S, T>(list, tensor, span.first, span.count, op);
    } else {
        walk_run(reinterpret_cast<const S*>(tensor.source) + span.first,
                 reinterpret_cast<T*>(tensor.target) + span.first, span.count, op);
    }
}
