"""Faults in the NumPy reference and in the public layer: (file, old text, new text, what)."""

_CLIP = "gradkit/_numpy/clipping.py"
_NORM = "gradkit/_numpy/normalization.py"
_BATCH = "gradkit/_numpy/batch_normalization.py"
_TILES = "gradkit/_numpy/tiles.py"
_BLOCKS = "gradkit/_numpy/blocks.py"
_ADD = "gradkit/_numpy/accumulation.py"

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
        "if low < total < high else",
        "if True else",
        "no scaling where squares leave the range",
    ),
    (_CLIP, "    values /= largest\n    np.power", "    np.power", "no scaling of other powers"),
    (
        _CLIP,
        ".sum(dtype=_F64)) + float(np.dot(rest, rest))",
        ".sum(dtype=_F64))",
        "the tail of a block lost",
    ),
    (
        _CLIP,
        "total = float(np.vecdot(runs, runs).sum(dtype=_F64))",
        "total = float(np.dot(values[:whole], values[:whole]))",
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
        "            out.fill(0)\n        return",
        "            out *= 0\n        return",
        "zeroing by multiplying",
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
        "of_w = row_sums(self.dy, self.scale) if self.grad.centred else np.zeros(len(self.dy))",
        "of_w = row_sums(self.dy, None) if self.grad.centred else np.zeros(len(self.dy))",
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
    (_BATCH, "            rest += means[1][at]\n", "", "the mean term left out"),
    (
        _BATCH,
        "((dscale, of_product), (dbias, of_dy))",
        "((dbias, of_product), (dscale, of_dy))",
        "dscale and dbias swapped",
    ),
    (
        _BATCH,
        "channels.vector(total / channels.size)",
        "channels.vector(total / (channels.size + 1))",
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
    (
        _TILES,
        "        part = tile[start : start + _STRETCH]\n",
        "        part = tile[start : start + _STRETCH - 1]\n",
        "a row lost in each stretch",
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
    (_ADD, "        grad.fill(0)\n", "        grad *= 0\n", "zeroing by multiplying"),
    (
        _ADD,
        "                term = term * scale\n",
        "                term = term * np.float32(scale)\n",
        "a scale rounded to float32",
    ),
    (
        _ADD,
        "np.float32 if direct and grad.itemsize <= buffer.itemsize else np.float64",
        "np.float32",
        "float32 where float64",
    ),
)
