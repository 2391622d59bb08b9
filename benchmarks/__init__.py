"""How fast gradkit is beside its peers; ``python -m benchmarks``, and see README.md."""
