"""Speed of gradkit compared with other libraries: ``python -m benchmarks``; see README.md."""
