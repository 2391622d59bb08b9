// Kernels that may start before the kernel in front of them in the stream has ended: programmatic
// dependent launch, compute capability 9.0 and later.

#pragma once

// Returns once all kernels in front of this one have ended and what they wrote can be read.
//
// Every thread of such a kernel calls it first: before it reads or writes global memory, or ends. Then
// the kernel neither sees nor overwrites what is in use, whatever is in front of it; and it ends after
// that, so that what is behind it, which waits for it alone, comes after both.
//
// No kernel says that the next may start (`griddepcontrol.launch_dependents`): without it, that is when
// the last block has ended. Said earlier, it would bring in blocks that only wait, beside blocks that
// work.
__device__ __forceinline__ void wait_for_kernels_in_front() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
