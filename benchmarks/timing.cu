// Kernels that the GPU's timer launches around a timed call: see places.Cuda.

// Reads `count` packs, so that the L2 cache holds nothing else. They are zeros, so nothing is
// written, but the compiler cannot know that.
extern "C" __global__ void evict(const float4* from, long long count, float* out) {
    float sum = 0;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const float4 pack = from[i];
        sum += pack.x + pack.y + pack.z + pack.w;
    }
    if (sum > 0) *out = sum;
}

// Keeps the stream busy for `cycles` cycles of a multiprocessor's clock.
extern "C" __global__ void hold(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}

// A kernel that does nothing: the cost of a launch.
extern "C" __global__ void nothing(float* a, float* b, long long n) {}
