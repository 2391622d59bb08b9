"""Faults in the list kernels and their launchers: (file, text, what it becomes, what that is).

Each text stands exactly once in its file.
"""

TESTS = (
    "tests/test_cupy_device.py",
    "tests/test_cuda_lists.py",
    "tests/test_cuda_arithmetic.py",
    "tests/test_clipping.py",
    "tests/test_accumulation.py",
    "tests/test_capture.py",
)
WIDE_TESTS = (
    "tests/test_cuda_kernels.py::test_no_64_bit_number_is_narrowed",
    "tests/test_cuda_lists.py::test_a_list_is_uploaded_once_for_norm_and_scaling",
    "tests/test_cuda_lists.py::test_elements_beyond_two_to_the_32",
    "tests/test_cuda_lists.py::test_strided_elements_beyond_two_to_the_32",
    "tests/test_distributed.py",
)

_DEVICE = "gradkit/_cuda/launch/device.py"

MUTANTS = [
    # Graphs
    (
        "gradkit/_cuda/launch/device.py",
        "return keep_if_captured(device, device.xp.empty(shape, dtype))",
        "return device.xp.empty(shape, dtype)",
        "a graph's scratch handed to somebody else",
    ),
    (
        "gradkit/_cuda/launch/buffers.py",
        'return keep_if_captured(device, array.copy(order="C"))',
        'return array.copy(order="C")',
        "a graph's copies handed to somebody else",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "own = dims[begin : ends[stop - 1]]",
        "own = dims[: ends[stop - 1] - begin]",
        "the first launch's dimensions in all of a graph's launches",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "key = (device, device.stream, *addresses, *properties)",
        "key = (device, *addresses, *properties)",
        "a plan shared between streams",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "if plan is None or (plan.uploaded and device.capturing()):",
        "if plan is None:",
        "an uploaded plan used while capturing",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "        if not device.capturing():\n            _plans.keep(key, plan)",
        "        _plans.keep(key, plan)",
        "a captured plan kept",
    ),
    (
        _DEVICE,
        "return bool(stream.ptr and stream.is_capturing())",
        "return False",
        "a capture not noticed",
    ),
    (
        _DEVICE,
        "return bool(stream.ptr and stream.is_capturing())",
        "return bool(stream.is_capturing())",
        "the legacy stream asked whether it is captured",
    ),
    (
        _DEVICE,
        "return (handle, threading.get_ident()) if handle == _PER_THREAD else handle",
        "return handle",
        "one key for all threads' default streams",
    ),
    (
        _DEVICE,
        "return self.xp.asarray(np.ascontiguousarray(host).reshape(-1).view(np.uint8))",
        "return self.xp.asarray(host.base if host.base is not None else host)",
        "the gaps uploaded too",
    ),
    (
        _DEVICE,
        "if self.xp.cuda.runtime.getDevice() == self.number:",
        "if True:",
        "another device left current",
    ),
    # Barriers and warps
    (
        "kernels/norm.cu",
        "for (int offset = WARP / 2; offset > 0;",
        "for (int offset = WARP / 4; offset > 0;",
        "half a warp left out of its sum",
    ),
    (
        "kernels/norm.cu",
        "w < blockDim.x / WARP; ++w",
        "w + 1 < blockDim.x / WARP; ++w",
        "the last warp left out of the block's sum",
    ),
    (
        "kernels/tensor_list.cuh",
        "__ballot_sync(ALL_LANES, reached)",
        "__ballot_sync(0xffffu, reached)",
        "a mask that names half a warp",
    ),
    # Indices
    (
        "kernels/tensor_list.cuh",
        "list.at[probe].first_chunk <= chunk",
        "list.at[probe].first_chunk < chunk",
        "< for <=: a tensor's first chunk taken for the one before",
    ),
    (
        "kernels/tensor_list.cuh",
        "const int count = (left + WARP - 1) / WARP;",
        "const int count = (left + WARP) / WARP;",
        "a pack beyond the packs",
    ),
    (
        "kernels/tensor_list.cuh",
        "const int count = (left + WARP - 1) / WARP;",
        "const int count = left / WARP;",
        "floor for ceil: a lane's last pack lost",
    ),
    (
        "kernels/tensor_list.cuh",
        "    if (reinterpret_cast<u64>(from) % sizeof(T)) {\n",
        "    if (false) {\n",
        "misaligned elements read at once",
    ),
    (
        "kernels/tensor_list.cuh",
        "const i64 first = static_cast<i64>(chunk - tensor.first_chunk) * length;",
        "const i64 first = 0;",
        "every chunk begins where its tensor does",
    ),
    (
        "kernels/tensor_list.cuh",
        "const i64 first = static_cast<i64>(chunk - tensor.first_chunk) * length;",
        "const i64 first = (chunk - tensor.first_chunk) * length;",
        "32 bits: the first element of a chunk, unsigned",
    ),
    (
        "kernels/tensor_list.cuh",
        "const i64 first = static_cast<i64>(chunk - tensor.first_chunk) * length;",
        "const int first = static_cast<int>((chunk - tensor.first_chunk) * length);",
        "32 bits: the first element of a chunk, signed",
    ),
    (
        "kernels/tensor_list.cuh",
        "if (static_cast<u64>(a | b) >> 32) return a / b;",
        "",
        "32 bits: always the short division",
    ),
    (
        "kernels/tensor_list.cuh",
        "min(static_cast<i64>(length), tensor.count - first)",
        "min(length, static_cast<u32>(tensor.count) - static_cast<u32>(first))",
        "32 bits: what is left of a tensor",
    ),
    (
        "kernels/tensor_list.cuh",
        "if (head > count || reinterpret_cast<u64>(source + head) % (N * sizeof(S)))",
        "if (head > count)",
        "packs of a source that is aligned otherwise than its target",
    ),
    (
        "kernels/tensor_list.cuh",
        "const int at = i < head ? i : i + packs * N;",
        "const int at = i + packs * N;",
        "the head lost",
    ),
    (
        "kernels/tensor_list.cuh",
        "source += O::BATCH * STEP;",
        "source += STEP;",
        "a wrong stride between batches",
    ),
    (
        "kernels/scale.cu",
        "walk(list, list.chunks - 1 - k, op)",
        "walk(list, list.chunks - k, op)",
        "chunks backwards, off by one",
    ),
    (
        "kernels/norm.cu",
        "chunk += warps_in_grid()",
        "chunk += 2 * warps_in_grid()",
        "a wrong grid stride",
    ),
    (
        "kernels/tensor_list.cuh",
        "blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP",
        "blockIdx.x * blockDim.x + threadIdx.x / WARP",
        "blocks for warps in the first chunk",
    ),
    # Memory
    ("kernels/norm.cu", "if (lane() == 0) partials[chunk]", "partials[chunk]", "all lanes write"),
    (
        "kernels/norm.cu",
        "__shared__ Part shared[32]",
        "__shared__ Part shared[31]",
        "shared memory short",
    ),
    (
        "kernels/norm.cu",
        "held.source = load<N>(source);",
        "held.source = load<N>(source);\n        store<N>(const_cast<T*>(source), held.source);",
        "an input written",
    ),
    (
        "kernels/accumulate.cu",
        "const S* grad, const T*) {\n        held.source = load<N>(grad);",
        "const S* grad, const T* buffer) {\n        held.source = load<N>(grad);\n"
        "        held.target = load<N>(buffer);\n"
        "        if (to_double(held.target.at(0)) == 0.123) held.source.put(0, S());",
        "= reads what it overwrites",
    ),
    # Numbers
    (
        "kernels/norm_orders.cuh",
        "return to_double(x) * to_double(x);",
        "return widen(x).value * widen(x).value;",
        "squares in float",
    ),
    (
        "kernels/norm_orders.cuh",
        "return to_double(x) * to_double(x);",
        "return to_double(narrow<T>(to_double(x) * to_double(x)));",
        "squares in the input's dtype",
    ),
    (
        "kernels/norm_orders.cuh",
        "add_packs<Sum>(part, packs);",
        "add_packs<Sum>(part, packs);\n        part.hi = to_double(narrow<T>(part.hi));",
        "magnitudes added up in the data's dtype",
    ),
    (
        "kernels/norm_orders.cuh",
        "add_packs<SumOfSquares>(part, packs);",
        "add_packs<SumOfSquares>(part, packs);\n"
        "            part.hi = to_double(narrow<T>(part.hi));",
        "squares added up in the data's dtype",
    ),
    (
        "kernels/norm_orders.cuh",
        "    part.lo = __dadd_rn(part.lo, lost);\n",
        "",
        "no compensation of the sum",
    ),
    (
        "kernels/norm_orders.cuh",
        "const double scale = x > 0x1p480 ? 0x1p600 : x < 0x1p-480 ? 0x1p-600 : 1;",
        "const double scale = 1;",
        "no scaling of squares",
    ),
    (
        "kernels/norm_orders.cuh",
        "const double scale = x > LARGEST ? LARGEST : x;",
        "const double scale = 1;",
        "no scaling of powers",
    ),
    (
        "kernels/norm_orders.cuh",
        "if (x > part.hi || x != x) part.hi = x;",
        "part.hi = fmax(part.hi, x);",
        "a maximum that drops NaN",
    ),
    (
        "kernels/norm_orders.cuh",
        "        part.hi = part.hi * ratio * ratio;\n",
        "        part.hi = part.hi * ratio;\n",
        "squares shrunk by the ratio alone",
    ),
    (
        "kernels/norm_orders.cuh",
        "return fabs(part.hi) <= LARGEST ? part.hi + part.lo : part.hi;",
        "return part.hi + part.lo;",
        "the compensation of infinity is NaN",
    ),
    (
        "kernels/norm_orders.cuh",
        "    if (other.scale > into.scale) {",
        "    if (false) {",
        "parts joined on the scale of the first",
    ),
    (
        "kernels/clip_coefficient.cuh",
        "    if (norm <= max_norm) return 1;\n    return max_norm / (norm < eps ? eps : norm);",
        "    return fmin(1.0, max_norm / fmax(norm, eps));",
        "a minimum that drops NaN",
    ),
    (
        "kernels/clip_coefficient.cuh",
        "(norm < eps ? eps : norm)",
        "norm",
        "eps ignored",
    ),
    (
        "kernels/products.cuh",
        "    Real<f32> one[N], other[N];\n",
        "    for (int i = 0; i < N; ++i) result.put(i, narrow<T>(widen(x.at(i)).value * by.near));\n"
        "    return true;\n    Real<f32> one[N], other[N];\n",
        "scaled in float",
    ),
    (
        "kernels/accumulate.cu",
        "narrow<T>(__dadd_rn(to_double(held.target.at(i)), term))",
        "narrow<T>(__dadd_rn(to_double(held.target.at(i)), to_double(narrow<S>(term))))",
        "the product in the gradient's dtype",
    ),
    (
        "kernels/dtypes.cuh",
        "return narrow<bf16>(to_odd(x));",
        "return narrow<bf16>(rounded(x));",
        "bfloat16 rounded twice",
    ),
    # Dtypes
    (
        "kernels/dtypes.cuh",
        "ROW(0, f16, Real<f32>)",
        "ROW(4, f16, Real<f32>)",
        "no row for float16's number",
    ),
    (
        "kernels/dtypes.cuh",
        "ROW(1, bf16, Real<f32>)",
        "ROW(4, bf16, Real<f32>)",
        "no row for bfloat16's number",
    ),
    (
        "kernels/dtypes.cuh",
        "ROW(2, f32, Real<f32>)",
        "ROW(4, f32, Real<f32>)",
        "no row for float32's number",
    ),
    (
        "kernels/dtypes.cuh",
        "ROW(3, f64, Real<f64>)",
        "ROW(4, f64, Real<f64>)",
        "no row for float64's number",
    ),
    (
        "kernels/tensor_list.cuh",
        "default: __trap();  // a dtype without a row\n",
        "",
        "a dtype without a row passed over",
    ),
    (
        "kernels/tensor_list.cuh",
        "default: __trap();  // a dtype without a row\n",
        "default: walk_chunk<f32, f32>(list, tensor, chunk, op);\n",
        "a dtype without a row taken for float32",
    ),
    # Meaning
    (
        "kernels/scale.cu",
        "if (in_place && factor == 1 && !zero) return;",
        "if (factor == 1 && !zero) return;",
        "nothing copied where the coefficient is 1",
    ),
    (
        "kernels/scale.cu",
        "if (in_place && factor == 1 && !zero) return;",
        "",
        "a coefficient of 1 reads and writes everything",
    ),
    (
        "kernels/scale.cu",
        "zero ? ZERO : factor == 1",
        "factor == 1",
        "zeroes by multiplying",
    ),
    (
        "kernels/clip_value.cu",
        "if (x < -top) result.put(i, narrow<T>(-top));",
        "",
        "clamped from above alone",
    ),
    (
        "kernels/clip_value.cu",
        "if (x > top) result.put(i, narrow<T>(top));",
        "if (!(x <= top)) result.put(i, narrow<T>(top));",
        "NaN clamped",
    ),
    (
        "kernels/accumulate.cu",
        "if (overwrite ? *overwrite : otherwise) apply(list, Overwrite());",
        "if (false) apply(list, Overwrite());",
        "+= for =",
    ),
    (
        "kernels/accumulate.cu",
        "if (!do_update || *do_update) apply(list, Add(scale));",
        "apply(list, Add(scale));",
        "the flag on the device ignored",
    ),
    (
        "kernels/norm.cu",
        "const u32 begin = per_tensor ? list.at[k].first_chunk : 0;",
        "const u32 begin = 0;",
        "every tensor's norm includes those before",
    ),
    # Launchers
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "len(table) <= CAPACITY and len(every) <= DIMS",
        "len(table) <= CAPACITY + 1 and len(every) <= DIMS",
        "a tensor too many for the parameter block",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "len(table) <= CAPACITY and len(every) <= DIMS",
        "len(table) <= CAPACITY and len(every) <= DIMS + 1",
        "a dimension too many for the parameter block",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "chunks = -(-counts // (chunk // sizes))",
        "chunks = counts // (chunk // sizes)",
        "floor for ceil: the last chunk of a tensor lost",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "return -(-count // _WARPS)",
        "return count // _WARPS",
        "floor for ceil: the last blocks lost",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        'fields["at"]["first_chunk"][: len(table)] -= np.uint32(begin)',
        "pass",
        "a part of a list counts chunks from the list's start",
    ),
    (
        "gradkit/_cuda/launch/strides.py",
        "        source_at += (length - 1) * step\n",
        "        source_at += 0\n",
        "a reversed source walked from its wrong end",
    ),
    (
        "gradkit/_cuda/launch/strides.py",
        "if dim[1:] == (length * step, length * target_step):",
        "if dim[2] == length * target_step:",
        "merged by the target's strides alone",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "1 if len(table) == 1 else CAPACITY",
        "CAPACITY",
        "a large parameter block for one array",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        'return self.fields.view(f"V{self.fields.nbytes}")',
        "return self.fields",
        "fields that CuPy describes in each launch",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "if cut is None or not cut.aligned(starts):",
        "if cut is None:",
        "misaligned arrays in chunks for aligned ones",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "        if cut.aligned(starts):\n            _cuts.keep(known, cut)",
        "        _cuts.keep(known, cut)",
        "chunks for misaligned arrays kept for aligned ones",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        'table["source"], table["target"] = starts + self.shifts',
        'table["source"], table["target"] = np.broadcast_to(starts, self.shifts.shape)',
        "a reversed array kept begins at its wrong end",
    ),
    (
        "gradkit/_cuda/launch/tensor_lists.py",
        "known = tuple(properties)\n",
        "known = tuple(properties[:1])\n",
        "chunks kept whatever the targets",
    ),
]
