"""NumPy's own warnings are no part of a result: the reference gives none, whatever it is given."""

import numpy as np
import pytest

import gradkit
from tests.operations import POSITIVE, calls
from tests.problems import LAYER_TYPES
from tests.ranks import together

_, FLOAT64, FLOAT16, *_ = LAYER_TYPES
# Sums and products of these overflow, underflow, or are of infinities of two signs, 0 / 0.
VALUES = {
    "huge": (1.0, -1.0),
    "not finite": (np.inf, -np.inf, np.nan),
    "zero": (0.0, -0.0),
    "tiny": (1.0, 3.0),
    "mixed": (1.0, 1e-5, 1e-300),
}


def hostile(kind):
    """Return a maker of arrays of such values."""

    def make(label, shape, dtype):
        if label == "scale" and kind in ("zero", "tiny", "mixed"):  # which no inverse takes
            return np.ones(shape, dtype)
        limits = np.finfo(dtype) if dtype != "bfloat16" else np.finfo(np.float32)
        unit = {
            "huge": float(limits.max),
            "mixed": float(limits.max),
            "tiny": float(limits.smallest_subnormal),
        }.get(kind, 1.0)
        with np.errstate(all="ignore"):
            found = np.resize(np.array(VALUES[kind]) * unit, shape).astype(dtype)
        return np.abs(found) if label in POSITIVE else found

    return make


@pytest.mark.parametrize("types", [FLOAT64, FLOAT16], ids=["float64", "float16"])
@pytest.mark.parametrize("kind", VALUES)
def test_the_reference_is_silent(kind, types):
    with gradkit.use_cpu_backend("numpy"), np.errstate(all="raise"):
        for call in calls(hostile(kind), types=types).values():
            call()


@pytest.mark.parametrize("norm_type", [1, 2, 3.5, np.inf])
@pytest.mark.parametrize("kind", VALUES)
def test_norms_over_ranks_are_silent(kind, norm_type):
    """Also of scales whose product with a norm overflows, and of a rank without gradients."""
    make = hostile(kind)

    def norm(group):
        grads = [make("grads", (n,), "float64") for n in (3, 4)] * (group.rank > 0)
        with np.errstate(all="raise"):
            return gradkit.grad_norm(grads, norm_type, group=group, scale=1e300, replicas=3)

    with gradkit.use_cpu_backend("numpy"):
        assert not any(isinstance(found, Exception) for found in together(norm, 3))
