"""Training-loop utilities for people who hold arrays."""
