"""The NVRTC checks themselves, on kernels whose needs are known."""
