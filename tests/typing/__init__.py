"""Programs that type checkers read: `make lint` by mypy, `make check-package` by pyright too.

``assert_type`` says what each result is to be. When the tests run them, it does nothing.
"""
