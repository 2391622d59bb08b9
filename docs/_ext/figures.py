"""The style of the gallery's figures, shared by its scripts; their legends are checked."""

import matplotlib as mpl
from cycler import cycler
from legends import under_legends
from matplotlib import pyplot as plt
from sphinx_gallery.scrapers import matplotlib_scraper

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


def arguments(gallery_conf, script_vars):
    """Return the command line of a script: the GPT is trained for a few steps."""
    return ["--steps", "40", "--plot"] if "gpt" in script_vars["src_file"] else []


def scraper(block, block_vars, gallery_conf, **more):
    """Save the figures of a block; a legend over a line is an error."""
    for number in plt.get_fignums():
        if lines := under_legends(plt.figure(number)):
            raise ValueError(f"{block_vars['src_file']}: a legend lies over {', '.join(lines)}")
    return matplotlib_scraper(block, block_vars, gallery_conf, **more)
