"""Tests of the reader of machine code, and of the tables made with it."""
