// target = source over a list of pairs of tensors, byte for byte, if a verdict is true.
//
// One list may mix elements of 1, 2, 4 and 8 bytes, whatever they mean: a tensor's number is that of
// a floating dtype of its size, or 4 for single bytes. The verdict is read on the device. If it is
// false, the launch returns before it accesses any tensor. Targets are written with =. Deterministic.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "tensor_list.cuh"

struct Copy : ReadsSource {
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, const T*, T* target) {
        write<N>(target, held.source);
    }
};

// Four single bytes at a time: each takes a register of its own.
struct CopyBytes : Copy {
    static constexpr int BYTES = 4;
};

// With *verdict, or `otherwise` if `verdict` is null.
extern "C" __global__ void __launch_bounds__(256, 3)
keep_if(const __grid_constant__ TensorList list, const unsigned char* verdict, u32 otherwise) {
    if (!(verdict ? *verdict : otherwise)) return;
    Copy op;
    CopyBytes bytes;
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) {
        const Tensor tensor = list.at[tensor_of(list, chunk)];
        switch (tensor.dtype) {
            case 0:  // f16
            case 1: walk_chunk<bf16, bf16>(list, tensor, chunk, op); break;
            case 2: walk_chunk<u32, u32>(list, tensor, chunk, op); break;
            case 3: walk_chunk<u64, u64>(list, tensor, chunk, op); break;
            default: walk_chunk<unsigned char, unsigned char>(list, tensor, chunk, bytes);
        }
    }
}
