"""The style of the gallery's figures, shared by its scripts, and a check of their legends."""

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
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


def scraper(block, block_vars, gallery_conf, **more):
    """Save the figures of a block; a legend over a line is an error."""
    for number in plt.get_fignums():
        if lines := under_legends(plt.figure(number)):
            raise ValueError(f"{block_vars['src_file']}: a legend lies over {', '.join(lines)}")
    return matplotlib_scraper(block, block_vars, gallery_conf, **more)


def under_legends(figure: Figure) -> list[str]:
    """Return the labels of the lines that a figure's legends cover."""
    figure.canvas.draw()
    found = []
    for axes in figure.axes:
        if legend := axes.get_legend():
            box = legend.get_window_extent()
            for line in axes.lines:
                at = line.get_transform().transform(np.column_stack(line.get_data(orig=False)))
                path = mpl.path.Path(at[np.isfinite(at).all(axis=1)])
                if len(path) and path.intersects_bbox(box, filled=False):
                    found.append(str(line.get_label()))
    return found
