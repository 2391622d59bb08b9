"""The same values laid out in memory in every way that a view can have."""

import numpy as np


def _gap(shape, dtype):
    """Memory whose every element is NaN, so that whoever reads a gap is found out."""
    return np.full(shape, 1 if dtype.kind in "biu" else np.nan, dtype)


def _filled(view, values):
    view[...] = values
    return view


def _c(values):
    return values.copy(order="C")


def _fortran(values):
    return values.copy(order="F")


def _reversed(values):
    everywhere = (..., *(slice(None, None, -1),) * values.ndim)
    return values[everywhere].copy()[everywhere]


def _stepped(values):
    """Every second element along the last axis."""
    if values.ndim == 0:
        return _c(values)
    room = _gap((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
    return _filled(room[..., ::2], values)


def _padded(values):
    """Rows with room after each."""
    if values.ndim == 0:
        return _c(values)
    room = _gap((*values.shape[:-1], values.shape[-1] + 3), values.dtype)
    return _filled(room[..., : values.shape[-1]], values)


def _rolled(values):
    """Axes in memory in another order than in the shape: channels last, say."""
    if values.ndim < 2:
        return _c(values)
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)


def _every_third(values):
    """Every third, backwards, along the first axis."""
    if values.ndim == 0:
        return _c(values)
    room = _gap((3 * values.shape[0], *values.shape[1:]), values.dtype)
    return _filled(room[::-3], values)


def _misaligned(values):
    """One byte past where the dtype may start."""
    room = np.zeros(values.nbytes + 1, np.uint8)
    return _filled(np.ndarray(values.shape, values.dtype, room, 1), values)


def _offset(values):
    """One element past a wide vector's boundary."""
    room = _gap(values.size + 1, values.dtype)
    return _filled(room[1:].reshape(values.shape), values)


LAYOUTS = {
    "C": _c,
    "Fortran": _fortran,
    "reversed": _reversed,
    "stepped": _stepped,
    "padded": _padded,
    "rolled": _rolled,
    "every third": _every_third,
    "misaligned": _misaligned,
    "offset": _offset,
}
