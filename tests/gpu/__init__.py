"""Tests that need a GPU, or CuPy on the testbed's driver."""
