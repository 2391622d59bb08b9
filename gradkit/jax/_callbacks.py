"""Calls of gradkit by XLA: on its own buffers, once for each example of a ``vmap``.

On a CPU it calls compiled code where there is a call of that which does the same. All else is a
callback in Python. What that does must not call JAX, which would wait for itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradkit._arrays import cuda
from gradkit._arrays.dlpack import DLPack, device_of
from gradkit._backend import Array, Shape
from gradkit._numpy import floating_point
from gradkit.jax._compiled import CompiledCall, Compute, call_of_xla

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # JAX 0.6.0
    buffer_callback = None
try:
    from jax.sharding import reshard as _reshard
except ImportError:
    from jax.experimental.shard import reshard as _reshard

_DLPACK = DLPack()
_CPU = 1  # kDLCPU


def _refuse(primals: Any, tangents: Any, *, refusal: str) -> Any:  # noqa: ARG001
    raise TypeError(f"gradkit.jax.{refusal}")


# The same array, by which nobody differentiates. A custom rule does not outlive the first
# derivative of a loop: what JAX then differentiates is what the rule stood before.
_undifferentiated = Primitive("gradkit_undifferentiated")
_undifferentiated.def_impl(lambda array, **_: array)
_undifferentiated.def_abstract_eval(lambda array, **_: array)
ad.primitive_jvps[_undifferentiated] = _refuse
batching.defvectorized(_undifferentiated)
mlir.register_lowering(_undifferentiated, lambda _, array, **__: [array])


class ResultShape(NamedTuple):
    """A result of a callback.

    ``same_on``: axes of devices on all of which it is the same. ``sharding``: how it is spread over
    a mesh on which that is a part of its type.
    """

    shape: Shape
    dtype: np.dtype[Any]
    same_on: frozenset[Any] = frozenset()
    sharding: Any = None

    @classmethod
    def like(cls, array: Any, same_on: frozenset[Any] = frozenset()) -> "ResultShape":
        """A result of an array's shape and dtype, spread as that is."""
        return cls(array.shape, array.dtype, same_on, sharding_of(array))


def call(
    refusal: str,
    compute: Compute,
    results: Sequence[ResultShape],
    operands: Sequence[Any],
    *,
    reuse: Mapping[int, int] | None = None,
    shared: Sequence[int] | None = None,
    compiled: CompiledCall | None = None,
) -> list[jax.Array]:
    """Return the arrays that ``compute`` writes, as JAX's.

    ``reuse``: the results that begin as the operand of that number, whose memory they take if
    nobody else needs it. ``shared``: ``compute`` does all examples of a ``vmap`` at once, which are
    further axes in front, if only other operands differ between examples. By default it does one.
    ``refusal``: what is said if the results are differentiated. ``compiled``: does the same.
    """
    present = [k for k, operand in enumerate(operands) if operand is not None]
    whole = whole_on(*operands)  # XLA knows nothing of what calls do with parts
    arrays = [place(operands[k], whole) for k in present]
    aliases = {present.index(k): result for k, result in (reuse or {}).items()}
    ndim = arrays[0].ndim
    alike = None if shared is None else {present.index(k) for k in shared if k in present}
    one = compute if len(arrays) == len(operands) else _among(compute, present, len(operands))

    def run(outs: list[Array], ins: list[Array]) -> None:
        if ins[0].ndim == ndim:
            one(outs, ins)
        else:
            _for_examples(one, outs, ins, ins[0].ndim - ndim, alike)

    shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    # An operand that a result takes the memory of must have its shape under vmap too.
    how = {
        "vmap_method": "broadcast_all" if aliases else "expand_dims",
        "input_output_aliases": aliases or None,
    }
    through = _through_copies if buffer_callback is None else _through_buffers

    axes = varying(*arrays)

    def spread(made: Sequence[Any]) -> list[Any]:
        return [vary(each, axes - kind.same_on) for each, kind in zip(made, results, strict=True)]

    def in_python(*arguments: Any) -> Any:
        return spread(through(run, shapes, arguments, how))

    fixed = [_undifferentiated.bind(array, refusal=refusal) for array in arrays]
    if compiled is None:
        made = in_python(*fixed)
    else:
        by_itself = call_of_xla(compiled, shapes, arrays, how)
        each = {"cpu": lambda *arguments: spread(by_itself(*arguments)), "default": in_python}
        made = jax.lax.platform_dependent(*fixed, **each)
    return [place(one, kind.sharding or whole) for one, kind in zip(made, results, strict=True)]


def _among(compute: Compute, present: list[int], count: int) -> Compute:
    """``compute``, given the operands that there are, which stand at the places ``present``."""

    def one(outs: list[Array], ins: Any) -> None:
        every: list[Array | None] = [None] * count
        for k, operand in zip(present, ins, strict=True):
            every[k] = operand
        compute(outs, every)

    return one


def _for_examples(
    compute: Compute, outs: list[Array], ins: list[Array], depth: int, shared: set[int] | None
) -> None:
    """Call ``compute`` on each example; the first ``depth`` axes of all arrays count them."""
    lead = outs[0].shape[:depth]
    ones = (1,) * depth
    wanted = [ones if shared and k in shared else lead for k in range(len(ins))]
    if shared is not None and [a.shape[:depth] for a in ins] == wanted:
        compute(outs, [a[(0,) * depth] if k in shared else a for k, a in enumerate(ins)])
        return
    for example in np.ndindex(lead):
        inputs = [
            a[(*(0 if n == 1 else i for i, n in zip(example, a.shape, strict=False)), ...)]
            for a in ins
        ]
        compute([a[(*example, ...)] for a in outs], inputs)


def _through_buffers(run: Any, shapes: list[Any], arguments: Any, how: dict[str, Any]) -> Any:
    def callback(context: Any, outs: Any, *ins: Any) -> None:
        kind, device = device_of(outs[0])
        if kind == _CPU:
            arrays = [b.__array__() for b in outs], [b.__array__() for b in ins]
            # XLA flushes subnormal numbers to zero on its threads.
            floating_point.within(floating_point.DEFAULT, run, *arrays)
            return
        pool = cuda.cupy().get_default_memory_pool()
        with cuda.on_stream(device, context.stream, pool.malloc):
            run(*([_DLPACK.view(b, write=False) for b in each] for each in (outs, ins)))

    return buffer_callback(callback, shapes, **how)(*arguments)


def _through_copies(run: Any, shapes: list[Any], arguments: Any, how: dict[str, Any]) -> Any:
    ndim = arguments[0].ndim

    def callback(*ins: Any) -> list[Array]:
        ins = tuple(map(np.asarray, ins))
        depth = ins[0].ndim - ndim
        lead = np.broadcast_shapes(*(a.shape[:depth] for a in ins))
        outs = [np.empty(lead + result.shape, result.dtype) for result in shapes]
        for operand, result in (how["input_output_aliases"] or {}).items():
            outs[result][...] = ins[operand]
        floating_point.within(floating_point.DEFAULT, run, outs, list(ins))
        return outs

    return jax.pure_callback(callback, shapes, *arguments, vmap_method=how["vmap_method"])


def is_known(shape: Shape) -> bool:
    """True if all sizes are numbers, and none is a name, as in an export."""
    return all(isinstance(size, int) for size in shape)


def axes_of(axis_name: Any) -> frozenset[Any]:
    """The names of axes of devices; none for ``None``."""
    if axis_name is None:
        return frozenset()
    return frozenset(axis_name if isinstance(axis_name, tuple) else (axis_name,))


def sharding_of(value: Any) -> Any:
    """Return the sharding of a value over a mesh, if its type says one; else ``None``.

    It does if axes of the mesh are explicit, as ``jax.make_mesh`` makes them. A partial sum on each
    device is taken for the sum.
    """
    sharding = getattr(jax.typeof(value), "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, P(*getattr(sharding.spec, "partitions", sharding.spec)))


def place(value: Any, sharding: Any) -> Any:
    """The same value, spread like one whose ``sharding_of`` this is."""
    return value if sharding is None else _reshard(value, sharding)


def place_alike(*values: Any) -> list[Any]:
    """All values, spread like the first."""
    sharding = None if values[0] is None else sharding_of(values[0])
    return [None if value is None else place(value, sharding) for value in values]


def whole_on(*values: Any) -> Any:
    """The sharding of what is whole on each device of these values' mesh, if types have one."""
    for value in values:
        sharding = None if value is None else sharding_of(value)
        if sharding is not None:
            return NamedSharding(sharding.mesh, P())
    return None


def rows_of_all(value: Any, axis_name: Any) -> jax.Array:
    """Each device's numbers, a row of each."""
    if not isinstance(axis_name, tuple):
        return jax.lax.all_gather(value, axis_name)
    # JAX does not gather over several axes of a vmap.
    is_here = jnp.arange(jax.lax.psum(1, axis_name)) == jax.lax.axis_index(axis_name)
    is_here = is_here.reshape(-1, *[1] * value.ndim)
    return jax.lax.psum(jnp.where(is_here, value, 0), axis_name)


def varying(*values: Any) -> frozenset[Any]:
    """Over which axes of a ``shard_map`` values differ between devices, as JAX has inferred."""
    axes: frozenset[Any] = frozenset()
    for value in values:
        if value is not None:
            kind = jax.typeof(value)
            manual = getattr(kind, "mat", None)  # before JAX 0.10, .vma
            axes |= frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)
    return axes


def vary(value: Any, axes: frozenset[Any]) -> Any:
    """The same value, as one that differs over these axes at least."""
    missing = tuple(sorted(axes - varying(value), key=str))
    if not missing:
        return value
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(value, missing, to="varying")
    return jax.lax.pvary(value, missing)


def vary_alike(*values: Any) -> list[Any]:
    """All values as ones that differ over the same axes; the gradient of a copy is then a sum."""
    axes = varying(*values)
    return [None if value is None else vary(value, axes) for value in values]
