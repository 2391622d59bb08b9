"""Faults in the NumPy reference and in the public layer: (file, old text, new text, what)."""

_CLIP = "gradkit/_numpy/clipping.py"
_NORM = "gradkit/_numpy/row_norms.py"
_BATCH = "gradkit/_numpy/batch_normalization.py"
_TILES = "gradkit/_numpy/tiles.py"
_BLOCKS = "gradkit/_numpy/blocks.py"
_CASTS = "gradkit/_numpy/casts.py"
_ADD = "gradkit/_numpy/accumulation.py"
_PUBLIC_CLIP = "gradkit/clipping.py"
_PUBLIC_ADD = "gradkit/accumulation.py"
_CHECKS = "gradkit/_arguments/checks.py"
_MEMORY = "gradkit/_arguments/memory.py"
_CALL = "gradkit/_arguments/outputs.py"
_NAMED = "gradkit/gradients.py"
_TREE = "gradkit/_arguments/trees.py"
_GRADIENTS = "gradkit/_arguments/gradients.py"
_SIGNATURES = "gradkit/_arguments/signatures.py"
_NORM_ARGUMENTS = "gradkit/_arguments/norms.py"
_CHANNELS = "gradkit/_numpy/channels.py"
_SUMS = "gradkit/_numpy/sums.py"
_SCRATCH = "gradkit/_numpy/scratch.py"
_THREADS = "gradkit/_numpy/threads.py"
_PUBLIC_BATCH = "gradkit/batch_normalization.py"
_ENGINES = "gradkit/_cuda/batch_normalization.py"
_STREAMS = "gradkit/_frameworks/cuda.py"

ROWS = (
    (
        _CLIP,
        "    if norm <= max_norm:\n        return 1.0\n",
        "    if norm < max_norm:\n        return 1.0\n",
        "coefficient below 1 at the limit",
    ),
    (_CLIP, "else max_norm / max(norm, eps)", "else max_norm / norm", "eps ignored"),
    (
        _CLIP,
        "else max_norm / max(norm, eps)",
        "else max_norm / max(eps, norm)",
        "min that drops NaN",
    ),
    (
        _CLIP,
        "return math.nan if max_norm < 0 else",
        "return",
        "gradients turned round by a negative limit",
    ),
    (
        _CLIP,
        "by = abs(float(scale))",
        "by = float(scale)",
        "a negative norm",
    ),
    (
        _CLIP,
        "return largest * scale * root",
        "return largest * root * scale",
        "a norm that overflows before it is scaled",
    ),
    (
        _CLIP,
        "math.isfinite(m) and math.isfinite(s) for m, s in parts",
        "math.isfinite(m * s) for m, s in parts",
        "a norm that overflows taken for infinite elements",
    ),
    (
        _CLIP,
        "coefficient * by if coefficient else coefficient",
        "coefficient * by",
        "0 times an infinite scale",
    ),
    (
        _CLIP,
        "not (math.isfinite(value) and math.isfinite(by))",
        "not math.isfinite(value)",
        "a scale that is not finite, with a norm that is",
    ),
    (
        _PUBLIC_CLIP,
        'return checks.finite(factor, "scale") if isinstance(factor, float) else factor',
        "return factor",
        "a scale that is not finite accepted",
    ),
    (
        _PUBLIC_CLIP,
        'found = _combined(group, found, "max", reduce)',
        "found = found",
        "a flag of this rank alone",
    ),
    (
        _PUBLIC_CLIP,
        "            if not isinstance(by, float):\n                _raise_if_nonfinite(group, by)\n",
        "",
        "a scale on the device that is not finite not raised",
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
        "grad.size <= tuning.SMALL_GRADIENT or grad.itemsize == 8",
        "grad.size <= tuning.SMALL_GRADIENT",
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
        "    if any(math.isnan(m) for m, _ in parts):\n        return math.nan, 1.0\n",
        "",
        "a block's NaN lost",
    ),
    (
        _CLIP,
        "if zero_nonfinite and not (math.isfinite(value) and math.isfinite(by)):",
        "if zero_nonfinite and math.isnan(value):",
        "an infinite norm not zeroed",
    ),
    (
        _CLIP,
        "        zero_grad(outs)\n",
        "        pass\n",
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
        "np.add(xhat, rows.row_values(mean_of_w), xhat)",
        "np.add(xhat, 0 * rows.row_values(mean_of_w), xhat)",
        "the mean term left out",
    ),
    (
        _NORM,
        "of_w = row_sums(self.dy, self.scale)",
        "of_w = row_sums(self.dy, None)",
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
        "        of_product /= self.rows.divisor\n",
        "",
        "1/N missing",
    ),
    (_NORM, "np.zeros(())) / self.rows.divisor\n", "np.zeros(()))\n", "1/N missing in long rows"),
    (
        _NORM,
        "np.subtract(tile, rows.column_values(bias[column]), out=out)",
        "np.copyto(out, tile)",
        "bias left in the inverse",
    ),
    (
        _NORM,
        "inv_std = 1 / np.sqrt(variance + self.eps)",
        "inv_std = 1 / np.sqrt(variance)",
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
        "exact = 1 / np.sqrt(variance + eps)",
        "exact = 1 / np.sqrt(variance)",
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
        _SUMS,
        "rest = _ones(len(tile) - whole, tile.dtype) @ tile[whole:]",
        "rest = 0 * (_ones(len(tile) - whole, tile.dtype) @ tile[whole:])",
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
    (_ADD, "if do_update else ()", "", "do_update ignored by a list"),
    (_ADD, "        if not overwrite:\n", "        if True:\n", "+= for = in a list"),
    (_ADD, "None if factor == 1 else factor", "None", "a list's scale ignored"),
    (_ADD, "store(term, total, other)", "store(term + total, total, other)", "products added"),
    (
        _PUBLIC_ADD,
        "own = k == other and memory",
        "own = memory",
        "another buffer's elements read while they are written",
    ),
    (
        _PUBLIC_ADD,
        "        if addend.shape != into.shape:\n",
        "        if False:\n",
        "a gradient of another shape",
    ),
    (_PUBLIC_ADD, " or not flat:", ":", "gradients beside buffers of other names"),
    (
        "gradkit/_numpy/zeros.py",
        "            (grad if grad.nbytes < tuning.FILLED_AS_BYTES else _as_bytes(grad)).fill(0)\n",
        "            grad *= 0\n",
        "zeroing by multiplying",
    ),
    (
        "gradkit/_numpy/zeros.py",
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
        "_F32 if direct and grad.itemsize <= buffer.itemsize else _F64",
        "_F32",
        "float32 where float64",
    ),
    (
        _BLOCKS,
        "block.shape == shape or block.ndim == len(shape) == 1",
        "block.ndim == len(shape)",
        "a block taken for one of another shape",
    ),
    (
        _TILES,
        "contiguous = contiguous and flags.c_contiguous",
        "contiguous = contiguous and (flags.c_contiguous or array.shape != shape)",
        "strided statistics and parameter gradients not written",
    ),
    (_TILES, "            start = stop\n", "", "all rows of long ones taken for the first"),
    (
        _NORM,
        "return mean[:, 0] + correction, np.maximum(second / width - correction**2, 0)",
        "return mean[:, 0], np.maximum(second / width - correction**2, 0)",
        "the mean not corrected",
    ),
    (
        _NORM,
        "            out -= rows.row_values(mean - high[:, 0])\n",
        "",
        "the mean in one piece",
    ),
    (
        _NORM,
        "lost = self.eps < tuning.TINY_VARIANCE and bool(np.any(variance < tuning.TINY_VARIANCE))",
        "lost = False",
        "variances that underflow",
    ),
    (
        _CHANNELS,
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
        _MEMORY,
        "accumulate((high for _, high, _ in ranges), max)",
        "high for _, high, _ in ranges",
        "an output inside a long input missed",
    ),
    (
        _MEMORY,
        "    for position, array in enumerate(written):",
        "    return\n    for position, array in enumerate(written):",
        "outputs beside many inputs not looked at",
    ),
    (
        _CALL,
        "allowed = source is may_be and memory.same_elements(backend, view, source)",
        "allowed = source is may_be",
        "an output over a part of its input",
    ),
    (
        _CALL,
        "        checks.writable(view, label)\n",
        "",
        "a read-only output written",
    ),
    (
        _SIGNATURES,
        "optional=label in given._field_defaults",
        "optional=True",
        "a missing argument not named",
    ),
    (
        _PUBLIC_CLIP,
        "own = group.backend.empty(norm.shape, _FLOAT64)\n",
        "own = norm\n",
        "out written before an error",
    ),
    (
        _PUBLIC_CLIP,
        '    largest = _combined(group, norm, "max", reduce)\n',
        '    largest = _combined(group, norm, "sum", reduce)\n',
        "a sum over ranks for a maximum",
    ),
    (
        _PUBLIC_CLIP,
        "    group.backend.grad_norm(group.views, math.inf, largest, per_tensor=True)\n",
        "    group.backend.grad_norm(group.views, 2.0, largest, per_tensor=True)\n",
        "a large gradient named as not finite",
    ),
    (
        _PUBLIC_ADD,
        "not memory.same_elements(\n        call.backend, into, addend\n    ):",
        "True:",
        "a buffer not added to itself",
    ),
    (
        _PUBLIC_ADD,
        "        length not in (1, wanted)\n",
        "        wanted not in (1, length)\n",
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
        "yield from paths(branch, is_leaf, (*keys, position))",
        "yield from paths(branch, is_leaf, (*keys, position + 1))",
        "the wrong gradient named",
    ),
    (
        _TREE,
        "return [grad for grad in map(attrgetter(attr), parameters) if grad is not None]",
        "return [grad for grad in map(attrgetter('grad'), parameters) if grad is not None]",
        "the attribute's name ignored in a list",
    ),
    (
        _NAMED,
        "if name in seen:",
        "if name in found:",
        "two parameters of one name, of which one has no gradient",
    ),
    (
        _NAMED,
        "gradient_of(parameter, own,",
        "gradient_of(parameter, 'grad',",
        "the attribute's name ignored in a dict",
    ),
    (
        _NAMED,
        "        if grad is not None:\n            found[name] = grad",
        "        found[name] = grad",
        "None among named gradients",
    ),
    (
        _NAMED,
        "tree = trees.freeze(grads, is_array)\n    norms",
        "tree = grads\n    norms",
        "a generator that is used up before its structure is known",
    ),
    (
        _NAMED,
        "norms[k, ...]",
        "norms[-1 - k, ...]",
        "norms in the wrong places",
    ),
    (
        _SIGNATURES,
        "[a if a is None else (a.shape, a.dtype) for a in given]",
        "[a if a is None else a.shape for a in given]",
        "a signature without its dtypes",
    ),
    (
        _SIGNATURES,
        "[a if a is None else (a.shape, a.dtype) for a in given]",
        "[a if a is None else (a.size, a.dtype) for a in given]",
        "a signature without its shapes",
    ),
    (_SIGNATURES, "*options, *map(type, options))", "*map(type, options))", "no options in it"),
    (_SIGNATURES, ", *map(type, options))", ")", "1.0 taken for 1"),
    (
        _SIGNATURES,
        "            self._known.clear()\n",
        "            pass\n",
        "signatures remembered without a bound",
    ),
    (
        _SIGNATURES,
        "self._decide(self._described(given), *options)",
        "self._decide(given, *options)",
        "a decision that sees the arrays",
    ),
    (
        _PUBLIC_BATCH,
        "partial(Signatures, strides=True)\ndef _plan_gradient",
        "partial(Signatures, strides=False)\ndef _plan_gradient",
        "a signature without its strides",
    ),
    (
        _NORM_ARGUMENTS,
        "            if parameter is not None:\n                meaning",
        "            if False:\n                meaning",
        "parameters of any shape",
    ),
    (
        _SCRATCH,
        "min(most, tuning.BLAS_THREADS - 1)",
        "most",
        "tiles on which BLAS starts threads of its own",
    ),
    (_THREADS, "    _workers = count\n", "    pass\n", "the number of threads not set"),
    (
        _THREADS,
        "cores or 1, int(others)",
        "cores or 1, 0 * int(others)",
        "OMP_NUM_THREADS ignored",
    ),
    (
        _GRADIENTS,
        "return self.tree if isinstance(grads, Iterator) else grads",
        "return self.tree",
        "a copy of the caller's container returned",
    ),
    (
        _ENGINES,
        "if _OUT_OF_MEMORY not in error.text and",
        "if error.unsupported and",
        "cuDNN asked again and again for a case that it failed on",
    ),
    (
        _ENGINES,
        "if _OUT_OF_MEMORY not in error.text and",
        "if",
        "no cuDNN any more once memory ran out",
    ),
    (
        _STREAMS,
        "return streams.Stream.from_external(_Stream(address))",
        "return streams.ExternalStream(address, device)",
        "a class that CuPy is about to remove",
    ),
    (
        _STREAMS,
        "if stream and ours.is_capturing():",
        "if False:",
        "a captured call takes memory from CuPy's pool",
    ),
    (
        _STREAMS,
        "if stream and ours.is_capturing():",
        "if ours.is_capturing():",
        "the legacy stream asked whether it is captured",
    ),
    (
        _STREAMS,
        "return bool((ends[order][:-1] <= begins[order][1:]).all())",
        "return bool((ends[:-1] <= begins[1:]).all())",
        "arrays in another order in memory taken for overlapping",
    ),
    (
        _STREAMS,
        "return bool((ends[order][:-1] <= begins[order][1:]).all())",
        "return bool((begins[order][:-1] <= begins[order][1:]).all())",
        "overlapping arrays taken for disjoint",
    ),
    (
        "gradkit/_frameworks/cupy.py",
        "if length != 1 and step != size:",
        "if False:",
        "an array with gaps taken for a contiguous one",
    ),
    (
        "gradkit/_frameworks/cupy.py",
        "if None in map(float_name, set(dtypes)):",
        "if False:",
        "integers taken for gradients",
    ),
)
