"""Tests of what the emulator must notice, refuse and compute."""
