"""Tests around the code: its structure, pages, examples, benchmarks, and a release."""
