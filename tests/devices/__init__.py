"""gradkit on devices that need no GPU: arrays on the testbed's devices, and libraries kept idle.

Tests and benchmarks import it; it imports neither.
"""
