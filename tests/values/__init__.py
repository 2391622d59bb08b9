"""Tests of the values that every public function computes, on every backend."""
