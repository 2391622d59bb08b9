"""The gate on the machine code of gradkit's kernels, and the tables that it compares."""
