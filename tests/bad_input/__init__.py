"""The bad-input table: every kind of bad input, and where it is held.

A row is one kind of bad input. Its cells are the functions, dtypes and variants that it
concerns, each for any backend. What is too large for all of them, or needs more than a
backend, names the tests that hold it instead.
"""

from collections import Counter
from collections.abc import Iterator
from math import inf

from tests.bad_input.answered import (
    BATCH_NORMS,
    BIASED,
    CENTRED,
    FROM_INPUT,
    FROM_X,
    NORMS,
    ROW_NORMS,
    accumulated,
    beyond_the_dtype,
    clipped,
    every_axis,
    huge,
    in_layout,
    lists_at_the_limits,
    lists_of_layouts,
    mixed,
    narrower,
    normed,
    nothing,
    one_column,
    ones,
    sized_nothing_among_others,
    tiny,
    together,
    wider,
    with_a_constant_row,
    with_an_offset,
    with_broadcast_dy,
    with_zeros_in_scale,
    without,
    zero_d,
    zeroed,
    zeros,
)
from tests.bad_input.arguments import Cell
from tests.bad_input.refused import (
    biases_alone,
    compensation_that_does_not_fit,
    flags,
    gradients_over_themselves,
    gradients_past_a_norm,
    gradients_that_grow_the_buffer,
    gradients_within_the_buffer,
    group_counts,
    groups,
    guards,
    limits,
    lists_that_do_not_match,
    not_arrays,
    not_gradients,
    not_numbers,
    other_axes,
    other_combinations,
    other_dtypes,
    other_shapes,
    outputs,
    outputs_of_lists,
    parameters,
    read_only_gradients,
    running_statistics,
    scale_offsets,
    scales,
    scales_without_inverse,
    shared_memory,
    unwritable_buffers,
    wider_gradients,
    wrong_words,
)
from tests.operations import C, R

REGRESSIONS, LISTS_ON_CUDA = "tests/values/test_regressions.py::", "tests/cuda/test_lists.py::"
CUDA, INTEROP = "tests/cuda/test_normalization.py::", "tests/interop/"
ROW_TESTS, BATCH_TESTS = "tests/values/test_normalization.py::", "tests/values/test_batch_norm.py::"
GROUP_TESTS = "tests/values/test_group_norm.py::"

Row = Iterator[Cell] | tuple[str, ...]  # cells, or the tests that hold it

TABLE: dict[str, dict[str, Row]] = {
    "clipping and norms": {
        "no gradients, or none with elements: 0.0 and no launch": nothing(),
        "size-0 among others": clipped(sized_nothing_among_others),
        "0-d": clipped(zero_d),
        "all zero and max_norm 0": clipped(zeros, max_norm=0.0),
        "max_norm 0 gives zeros": clipped(ones, max_norm=0.0),
        "max_norm infinity changes nothing": clipped(ones, max_norm=inf),
        "squares that overflow": clipped(huge),
        "squares that underflow": clipped(tiny),
        "a norm above the dtype's maximum": clipped(
            beyond_the_dtype, names=("float16", "bfloat16", "float32")
        ),
        "mixed dtypes": clipped(mixed),
        "strided, negative-stride and misaligned views": lists_of_layouts(),
        "list lengths at the parameter block's limits": lists_at_the_limits(),
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
        "max_norm, clipping, eps or clip_value negative or NaN, eps infinite": limits(
            "max_norm", "clipping", "eps", "clip_value"
        ),
        "norm_type NaN, 0 or negative": limits("norm_type"),
        "a scale that is not finite": scales(),
        "no group, or copies of gradients that no group holds": groups(),
        "found_inf that is no place for it": flags(),
        "no number where one is due": not_numbers(),
        "a word or flag that is none of those accepted": wrong_words(),
        "a spike guard's numbers, states and norms": guards(),
        "the same or overlapping memory twice": shared_memory(),
        "memory that overlaps itself": gradients_over_themselves(),
        "read-only": read_only_gradients(),
        "int, bool, complex, big-endian, masked or no array at all": not_gradients(),
        "arrays of different devices": (
            INTEROP + "test_devices.py::test_arrays_of_two_devices_are_refused",
            INTEROP + "test_devices.py::test_arguments_of_two_devices_are_refused",
            INTEROP + "test_devices.py::test_host_and_device_are_two_devices",
            "tests/distributed/test_several_devices.py::test_other_functions_take_one_device",
        ),
        "a parameter in the place of a gradient": parameters(),
        "a tensor that requires grad": (
            INTEROP + "test_torch.py::test_a_parameter_is_no_gradient_to_write",
            INTEROP + "test_torch.py::test_a_parameter_is_no_gradient_to_read",
        ),
        "out that is no place for the norm": outputs_of_lists(),
    },
    "norm gradients": {
        "no rows: dscale = dbias = 0": normed((0, 5), norms=NORMS),
        "rows of length 0": normed((5, 0)),
        "no channels": normed((3, 0, 2), axis=1, norms=BATCH_NORMS),
        "rows of length 1: dx of layer norm exactly 0": together(normed((6, 1)), one_column()),
        "rows of 31 to 12289": (ROW_TESTS + "test_row_lengths", CUDA + "test_row_norms"),
        "65535, 65536 and 65537 rows": (
            ROW_TESTS + "test_row_counts",
            REGRESSIONS + "test_apex_411_onnxruntime_28724_more_rows_than_a_grid_has_blocks",
        ),
        "as many rows as no tile has": together(normed((33, 7)), normed((97, 5))),
        "more than 2^31 and 2^32 elements": (
            REGRESSIONS + "test_pytorch_181600_and_others_indices_are_wide",
            CUDA + "test_more_elements_in_short_rows_than_32_bits_can_count",
            CUDA + "test_rows_longer_than_32_bits_can_count",
            CUDA + "test_partial_sums_beyond_32_bits",
            CUDA + "test_batches_of_more_elements_than_32_bits_can_count",
        ),
        "rank 1 to 5, any axis": every_axis(ROW_NORMS, (1, 2, 3, 4, 5)),
        "scale None, and a bias": biases_alone(),
        "bias None": normed((9, 65), without("bias"), norms=BIASED),
        "scale and bias None": normed((9, 65), without("scale", "bias"), norms=NORMS),
        "0 in scale": normed((9, 65), with_zeros_in_scale, norms=FROM_INPUT),
        "0 in scale, where it must be divided by": scales_without_inverse(),
        "a constant row": normed((4, 33), with_a_constant_row, norms=FROM_X),
        "an offset of 1e4 deviations": normed((9, 257), with_an_offset, norms=CENTRED),
        "NaN in one row": (ROW_TESTS + "test_rows_are_independent_bit_for_bit",),
        "NaN in one channel": (BATCH_TESTS + "test_channels_are_independent_bit_for_bit",),
        "dy of stride 0": normed((6, 40), with_broadcast_dy, norms=NORMS),
        "dy and x transposed": normed((6, 40), in_layout("Fortran", "dy", "x"), norms=NORMS),
        "channels-last": normed((3, 4, 5, 6), in_layout("rolled", "dy", "x"), axis=1, norms=NORMS),
        "misaligned": normed((6, 40), in_layout("misaligned", "dy", "x"), norms=NORMS),
        "dy and x laid out otherwise": normed((6, 40), in_layout("Fortran", "dy"), norms=NORMS),
        "shapes that do not match": other_shapes(),
        "dtypes that do not match": other_combinations(),
        "int, bool, complex or big-endian arguments": other_dtypes(),
        "no array where one is due": not_arrays(),
        "an axis that there is not": other_axes(),
        "running statistics that cannot be moved": running_statistics(),
        "ds that cannot be added to dx": gradients_past_a_norm(),
        "a scale_offset that is not finite, or has no scale": scale_offsets(),
        "out that is no place for a result": outputs(),
        "one element a channel": normed((1, 5, 1, 1), axis=1, norms=BATCH_NORMS),
        "channels-last equals channels-first": (
            BATCH_TESTS + "test_channels_last_equals_channels_first",
        ),
        "groups that do not divide the channels": group_counts(),
        "groups without elements": (GROUP_TESTS + "test_no_elements",),
        "one element a group": (GROUP_TESTS + "test_one_element_a_group",),
        "NaN or infinity in one group": (GROUP_TESTS + "test_groups_are_independent_bit_for_bit",),
        "groups with an offset of 1e4 deviations": (
            "tests/values/test_channel_norms.py::test_a_mean_of_many_deviations",
        ),
        "groups in any layout": (GROUP_TESTS + "test_strides",),
        "batches around cuDNN's limits": (
            REGRESSIONS + "test_pytorch_2917_batches_around_cudnns_limits",
            "tests/cudnn/test_gpu.py::test_batch_limits_are_probed",
            "tests/cudnn/test_library.py::test_the_limits_of_a_descriptor_are_the_librarys",
        ),
        "rank 2 to 5, any channel_axis": every_axis(BATCH_NORMS, (2, 3, 4, 5)),
    },
    "accumulating and zeroing": {
        "the buffer as its own gradient": accumulated(alias=True),
        "a gradient that partly overlaps the buffer": gradients_within_the_buffer(),
        "a buffer that is read-only or overlaps itself": unwritable_buffers(),
        "a gradient that would grow the buffer": gradients_that_grow_the_buffer(),
        "containers that do not match": lists_that_do_not_match(),
        "compensation that does not fit": compensation_that_does_not_fit(),
        "gradients that broadcast": accumulated([(), (1,), (R, 1), (1, C)]),
        "a narrower gradient": accumulated(addends=narrower),
        "a wider gradient": wider_gradients(),
        "a wider gradient that is asked for": accumulated(addends=wider, casting="same_kind"),
        "zero over NaN, in every layout": zeroed(),
    },
}
ROWS = {
    f"{section}: {title}": row if isinstance(row, tuple) else tuple(row)
    for section, rows in TABLE.items()
    for title, row in rows.items()
}
tested: Counter[str] = Counter()  # cells that have passed, by backend
