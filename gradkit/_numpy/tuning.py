"""Every constant of the CPU backend, with its reason.

Sizes are elements unless they say bytes. What changes results (in their last bits) stands
apart from what changes time and memory alone.
"""

# --- how sums are formed: changing one changes bits, and the documented bounds rest on them -----

# Equal elements, as the gradient of a sum has them, round the same way each time. So few of them
# in one running total keep the error of their sum below some 16 units.
ROW_RUN = 1024  # elements of a row that one BLAS call adds up in the accumulation dtype
COLUMN_RUN = 128  # and of a column, whose elements BLAS adds one after the other
# Columns up to which a product with a matrix is as exact as a dot product, and quicker.
NARROW = 256
# A float32 variance below this has lost digits to underflow, and is computed again in float64.
TINY_VARIANCE = 2.0**-100
# What is added to normalised elements is left out below this part of the distance between 1 and
# the next number.
UNFELT = 2.0**-5

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
# A tile has at most so many columns and rows: a dozen float64 numbers are kept for each.
TILE_COLUMNS = 1 << 14
TILE_ROWS = 1 << 13

# --- time and memory alone -----------------------------------------------------------------------

MOST_WORKERS = 4  # threads by default: beyond them memory is the limit
# Sizes from which threads are faster: of a call, and on average per item.
MANY_PASSES = 1 << 18
WORTH_AN_ITEM = 1 << 13
# Outputs from this size on are computed in scratch and copied whole. The processor reads the memory
# that arithmetic writes for the first time, and need not if a whole tile is copied there.
STREAMED_BYTES = 1 << 22
# A call that fits into so many bytes allocates its scratch, which is quicker than to look for it.
SMALL_BYTES = 1 << 16
ALIGNMENT = 64  # bytes of a cache line, and of the widest vector load
# Broadcasting along long runs is twice as fast if NumPy's buffers are shorter than the run: it
# fills a longer one with copies of the broadcast operand first.
SHORT_BUFFER = 512
CONVERTED = 1 << 14  # float16 elements from which on a dozen integer operations are repaid
