"""Tests with the arrays of other frameworks; they run in an environment that has those."""
