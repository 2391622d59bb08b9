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
        "lane() < blockDim.x / WARP ?",
        "lane() + 1 < blockDim.x / WARP ?",
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
        "first += warps_in_grid()",
        "first += 2 * warps_in_grid()",
        "a wrong grid stride",
    ),
    (
        "kernels/tensor_list.cuh",
        "blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP",
        "blockIdx.x * blockDim.x + threadIdx.x / WARP",
        "blocks for warps in the first chunk",
    ),
    # Memory
    (
        "kernels/norm.cu",
        "if (lane() == 0 && first + own < list.chunks)",
        "if (first + own < list.chunks)",
        "all lanes write",
    ),
    (
        "kernels/norm.cu",
        "if (threadIdx.x == 0) partials[first / warps]",
        "partials[first / warps]",
        "all threads write",
    ),
    (
        "kernels/norm.cu",
        "__shared__ Part shared[WARP]",
        "__shared__ Part shared[WARP - 1]",
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
        "magnitude <= top ||",
        "magnitude <= top || bits >> 31 ||",
        "clamped from above alone",
    ),
    (
        "kernels/clip_value.cu",
        " || magnitude > 0x7f800000u",
        "",
        "NaN clamped",
    ),
    (
        "kernels/clip_value.cu",
        "magnitude > 0x7f800000u",
        "magnitude >= 0x7f800000u",
        "infinity not clamped",
    ),
    (
        "kernels/clip_value.cu",
        "top | (bits & 0x80000000u)",
        "top",
        "clamped to the positive limit",
    ),
    (
        "kernels/clip_value.cu",
        "x > limit ? limit : x < -limit ? -limit : x",
        "x > limit ? limit : x",
        "float64 clamped from above alone",
    ),
    (
        "kernels/clip_value.cu",
        "x > limit ? limit : x < -limit ? -limit : x",
        "x < -limit ? -limit : x <= limit ? x : limit",
        "NaN of float64 clamped",
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
        "return -(-self.count // _WARPS)",
        "return self.count // _WARPS",
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
    # Floats in place of doubles, and batches
    (
        "kernels/packs.cuh",
        "static_cast<u32>(x.bits) << (16 * k)",
        "static_cast<u32>(x.bits) << (16 * (1 - k))",
        "the other half of a word written",
    ),
    (
        "kernels/packs.cuh",
        "(word & ~(0xffffu << (16 * k)))",
        "word",
        "what a word held before left in it",
    ),
    (
        "kernels/tensor_list.cuh",
        "        if (b < count) op.finish(held[b],",
        "        op.finish(held[b],",
        "packs of a batch that do not exist written",
    ),
    (
        "kernels/tensor_list.cuh",
        "source + b * WARP * N, target + b * WARP * N);",
        "source + b * WARP * N, target);",
        "one place for all packs of a batch",
    ),
    (
        "kernels/tensor_list.cuh",
        "op.finish(held[b], source + b * WARP * N,",
        "op.finish(held[b], source,",
        "the first pack of a batch where another needs double",
    ),
    (
        "kernels/tensor_list.cuh",
        "op.fetch(held[b], source + b * STEP,",
        "op.fetch(held[b], source,",
        "the first pack of a batch for all",
    ),
    (
        "kernels/tensor_list.cuh",
        "    for (int left = packs - lane(); left > 0; left -= O::BATCH * WARP) {\n"
        "        const int count = (left + WARP - 1) / WARP;\n"
        "        Held<S, T, N> held[O::BATCH] = {};\n",
        "    Held<S, T, N> held[O::BATCH] = {};\n"
        "    for (int left = packs - lane(); left > 0; left -= O::BATCH * WARP) {\n"
        "        const int count = (left + WARP - 1) / WARP;\n",
        "packs left in a batch that is not full",
    ),
    (
        "kernels/arithmetic.cuh",
        "return {sum, sum_of(difference_of(a, difference_of(sum, back)), difference_of(b, back))};",
        "return {sum, 0};",
        "no two-sum of floats",
    ),
    (
        "kernels/norm_orders.cuh",
        "sum_of(sum.lo, sum_of(a.lo, b.lo))",
        "sum.lo",
        "what floats rounded off before dropped",
    ),
    (
        "kernels/norm_orders.cuh",
        "__dadd_rn(exactly(sum.hi), exactly(sum.lo))",
        "exactly(sum.hi)",
        "what floats rounded off lost on the way to double",
    ),
    (
        "kernels/norm_orders.cuh",
        "sizeof(T) == 2 ? 0.0f : fused(value, value, negative_of(square))",
        "0.0f",
        "what rounding took from a square dropped",
    ),
    (
        "kernels/norm_orders.cuh",
        "return sum >= 0x1p-96f && sum <= LARGEST_FLOAT;",
        "return sum <= LARGEST_FLOAT;",
        "no threshold under sums of squares",
    ),
    (
        "kernels/norm_orders.cuh",
        "sum >= 0x1p-96f",
        "sum >= 0x1p-126f",
        "digits of small squares lost",
    ),
    (
        "kernels/norm_orders.cuh",
        "return sum >= 0x1p-96f && sum <= LARGEST_FLOAT;",
        "return sum >= 0x1p-96f;",
        "squares beyond float32 kept",
    ),
    (
        "kernels/norm_orders.cuh",
        "        return sum <= LARGEST_FLOAT;\n",
        "        return true;\n",
        "magnitudes beyond float32 kept",
    ),
    (
        "kernels/norm_orders.cuh",
        "return magnitudes == 0;",
        "return true;",
        "tiny elements taken for zeros",
    ),
    (
        "kernels/norm_orders.cuh",
        "{magnitude_of(widen(x).value), 0}",
        "{widen(x).value, 0}",
        "signs left in a sum of magnitudes",
    ),
    (
        "kernels/norm_orders.cuh",
        "for (int b = 1; b < B; ++b) sum =",
        "for (int b = 1; b + 1 < B; ++b) sum =",
        "the last pack of a batch left out",
    ),
    (
        "kernels/norm_orders.cuh",
        "    for (int width = N / 2; width > 0;",
        "    for (int width = N / 4; width > 0;",
        "half of a pack left out",
    ),
    (
        "kernels/norm_orders.cuh",
        "            part.scale = 1;\n        }\n    }\n",
        "        }\n    }\n",
        "squares without a scale",
    ),
    (
        "kernels/norm_orders.cuh",
        "widen(packs[b].source.at(i)).value) & 0x7fffffffu",
        "widen(packs[b].source.at(i)).value)",
        "a maximum by bits with their signs",
    ),
    (
        "kernels/norm_orders.cuh",
        "join(part, exactly(__uint_as_float(largest)));",
        "join(part, exactly(__uint_as_float(min(largest, 0x7f800000u))));",
        "a maximum that drops NaN of floats",
    ),
    (
        "kernels/products.cuh",
        "1 - 0x1p-23f",
        "1",
        "products of 16 bits not enclosed from below",
    ),
    (
        "kernels/products.cuh",
        "1 + 0x1p-23f",
        "1",
        "products of 16 bits not enclosed from above",
    ),
    (
        "kernels/products.cuh",
        "{-1 + 0x1p-20f}",
        "{-1}",
        "products of float32 not enclosed on one side",
    ),
    (
        "kernels/products.cuh",
        "{-1 - 0x1p-20f}",
        "{-1}",
        "products of float32 not enclosed on the other side",
    ),
    (
        "kernels/products.cuh",
        "fused(minus, {by.rest}, fused(minus, {by.near}, product));\n"
        "        one = fused(excess, {-1 + 0x1p-20f}, product);\n"
        "        other = fused(excess, {-1 - 0x1p-20f}, product);",
        "fused(x, {by.rest}, fused(x, {by.near}, {negative_of(product.value)}));\n"
        "        one = fused(excess, {1 - 0x1p-20f}, product);\n"
        "        other = fused(excess, {1 + 0x1p-20f}, product);",
        "-0 becomes +0",
    ),
    (
        "kernels/products.cuh",
        "by.fits && smallest >= by.least - 1",
        "smallest >= by.least - 1",
        "factors that floats cannot hold",
    ),
    (
        "kernels/products.cuh",
        "by.fits && smallest >= by.least - 1",
        "by.fits",
        "products that floats cannot hold",
    ),
    (
        "kernels/products.cuh",
        "0x1p-99 /",
        "0x1p-126 /",
        "products whose rounding errors floats cannot hold",
    ),
    (
        "kernels/products.cuh",
        "if (fabs(exactly(__uint_as_float(bits))) > fabs(factor)) bits -= 0x800u;",
        "",
        "a head rounded up",
    ),
    (
        "kernels/products.cuh",
        "if (tail == 0) tail = product_of(head, 0x1p-40f);",
        "",
        "infinity times a tail of 0",
    ),
    (
        "kernels/products.cuh",
        "decided = decided && agree(result.word[w], same.word[w]);",
        "decided = decided && w >= 0;",
        "ties never decided in double",
    ),
    (
        "kernels/products.cuh",
        "agree(f16 one, f16 other) { return one.bits == other.bits; }",
        "agree(f16, f16) { return true; }",
        "ties of single float16 elements never decided in double",
    ),
    (
        "kernels/products.cuh",
        "agree(bf16 one, bf16 other) { return one.bits == other.bits; }",
        "agree(bf16, bf16) { return true; }",
        "ties of single bfloat16 elements never decided in double",
    ),
    (
        "kernels/products.cuh",
        "return narrow<T>(to_double(x) * by.exact);",
        "return narrow<T>(rounded(to_double(x) * by.exact));",
        "ties rounded to float32 first",
    ),
    (
        "kernels/scale.cu",
        "if (change == KEEP) result = held.source;",
        "",
        "0 where the coefficient is 1",
    ),
    (
        "kernels/scale.cu",
        "Raw<T, N> result = {};",
        "Raw<T, N> result = held.source;",
        "what is not finite kept",
    ),
    (
        "kernels/scale.cu",
        "        for (int i = 0; i < N; ++i)\n            write<1>",
        "        for (int i = 0; i + 1 < N; ++i)\n            write<1>",
        "the last element of a pack not written",
    ),
    (
        "kernels/scale.cu",
        "load<1>(source + i)",
        "load<1>(source)",
        "the first element of a pack for all",
    ),
    (
        "kernels/arithmetic.cuh",
        "__uint_as_float(bits | 1)",
        "__uint_as_float(bits)",
        "an inexact sum not made odd",
    ),
    (
        "kernels/arithmetic.cuh",
        "    if ((lost ^ bits) >> 31) bits -= 1;  // towards zero\n",
        "",
        "a sum made odd away from zero",
    ),
    (
        "kernels/arithmetic.cuh",
        " || (bits & 0x7f800000u) == 0x7f800000u",
        "",
        "infinite sums made odd",
    ),
    (
        "kernels/accumulate.cu",
        "{to_odd(sum_with_error(buffer.value, grad.value))}",
        "buffer + grad",
        "a sum rounded twice",
    ),
    (
        "kernels/accumulate.cu",
        "if (scale == 1) return",
        "return",
        "scale ignored for floats",
    ),
    (
        "kernels/accumulate.cu",
        "if constexpr (sizeof(T) == 4) sums[i]",
        "if constexpr (sizeof(T) == 2) sums[i]",
        "sums of 16 bits rounded to float first, those of float made odd",
    ),
    (
        "kernels/norm.cu",
        "partials[first / warps] = part",
        "partials[blockIdx.x] = part",
        "a block's later parts over its first",
    ),
    (
        "kernels/norm.cu",
        "    if (threadIdx.x >= WARP) return part;\n",
        "",
        "every warp joins the parts of the block",
    ),
    (
        "gradkit/_cuda/clipping.py",
        "        first += count\n",
        "        first += 0\n",
        "the parts of a list's launches in one place",
    ),
    (
        "gradkit/_cuda/clipping.py",
        "table.count if per_tensor else table.blocks",
        "table.count if per_tensor else table.blocks - 1",
        "room for a part too few",
    ),
    (
        "gradkit/_cuda/clipping.py",
        "joined = np.uint32(not per_tensor)",
        "joined = np.uint32(1)",
        "tensors joined that have norms of their own",
    ),
]
