"""Faults in the spike guard: (file, old text, new text, what)."""

TESTS = ("tests/test_spikes.py",)

_KERNEL = "kernels/spike_guard.cu"
_LAUNCHER = "gradkit/_cuda/spikes.py"
_NUMPY = "gradkit/_numpy/spikes.py"
_PUBLIC = "gradkit/spikes.py"

MUTANTS = (
    (_KERNEL, "!(norm.value > limit.value && is_finite(norm))", "!(norm.value > limit.value)", "an infinite norm taken for a spike"),
    (_KERNEL, "(margin / (norm - mean))", "(margin / norm)", "the mean not subtracted"),
    (_KERNEL, "const Number x = deviation / largest, y = d / largest;\n    return largest *", "const Number x = deviation, y = d;\n    return", "no scaling of squares"),
    (_KERNEL, "    if (largest.value == 0) return largest;\n", "", "0/0 for equal norms"),
    (_KERNEL, "!starting && deviation.value > 0", "!starting", "equal norms clipped to their mean"),
    (_KERNEL, "value.value > limit.value ? limit : value", "value", "statistics of norms that are not clipped"),
    (_KERNEL, "value.value >= 0 && is_finite(value)", "value.value >= 0", "an infinity in the statistics"),
    (_KERNEL, "value.value >= 0 && is_finite(value)", "is_finite(value)", "a negative norm in the statistics"),
    (_KERNEL, "rest = starting ? one : kept", "rest = one", "another variance than the paper's"),
    (_KERNEL, "one / (count + one)", "one - kept", "the first norms weighted unequally"),
    (_KERNEL, "next[0] = counts ?", "next[0] = true ?", "a NaN counted"),
    (_LAUNCHER, "            copy_back(out, written)\n", "            pass\n", "strided outputs not written"),
    (_LAUNCHER, "contiguous(device, array) for", "array for", "a strided state taken for a contiguous one"),
    (_NUMPY, "if limit < norm < math.inf:", "if limit < norm:", "an infinite norm taken for a spike"),
    (_NUMPY, "margin / (norm - mean)", "margin / norm", "the mean not subtracted"),
    (_NUMPY, "std, deviation = std / largest, deviation / largest\n    return largest *", "return", "no scaling of squares"),
    (_NUMPY, "not starting and std > 0", "not starting", "equal norms clipped to their mean"),
    (_NUMPY, "not starting and std > 0", "std > 0", "the first norms clipped"),
    (_NUMPY, "starting = count < warmup", "starting = count <= warmup", "one norm more that is only collected"),
    (_NUMPY, "min(value, limit) - mean", "value - mean", "statistics of norms that are not clipped"),
    (_NUMPY, "if not 0 <= value < math.inf:", "if not 0 <= value:", "an infinity in the statistics"),
    (_NUMPY, "weight = 1 / (count + 1) if starting else 1 - decay", "weight = 1 - decay", "the first norms weighted unequally"),
    (_NUMPY, "else (decay, decay)", "else (decay, 1.0)", "another variance than the paper's"),
    (_PUBLIC, "reuse=given.state)", ")", "a state that may not be written over itself"),
    (_PUBLIC, "out = (state, None) if _may_be_written(state) else None", "out = None", "a captured step that reads the same state again"),
    (_PUBLIC, '_statistic(state_dict[name], f"{name} in state_dict")', "state_dict[name]", "a checkpoint that is not looked at"),
)  # fmt: skip
