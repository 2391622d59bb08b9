"""Tests of the reader of machine code and of the table made with it."""
