"""The CPU backends: compiled code, threads, forks."""
