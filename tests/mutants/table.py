"""Every mutant, and which tests are to kill it."""

from typing import NamedTuple

from tests.mutants import (
    compiled,
    generated,
    group_norms,
    groups,
    interop,
    lists,
    norms,
    python,
    several_devices,
    spikes,
)

# What a file's mutants are run against; the tests of all that use the file.
_BAD_INPUT = "tests/test_bad_input.py"
_BATCH_NORM = "tests/test_batch_norm.py"
_OVER_RANKS = "tests/test_batch_norm_over_ranks.py"
_CLIPPING = "tests/test_clipping.py"
_SCALED = "tests/test_clipping_scaled.py"
_BLOCKS = "tests/test_block_clipping.py"
_GROUPS = "tests/test_groups.py"
_STREAMED = "tests/test_streamed.py"
_LIST_SUMS = "tests/test_accumulate_grads.py"
_RANKS = (_GROUPS, "tests/processes/test_threads.py")
_NORMALIZATION = "tests/test_normalization.py"
_RUNNING = "tests/test_running_statistics.py"
_RESIDUAL, _STRIDED = "tests/test_residual_norms.py", "tests/test_strided_rows.py"
_HOST_TESTS: dict[str, tuple[str, ...]] = {
    "gradkit/_open/outputs.py": (_BAD_INPUT,),
    "gradkit/_open/given.py": (
        _BAD_INPUT,
        "tests/test_dispatch.py",
        "tests/test_several_devices.py",
    ),
    "gradkit/_calls/checks.py": (_CLIPPING, _BAD_INPUT),
    "gradkit/layer_normalization.py": (_RESIDUAL,),
    "gradkit/rms_normalization.py": (_RESIDUAL,),
    "gradkit/_open/gradients.py": (_CLIPPING, _SCALED, _GROUPS, _BAD_INPUT),
    "gradkit/_open/meeting.py": _RANKS,
    "gradkit/_open/total_norm.py": (
        *(_GROUPS, "tests/test_shards.py", "tests/test_distributed.py", _SCALED),
    ),
    "gradkit/_ranks/threads.py": _RANKS,
    "gradkit/_ranks/torch.py": ("tests/test_shards.py",),
    "gradkit/_ranks/mpi.py": (_GROUPS,),
    "gradkit/distributed.py": ("tests/test_shards.py", _GROUPS),
    "gradkit/_open/memory.py": ("tests/test_overlap.py", _CLIPPING, _BAD_INPUT),
    "gradkit/_numpy/accumulation.py": ("tests/test_accumulation.py", _LIST_SUMS),
    "gradkit/_numpy/zeros.py": ("tests/test_accumulation.py",),
    "gradkit/_numpy/batch_normalization.py": (_BATCH_NORM,),
    "gradkit/_open/signatures.py": ("tests/test_signatures.py", _BAD_INPUT),
    "gradkit/_numpy/blocks.py": (_BATCH_NORM, _NORMALIZATION, _CLIPPING),
    "gradkit/_numpy/channels.py": (_BATCH_NORM, _STREAMED),
    "gradkit/_numpy/moments.py": (_NORMALIZATION, "tests/test_group_norm.py", _BATCH_NORM),
    "gradkit/_numpy/scratch.py": ("tests/test_threads.py",),
    "gradkit/_numpy/tuning.py": (_NORMALIZATION,),
    "gradkit/_numpy/sums.py": (_NORMALIZATION, _BATCH_NORM),
    "gradkit/_numpy/threads.py": ("tests/test_threads.py",),
    "gradkit/batch_normalization.py": (_RUNNING, _OVER_RANKS, _BAD_INPUT),
    "gradkit/split_batch_normalization.py": (_OVER_RANKS,),
    "gradkit/_open/batch_norms.py": ("tests/test_signatures.py", _BATCH_NORM),
    "gradkit/_open/batch_of_ranks.py": (_OVER_RANKS,),
    "gradkit/_numpy/split_batch_normalization.py": (_OVER_RANKS,),
    "gradkit/_numpy/running_statistics.py": (_RUNNING,),
    "gradkit/_numpy/inference_batch_normalization.py": ("tests/test_batch_norm_inference.py",),
    "gradkit/_open/call.py": (_BAD_INPUT,),
    "gradkit/_cuda/cudnn/batch_normalization.py": ("tests/cudnn/test_launcher.py",),
    "gradkit/_numpy/casts.py": ("tests/test_casts.py",),
    "gradkit/_numpy/clipping.py": (_CLIPPING, _SCALED, _GROUPS, "tests/test_distributed.py"),
    "gradkit/_numpy/row_norms.py": (_NORMALIZATION, _RESIDUAL, _STRIDED),
    "gradkit/_numpy/tiles.py": (_NORMALIZATION, _BATCH_NORM, _RESIDUAL, _STRIDED, _STREAMED),
    "gradkit/_open/trees.py": ("tests/test_gradients.py", _CLIPPING, _BLOCKS, _BAD_INPUT),
    "gradkit/_open/clipping.py": (_CLIPPING, _BAD_INPUT),
    "gradkit/_numpy/block_clipping.py": (_BLOCKS,),
    "gradkit/block_clipping.py": (_BLOCKS,),
    "gradkit/accumulation.py": ("tests/test_accumulation.py", _LIST_SUMS, _BAD_INPUT),
    "gradkit/gradients.py": ("tests/test_gradients.py",),
    "gradkit/clipping.py": (_CLIPPING, _SCALED, "tests/test_distributed.py"),
    "gradkit/_open/norms.py": (_BAD_INPUT,),
    "gradkit/_cuda/batch_normalization.py": ("tests/cudnn/test_engines.py",),
    "gradkit/_cuda/cudnn/engines.py": ("tests/cudnn/test_engines.py",),
    "gradkit/_open/engines.py": (_OVER_RANKS,),
    "gradkit/_arrays/cuda.py": ("tests/interop/test_devices.py", "tests/test_cupy_device.py"),
    "gradkit/_arrays/cupy.py": ("tests/test_cupy_device.py",),
}
# The kernels that work on lists of tensors.
_LISTS = (
    *("accumulat", "clip_", "coefficients", "norm", "products", "scal", "tensor", "unit", "zero"),
)


class Mutant(NamedTuple):
    """One piece of one file's text, and what it becomes."""

    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]  # that should notice
    compiled: bool = False  # whether it shows in NVRTC's code alone

    @property
    def name(self) -> str:
        """What no other mutant is called."""
        return f"{self.file}: {self.what}"

    @property
    def interop(self) -> bool:
        """Whether it takes an environment with PyTorch and JAX."""
        return self.file.startswith(("gradkit/torch/", "gradkit/jax/"))

    @property
    def marker(self) -> str:
        """The backend that a mutant shows on, by its file or as its description says."""
        if self.interop:
            return "interop"
        if self.compiled:
            return "ptx"
        on_devices = *groups.ON_DEVICES, several_devices.SHARES
        cuda = self.file.startswith(("kernels/", "gradkit/_cuda/", *on_devices))
        cuda |= "on the device" in self.what
        return "(emulated or cuda)" if cuda else "not emulated and not gpu"


def _compiled(file: str, old: str, new: str, what: str, functions: tuple[str, ...]) -> Mutant:
    golden = "tests/test_golden.py::test_a_few_bits[ptx-{}]"
    tests = tuple(name if "::" in name else golden.format(name) for name in functions)
    return Mutant(file, old, new, what, tests, compiled=True)


def _generated(file: str, old: str, new: str, what: str) -> Mutant:
    if file == "kernels/spike_guard.cu":
        return Mutant(file, old, new, what, spikes.TESTS)
    if file == groups.KERNEL:
        return Mutant(file, old, new, what, groups.TESTS)
    if file.startswith("kernels/group"):
        wide = what.startswith("int for i64")
        return Mutant(file, old, new, what, norms.WIDE_TESTS if wide else group_norms.TESTS)
    family = lists if file.startswith(tuple(f"kernels/{name}" for name in _LISTS)) else norms
    # What is too narrow shows where much is counted, and nowhere else.
    wide = what.startswith("int for i64")
    return Mutant(file, old, new, what, family.WIDE_TESTS if wide else family.TESTS)


def _of_group_norms(file: str, old: str, new: str, what: str) -> Mutant:
    more = {
        "gradkit/_open/group_norms.py": (_BAD_INPUT,),
        "gradkit/_numpy/group_normalization.py": (*group_norms.TESTS, "tests/test_memory.py"),
    }
    return Mutant(file, old, new, what, more.get(file, group_norms.TESTS))


MUTANTS = (
    *(_generated(*row) for row in generated.rows()),
    *(Mutant(*row, norms.TESTS) for row in norms.MUTANTS),
    *(Mutant(*row, norms.STARTUP_TESTS) for row in norms.STARTUP_MUTANTS),
    *(_of_group_norms(*row) for row in group_norms.MUTANTS),
    *(Mutant(*row, lists.TESTS) for row in lists.MUTANTS),
    *(Mutant(*row, spikes.TESTS) for row in spikes.MUTANTS),
    *(Mutant(*row, groups.TESTS) for row in groups.MUTANTS),
    *(Mutant(*row, several_devices.TESTS) for row in several_devices.MUTANTS),
    *(Mutant(*row, _HOST_TESTS[row[0]]) for row in python.ROWS),
    *(_compiled(*row) for row in compiled.ROWS),
    *(Mutant(*row) for row in interop.ROWS),
)
