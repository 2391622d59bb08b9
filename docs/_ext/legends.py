"""A check that no legend of a figure lies over a line."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.path import Path


def under_legends(figure: Figure) -> list[str]:
    """Return the labels of the lines that a figure's legends cover."""
    figure.draw_without_rendering()
    labels = []
    for axes in figure.axes:
        if legend := axes.get_legend():
            box = legend.get_window_extent()
            for line in axes.lines:
                at = line.get_transform().transform(np.column_stack(line.get_data(orig=False)))
                path = Path(at[np.isfinite(at).all(axis=1)])
                if len(path) and path.intersects_bbox(box, filled=False):
                    labels.append(str(line.get_label()))
    return labels
