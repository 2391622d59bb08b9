"""Pytrees of arrays by the paths of their leaves, and what else stands beside them in a call."""

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradkit._backend import Array, Shape
from gradkit._calls import checks
from gradkit.jax._callbacks import ResultShape, call, is_known, varying
from gradkit.jax._compiled import CompiledCall, Compute


def words(seed: Any) -> Any:
    """A seed as JAX holds it, which may have no integers of 64 bits: two words, the lower first."""
    if not isinstance(seed, jax.Array):
        return np.array([checks.seed(seed, "seed")], np.uint64).view(np.uint32)
    checks.shape(seed, (), "seed", "one number")
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(f"seed has dtype {seed.dtype}; accepted: integers")
    upper = seed >> 32 if seed.dtype.itemsize == 8 else jnp.zeros_like(seed)
    return jnp.stack([seed.astype(jnp.uint32), upper.astype(jnp.uint32)])


def flag(value: Any, label: str) -> Any:
    """A bool, or an array of one."""
    if isinstance(value, (jax.Array, np.ndarray)):
        if value.dtype == bool and value.shape == ():
            return value
        kind = f"{value.dtype} of shape {value.shape}"
        raise TypeError(f"{label} must be a bool, or a 0-d bool array, not {kind}")
    return np.array(checks.flag(value, label))


def by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by what leads to them. Dots in keys are escaped: no two are alike."""

    def name(key: Any) -> str:
        plain = jax.tree_util.keystr((key,), simple=True)
        return plain.replace("\\", "\\\\").replace(".", "\\.")

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(map(name, path)): jnp.asarray(leaf) for path, leaf in leaves}


def dotted_names(grads: Any) -> list[str]:
    """The keys and positions of each leaf of a pytree, joined by dots."""
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return [name(path) or "grads" for path, _ in leaves]


def different_names(grads: Any) -> list[str]:
    """The same if no two are alike, else an error."""
    names = dotted_names(grads)
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"grads has two gradients named {name!r}, by keys that contain dots")
    return names


def rebuilt(tree: Any, arrays: dict[str, Any]) -> Any:
    """A pytree like another one, of arrays by the paths of its leaves."""
    return jax.tree.structure(tree).unflatten([arrays[path] for path in by_path(tree)])


def call_on_lists(
    refusal: str,
    compute: Compute,
    written: list[dict[str, Any]],
    read: dict[str, Any],
    numbers: list[Any],
    compiled: CompiledCall | None = None,
) -> list[dict[str, jax.Array]]:
    """New arrays in the places of those of the lists ``written``, by path.

    ``compute`` gets the arrays of the lists that are written, of the one that is read, and the
    numbers. All lists have the paths of the first, and come in its order: pytrees of another type
    may have them in another one. A result depends on the arrays at its own place of all lists, and
    on the numbers.
    """
    paths, count = list(written[0]), len(written[0])
    arrays = [of[path] for of in (*written, read) for path in paths]
    axes = varying(*arrays, *numbers)
    results = [
        ResultShape.like(array, axes - varying(*arrays[k % count :: count], *numbers))
        for k, array in enumerate(arrays[:-count])
    ]
    reuse = {k: k for k in range(len(results))}
    new = call(refusal, compute, results, [*arrays, *numbers], reuse=reuse, compiled=compiled)
    return [dict(zip(paths, new[k : k + count], strict=True)) for k in range(0, len(new), count)]


def without_elements(arrays: dict[str, Any]) -> dict[str, Array]:
    """Arrays of the same shapes behind an axis of length 0."""
    refuse_symbolic_sizes({path: array.shape for path, array in arrays.items()})
    return {path: np.empty((0, *a.shape), a.dtype) for path, a in arrays.items()}


def refuse_symbolic_sizes(shapes: dict[str, Shape]) -> None:
    """Raise if the size of an axis is a name, as in an export."""
    for path, shape in shapes.items():
        if not is_known(shape):
            raise TypeError(
                f"an array at {path or 'the root'!r} has shape {shape}: gradkit.jax's sums, "
                "steps and clips by units take no symbolic sizes; export with fixed sizes"
            )


def shapes_alike(of: str, arrays: dict[str, Any], **others: dict[str, Any]) -> None:
    """Raise if the arrays at one path differ in shape, which those without elements do not tell."""
    for label, beside in others.items():
        for path, array in beside.items():
            if path in arrays:
                name, meaning = (f"{each}[{path!r}]" if path else each for each in (label, of))
                checks.shape(array, arrays[path].shape, name, f"the shape of {meaning}")
