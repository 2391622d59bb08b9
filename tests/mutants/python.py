"""Faults in the NumPy reference and in the public layer: (file, old text, new text, what)."""

_CLIP = "gradkit/_numpy/clipping.py"
_NORM = "gradkit/_numpy/normalization.py"
_BATCH = "gradkit/_numpy/batch_normalization.py"
_TILES = "gradkit/_numpy/tiles.py"
_BLOCKS = "gradkit/_numpy/blocks.py"
_CASTS = "gradkit/_numpy/casts.py"
_ADD = "gradkit/_numpy/accumulation.py"
_PUBLIC_CLIP = "gradkit/clipping.py"
_PUBLIC_ADD = "gradkit/accumulation.py"
_CHECKS = "gradkit/_checks.py"
_MEMORY = "gradkit/_memory.py"
_CALL = "gradkit/_call.py"
_TREE = "gradkit/_tree.py"
_GRADIENTS = "gradkit/_gradients.py"

ROWS = (
    (
        _CLIP,
        "np.where(norm <= max_norm,",
        "np.where(norm < max_norm,",
        "coefficient below 1 at the limit",
    ),
    (_CLIP, "np.maximum(norm, eps))", "norm)", "eps ignored"),
    (
        _CLIP,
        "np.where(norm <= max_norm, 1.0, max_norm / np.maximum(norm, eps))",
        "np.fmin(1.0, max_norm / np.maximum(norm, eps))",
        "min that drops NaN",
    ),
    (
        _CLIP,
        "np.maximum(values.max(), -values.min())",
        "np.fmax(np.nanmax(values), -np.nanmin(values))",
        "max that drops NaN",
    ),
    (_CLIP, "np.maximum(values.max(), -values.min())", "values.max()", "max without magnitudes"),
    (
        _CLIP,
        "    if low < total < high:\n",
        "    if True:\n",
        "no scaling where squares leave the range",
    ),
    (
        _CLIP,
        "matched(*arrays, limit=_PIECE) if len(arrays) == 1 else [arrays]",
        "[arrays]",
        "more than the scratch holds",
    ),
    (_CLIP, "[*large, *_cut(medium), ", "[*large, ", "gradients of medium size left out"),
    (
        _CLIP,
        "grad.size <= _SMALL or grad.itemsize == 8",
        "grad.size <= _SMALL",
        "float64 gradients squared in float32",
    ),
    (_CLIP, "    values /= largest\n    np.power", "    np.power", "no scaling of other powers"),
    (
        _CLIP,
        " + _sum(rest * rest)",
        "",
        "the tail of a block lost",
    ),
    (
        _CLIP,
        "float(np.vecdot(runs, runs).sum(dtype=_F64))",
        "float(np.dot(values[:whole], values[:whole]))",
        "float32 where float64",
    ),
    (
        _CLIP,
        "    if any(math.isnan(m) for m, _ in parts):\n        return math.nan\n",
        "",
        "a block's NaN lost",
    ),
    (
        _CLIP,
        "if zero_nonfinite and not np.isfinite(norm):",
        "if zero_nonfinite and np.isnan(norm):",
        "an infinite norm not zeroed",
    ),
    (
        _CLIP,
        "        zero_grad(outs)\n        return",
        "        return",
        "what is not finite not zeroed",
    ),
    (_CLIP, "    if factor == 1.0:\n", "    if factor >= 1.0:\n", "coefficients above 1 ignored"),
    (
        _CLIP,
        "share = np.where(norm == largest, 1.0, norm / largest)",
        "share = norm / largest",
        "0/0 over ranks",
    ),
    (_CLIP, "largest * total ** (1 / norm_type)", "largest * total", "no root over ranks"),
    (
        _NORM,
        "        if self.grad.centred:\n            self.xhat += of_w\n",
        "        self.xhat += of_w * 0 if self.grad.centred else of_w\n",
        "the mean term left out",
    ),
    (
        _NORM,
        "sums[0] = row_sums(self.dy, self.scale)",
        "sums[0] = row_sums(self.dy, None)",
        "scale left out of mean(w)",
    ),
    (
        _NORM,
        "zip(totals, (self.dscale, self.dbias), strict=True)",
        "zip(totals, (self.dbias, self.dscale), strict=True)",
        "dscale and dbias swapped",
    ),
    (
        _NORM,
        "tile.write_dx(tile.row_sums() / self.rows.width)",
        "tile.write_dx(tile.row_sums())",
        "1/N missing",
    ),
    (_NORM, "np.zeros(())) / self.rows.width\n", "np.zeros(()))\n", "1/N missing in long rows"),
    (
        _NORM,
        "np.subtract(tile, rows.column_values(biases[column]), out=out)",
        "np.copyto(out, tile)",
        "bias left in the inverse",
    ),
    (
        _NORM,
        "factor = 1 / np.sqrt(variance + eps)",
        "factor = 1 / np.sqrt(variance)",
        "eps ignored",
    ),
    (_BATCH, "        rest += offset[at]\n", "", "the mean term left out"),
    (
        _BATCH,
        "((dscale, of_product), (dbias, of_dy))",
        "((dbias, of_product), (dscale, of_dy))",
        "dscale and dbias swapped",
    ),
    (
        _BATCH,
        "channels.vector(of_dy / channels.size)",
        "channels.vector(of_dy / (channels.size + 1))",
        "a wrong N",
    ),
    (
        _BATCH,
        "deviation = 1 / np.sqrt(variance + eps)",
        "deviation = 1 / np.sqrt(variance)",
        "eps ignored",
    ),
    (
        _BATCH,
        "            gradient[...] = total\n",
        "            gradient[...] += total\n",
        "+= for =",
    ),
    (_CASTS, " and _all_finite(source)", "", "float16 infinities taken for finite"),
    (_CASTS, "negative < 0xFC00", "negative <= 0xFC00", "a negative infinity taken for finite"),
    (_CASTS, "    half &= -0x8000  # the sign\n", "    half.fill(0)\n", "the sign lost"),
    (
        _CASTS,
        "    np.clip(values, -_BEYOND, _BEYOND, out=values)\n",
        "",
        "float16 wraps around",
    ),
    (
        _TILES,
        "total = (_ones(len(tile) - whole, tile.dtype) @ tile[whole:])",
        "total = 0 * (_ones(len(tile) - whole, tile.dtype) @ tile[whole:])",
        "the rows after the stretches lost",
    ),
    (
        _BLOCKS,
        "yield (slice(start, min(start + step, shape[0])),)",
        "yield (slice(start, min(start + step, shape[0] - 1)),)",
        "the last row lost",
    ),
    (
        _BLOCKS,
        "yield (slice(i, i + 1), *rest)",
        "yield (slice(i, i + 2), *rest)",
        "blocks that overlap",
    ),
    (_ADD, "    if do_update:\n", "    if True:\n", "do_update ignored"),
    (_ADD, "    if not overwrite:\n", "    if True:\n", "+= for ="),
    (
        _ADD,
        "            (grad if grad.nbytes < _MANY_BYTES else _as_bytes(grad)).fill(0)\n",
        "            grad *= 0\n",
        "zeroing by multiplying",
    ),
    (
        _ADD,
        "    if not flags.forc:\n        return array\n",
        "",
        "gaps zeroed, or a copy instead of the array",
    ),
    (
        _ADD,
        "factor = None if scale is None else np.array(scale)",
        "factor = None if scale is None else np.array(np.float32(scale))",
        "a scale rounded to float32",
    ),
    (
        _ADD,
        "np.float32 if direct and grad.itemsize <= buffer.itemsize else np.float64",
        "np.float32",
        "float32 where float64",
    ),
    (
        _BLOCKS,
        "view.shape == shape or view.ndim == len(shape) == 1",
        "view.ndim == len(shape)",
        "a block taken for one of another shape",
    ),
    (
        _TILES,
        "self.plain = all(array.flags.c_contiguous for array in present)",
        "self.plain = all(a.flags.c_contiguous for a in present if a.shape == data.shape)",
        "strided statistics and parameter gradients not written",
    ),
    (_TILES, "            start = stop\n", "", "all rows of long ones taken for the first"),
    (
        _NORM,
        "return mean[:, 0] + correction, np.maximum(second / width - correction**2, 0)",
        "return mean[:, 0], np.maximum(second / width - correction**2, 0)",
        "the mean not corrected",
    ),
    (_NORM, "                        out -= low\n", "", "the mean in one piece"),
    (
        _NORM,
        "lost = eps < _TINY and bool(np.any(variance < _TINY))",
        "lost = False",
        "variances that underflow",
    ),
    (
        _BATCH,
        "variance = np.maximum(of_square - of_deviation**2, 0)",
        "variance = np.maximum(of_square, 0) + of_deviation",
        "the variance not corrected",
    ),
    (
        _CHECKS,
        "    if not number >= 0:  # NaN too\n",
        "    if number < 0:\n",
        "NaN taken for a limit",
    ),
    (_CHECKS, "    if not number > 0:\n", "    if number <= 0:\n", "NaN taken for an order"),
    (
        _CHECKS,
        "    if overlaps_itself(array):\n",
        "    if False:\n",
        "a broadcast view written",
    ),
    (_MEMORY, "        if stride < covered:\n", "        if stride <= 0:\n", "windows written"),
    (
        _MEMORY,
        "        active = [(end, other) for end, other in active if end > low]\n",
        "        active = active[-1:]\n",
        "an overlap with an array further back missed",
    ),
    (
        _MEMORY,
        "high += (length - 1) * stride",
        "high += (length - 2) * stride",
        "an overlap of few bytes missed",
    ),
    (
        _MEMORY,
        '            "strides": array.strides,\n',
        "",
        "an array on a device taken for one without gaps",
    ),
    (
        _CALL,
        "same = other == alias and _memory.same_elements(native, source)",
        "same = other == alias",
        "an output over a part of its input",
    ),
    (
        _CALL,
        "        _checks.writable(native, label)\n",
        "",
        "a read-only output written",
    ),
    (
        _CALL,
        "if array is not None or label not in _OPTIONAL:",
        "if array is not None:",
        "a missing argument not named",
    ),
    (
        _PUBLIC_CLIP,
        'fallible = policy == "raise" or reduce is not None',
        "fallible = False",
        "out written before an error",
    ),
    (
        _PUBLIC_CLIP,
        '    largest = combined(norm, "max")\n',
        '    largest = combined(norm, "sum")\n',
        "a sum over ranks for a maximum",
    ),
    (
        _PUBLIC_CLIP,
        "    group.backend.grad_norm(group.natives, math.inf, largest, per_tensor=True)\n",
        "    group.backend.grad_norm(group.natives, 2.0, largest, per_tensor=True)\n",
        "a large gradient named as not finite",
    ),
    (
        _PUBLIC_ADD,
        "if _memory.overlap(into, addend) and not _memory.same_elements(into, addend):",
        "if _memory.overlap(into, addend):",
        "a buffer not added to itself",
    ),
    (
        _PUBLIC_ADD,
        "        length in (1, wanted) for length",
        "        wanted in (1, length) for length",
        "a gradient that would grow the buffer",
    ),
    (
        _TREE,
        'if hasattr(tree, "_fields"):',
        'if hasattr(tree, "_nothing"):',
        "a namedtuple rebuilt as a tuple",
    ),
    (
        _TREE,
        """            yield from walk(branch, is_leaf, f"{path}[{position}]")""",
        """            yield from walk(branch, is_leaf, f"{path}[{position + 1}]")""",
        "the wrong gradient named",
    ),
    (
        _GRADIENTS,
        "return self.tree if isinstance(grads, Iterator) else grads",
        "return self.tree",
        "a copy of the caller's container returned",
    ),
)
