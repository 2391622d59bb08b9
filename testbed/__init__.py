"""What stands in for a GPU where there is none: an emulator of its threads, and its compiler.

Tests, benchmarks and examples import it; it imports none of them.
"""
