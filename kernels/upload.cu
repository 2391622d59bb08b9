// to = bytes of the host's, which travel in the launch's parameters.
//
// While a stream is captured into a graph nothing else can bring them: a replay would read the host's
// memory again, but the parameters are the graph's own.
//
// -DBYTES: how many travel, a multiple of 8. Launch: a thread for each of `count` times 8 bytes, at
// most BYTES.

#include "dtypes.cuh"

struct Carried { u64 at[BYTES / 8]; };

extern "C" __global__ void __launch_bounds__(256)
upload(const __grid_constant__ Carried from, u64* to, u32 count) {
    const u32 k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k < count) to[k] = from.at[k];
}
