"""One suite for every backend: see ``backends.py`` for how a backend joins it."""
