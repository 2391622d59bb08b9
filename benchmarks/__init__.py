"""How fast gradkit is beside other libraries: ``python -m benchmarks``, and see README.md."""
