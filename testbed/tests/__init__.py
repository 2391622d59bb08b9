"""Tests of the testbed: what its machines must notice, refuse and compute."""
