"""Faults that the suite must find: each is a small change of one file."""
