"""The bad-input table: every kind of bad input, and where it is held.

A row is one kind of bad input. Its cells are the functions, dtypes and variants that it
concerns, each for any backend. What is too large for all of them, or needs more than a
backend, names the tests that hold it instead.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from math import inf

from tests.bad_input import answered, refused
from tests.bad_input.arguments import Cell

REGRESSIONS, LISTS_ON_CUDA = "tests/values/test_regressions.py::", "tests/cuda/test_lists.py::"
CUDA, INTEROP = "tests/cuda/test_normalization.py::", "tests/interop/"
ROW_TESTS, BATCH_TESTS = "tests/values/test_normalization.py::", "tests/values/test_batch_norm.py::"
GROUP_TESTS = "tests/values/test_group_norm.py::"
CHANNEL_TESTS = "tests/values/test_channel_norms.py::"
EVERY_NORM = "tests/values/test_every_norm.py::"
SUMS = "tests/values/test_accumulation.py::"

Row = Iterator[Cell] | tuple[str, ...]  # cells, or the tests that hold it

TABLE: dict[str, dict[str, Row]] = {
    "clipping and norms": {
        "no gradients, or none with elements: 0.0 and no launch": answered.nothing(),
        "size-0 among others": answered.clipped(answered.sized_nothing_among_others),
        "0-d": answered.clipped(answered.zero_d),
        "all zero and max_norm 0": answered.clipped(answered.zeros, max_norm=0.0),
        "max_norm 0 gives zeros": answered.clipped(answered.ones, max_norm=0.0),
        "max_norm infinity changes nothing": answered.clipped(answered.ones, max_norm=inf),
        "squares that overflow": answered.clipped(answered.huge),
        "squares that underflow": answered.clipped(answered.tiny),
        "a norm above the dtype's maximum": answered.clipped(
            answered.beyond_the_dtype, names=("float16", "bfloat16", "float32")
        ),
        "mixed dtypes": answered.clipped(answered.mixed),
        "strided, negative-stride and misaligned views": answered.lists_of_layouts(),
        "list lengths at the parameter block's limits": answered.lists_at_the_limits(),
        "a million one-element arrays": (
            REGRESSIONS + "test_a_million_tensors",
            LISTS_ON_CUDA + "test_ten_thousand_tensors_take_three_launches",
        ),
        "more than 2^31 elements": (
            REGRESSIONS + "test_pytorch_181600_and_others_more_elements_than_32_bits_count",
            LISTS_ON_CUDA + "test_elements_beyond_two_to_the_32",
            LISTS_ON_CUDA + "test_strided_elements_beyond_two_to_the_32",
        ),
        "NaN, infinity or -infinity in one element, under each policy": (
            "tests/values/test_clipping.py::TestNonFinite",
            "tests/values/test_clipping.py::test_one_nonfinite_element_is_never_lost",
        ),
        "max_norm, clipping, eps or clip_value negative or NaN, eps infinite": refused.limits(
            "max_norm", "clipping", "eps", "clip_value"
        ),
        "norm_type NaN, 0 or negative": refused.limits("norm_type"),
        "a scale that is not finite": refused.scales(),
        "no group, or copies of gradients that no group holds": refused.groups(),
        "found_inf that is no place for it": refused.flags(),
        "no number where one is due": refused.not_numbers(),
        "a word or flag that is none of those accepted": refused.wrong_words(),
        "a spike guard's numbers, states and norms": refused.guards(),
        "what is no step of an optimiser": refused.updates(),
        "verdicts of no step, and copies that cannot be kept": refused.verdicts(),
        "axes, limits and parameters of no unit": refused.units(),
        "no choice of gradients that are clipped or count": refused.choices(),
        "a norm that cannot be exact": refused.inexact(),
        "the same or overlapping memory twice": refused.shared_memory(),
        "memory that overlaps itself": refused.gradients_over_themselves(),
        "read-only": refused.read_only_gradients(),
        "int, bool, complex, big-endian, masked or no array at all": refused.not_gradients(),
        "arrays of different devices": (
            INTEROP + "test_devices.py::test_arrays_of_two_devices_are_refused",
            INTEROP + "test_devices.py::test_arguments_of_two_devices_are_refused",
            INTEROP + "test_devices.py::test_host_and_device_are_two_devices",
            "tests/distributed/test_several_devices.py::test_other_functions_take_one_device",
        ),
        "a parameter in the place of a gradient": refused.parameters(),
        "a tensor that requires grad": (
            INTEROP + "test_torch.py::test_a_parameter_is_no_gradient_to_write",
            INTEROP + "test_torch.py::test_a_parameter_is_no_gradient_to_read",
        ),
        "out that is no place for the norm": refused.outputs_of_lists(),
    },
    "norm gradients": {
        "no rows: dscale = dbias = 0": (EVERY_NORM + "test_no_elements",),
        "rows of length 0": (EVERY_NORM + "test_no_elements",),
        "no channels": (EVERY_NORM + "test_no_elements",),
        "rows of length 1: dx of layer norm exactly 0": (
            ROW_TESTS + "test_one_column_has_no_gradient",
        ),
        "rows of 31 to 12289": (ROW_TESTS + "test_row_lengths", CUDA + "test_row_norms"),
        "65535, 65536 and 65537 rows": (
            ROW_TESTS + "test_row_counts",
            REGRESSIONS + "test_apex_411_onnxruntime_28724_more_rows_than_a_grid_has_blocks",
        ),
        "as many rows as no tile has": (
            REGRESSIONS + "test_attorch_18_a_last_partial_block_is_summed",
        ),
        "more than 2^31 and 2^32 elements": (
            REGRESSIONS + "test_pytorch_181600_and_others_indices_are_wide",
            CUDA + "test_more_elements_in_short_rows_than_32_bits_can_count",
            CUDA + "test_rows_longer_than_32_bits_can_count",
            CUDA + "test_partial_sums_beyond_32_bits",
            CUDA + "test_batches_of_more_elements_than_32_bits_can_count",
        ),
        "rank 1 to 5, any axis": (ROW_TESTS + "test_every_axis_of_every_rank",),
        "scale None, and a bias": answered.normed(
            (9, 65), answered.without("scale"), norms=answered.BIASED_FORWARD
        ),
        "bias None": answered.normed((9, 65), answered.without("bias"), norms=answered.BIASED),
        "scale and bias None": (EVERY_NORM + "test_no_scale_is_a_scale_of_ones",),
        "0 in scale": answered.normed(
            (9, 65), answered.with_zeros_in_scale, norms=answered.FROM_INPUT
        ),
        "0 in scale, where it must be divided by": refused.scales_without_inverse(),
        "a constant row": answered.normed(
            (4, 33), answered.with_a_constant_row, norms=answered.FROM_X
        ),
        "an offset of 1e4 deviations": answered.normed(
            (9, 257), answered.with_an_offset, norms=answered.CENTRED
        ),
        "NaN in one row": (EVERY_NORM + "test_what_is_not_finite_stays_where_it_counts",),
        "NaN in one channel": (
            CHANNEL_TESTS + "test_what_a_channel_holds_stays_out_of_its_neighbours",
        ),
        "dy of stride 0": (REGRESSIONS + "test_pytorch_1866_quack_88_a_gradient_of_stride_0",),
        "transposed, channels-last, misaligned": (
            "tests/calls/test_layouts.py::test_no_layout_changes_a_bit",
            BATCH_TESTS + "test_every_channel_axis_of_every_rank",
        ),
        "dy and x laid out otherwise": (
            "tests/calls/test_layouts.py::test_no_layout_changes_a_bit",
            REGRESSIONS + "test_pytorch_64100_layouts_that_differ",
        ),
        "shapes that do not match": refused.other_shapes(),
        "dtypes that do not match": refused.other_combinations(),
        "int, bool, complex or big-endian arguments": refused.other_dtypes(),
        "no array where one is due": refused.not_arrays(),
        "an axis that there is not": refused.other_axes(),
        "running statistics that cannot be moved": refused.running_statistics(),
        "ds that cannot be added to dx": refused.gradients_past_a_norm(),
        "a scale_offset that is not finite, or has no scale": refused.scale_offsets(),
        "out that is no place for a result": refused.outputs(),
        "one element a channel": chain(
            answered.normed((1, 5, 1, 1), axis=1, norms=["batch_norm_grad"]),
            refused.batches_without_variance(),
        ),
        "channels-last equals channels-first": (
            BATCH_TESTS + "test_channels_last_equals_channels_first",
        ),
        "groups that do not divide the channels": refused.group_counts(),
        "groups without elements": (EVERY_NORM + "test_no_elements",),
        "one element a group": (GROUP_TESTS + "test_one_element_a_group",),
        "NaN or infinity in one group": (
            EVERY_NORM + "test_what_is_not_finite_stays_where_it_counts",
        ),
        "groups with an offset of 1e4 deviations": (
            CHANNEL_TESTS + "test_a_mean_of_many_deviations",
        ),
        "groups in any layout": (GROUP_TESTS + "test_strides",),
        "batches around cuDNN's limits": (
            REGRESSIONS + "test_pytorch_2917_batches_around_cudnns_limits",
            "tests/cudnn/test_gpu.py::test_batch_limits_are_probed",
            "tests/cudnn/test_library.py::test_the_limits_of_a_descriptor_are_the_librarys",
        ),
        "rank 2 to 5, any channel_axis": (BATCH_TESTS + "test_every_channel_axis_of_every_rank",),
    },
    "accumulating and zeroing": {
        "the buffer as its own gradient": (SUMS + "test_a_buffer_added_to_itself_doubles",),
        "a gradient that partly overlaps the buffer": refused.gradients_within_the_buffer(),
        "a buffer that is read-only or overlaps itself": refused.unwritable_buffers(),
        "a gradient that would grow the buffer": refused.gradients_that_grow_the_buffer(),
        "averages of nothing that they can hold": refused.averages(),
        "containers that do not match": refused.lists_that_do_not_match(),
        "compensation that does not fit": refused.compensation_that_does_not_fit(),
        "gradients that broadcast": (
            SUMS + "test_adds_with_one_rounding",
            SUMS + "test_overwrites",
        ),
        "a narrower gradient": (SUMS + "test_adds_with_one_rounding", SUMS + "test_overwrites"),
        "a wider gradient": refused.wider_gradients(),
        "a wider gradient that is asked for": (SUMS + "test_wider_gradients_when_asked_for",),
        "zero over NaN, in every layout": (SUMS + "test_zeroes_large_arrays_in_any_layout",),
    },
}
ROWS = {
    f"{section}: {title}": row if isinstance(row, tuple) else tuple(row)
    for section, rows in TABLE.items()
    for title, row in rows.items()
}
tested: Counter[str] = Counter()  # cells that have passed, by backend
