"""Faults in group norm: (file, text, what it becomes, what that is).

Each text stands exactly once in its file.
"""

_ALL = "tests/test_group_norm.py::"
TESTS = (
    "tests/test_cuda_group_norm.py",
    _ALL + "test_every_rank_and_layout",
    _ALL + "test_a_mean_of_1e4_deviations",
    _ALL + "test_a_mean_that_float32_hardly_holds",
    _ALL + "test_by_mpmath_on_channels_last_data_far_from_zero",
    _ALL + "test_down_to_the_smallest_number",
    _ALL + "test_constant_groups_at_the_top_of_the_range",
    _ALL + "test_both_ends_of_the_range_in_one_group",
    _ALL + "test_squares_outside_float32",
    _ALL + "test_one_element_a_group",
    _ALL + "test_no_elements",
    _ALL + "test_no_scale_is_a_scale_of_ones",
    _ALL + "test_strides",
    _ALL + "test_samples_in_parts",
    _ALL + "test_groups_are_independent_bit_for_bit",
    _ALL + "test_out",
    _ALL + "test_over_its_own_input",
    _ALL + "test_group_norm",
    _ALL + "test_group_norm_grad",
    "tests/test_grids.py",
    "tests/test_streamed.py",
)

_LAYOUT = "kernels/groups.cuh"
_FORWARD = "kernels/group_norm.cu"
_GRADIENT = "kernels/group_norm_grad.cu"
_LAUNCH = "gradkit/_cuda/launch/groups.py"
_BACKEND = "gradkit/_cuda/group_normalization.py"
_NUMPY = "gradkit/_numpy/group_normalization.py"
_CUT = "gradkit/_numpy/groups.py"
_PLANS = "gradkit/_open/group_norms.py"
_SUMS = "gradkit/_numpy/sums.py"

MUTANTS = (
    (_LAYOUT, "LAST ? column / of.channels : 0", "0", "channels-last samples all the first"),
    (_LAYOUT, "if (++within < of.width) continue;", "++within;", "a group for each channel"),
    (_LAYOUT, "within = 0;", "", "groups of one channel after the first of a pack"),
    (_LAYOUT, "column % of.channels", "column", "parameters read beyond the first sample's"),
    (_LAYOUT, "weights ? first % of.channels : 0", "0", "the first group's scale for all"),
    (_LAYOUT, "share * columns + first", "first", "the first share's sums for all"),
    (_LAYOUT, "k < count; k += blockDim.x", "k < of.width; k += blockDim.x", "shares left out"),
    (_FORWARD, "about[k] = narrow<A>(known[k])", "about[k] = A{0}", "squares about 0"),
    (_FORWARD, "packs * (VEC / OWN)", "packs", "a pack counted as one element"),
    (_FORWARD, "if (!exact_enough(sums)) sum", "if (false) sum", "squares that float32 loses"),
    (_FORWARD, "centre[group] + correction", "centre[group]", "the mean not corrected"),
    (
        _FORWARD,
        "fused(-correction, correction, total.second / count)",
        "total.second / count",
        "a variance about the centre",
    ),
    (_FORWARD, "(variance < 0 ? 0 : variance) + eps", "variance", "eps ignored"),
    ("kernels/channel_forward.cuh", " - own.low[k % OWN]", "", "a mean rounded to float32"),
    (_FORWARD, "exact + of.columns() / of.width, column", "exact, column", "mean for inv_std"),
    (
        _GRADIENT,
        "share_of_group(partials, scale,",
        "share_of_group<PARAM_T>(partials, nullptr,",
        "means without the scale",
    ),
    (
        _GRADIENT,
        "means[groups + group] = narrow<A>(total.second / count)",
        "means[groups + group] = A{0}",
        "the mean of w left out",
    ),
    (_GRADIENT, "plane ? dbias : dscale", "plane ? dscale : dbias", "parameters swapped"),
    (
        _GRADIENT,
        "const i64 rows = shares * samples",
        "const i64 rows = samples",
        "the first share's parameters alone",
    ),
    (_GRADIENT, " * factor[k % OWN] - rest", " - rest", "dx without the scale"),
    (_LAUNCH, "last = space == 1 or (", "last = (", "two dimensions read one by one"),
    (
        _LAUNCH,
        "shape[0], channels, space, channels // groups",
        "shape[0], channels, space, 1",
        "groups of one channel",
    ),
    (_LAUNCH, "channels if last else space)", "space)", "vectors across channels"),
    (_LAUNCH, "terms = self.grid[1] * self.layout.width", "terms = 0", "one thread a group"),
    (
        _LAUNCH,
        "return (tiles, max(1, shares)), (across, down)",
        "return (tiles, 1), (across, down)",
        "one share of a column",
    ),
    (_BACKEND, "gradient.fill(0)", "pass", "sums over nothing not written"),
    (_NUMPY, "rest -= groups.numbers(low, block)", "pass", "a mean rounded to float32"),
    (_NUMPY, "kept = not groups.last", "kept = True", "squares taken for deviations"),
    (_NUMPY, "[part * self.weights[channels] for part in sums]", "sums", "means without the scale"),
    (
        _NUMPY,
        "total[block.channels] += columns",
        "total[: columns.shape[1]] += columns",
        "sums astray",
    ),
    (
        _NUMPY,
        "total[:, block.channels] += part",
        "total[:, block.channels] = part",
        "the last block's sums alone",
    ),
    (
        _NUMPY,
        "        return sums[:, 0]",
        "        return sums[:, 0] * 0",
        "parameters of long samples left out",
    ),
    (
        _NUMPY,
        "step = max(1, tuning.GROUP_COLUMNS // width)",
        "step = groups",
        "more channels at a time than fit",
    ),
    (
        _CUT,
        "direct = gapless and view.shape",
        "direct = view.shape",
        "results computed in a copy of a view",
    ),
    (_CUT, "direct and not self._streams", "direct", "large results written by arithmetic"),
    (
        _CUT,
        "index[axis] if len(index) > axis else everything",
        "everything",
        "parts of a sample with the first channels' numbers",
    ),
    (_CUT, "parameter[start * self", "parameter[0 * self", "the first groups' parameters"),
    (
        _CUT,
        "slice(start, stop), channels)",
        "slice(0, stop - start), channels)",
        "others' statistics",
    ),
    (_CUT, "if not self.last else self.groups", "", "groups cut apart from their neighbours"),
    (
        _CUT,
        "if self.whole else columns[:",
        "if self.whole or True else columns[:",
        "others' numbers",
    ),
    (_CUT, "rank - 2 if self.last else 0", "0", "space for channels"),
    (_SUMS, "total += by_halves(np.moveaxis(sums, 1, 0))[0]", "", "runs left out"),
    (
        _PLANS,
        'groups < 1 or self.channels % groups:\n            raise ValueError(\n                f"num',
        'groups < 1:\n            raise ValueError(\n                f"num',
        "groups of unequal sizes",
    ),
    (_PLANS, "for other in statistics[1:]:", "for other in ():", "inv_std of another shape"),
    (_PLANS, "if index == 0:", "if index == -1:", "samples taken for channels"),
)
