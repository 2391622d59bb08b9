r"""
Spikes that a fixed limit misses
================================

A limit that fits the beginning of a training run is too high for its end.
:class:`gradkit.SpikeGuard` follows the norm and clips what is far above what it was. Here four
steps are poisoned: their loss is summed over the batch instead of averaged, so that their gradients
are 128 times too large. There is no other clipping. ``examples/spike_guard.py`` has the code of the
run.
"""

import math

import matplotlib.pyplot as plt
from digits_plot import GREY, dress
from spike_guard import draw_runs, train

import gradkit

without = train(None)
guarded = train(gradkit.SpikeGuard())

figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, layout="constrained")
draw_runs(upper, without.loss, guarded.loss)
draw_runs(lower, without.norm, guarded.norm)
lower.plot(guarded.limit, color=GREY, linewidth=1, label="the guard's limit")
upper.set_ylabel("cross-entropy (nats per digit)")
lower.set_ylabel("L2 norm of all gradients")
lower.set_xlabel("training step")
for axes in (upper, lower):
    axes.legend(frameon=False, loc="upper left")
dress(upper, "Training loss, with four poisoned steps")
dress(
    lower, f"Norm of all gradients: the guard clips {len(guarded.clipped)} of {len(guarded.norm)}"
)

# %%
# The limit is infinite while the guard collects its first 25 norms. It stays where it was after a
# spike, because only what was let through enters the average.

print("steps clipped:", guarded.clipped)
print(f"test accuracy: {guarded.accuracy:.1%} with the guard, {without.accuracy:.1%} without")
assert guarded.limit[0] == math.inf
assert guarded.accuracy > 0.95 > 0.5 > without.accuracy
