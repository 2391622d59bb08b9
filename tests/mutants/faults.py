"""The 32 kinds of fault that a kernel may have, and the mutants that stand for each.

A kind is a regular expression that finds the names of its mutants.
"""

FAMILIES: dict[str, dict[str, str]] = {
    "barriers and warps": {
        "the first barrier dropped": r"layer_norm_grad.cu: no barrier.*by the call before",
        "a middle barrier dropped": r"no barrier: `__syncthreads\(\);`",
        "the trailing barrier dropped": r"no barrier.*(next round|filled again)|no trailing barrier",
        "a barrier in a divergent branch": r"divergent branch|leave the block",
        "a wrong shuffle mask": r"half of the warp in the mask|a mask that names half a warp",
        "the last warp left out": r"the last warps? left out",
    },
    "indices": {
        "<= for <": r"<= for <|> for >=",
        "a signed 32-bit index": r"int for i64|: 32-bit index|, signed$",
        "an unsigned 32-bit index": r"[:,] unsigned",
        "the tail lost": r"the head lost|the last part of a row is lost|last row is lost",
        "a wrong grid stride": r"wrong grid stride|strided by the wrong dimension",
        "floor for ceil": r"floor for ceil",
        "the last dimension taken for N": r"the last dimension for all normalised ones",
        "a wrong row stride": r"row stride wrong|partial rows are not 32 apart",
        "a chunk's place lost": r"every chunk begins where its tensor does|from the list's start",
    },
    "memory": {
        "shared memory uninitialised": r"shared memory uninitialised|slots that nobody wrote",
        "an output element not written": r"not written",
        "an input written": r"an input written",
        "a misaligned vector access": r"misaligned|aligned otherwise",
        "shared memory one element short": r"one element short|shared memory short|too few slots",
    },
    "numbers": {
        "a 16-bit accumulator": r"in the (data|input|gradient)'s dtype",
        "float32 where float64": r"float where double|(squares|held|scaled) in float",
        "a maximum that drops NaN": r"a maximum that drops NaN",
        "a minimum that drops NaN": r"a minimum that drops NaN",
        "E[x^2] - mean^2": r"E\[x\^2\] - mean\^2",
        "no scaling": r"no scaling",
        "1/N missing": r"1/N missing",
    },
    "compiled code": {
        "subnormals flushed to zero": r"that flush(es)?$",
        "another rounding": r"(toward zero|rounded up|rounded down)$",
        "a plain cast": r"by a plain cast$",
        "what a compiler may fuse": r"that a compiler may fuse$",
    },
    "meaning": {
        "the mean term in an RMS norm": r"the mean term in an RMS norm",
        "dscale and dbias swapped": r"dscale and dbias swapped",
        "= for +=": r": (= for \+=|\+= for =)$",
        "zeroing by multiplying": r"zeroes by multiplying",
        "eps ignored": r"eps ignored",
    },
}
KINDS = {kind: name for family in FAMILIES.values() for kind, name in family.items()}
