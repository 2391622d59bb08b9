"""Every constant of the CPU backend, with its reason.

Sizes are elements unless they say bytes. What changes results (in their last bits) stands
apart from what changes time and memory alone.
"""

# --- how work is cut: STRIPS changes bits, the rest changes time and memory ----------------------

STRIPS = 8  # shares of a large call, whatever the number of threads: bits depend on it
# Numbers that all strips together may accumulate of each sum: 1 MiB for the two of a gradient.
STRIP_TOTALS = 1 << 16
# Bytes of scratch for each strip. Larger tiles mean fewer waits for the GIL, which changes hands
# once per NumPy call; from 4 MiB on, tiles of 2048 x 4096 took two to five times as long.
SCRATCH_BYTES = 1 << 21
# From this size on OpenBLAS's gemv starts threads of its own, which compete with ours. No tile
# may reach it, however large the scratch.
BLAS_THREADS = 460_800

# --- time and memory alone -----------------------------------------------------------------------

MOST_WORKERS = 4  # threads by default: beyond them memory is the limit
# Sizes from which threads are faster: of a call, and on average per item.
MANY_PASSES = 1 << 18
WORTH_AN_ITEM = 1 << 13
ALIGNMENT = 64  # bytes of a cache line, and of the widest vector load
# Broadcasting along long runs is twice as fast if NumPy's buffers are shorter than the run: it
# fills a longer one with copies of the broadcast operand first.
SHORT_BUFFER = 512
