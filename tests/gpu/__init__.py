"""What only a GPU shows, or CuPy on the testbed's driver."""
