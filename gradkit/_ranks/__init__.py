"""Norms and batches over ranks, and groups of them.

One communication library a file, imported when a caller has an object of it.
"""
