"""Gradients of parameters, and their names.

Gradients are what :mod:`gradkit.clipping` takes: one array, any iterable of arrays, or nested
dicts, lists and tuples of them; ``None`` leaves are skipped.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

from gradkit._calls import checks
from gradkit._calls.backend import runs
from gradkit._open import trees
from gradkit._open.arguments import known_framework
from gradkit._open.clipping import rule_of
from gradkit._open.foreign import answers
from gradkit._ranks.collective import NOBODY, Collective
from gradkit._ranks.groups import OverRanks
from gradkit._ranks.norms import RUN_BY_NORMS, Ranks, Wanted, norm_of
from gradkit._typing import (
    FoundInf,
    GradTree,
    HasGrad,
    NonFinite,
    Order,
    Out,
    Replicas,
    Scalar,
    T,
    Tree,
    X,
)

__all__ = ["grads_of", "named_grads_of", "names_of", "per_tensor_norms"]


@overload
def grads_of(
    parameters: Iterable[HasGrad[X]] | Mapping[Any, HasGrad[X]], *, attr: Literal["grad"] = "grad"
) -> list[X]: ...
@overload
def grads_of(parameters: Any, *, attr: str = "grad") -> list[Any]: ...
@answers
def grads_of(parameters: Any, *, attr: str = "grad") -> list[Any]:
    """The gradient of each parameter that has one, in order.

    Parameters
    ----------
    parameters : object with a ``grad`` attribute, or iterable or nested dict/list/tuple of them
        For example ``model.parameters()``; ``None`` leaves are skipped.
    attr : str
        The attribute that holds gradients: "main_grad" where mixed precision keeps them in float32.

    Returns
    -------
    list
        The gradients themselves, not copies; pass it to any function that takes gradients. Errors
        name a gradient by its position here, where parameters without one are left out;
        :func:`named_grads_of` gives names instead.

    Raises
    ------
    TypeError
        A leaf has no such attribute, or none is a parameter; ``attr`` is no attribute's name.
    ValueError
        A parameter occurs twice, as tied weights do in a list that is put together.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np, gradkit
    >>> weights = SimpleNamespace(grad=np.array([3.0, 4.0]))
    >>> frozen = SimpleNamespace(grad=None)
    >>> gradkit.clip_grad_norm(gradkit.grads_of([weights, frozen]), max_norm=1.0)
    array(5.)
    >>> weights.grad
    array([0.6, 0.8])
    """
    return trees.gradients_of(parameters, _attribute(attr))


@overload
def named_grads_of(
    named_parameters: Mapping[str, HasGrad[X]] | Iterable[tuple[str, HasGrad[X]]],
    *,
    attr: Literal["grad"] = "grad",
) -> dict[str, X]: ...
@overload
def named_grads_of(named_parameters: Any, *, attr: str = "grad") -> dict[str, Any]: ...
@answers
def named_grads_of(named_parameters: Any, *, attr: str = "grad") -> dict[str, Any]:
    """The gradient of each named parameter that has one, by name.

    An error about one of them, such as a NaN in it, then has the parameter's name.

    Parameters
    ----------
    named_parameters : iterable of (name, parameter) pairs, or dict of parameters
        For example ``model.named_parameters()``.
    attr : str
        The attribute that holds gradients.

    Returns
    -------
    dict
        The gradients themselves, not copies, in the parameters' order.

    Raises
    ------
    TypeError
        An item is not a pair of a string and an object with such an attribute.
    ValueError
        Two parameters have one name, or one has two names, as tied weights may.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np, gradkit
    >>> scale, frozen = SimpleNamespace(grad=np.array([3.0])), SimpleNamespace(grad=None)
    >>> gradkit.named_grads_of({"scale": scale, "frozen": frozen})
    {'scale': array([3.])}
    """
    pairs = named_parameters.items() if isinstance(named_parameters, dict) else named_parameters
    if not isinstance(pairs, Iterable):
        pairs = (pairs,)  # which is no pair either
    return grads_by_name(map(_named, pairs), "named_parameters", _attribute(attr))


def grads_by_name(pairs: Iterable[tuple[str, Any]], label: str, attr: str) -> dict[str, Any]:
    """The gradient of each parameter that has one; errors name the argument by its label."""
    grads: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, parameter in pairs:
        if name in parameters:
            raise ValueError(f"{label} has two parameters named {name!r}")
        grad = trees.gradient_of(parameter, attr, f"{label}[{name!r}] is")
        parameters[name] = parameter
        if grad is not None:
            grads[name] = grad
    every, names = [*parameters.values()], [*parameters]
    trees.refuse_gradients(every, attr, label)
    trees.refuse_twice(every, label, names)
    return grads


def names_of(grads: Tree) -> list[str]:
    """The name of each gradient, in the order of ``per_tensor_norms(grads, flat=True)``.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        ``None`` leaves have no name, as they have no norm. A generator is used up.

    Returns
    -------
    list of str
        Keys and positions joined by dots: "layers.0.weight". One bare array is "grads".

    Raises
    ------
    TypeError
        A leaf is not an array.
    ValueError
        Keys contain dots, so that two names are the same.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = {"w": np.array([3.0]), "unused": None, "layers": [np.array([4.0])]}
    >>> norms = gradkit.per_tensor_norms(grads, flat=True)
    >>> dict(zip(gradkit.names_of(grads), norms.tolist()))
    {'w': 3.0, 'layers.0': 4.0}
    """
    tree = trees.freeze(grads)
    for keys, leaf in trees.paths(tree):
        known_framework(leaf, trees.expression("grads", keys))  # or it is no gradient
    return trees.dotted_names(tree, "grads")


@overload
def per_tensor_norms(
    grads: T,
    norm_type: Order = 2.0,
    *,
    scale: Scalar = 1.0,
    nonfinite: NonFinite = "propagate",
    group: OverRanks = None,
    replicas: Replicas = 1,
    found_inf: FoundInf = None,
    flat: Literal[False] = False,
    out: Out = None,
) -> T: ...
@overload
def per_tensor_norms(
    grads: GradTree[X],
    norm_type: Order = 2.0,
    *,
    scale: Scalar = 1.0,
    nonfinite: NonFinite = "propagate",
    group: OverRanks = None,
    replicas: Replicas = 1,
    found_inf: FoundInf = None,
    flat: Literal[True],
    out: Out = None,
) -> X: ...
@runs(*RUN_BY_NORMS)
@answers
def per_tensor_norms(
    grads: Any,
    norm_type: Order = 2.0,
    *,
    scale: Scalar = 1.0,
    nonfinite: NonFinite = "propagate",
    group: OverRanks = None,
    replicas: Replicas = 1,
    found_inf: FoundInf = None,
    flat: bool = False,
    out: Out = None,
) -> Any:
    """The p-norm of each gradient, in the caller's own structure: for logging.

    Nothing waits for a device until a norm is looked at, by ``float()`` for example.

    Parameters
    ----------
    grads : array, or iterable or nested dict/list/tuple of arrays
        float16, bfloat16, float32 or float64, of any shape; dtypes may be mixed. Never written.
        They may lie on several devices, as in :func:`grad_norm`.
    norm_type : float
        p: any real number above 0, or infinity.
    scale, nonfinite
        As in :func:`grad_norm`, about the norm of each gradient.
    group, replicas
        As in :func:`grad_norm`: each norm is that of one gradient on all ranks, which have
        gradients of the same names.
    found_inf : bool or floating-point array of one element per gradient, optional
        **Written:** whether an element of that gradient is NaN or infinite, on any rank.
    flat : bool
        Return one 1-D array, in the order of :func:`names_of`: one copy from a GPU.
    out : float64 array of one element per gradient, optional
        Where the norms are written; what is returned are its elements.

    Returns
    -------
    dict, list, tuple or 0-d float64 array, like ``grads``
        A 0-d array in each gradient's place, and ``None`` where ``None`` was.

    Raises
    ------
    TypeError
        A leaf is not a floating-point array; arrays are of two frameworks; ``flat`` is not a bool.
    ValueError
        ``norm_type`` is NaN or not above 0; ``scale`` is a NaN or infinite number.
    NonFiniteNormError
        A norm is not finite and ``nonfinite="raise"``; names the gradients.

    Examples
    --------
    >>> import numpy as np, gradkit
    >>> grads = {"w": np.array([3.0, 4.0]), "unused": None, "b": [np.array([2.0])]}
    >>> gradkit.per_tensor_norms(grads)
    {'w': array(5.), 'unused': None, 'b': [array(2.)]}
    >>> gradkit.per_tensor_norms(grads, flat=True)
    array([5., 2.])
    """
    with NOBODY if group is None else Collective(group) as collective:
        rule, whole = rule_of(norm_type, 0.0, nonfinite), checks.flag(flat, "flat")
        wanted = Wanted("per_tensor_norms", rule, scale, per_tensor=True)
        gradients, norms = norm_of(grads, wanted, Ranks(collective, replicas), found_inf, out)
        return (
            norms
            if whole
            else gradients.rebuilt(gradients.framework.parts(norms, [()] * len(gradients.arrays)))
        )


def _attribute(attr: Any) -> str:
    if isinstance(attr, str) and attr.isidentifier():
        return attr
    raise TypeError(f"attr is {attr!r}; expected an attribute's name, such as 'main_grad'")


def _named(pair: Any) -> tuple[str, Any]:
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str):
        return pair[0], pair[1]
    raise TypeError(
        f"named_parameters holds a {type(pair).__qualname__} that is no pair of a name and a "
        "parameter; pass model.named_parameters() or a dict"
    )
