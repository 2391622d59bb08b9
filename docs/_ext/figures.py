"""The style of the gallery's figures, shared by its scripts."""

import matplotlib as mpl
from cycler import cycler

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"


def dress(gallery_conf, fname):
    """Titles on the left, a light grid and no box: run before each script."""
    mpl.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREY]),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 11,
            "axes.xmargin": 0.01,
            "grid.color": "0.9",
        }
    )
