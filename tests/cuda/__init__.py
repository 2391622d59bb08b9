"""The CUDA backend and its kernels, without a GPU."""
