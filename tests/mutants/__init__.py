"""Planted faults: see README.md."""
