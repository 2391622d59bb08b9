"""Runs, compiles and measures CUDA kernels on a machine without a GPU: see README.md."""
