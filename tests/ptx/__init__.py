"""gradkit's kernels on the PTX machine: what of them has passed, and what no test reaches."""
