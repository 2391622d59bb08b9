"""Tests of every call: arguments, memory, plans, capture, faults of the host."""
