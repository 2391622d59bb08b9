"""Every mutant, and which tests are to kill it."""

from typing import NamedTuple

from tests.mutants import lists, norms, python

# What a file's mutants are run against; the tests of all that use the file.
_TESTS: dict[str, tuple[str, ...]] = {
    "gradkit/_numpy/accumulation.py": ("tests/test_accumulation.py",),
    "gradkit/_numpy/batch_normalization.py": ("tests/test_batch_norm.py",),
    "gradkit/_numpy/blocks.py": (
        "tests/test_batch_norm.py",
        "tests/test_normalization.py",
        "tests/test_clipping.py",
    ),
    "gradkit/_numpy/casts.py": ("tests/test_casts.py",),
    "gradkit/_numpy/clipping.py": ("tests/test_clipping.py", "tests/test_distributed.py"),
    "gradkit/_numpy/normalization.py": ("tests/test_normalization.py",),
    "gradkit/_numpy/tiles.py": ("tests/test_normalization.py", "tests/test_batch_norm.py"),
    "gradkit/clipping.py": ("tests/test_clipping.py", "tests/test_distributed.py"),
    "gradkit/accumulation.py": ("tests/test_accumulation.py", "tests/test_bad_input.py"),
    "gradkit/_call.py": ("tests/test_bad_input.py",),
    "gradkit/_tree.py": ("tests/test_clipping.py", "tests/test_bad_input.py"),
    "gradkit/_gradients.py": ("tests/test_clipping.py", "tests/test_bad_input.py"),
    "gradkit/normalization.py": ("tests/test_normalization.py", "tests/test_batch_norm.py"),
    "gradkit/_memory.py": ("tests/test_clipping.py", "tests/test_bad_input.py"),
    "gradkit/_checks.py": ("tests/test_clipping.py", "tests/test_bad_input.py"),
}
_HOST = "not emulated and not gpu"
_CUDA = "emulated"


class Mutant(NamedTuple):
    """One piece of one file's text, and what it becomes."""

    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]  # that should notice

    @property
    def marker(self) -> str:
        """The backend that a mutant shows on."""
        return _CUDA if self.file.startswith(("kernels/", "gradkit/_cuda/")) else _HOST


MUTANTS = (
    *(Mutant(*row, _TESTS[row[0]]) for row in python.ROWS),
    *(Mutant(*row, lists.TESTS) for row in lists.MUTANTS),
    *(Mutant(*row, norms.TESTS) for row in norms.MUTANTS),
)
