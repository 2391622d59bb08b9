"""Places where a rule of ``generated.py`` makes no fault: why, in which files, and what.

Files and what are regular expressions that match from beginning to end.
"""

EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    (
        "launchers bound this side of the grid, whose threads an int can count",
        r"layer_norm(_grad|_grad_wide|_inverse)?\.cu",
        r"int for i64: .*static_cast<i64>\(\w+\.(x\) \* blockDim\.y|y\) \* blockDim\.x).*\(2\)",
    ),
    (
        "launchers bound this side of the grid, whose threads an int can count",
        r"coefficients\.cu",
        r"int for i64: (`i \+= .*|`for .*\(2\))",
    ),
    (
        "launchers bound this side of the grid, whose threads an int can count",
        r"channels\.cuh",
        r"int for i64: .*static_cast<i64>\((gridDim|blockIdx)\.y\).*\(2\)",
    ),
    (
        "there are two planes at most, of as many rows as the grid has blocks",
        r"layer_norm_grad(_wide)?\.cu|channels\.cuh",
        r"int for i64: .*static_cast<i64>\(plane\).*\(2\)",
    ),
    (
        "an int counts the columns of a block",
        r".*",
        r"int for i64: `const i64 (ahead = threadIdx|step = static_cast<i64>\(blockDim).*",
    ),
    (
        "there is a partial row for each block",
        r"columns\.cuh",
        r"int for i64: `for \(i64 row = threadIdx\.y; .*",
    ),
    (
        "there is a partial row for each block",
        r"batch_norm\.cu",
        r"int for i64: `for \(i64 row = 0; row < shares; .*",
    ),
    (
        "only float64 elements come there",
        r"batch_norm\.cu",
        r"a sum in the data's dtype: `(sums\.of\[1\]\[k\] = fused\(count|for \(i64 row = 0; row < shares).*",
    ),
    (
        "no memory holds 2^31 rows of the lengths that this kernel is for",
        r"layer_norm_grad_wide\.cu",
        r"int for i64: `(for \(i64 row = blockIdx\..*|(for \(i64 first|const i64 row) = .*\((2|4)\))",
    ),
    (
        "an int counts the columns of a row that one block holds, and the packs of a thread",
        r"layer_norm(_grad)?\.cu",
        r"int for i64: `(__device__ .* i64 chunk_offset.*|for \(i64 k = 0; .*)",
    ),
    (
        "one more round of a block, which finds nothing to do",
        r"(batch|group)_norm(_grad|_steps|_inference_grad)?\.cu|column_sums\.cu|layer_norm(_grad|_grad_wide)?\.cu",
        r"<= for <: `for \((i64 (start|first|channel|column)|int turn) = .*(start|first|ahead) < .*",
    ),
    (
        "scale that lies in shared memory is read there; registers beside it stay unused",
        r"layer_norm_grad\.cu",
        r"<= for <: `constexpr bool KEEP_SCALE = .*",
    ),
    (
        "one more batch, of which nothing is wanted",
        r"layer_norm_grad_wide\.cu",
        r"<= for <: `for \(; column < width; column \+= PACKS .*",
    ),
    (
        "an int counts the packs of a thread",
        r"deviations\.cuh",
        r"int for i64: `i64 count = 0;.*",
    ),
    (
        "one more group, of which no pack exists",
        r"layer_norm\.cu",
        r"<= for <: `for \(Index k = 0; .* k \+= (N|SUMMED)\).*",
    ),
    (
        "a constant row is summed in double too, to the same numbers",
        r"layer_norm\.cu",
        r"<= for <: `if \(column_of\(i\) < row\.width\)`",
    ),
    (
        "how many packs are in flight, not what is computed; machine-code.md has the registers",
        r"layer_norm\.cu",
        r"<= for <: `constexpr bool FEW = .*",
    ),
    (
        "launchers bound this side of the grid, whose threads an int can count",
        r"group_norm(_grad)?\.cu",
        r"int for i64: .*static_cast<i64>\(\w+\.x\) \* blockDim\.y.*\((2|4)\)",
    ),
    (
        "the grid takes all channels at once, and a product of unsigned numbers all below 2^32",
        r"group_norm_grad\.cu",
        r"int for i64: .*static_cast<i64>\(\w+\.x\) \* blockDim\.x.*\(2\)",
    ),
    (
        "no memory holds the partial sums of a group of 2^31 channels beside the data",
        r"groups\.cuh",
        r"int for i64: `for \(i64 k = threadIdx\.x; k < count; .*",
    ),
    (
        "a thread beyond the last channel reads the first one's number, and writes nothing",
        r"groups\.cuh",
        r"<= for <: `to\[k\] = from && column \+ k < of\.columns\(\) \? widen\(from\[channel .*",
    ),
    (
        "one number more is left to double, which is always right",
        r"products\.cuh|norm_orders\.cuh|accumulat.*|arithmetic\.cuh",
        r"> for >=: .*",
    ),
    (
        "the same where both sides are the same",
        r".*",
        r"<= for <: .*(variance < 0|norm < eps|size < least|threads < WARP|x < 0x1p-480|other\.scale < into).*",
    ),
    (
        "no compiler takes it: which minimum is meant?",
        r"tensor_list\.cuh",
        r"int for i64: .*min\(static_cast<i64>\(length\), .*",
    ),
    (
        "changes a term that has been added already",
        r"norm_orders\.cuh",
        r"<= for <: .*i < width; .*",
    ),
    (
        "one more pack before double takes over",
        r"deviations\.cuh|channel_gradient\.cuh|batch_norm_inference_grad\.cu",
        r"<= for <: .*i < STRETCH.*",
    ),
)
