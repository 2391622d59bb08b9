"""How fast gradkit is compared with other libraries: ``python -m benchmarks``; see README.md."""
