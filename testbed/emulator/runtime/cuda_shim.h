// Put in front of a kernel's source by g++ -include: the subset of CUDA C++ that the kernels use.
// Memory accesses need nothing here, since -fsanitize=thread turns each into a call of the runtime.
#pragma once
#include "abi.h"

#define GRADKIT_EMULATED 1

#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
// A static's storage is the block's shared memory: one block runs at a time, or each of a cluster in
// a copy of the kernel's library.
#define __shared__ static
#ifndef EMU_READ_SIGNATURES  // the pass which looks for kernels needs these two words as they are
#define __global__ __attribute__((noinline, visibility("default")))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#endif

#define DYNAMIC_SHARED(T, name) T* name = (T*)emu_dynamic_shared()

#define threadIdx (emu_thread_index())
#define blockIdx (emu_block_index())
#define blockDim (emu_block_dim())
#define gridDim (emu_grid_dim())
static constexpr int warpSize = 32;
typedef __SIZE_TYPE__ size_t;

#define __syncthreads() ((void)emu_barrier(0))
#define __syncthreads_count(p) (emu_barrier((p) != 0))
#define __syncthreads_or(p) (emu_barrier((p) != 0) != 0)
#define __syncthreads_and(p) (emu_barrier((p) == 0) == 0)
#define __threadfence() emu_fence()
#define __threadfence_block() emu_fence()
#define __trap() emu_trap()

#include "shim_cluster.h"
#include "shim_math.h"
#include "shim_vectors.h"
#include "shim_warp.h"
#include "shim_signature.h"
