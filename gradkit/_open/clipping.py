"""Parts that the clipping functions share: limits, policies, and where results go."""

import math
from collections.abc import Iterable, Iterator
from itertools import compress, repeat
from typing import Any, NamedTuple

import numpy as np

from gradkit import _host
from gradkit._arrays import is_array
from gradkit._backend import FLOAT64, Array, Spec
from gradkit._calls import checks
from gradkit._calls.lists import GradNorm
from gradkit._open import trees
from gradkit._open.arguments import is_scalar
from gradkit._open.gradients import Gradients
from gradkit._open.results import Results
from gradkit._open.several_devices import Twins
from gradkit.errors import NonFiniteNormError

NORM = Spec("the norm", (), FLOAT64)
_ABSENT = {type(None)}


class Rule(NamedTuple):
    """The rule by which a norm is taken and applied. An ``eps`` below 0 is added to the norm."""

    order: float
    eps: float = 0.0
    policy: str = "propagate"
    exact: bool = False  # sums are rounded once; a maximum is anyway


def rule_of(
    norm_type: Any, eps: Any, nonfinite: str, eps_mode: str = "max", *, exact: Any = False
) -> Rule:
    """The numbers of a call, as checked."""
    plain = type(norm_type) is type(eps) is float and norm_type > 0 <= eps < math.inf
    if plain and nonfinite == "propagate" and eps_mode == "max" and exact is False:
        return Rule(norm_type, eps)  # as nearly always
    order, signed = checks.norm_order(norm_type), checks.signed_epsilon(eps, eps_mode)
    exactly = checks.flag(exact, "exact") and not math.isinf(order)
    return Rule(order, signed, policy_of(nonfinite), exactly)


def policy_of(nonfinite: str) -> str:
    """Check ``nonfinite``, the policy for norms that are NaN or infinite."""
    return checks.choice(nonfinite, "nonfinite", ("propagate", "raise", "zero"))


def norm_array(norm: Any) -> Array:
    """An array as it is, a number as a host array, which any library's arrays may meet."""
    if is_array(norm) and not is_scalar(norm):
        return norm
    number = checks.real(norm, "norm")
    if number < 0:
        raise ValueError(f"norm must be at least 0, not {number}")
    return np.array(number)


def raise_if_nonfinite(group: Gradients, norm: Array) -> None:
    """Wait for the norms; if one is not finite, raise an error that names the gradients."""
    norms = group.backend.read(norm).reshape(-1)
    bad = norms[~np.isfinite(norms)]
    if not bad.size:
        return
    largest = group.backend.empty((len(group.arrays),), FLOAT64)
    group.backend.grad_norm(
        GradNorm(grads=group.views, norm_type=np.inf, norm=largest, per_tensor=True)
    )
    culprits = ~np.isfinite(group.backend.read(largest))
    raise NonFiniteNormError(float(bad[0]), tuple(compress(group.names(), culprits)))


def pair_of(out: Any, second: str) -> tuple[Any, Any]:
    """The two parts of ``out``, either of which may be absent."""
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out must be a tuple (clipped, {second}); either may be None")
    return out


class Likes(NamedTuple):
    """New arrays like gradients that compiled code reads: as ``Results``."""

    views: Any  # a table

    def results(self) -> list[Any]:
        """Results, as the caller's arrays."""
        return self.views.arrays


def twins(group: Gradients, out: Any, apart: Iterable[Any] = ()) -> Results | Twins | Likes:
    """Arrays like the gradients: the caller's, or new ones."""
    if out is None and isinstance(group.views, _host.Table):
        new_arrays = group.framework.alike(group.arrays)
        if new_arrays is not None:
            return Likes(group.views.like(new_arrays))
    outs: tuple[Any, ...] | None = None
    labels: tuple[str, ...] = ()
    if out is not None:
        outs, labels = tuple(_in_order_of(group, out)), tuple(trees.names(group.tree, "out[0]"))
    names = group.names() if outs else repeat("")
    named = zip(names, group.views, strict=False)
    specs = [Spec(name, view.shape, view.dtype) for name, view in named]
    return group.twins(outs, specs, labels, apart)


def _in_order_of(group: Gradients, out: Any) -> list[Any]:
    """The arrays of ``out``, each at its gradient's place."""
    tree = trees.in_order_of(group.tree, trees.freeze(out))
    arrays: list[Any] = trees.leaves(tree)
    alike = arrays is tree and group.is_flat and len(arrays) == len(group.arrays)
    if not alike:  # plain lists differ in length at most
        labels = trees.names(tree, "out[0]")
        trees.check_structure(labels, group.names(), "out[0]", "grads")
    return arrays


def apart_from(group: Gradients, clipped: Results | Twins | Likes) -> Iterator[tuple[str, Array]]:
    """Clipped gradients by name, with which norms must share no memory."""
    yield from zip(trees.names(group.tree, "out[0]"), clipped.views, strict=True)
