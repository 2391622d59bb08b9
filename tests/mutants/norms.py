"""Faults in the norm kernels and their launchers: (file, text, what it becomes, what that is).

Each text stands exactly once in its file.
"""

TESTS = (
    "tests/test_grids.py",
    "tests/test_cuda_normalization.py",
    "tests/test_normalization.py::test_squares_outside_float32",
    "tests/test_normalization.py::test_constant_rows_at_the_top_of_the_range",
    "tests/test_batch_norm.py::test_constant_channels_at_the_top_of_the_range",
    "tests/test_traffic.py",
    "tests/test_residual_norms.py",
    "tests/test_strided_rows.py",
    "tests/test_batch_norm_over_ranks.py",
    "tests/test_batch_norm_inference.py",
    "tests/test_running_statistics.py",
    "tests/test_golden.py",
)
WIDE_TESTS = (
    "tests/test_cuda_kernels.py::test_no_64_bit_number_is_narrowed",
    "tests/test_cuda_normalization.py::test_loops_over_blocks_go_round",
    "tests/test_cuda_normalization.py::test_more_elements_in_short_rows_than_32_bits_can_count",
    "tests/test_cuda_normalization.py::test_rows_longer_than_32_bits_can_count",
    "tests/test_cuda_normalization.py::test_blocks_of_long_rows_stride_over_more_than_32_bits",
    "tests/test_cuda_normalization.py::test_partial_sums_beyond_32_bits",
    "tests/test_cuda_normalization.py::test_batches_of_more_elements_than_32_bits_can_count",
    "tests/test_cuda_normalization.py::test_more_channels_than_32_bits_can_count",
    "tests/test_cuda_normalization.py::test_statistics_of_more_channels_than_32_bits_can_count",
    "tests/test_cuda_normalization.py::test_steps_of_more_channels_than_32_bits_can_count",
    "tests/test_cuda_normalization.py::test_statistics_of_all_ranks_for_more_channels_than_32_bits_can_count",
)

GRAD = "kernels/layer_norm_grad.cu"
WIDE = "kernels/layer_norm_grad_wide.cu"
SHARED = "kernels/row_gradient.cuh"
ROWS = "kernels/rows.cuh"
STARTS = "kernels/row_starts.cuh"
ARITHMETIC = "kernels/arithmetic.cuh"
COLUMNS = "kernels/columns.cuh"
SUMS = "kernels/column_sums.cu"
PACKS = "kernels/packs.cuh"
DTYPES = "kernels/dtypes.cuh"
FORWARD = "kernels/layer_norm.cu"
INVERSE = "kernels/layer_norm_inverse.cu"
CHANNELS = "kernels/channels.cuh"
BATCH = "kernels/batch_norm.cu"
BATCH_GRAD = "kernels/batch_norm_grad.cu"
DEVIATIONS = "kernels/deviations.cuh"
CHANNEL_GRADIENT = "kernels/channel_gradient.cuh"
PLANNED = "gradkit/_cuda/launch/planned.py"
LAUNCH = "gradkit/_cuda/row_gradient.py"
GRIDS = "gradkit/_cuda/launch/grids.py"
BUFFERS = "gradkit/_cuda/launch/buffers.py"
LAYOUT = "gradkit/_cuda/row_starts.py"
LAUNCH_ROWS = "gradkit/_cuda/row_forward.py"
LAUNCH_BATCH = "gradkit/_cuda/launch/channels.py"
STEPS = "kernels/batch_norm_steps.cu"
COMBINE = "kernels/combine_stats.cu"
LAUNCH_STEPS = "gradkit/_cuda/split_batch_normalization.py"
KNOWN = "kernels/known_stats.cuh"
INFER_GRAD = "kernels/batch_norm_inference_grad.cu"
RUNNING = "kernels/running_statistics.cu"

MUTANTS = [
    # Running statistics
    (KNOWN, "exactly(variance[k]) + eps", "exactly(variance[k])", "eps ignored"),
    (
        INFER_GRAD,
        "factor[k] = of.inv_std[k] * factor[k]",
        "factor[k] = of.inv_std[k]",
        "dx without scale",
    ),
    (
        INFER_GRAD,
        "(plane ? dbias : dscale)[channel]",
        "(plane ? dscale : dbias)[channel]",
        "dscale and dbias swapped",
    ),
    (
        INFER_GRAD,
        "summed ? fetch_packs(x, places) : dys",
        "fetch_packs(x, places)",
        "x read for dx",
    ),
    (RUNNING, "unbiased = n / (n - 1)", "unbiased = 1", "the biased variance"),
    (RUNNING, "n <= 1 ? 0 : momentum", "momentum", "no elements that move something"),
    (RUNNING, "    if (momentum == 0) return from;\n", "", "a NaN batch that has no weight"),
    (RUNNING, "    if (momentum == 1) return to;\n", "", "NaN that has no weight"),
    (
        LAUNCH_BATCH,
        "update_running(device, *moved, known[0], known[1], count",
        "update_running(device, *moved, known[1], known[0], count",
        "running statistics swapped",
    ),
    # Rows at strides, sums, offsets
    (
        STARTS,
        "if (row < layout.inner) return {0, 0, row};",
        "return {0, 0, row};",
        "one stride from row to row, whatever there are",
    ),
    (STARTS, "others - outer * layout.middle", "others", "a middle index that is never reset"),
    (STARTS, "return VEC == 1 || layout.packed;", "return true;", "packs that begin anywhere"),
    (STARTS, "scale + narrow<A>(layout.scale_offset)", "scale", "an offset left out"),
    (
        FORWARD,
        "widen(sums.at[i].at(j)) + widen(more.at[i].at(j))",
        "widen(sums.at[i].at(j))",
        "a residual left out",
    ),
    (FORWARD, "Row row = {s, width};", "Row row = {x, width};", "x read again instead of s"),
    (
        SHARED,
        "ADDED ? fused(inv_std, w - rest, ds) : inv_std * (w - rest)",
        "inv_std * (w - rest)",
        "ds left out",
    ),
    (
        GRAD,
        "ADDED ? in.ds + start_of(in.layout, DS, place, width)",
        "ADDED ? in.ds + start_of(in.layout, DX, place, width)",
        "a long row's ds at the strides of dx",
    ),
    (
        GRAD,
        "DS_WITH_ROW ? in.ds + start_of(in.layout, DS, place, width)",
        "DS_WITH_ROW ? in.ds + start_of(in.layout, DX, place, width)",
        "ds at the strides of dx",
    ),
    (
        GRAD,
        "const A scale = shifted(in.layout, widen(scales.at(k)));",
        "const A scale = widen(scales.at(k));",
        "an offset left out of dx",
    ),
    (
        WIDE,
        "in.ds + start_of(in.layout, DS, place, width) + column",
        "in.ds + start_of(in.layout, DX, place, width) + column",
        "ds of a row that is read twice at the strides of dx",
    ),
    (
        WIDE,
        "in.dy + start_of(in.layout, DY, row, width) + column",
        "in.dy + start_of(in.layout, SOURCE, row, width) + column",
        "dy at the strides of x",
    ),
    (LAYOUT, "scale_offset or -0.0", "scale_offset", "a scale of -0 that loses its sign"),
    (LAYOUT, "aligned and not any(", "aligned or not any(", "the first row alone asked"),
    (
        LAYOUT,
        "if address_of(array) % size or any(step % size for step in array.strides[:axis]):",
        "if False:",
        "rows that begin within an element",
    ),
    (
        LAUNCH_ROWS,
        "data.residual is None and not scale_offset",
        "data.residual is None",
        "an offset of contiguous rows forgotten",
    ),
    (
        LAUNCH,
        "plain = ds is None and not scale_offset",
        "plain = ds is None",
        "an offset of contiguous gradients forgotten",
    ),
    (
        LAUNCH,
        "return self._one_visit._replace(kernel=found, shared_mem=shared)",
        "return self._one_visit._replace(kernel=found, shared_mem=shared, grid=(1,))",
        "a grid of its own, and other bits of dscale",
    ),
    # Barriers and warps
    (ROWS, "(turn & 1) * WARP", "0 * WARP", "one set of slots for all rows: no trailing barrier"),
    (
        ROWS,
        "value = warp_sums(value, width);",
        "value = warp_sums(value, WARP);",
        "a sum over the rows beside it too",
    ),
    (
        ROWS,
        "return warp_sums(value, warps);",
        "return warp_sums(value, warps / 2);",
        "the last warps left out",
    ),
    (ROWS, "threads < WARP ? threads : WARP", "WARP", "shuffles over the whole warp"),
    (
        ROWS,
        "row[threadIdx.x & (warps - 1)]",
        "row[threadIdx.x & (WARP - 1)]",
        "slots that nobody wrote",
    ),
    (
        ROWS,
        "    if (threadIdx.x % WARP == 0) row[threadIdx.x / WARP] = value;\n    __syncthreads();",
        "    if (threadIdx.x % WARP == 0) {\n        row[threadIdx.x / WARP] = value;\n"
        "        __syncthreads();\n    }",
        "a barrier in a divergent branch",
    ),
    (ROWS, " + threadIdx.y * warps", "", "rows of a block share their slots"),
    (
        "kernels/reductions.cuh",
        "__shfl_xor_sync(ALL_LANES, x.value, mask)",
        "__shfl_xor_sync(0x0000ffffu, x.value, mask)",
        "half of the warp in the mask",
    ),
    (
        COLUMNS,
        "*own += own[half * blockDim.x];\n        __syncthreads();",
        "*own += own[half * blockDim.x];\n        if (half > 1) __syncthreads();",
        "a tile filled again while it is read",
    ),
    # Indices
    (
        GRAD,
        "const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;",
        "const i64 step = static_cast<i64>(gridDim.x);",
        "wrong grid stride",
    ),
    (
        GRAD,
        "in.dy + start_of(in.layout, DY, place, width)",
        "in.dy + static_cast<int>(start_of(in.layout, DY, place, width))",
        "32-bit index of dy",
    ),
    (
        GRAD,
        "in.source + start_of(in.layout, SOURCE, place, width)",
        "in.source + static_cast<int>(start_of(in.layout, SOURCE, place, width))",
        "32-bit index of x",
    ),
    (
        GRAD,
        "dx += start_of(in.layout, DX, place, width)",
        "dx += static_cast<u32>(start_of(in.layout, DX, place, width))",
        "unsigned 32-bit index of dx",
    ),
    (
        GRAD,
        "dx += start_of(in.layout, DX, place, width)",
        "dx += start_of(in.layout, DX, place, gridDim.x)",
        "row stride wrong",
    ),
    (
        GRAD,
        "for (int y = 1; y < blockDim.y; ++y)",
        "for (int y = 1; y + 1 < blockDim.y; ++y)",
        "the block's last row is lost",
    ),
    (
        GRAD,
        "NEVER_EARLY || inside ? of : Statistics{0, 0}",
        "of",
        "0 * infinity beyond the last column",
    ),
    (
        GRAD,
        "if (NEVER_EARLY && !inside) xhat = A{0};",
        "",
        "0 * infinity beyond the last column of 16-bit elements",
    ),
    (
        GRAD,
        "if (NEVER_EARLY && !inside) xhat = A{0};",
        "if (NEVER_EARLY && inside) xhat = A{0};",
        "xhat 0 within the row",
    ),
    (
        GRAD,
        "[c * LONG_THREADS + threadIdx.x];",
        "[c * LONG_THREADS];",
        "threads share their scale",
    ),
    (
        GRAD,
        "A* behind = sums + PLANES * CHUNKS * VEC * LONG_THREADS;",
        "A* behind = sums + CHUNKS * VEC * LONG_THREADS;",
        "scale in the place of sums",
    ),
    (
        GRAD,
        "own.shared_scale(c) = fetch_columns(scale, c, width, A{1});",
        "own.shared_scale(c) = fetch_columns(scale, c, width, A{0});",
        "an absent scale is 0 in shared memory",
    ),
    (
        LAUNCH,
        "if kept or spills or both + _SLOTS > available:",
        "if kept or spills:",
        "more shared memory for scale than there is",
    ),
    (
        LAUNCH,
        "return 2, both",
        "return 2, plan.shared",
        "no room for scale in shared memory",
    ),
    (
        LAUNCH,
        "kernel=found, shared_mem=shared",
        "kernel=found",
        "a variant with the shared memory of plain rows",
    ),
    (
        WIDE,
        "first += static_cast<i64>(AT_ONCE) * gridDim.y",
        "first += static_cast<i64>(AT_ONCE) * gridDim.x",
        "rows are strided by the wrong dimension",
    ),
    (
        WIDE,
        "static_cast<i64>(gridDim.y) * blockDim.x * VEC",
        "static_cast<i64>(gridDim.x) * blockDim.x * VEC",
        "columns strided by the wrong dimension",
    ),
    (
        WIDE,
        "in.dy + start_of(in.layout, DY, row, width) + column",
        "in.dy + static_cast<int>(start_of(in.layout, DY, row, width) + column)",
        "32-bit index of dy",
    ),
    (
        WIDE,
        "in.source + start_of(in.layout, SOURCE, row, width) + column",
        "in.source + static_cast<u32>(start_of(in.layout, SOURCE, row, width) + column)",
        "unsigned 32-bit index of x",
    ),
    (
        WIDE,
        "dx + start_of(in.layout, DX, place, width) + column",
        "dx + static_cast<int>(start_of(in.layout, DX, place, width) + column)",
        "32-bit index of dx",
    ),
    (WIDE, "part < parts; ++part", "part + 1 < parts; ++part", "the last part of a row is lost"),
    (COLUMNS, "row += blockDim.y,", "row += blockDim.y + 1,", "partial rows skipped"),
    (
        COLUMNS,
        "T* at = rows + threadIdx.y * width + column;",
        "T* at = rows + threadIdx.y * 32 + column;",
        "partial rows are not 32 apart",
    ),
    (
        SUMS,
        "partials + blockIdx.y * count * width",
        "partials + static_cast<u32>(blockIdx.y * count * width)",
        "unsigned 32-bit index of a plane",
    ),
    (
        SUMS,
        "const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;",
        "const i64 step = static_cast<i64>(gridDim.x) * blockDim.x * 2;",
        "every second tile of columns",
    ),
    (
        FORWARD,
        "x + start_of(layout, X, place, width)",
        "x + static_cast<int>(start_of(layout, X, place, width))",
        "32-bit index of x",
    ),
    (
        FORWARD,
        "y + start_of(layout, Y, place, width)",
        "y + static_cast<u32>(start_of(layout, Y, place, width))",
        "unsigned 32-bit index of y",
    ),
    (
        INVERSE,
        "const i64 at = row * width + column;",
        "const i64 at = static_cast<int>(row * width + column);",
        "32-bit index",
    ),
    (
        CHANNELS,
        "(run * shape.channels + channel) * shape.after + pack * VEC",
        "static_cast<int>((run * shape.channels + channel) * shape.after + pack * VEC)",
        "32-bit index",
    ),
    (
        CHANNELS,
        "(run * shape.channels + channel) * shape.after + pack * VEC",
        "static_cast<u32>((run * shape.channels + channel) * shape.after + pack * VEC)",
        "unsigned 32-bit index",
    ),
    (
        CHANNELS,
        "static_cast<i64>(gridDim.y) * blockDim.y;",
        "static_cast<i64>(gridDim.y);",
        "wrong grid stride",
    ),
    (COLUMNS, "half = blockDim.y / 2", "half = blockDim.y / 4", "half of the shares are lost"),
    (
        BATCH_GRAD,
        "channel - ahead < channels",
        "channel < channels",
        "threads past the last channel leave the block",
    ),
    (
        CHANNELS,
        "if (!walk.inside(shape)) continue;",
        "",
        "a walk past its end",
    ),
    (
        BATCH,
        "channel - ahead < channels",
        "channel < channels",
        "threads past the last channel leave the block",
    ),
    (
        LAUNCH,
        "else -(-self.width // held)",
        "else self.width // held",
        "floor for ceil: a row's tail is lost",
    ),
    (
        GRIDS,
        "math.prod(shape[axis:])",
        "shape[-1] if shape[axis:] else 1",
        "the last dimension for all normalised ones",
    ),
    (
        LAUNCH_BATCH,
        "down = min(_THREADS, power_of_two(packs))",
        "down = min(_THREADS, packs)",
        "shares that are no power of two",
    ),
    # Memory
    (
        GRAD,
        "__shared__ Pair<A> slots[2 * WARP];",
        "__shared__ Pair<A> slots[WARP + 1];",
        "too few slots",
    ),
    (
        GRAD,
        "VEC + k) * LONG_THREADS + threadIdx.x]",
        "VEC + k) * LONG_THREADS / 2 + threadIdx.x]",
        "threads share their sums",
    ),
    (
        LAUNCH,
        "shared = norm.planes * chunks * vector * _LONGEST * accumulated",
        "shared = norm.planes * chunks * vector * _LONGEST * accumulated - accumulated",
        "shared memory one element short",
    ),
    (
        LAUNCH,
        "fits and plan.shared + _SLOTS <= self.device.max_shared_memory",
        "fits",
        "more shared memory than there is",
    ),
    (
        GRAD,
        "__shared__ A tile[MERGED_THREADS * VEC];",
        "__shared__ A tile[MERGED_THREADS * VEC - 1];",
        "a tile one element short",
    ),
    (
        SUMS,
        "__shared__ A tile[1024];",
        "__shared__ A tile[1023];",
        "a tile one element short",
    ),
    (
        CHANNELS,
        "#define BLOCK_THREADS 256",
        "#define BLOCK_THREADS 255",
        "a tile one element short",
    ),
    (
        COLUMNS,
        "    *own = value;",
        "    if (threadIdx.x + 1 < blockDim.x) *own = value;",
        "shared memory uninitialised",
    ),
    (
        WIDE,
        "if (!partials) continue;",
        "if (!partials || column == 0) continue;",
        "partial sums not written",
    ),
    (FORWARD, "if (CENTRED) mean[row]", "if (CENTRED && row) mean[row]", "a mean not written"),
    (
        BATCH_GRAD,
        "if (out) out[channel]",
        "if (out && channel) out[channel]",
        "a gradient not written",
    ),
    (
        BUFFERS,
        "return 1 if run % count else count",
        "return count",
        "vectors over the end of a row",
    ),
    (
        BUFFERS,
        "                return False\n            self._gapless",
        "                pass\n            self._gapless",
        "arrays that kernels cannot read taken as they are",
    ),
    (
        LAUNCH,
        "self._all_usable((*inputs, *outputs))",
        "self._all_usable((*inputs[:4], *outputs))",
        "statistics with gaps taken as they are",
    ),
    (
        LAUNCH,
        "self._all_usable((*inputs, *outputs))",
        "self._all_usable(inputs)",
        "results with gaps taken as they are",
    ),
    (
        LAUNCH_ROWS,
        "self._all_usable((data.x, scale, bias, data.y, mean, inv_std))",
        "self._all_usable((data.x, scale, bias, data.y))",
        "statistics with gaps taken as they are",
    ),
    (
        PLANNED,
        "self._all_usable((*inputs, *outs))",
        "self._all_usable(inputs)",
        "results with gaps taken as they are",
    ),
    (
        PLANNED,
        "self._all_usable((*inputs, *outs))",
        "self._all_usable((*inputs[:2], *outs))",
        "vectors with gaps taken as they are",
    ),
    (
        BUFFERS,
        "if strides != self._gapless:",
        "if not self._gapless:",
        "arrays with gaps taken for earlier ones without",
    ),
    (
        BUFFERS,
        "return places % VECTOR_BYTES == 0",
        "return True",
        "addresses that are not looked at",
    ),
    (
        LAUNCH,
        "found.resident(_WIDE_THREADS) * self.device.multiprocessors",
        "self.device.multiprocessors",
        "a block a multiprocessor, whatever it holds",
    ),
    (
        LAUNCH,
        "row_blocks(found, self.rows, packs, _LONGEST, shared)",
        "row_blocks(found, self.rows, packs, _LONGEST)",
        "blocks counted without their shared memory",
    ),
    (
        GRIDS,
        "kernel.resident(threads * side_by_side, shared_mem)",
        "kernel.resident(threads, shared_mem)",
        "residency of blocks of one row",
    ),
    (
        LAUNCH_BATCH,
        "first.resident(across * down) * first",
        "first",
        "one block of channels a multiprocessor",
    ),
    (
        LAUNCH_ROWS,
        "found.resident(math.prod(blocks.block)) * self",
        "self",
        "one block of the inverse a multiprocessor",
    ),
    (
        BUFFERS,
        "VECTOR_BYTES if vector > 1 else array.itemsize",
        "1",
        "misaligned vectors",
    ),
    (
        PACKS,
        "for (int i = 0; i < Written::WORDS; i += Written::EACH) {",
        "for (int i = 0; i + 1 < Written::WORDS; i += Written::EACH) {",
        "packs of one element are not written",
    ),
    (
        GRAD,
        "to.dy[c] = fetch_if<VEC>(inside, dy + chunk_offset(c), DATA_T{});",
        "to.dy[c] = fetch_if<VEC>(inside, dy + chunk_offset(c), DATA_T{});\n"
        "        if (inside) store<VEC>(const_cast<DATA_T*>(dy) + chunk_offset(c), to.dy[c]);",
        "an input written",
    ),
    # Numbers
    (
        COLUMNS,
        "total += *at;",
        "{ total += *at; if constexpr (sizeof(T) == 8) reinterpret_cast<double&>(total) ="
        " static_cast<float>(reinterpret_cast<double&>(total)); }",
        "sums held in float",
    ),
    (
        SUMS,
        "const A total = column_total(plane, count, width, column, tile);",
        "const A total = narrow<A>(static_cast<double>(rounded(exactly(column_total(plane, count, width, column, tile)))));",
        "float where double is due",
    ),
    (
        GRAD,
        "means.second = means.second * share;",
        "",
        "1/N missing in the mean of w * xhat",
    ),
    (GRAD, "means.first = means.first * share;", "", "1/N missing in the mean of w"),
    (
        WIDE,
        "narrow<A>(total.second / width)",
        "narrow<A>(total.second)",
        "1/N missing in long rows",
    ),
    (BATCH_GRAD, "narrow<A>(total / count)", "narrow<A>(total)", "1/N missing"),
    (
        FORWARD,
        "A centre = {0};\n    if (CENTRED) centre",
        "A centre = {0};\n    if (false) centre",
        "E[x^2] - mean^2",
    ),
    (
        BATCH,
        "about[k] = narrow<A>(known[k]);",
        "about[k] = A{0};",
        "E[x^2] - mean^2",
    ),
    (FORWARD, "x - high - low", "x - high", "the mean rounded to one piece"),
    (
        ARITHMETIC,
        "sum >= 0x1p-96 && sum <= LARGEST",
        "sum >= 0x1p-96",
        "squares that overflow float32",
    ),
    (
        ARITHMETIC,
        "sum >= 0x1p-96 && sum <= LARGEST",
        "sum <= LARGEST",
        "squares that underflow float32",
    ),
    (
        ARITHMETIC,
        "sum >= 0x1p-96 && sum <= LARGEST",
        "sum >= 0x1p-130 && sum <= LARGEST",
        "squares of which float32 loses digits",
    ),
    (
        FORWARD,
        "exact || (sums.second == 0 && all_equal(row, centre))",
        "exact || sums.second == 0",
        "squares that vanish in float32",
    ),
    (
        FORWARD,
        "exact || (sums.second == 0 && all_equal(row, centre))",
        "exact",
        "rows of zeros read again",
    ),
    (
        FORWARD,
        "return CHUNKS && apart == 0;",
        "return apart == 0;",
        "long rows said to be of equal elements",
    ),
    (
        FORWARD,
        "if (!(fabs(sum) <= LARGEST)) return",
        "if (false) return",
        "distances from the first element that overflow",
    ),
    (
        FORWARD,
        "packs += column_of(first + i) < row.width;",
        "packs += 1;",
        "packs beyond the row counted in its sum",
    ),
    (
        FORWARD,
        "- exactly(centre);\n            sums.first",
        ";\n            sums.first",
        "sums in double about 0",
    ),
    (
        FORWARD,
        "exactly(centre) + correction",
        "exactly(centre)",
        "the mean not corrected",
    ),
    (
        DEVIATIONS,
        "sums.apart[k] == 0 ||",
        "sums.of[1][k] == 0 ||",
        "squares that vanish in float32",
    ),
    (
        DEVIATIONS,
        "sums.apart[k] == 0 ||",
        "",
        "channels of zeros read again",
    ),
    (
        DEVIATIONS,
        " && fabs(sums.of[0][k]) <= LARGEST",
        "",
        "distances from the first element that overflow",
    ),
    (
        BATCH,
        "const bool held = sizeof(DATA_T) < 8 || fabs(total) <= LARGEST;",
        "const bool held = true;",
        "sums of float64 that overflow",
    ),
    (
        BATCH,
        "const double apart = SHRUNK * first - SHRUNK * origin[k];",
        "const double apart = SHRUNK * first;",
        "distances from 0 in the place of those from a first element",
    ),
    (
        DEVIATIONS,
        "second += SHRUNK * deviation - SHRUNK * origin[k % OWN];",
        "second += SHRUNK * deviation;",
        "distances from 0 summed again",
    ),
    (
        "kernels/columns.cuh",
        "return lost ? 0 : distance;",
        "return distance;",
        "a mean corrected by distances that overflowed",
    ),
    (
        DEVIATIONS,
        "if (about_first) fill",
        "if (false) fill",
        "distances that overflow summed again",
    ),
    (
        DEVIATIONS,
        "if (about_first && count == 0) centre[k]",
        "if (false) centre[k]",
        "a sum about 0 whose roundings are large compared with the deviations",
    ),
    (
        DEVIATIONS,
        "count += places.count;",
        "count += AT_ONCE;",
        "packs beyond the last counted in a sum",
    ),
    (
        BATCH,
        "packs * (VEC / OWN)",
        "packs",
        "a pack counted as one element",
    ),
    (
        BATCH,
        "exactly(narrow<A>(total / count))",
        "total / count",
        "a centre that floats round once more",
    ),
    (
        DEVIATIONS,
        "- exactly(centre[k % OWN]);\n            sums.of",
        ";\n            sums.of",
        "sums in double about 0",
    ),
    (
        DEVIATIONS,
        "#define STRETCH (LAST ? 16 : AT_ONCE)",
        "#define STRETCH 65536",
        "sums in float that run too long",
    ),
    (
        CHANNEL_GRADIENT,
        "#define STRETCH 16",
        "#define STRETCH 65536",
        "sums in float that run too long",
    ),
    # Steps
    (STEPS, "centre[channel] + first", "centre[channel]", "a centre taken for the mean"),
    (STEPS, "fused(-first, first, second)", "second", "a variance about the centre"),
    (STEPS, "var[k] + eps", "var[k]", "eps ignored"),
    (STEPS, "(plane ? sum_dy : sum_dy_xhat)", "(plane ? sum_dy_xhat : sum_dy)", "sums swapped"),
    (STEPS, "count_at ? *count_at : count", "count", "a count on the device ignored"),
    (STEPS, "exact[channels + k] = factor", "exact[channels + k] = var[k]", "var for inv_std"),
    (COMBINE, "if (counts[r] == 0) continue;", "", "ranks without elements that count"),
    (
        COMBINE,
        "            if (counts[r] != 0)\n",
        "",
        "means of ranks without elements",
    ),
    (
        COMBINE,
        "            spread = fused(product_of(weight, apart), apart, spread);\n",
        "",
        "the variance between ranks left out",
    ),
    (
        COMBINE,
        "half_of(means[r * channels + k]) - half_of(centre)",
        "half_of(means[r * channels + k] - centre)",
        "differences of means that overflow",
    ),
    (COMBINE, "if (first == ranks && counts[r] != 0) first = r;", "first = 0;", "the first rank"),
    (
        LAUNCH_STEPS,
        "        work.deliver((mean, var), written)\n",
        "",
        "results with gaps left where they were made",
    ),
    (
        LAUNCH_STEPS,
        "first_of(scale, bias, inv_std)",
        "first_of(inv_std, bias, scale)",
        "parameters read as statistics",
    ),
    (
        LAUNCH_STEPS,
        "rows = [contiguous(device, array) for array in (means, variances, counts)]",
        "rows = [means, variances, counts]",
        "rows with gaps taken as they are",
    ),
    (FORWARD, "of.variance + eps", "of.variance", "eps ignored"),
    (BATCH, "(variance < 0 ? 0 : variance) + eps", "(variance < 0 ? 0 : variance)", "eps ignored"),
    # Meaning
    (
        SHARED,
        "CENTRED ? fused(xhat, means.second, means.first) : xhat * means.second",
        "fused(xhat, means.second, means.first)",
        "the mean term in an RMS norm",
    ),
    (
        SHARED,
        "CENTRED ? fused(xhat, means.second, means.first) : xhat * means.second",
        "xhat * means.second",
        "no mean term in a layer norm",
    ),
    (
        SHARED,
        "(CENTRED ? source - of.mean : source) * of.inv_std",
        "source * of.inv_std - (CENTRED ? of.mean * of.inv_std : A{0})",
        "the mean is not subtracted first",
    ),
    (
        SHARED,
        "return (source - bias) / scale;",
        "return source / scale - bias;",
        "bias after scale",
    ),
    (
        SUMS,
        "blockIdx.y ? second : first",
        "blockIdx.y ? first : second",
        "dscale and dbias swapped",
    ),
    (BATCH_GRAD, "plane ? dbias : dscale", "plane ? dscale : dbias", "dscale and dbias swapped"),
    (
        SUMS,
        "out[column] = narrow<PARAM_T>(total)",
        "out[column] = narrow<PARAM_T>(widen(out[column]) + total)",
        "+= for =",
    ),
    (
        WIDE,
        "fill<VEC>(totals[plane], A{0})",
        "if (blockIdx.x == 0) fill<VEC>(totals[plane], A{0})",
        "sums that do not begin at 0",
    ),
    (
        CHANNEL_GRADIENT,
        "sums[0][k] += exactly(part[0][k]);",
        "sums[0][k] = exactly(part[0][k]);",
        "= for +=",
    ),
    (
        GRAD,
        "own.sum(0, c, k) = fused(dy, xhat, own.sum(0, c, k));",
        "own.sum(0, c, k) = dy * xhat;",
        "= for +=",
    ),
    (
        GRAD,
        "own.sum(0, c, k) = fused(dy, xhat, own.sum(0, c, k));",
        "own.sum(0, c, k) = fused(w, xhat, own.sum(0, c, k));",
        "scale in its own gradient",
    ),
    (
        GRAD,
        "const A w = dy * scale;",
        "const A w = dy;",
        "the row's sums without scale",
    ),
    (
        INVERSE,
        "/ factor[k] / inv_std + mean",
        "/ factor[k] * inv_std + mean",
        "inv_std upside down",
    ),
    # Loads ahead of what uses them
    (
        PACKS,
        "if (wanted) raw = fetch<N>(from);",
        "raw = fetch<N>(from);",
        "what is not wanted read all the same",
    ),
    (
        PACKS,
        "raw.word[i] = Raw<T, N>::Of::both(absent);",
        "raw.word[i] = Raw<T, N>::Of::both(T{});",
        "0 for what is absent",
    ),
    (
        PACKS,
        "return x.bits * 0x10001u;",
        "return x.bits;",
        "what is absent in the lower half of a word alone",
    ),
    (
        PACKS,
        "word >> (16 * k)",
        "word >> (16 * (1 - k))",
        "the other half of a word read",
    ),
    (
        PACKS,
        "(from)[i / Read::EACH]",
        "(from)[0]",
        "the first access of a pack for all",
    ),
    (
        PACKS,
        "(to)[i / Written::EACH]",
        "(to)[0]",
        "every access of a pack where the first is due",
    ),
    (
        DTYPES,
        "narrow<T>(low).bits | static_cast<u32>(narrow<T>(high).bits) << 16",
        "narrow<T>(high).bits | static_cast<u32>(narrow<T>(low).bits) << 16",
        "the halves of a word swapped",
    ),
    (
        ROWS,
        "offset > 0; offset /= 2",
        "offset > 1; offset /= 2",
        "one step of a sum left out",
    ),
    (
        ROWS,
        "second += b.second;",
        "second += b.first;",
        "the first sum added to both",
    ),
    (
        GRAD,
        "exists && column_of(c) < width;\n            to.dy[c] = fetch_if<VEC>",
        "column_of(c) < width;\n            to.dy[c] = fetch_if<VEC>",
        "a row beyond the last read",
    ),
    (
        GRAD,
        "if (STATISTICS_FIRST) to.of = fetch_statistics(in, exists, row);",
        "if (STATISTICS_FIRST) to.of = fetch_statistics(in, true, row);",
        "the statistics of a row beyond the last read",
    ),
    (
        GRAD,
        "if (!STATISTICS_FIRST) to.of = fetch_statistics(in, exists, row);",
        "if (STRIDED) to.of = fetch_statistics(in, exists, row);",
        "no statistics of long rows",
    ),
    (
        GRAD,
        "AHEAD ? row + step : row",
        "row",
        "this row again for the next one",
    ),
    (
        GRAD,
        "AHEAD ? row + step : row",
        "AHEAD ? row + 1 : row",
        "the row below for the next one",
    ),
    (
        GRAD,
        "AHEAD ? row + step : row, rows,",
        "AHEAD ? row + step : row, rows + step,",
        "a step beyond the last row read",
    ),
    (
        GRAD,
        "fetch_row(in, first + threadIdx.y, rows, width, next)",
        "fetch_row(in, first, rows, width, next)",
        "the first row ahead of a block for all of its rows",
    ),
    (
        GRAD,
        "fetch_row(in, first + threadIdx.y, rows, width, next)",
        "fetch_row(in, first + step + threadIdx.y, rows, width, next)",
        "a step too far ahead",
    ),
    (
        GRAD,
        "const Statistics of = widen(at.of);",
        "const Statistics of = widen(AHEAD ? next.of : at.of);",
        "the next row's statistics for this one",
    ),
    (
        GRAD,
        "    share /= width;",
        "    share /= CHUNKS * VEC * threads();",
        "the columns that a block has room for in place of N",
    ),
    (
        GRAD,
        "source + chunk_offset(c), DATA_T{}",
        "source, DATA_T{}",
        "the first chunk's source for all",
    ),
    (
        GRAD,
        "store_data<VEC>(in.layout, dx + chunk_offset(c), out);",
        "store_data<VEC>(in.layout, dx, out);",
        "every chunk of dx where the first is due: an output not written",
    ),
    (
        GRAD,
        "own.scale[c] = fetch_columns(scale, c, width, A{1})",
        "own.scale[c] = fetch_columns(scale, 0, width, A{1})",
        "the first chunk's scale kept for all",
    ),
    (
        GRAD,
        "KEEP_SCALE ? own.scale[c] : fetch_columns(scale, c, width, A{1})",
        "KEEP_SCALE ? own.scale[c] : fetch_columns(scale, 0, width, A{1})",
        "the first chunk's scale for all where it is not kept",
    ),
    (
        GRAD,
        "    if (FROM_OUTPUT && BIAS_AT_ONCE)\n"
        "#pragma unroll\n"
        "        for (int c = 0; c < CHUNKS; ++c) biases[c] = fetch_columns(in.bias, c, width, A{0});",
        "    if (FROM_OUTPUT && BIAS_AT_ONCE)\n"
        "#pragma unroll\n"
        "        for (int c = 0; c < CHUNKS; ++c) biases[c] = fetch_columns(in.bias, 0, width, A{0});",
        "the first chunk's bias for all",
    ),
    (
        GRAD,
        "if (FROM_OUTPUT && !BIAS_AT_ONCE) biases[c] = fetch_columns(in.bias, c, width, A{0});",
        "if (FROM_OUTPUT && !BIAS_AT_ONCE) biases[c] = fetch_columns(in.bias, 0, width, A{0});",
        "the first chunk's bias for all where it is read chunk by chunk",
    ),
    (
        GRAD,
        "from && column_of(c) < width, from + column_of(c), narrow<PARAM_T>(absent)",
        "from && column_of(c) < width, from + column_of(c), PARAM_T{}",
        "0 for an absent scale",
    ),
    (
        GRAD,
        "at.xhat[c][k] = xhat;",
        "at.xhat[c][k] = w;",
        "w kept for xhat",
    ),
    (
        WIDE,
        "column += PACKS * step",
        "column += step",
        "packs of a batch summed again",
    ),
    (
        WIDE,
        "column += PACKS * step",
        "column += (AT_ONCE + 1) * step",
        "a pack skipped after each batch",
    ),
    (
        WIDE,
        "static_cast<i64>(AT_ONCE) * gridDim.y",
        "gridDim.y",
        "rows of a batch taken again",
    ),
    (
        WIDE,
        "static_cast<i64>(AT_ONCE) * gridDim.y",
        "static_cast<i64>(AT_ONCE + 1) * gridDim.y",
        "a row skipped after each batch",
    ),
    (
        WIDE,
        "own_column < width, own_column)",
        "own_column < width, column)",
        "the first pack's parameters for all of a batch",
    ),
    (
        WIDE,
        "fetch_statistics(in, row < rows, row)",
        "fetch_statistics(in, row < rows, first)",
        "the first row's statistics for all of a batch",
    ),
    (
        WIDE,
        "in.scale + column, narrow<PARAM_T>(A{1})",
        "in.scale + column, PARAM_T{}",
        "0 for an absent scale",
    ),
    (
        WIDE,
        "FROM_OUTPUT && wanted && in.bias,",
        "FROM_OUTPUT && wanted,",
        "an absent bias read",
    ),
    (
        WIDE,
        "if (column + b * step >= width) continue;",
        "",
        "xhat of columns that do not exist counted in",
    ),
    (
        FORWARD,
        "x + column_of(k + i), DATA_T{}",
        "x + column_of(k), DATA_T{}",
        "the first pack of a row for all",
    ),
    (
        FORWARD,
        "inside ? static_cast<Index>(width) : 0",
        "static_cast<Index>(width)",
        "a row beyond the last read",
    ),
    (
        FORWARD,
        "if (column_of(first + i) >= row.width) continue;",
        "",
        "columns beyond the width counted in",
    ),
    (
        CHANNELS,
        "i64 channel) : count(0)",
        "i64 channel) : count(-1)",
        "a batch one pack short",
    ),
    (
        CHANNELS,
        "++count;\n            walk.next();",
        "++count;\n            if (b + 1 < AT_ONCE) walk.next();",
        "the last pack of a batch taken again",
    ),
    (
        CHANNELS,
        "++count;\n            walk.next();",
        "++count;\n            walk.next();\n            if (b + 1 == AT_ONCE) walk.next();",
        "a pack skipped after each batch",
    ),
    (
        CHANNELS,
        "fetch_if<VEC>(b < places.count,",
        "fetch_if<VEC>(true,",
        "packs beyond the last read",
    ),
    (
        CHANNELS,
        "from + places.at[b]",
        "from + places.at[0]",
        "the first pack of a batch for all",
    ),
    (
        LAUNCH_ROWS,
        "if packs <= _FORWARD_THREADS else 0",
        "if packs <= 2 * _FORWARD_THREADS else 0",
        "rows kept that are longer than a block",
    ),
    (
        LAUNCH_ROWS,
        "if packs <= _FORWARD_THREADS else 0",
        "if packs < _FORWARD_THREADS // 2 else 0",
        "rows that a block could keep read again",
    ),
    (
        LAUNCH,
        "min(busy, most)",
        "busy",
        "partial sums larger than the arrays",
    ),
    (
        LAUNCH,
        "_CACHED // (sums * self.width)",
        "0",
        "multiprocessors idle for partial sums that a cache holds",
    ),
    (
        LAUNCH,
        "and norm.from_output else 32",
        "and norm.from_output else 24",
        "rows that fit read twice",
    ),
    (
        LAUNCH,
        "else (16, 20):",
        "else (16,):",
        "rows that fit element by element read twice",
    ),
    (
        LAUNCH,
        "fits = self.width <= plan.threads * plan.chunks * self.vector",
        "fits = self.width < 2 * plan.threads * plan.chunks * self.vector",
        "rows longer than a block has room for",
    ),
]

# What is compiled in advance, which shows in no result.
STARTUP_TESTS = ("tests/test_startup.py::test_nothing_is_compiled_in_vain",)
STARTUP_MUTANTS = (
    (
        LAUNCH,
        "return fits and _long(",
        "return _long(",
        "compiled in advance for more shared memory than there is",
    ),
    (
        LAUNCH,
        '[0] == macros["LONG"]',
        "[0] > 0",
        "both ways to hold scale compiled in advance",
    ),
)
