"""Faults that only compiled code shows: inline assembly, what g++ never sees, contraction.

(file, old text, new text, what, the public functions whose bits change or the tests that fail).
"""

_ARITHMETIC = "kernels/arithmetic.cuh"
_DTYPES = "kernels/dtypes.cuh"
_MAGNITUDES = ("tests/test_cuda_arithmetic.py::test_norms_of_every_magnitude[float32-1.0]",)
_MAGNITUDE_OF = """    float y;
    asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;"""
_ROWS = ("layer_norm_grad", "rms_norm_grad")
_EXACTLY = """    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;"""
_ROUNDED = """    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;"""
_IN_DOUBLE = """\
__device__ __forceinline__ double sum_of(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double difference_of(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ double product_of(double a, double b) { return __dmul_rn(a, b); }"""
_PLAIN = _IN_DOUBLE
for _intrinsic, _operator in (("add", "+"), ("sub", "-"), ("mul", "*")):
    _PLAIN = _PLAIN.replace(f"__d{_intrinsic}_rn(a, b)", f"a {_operator} b")

ROWS = (
    (
        "kernels/norm_parts.cuh",
        "if (lane() == 0) add_waiting(share);",
        "if (lane() == 0 && share.waiting.hi > 0) add_waiting(share);",
        "a subnormal sum that waits taken for 0",
        ("clip_by_block_norm",),
    ),
    (_ARITHMETIC, '"add.rn.f32"', '"add.rn.ftz.f32"', "sums that flush", _ROWS),
    (_ARITHMETIC, '"sub.rn.f32"', '"sub.rn.ftz.f32"', "differences that flush", ("layer_norm",)),
    (_ARITHMETIC, '"mul.rn.f32"', '"mul.rn.ftz.f32"', "products that flush", _ROWS),
    (_ARITHMETIC, '"div.rn.f32"', '"div.rn.ftz.f32"', "quotients that flush", _ROWS),
    (_ARITHMETIC, '"fma.rn.f32 %0', '"fma.rn.ftz.f32 %0', "multiply-adds that flush", _ROWS),
    (_ARITHMETIC, '"add.rn.f32"', '"add.rz.f32"', "sums rounded toward zero", _ROWS),
    (_ARITHMETIC, '"sub.rn.f32"', '"sub.rm.f32"', "differences rounded down", ("layer_norm",)),
    (_ARITHMETIC, '"mul.rn.f32"', '"mul.rp.f32"', "products rounded up", _ROWS),
    (_ARITHMETIC, '"div.rn.f32"', '"div.rz.f32"', "quotients rounded toward zero", _ROWS),
    (_ARITHMETIC, '"fma.rn.f32 %0', '"fma.rz.f32 %0', "multiply-adds toward zero", _ROWS),
    (_ARITHMETIC, '"cvt.f64.f32 %0', '"cvt.ftz.f64.f32 %0', "widening that flushes", ("scale_grads",)),
    (_ARITHMETIC, _EXACTLY, "    return x;", "widening by a plain cast", ("accumulate_grad",)),
    (_ARITHMETIC, '"cvt.rn.f32.f64 %0', '"cvt.rz.f32.f64 %0', "narrowing toward zero", ("scale_grads",)),
    (_ARITHMETIC, _ROUNDED, "    return static_cast<float>(x);", "narrowing by a plain cast", ("accumulate_grad",)),
    (_ARITHMETIC, _IN_DOUBLE, _PLAIN, "doubles that a compiler may fuse", _ROWS),
    (_DTYPES, '"cvt.rn.f16.f32 %0', '"cvt.rz.f16.f32 %0', "float16 rounded toward zero", _ROWS),
    (_DTYPES, '"cvt.rn.bf16x2.f32 %0', '"cvt.rz.bf16x2.f32 %0', "bfloat16 rounded toward zero", _ROWS),
    (_DTYPES, '"f"(high.value), "f"(low.value)', '"f"(low.value), "f"(high.value)', "the halves of a bfloat16 word swapped", _ROWS),
    (_ARITHMETIC, '"abs.f32 %0', '"abs.ftz.f32 %0', "magnitudes that flush", _MAGNITUDES),
    (_ARITHMETIC, _MAGNITUDE_OF, "    return fabsf(x);", "magnitudes by CUDA's own function, that flush", _MAGNITUDES),
    (
        "kernels/accumulation.cuh",
        "            const double term = __dmul_rn(to_double(held.source.at(i)), scale.exact);\n"
        "            result.put(i, narrow<T>(__dadd_rn(to_double(held.target.at(i)), term)));",
        "            const double term = to_double(held.source.at(i)) * scale.exact;\n"
        "            result.put(i, narrow<T>(to_double(held.target.at(i)) + term));",
        "a product and a sum that a compiler may fuse",
        ("accumulate_grad",),
    ),
)  # fmt: skip
