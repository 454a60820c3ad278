"""One look for every picture: readable at page width, safe for colour-blind readers."""

from __future__ import annotations

from typing import Any

#: Okabe and Ito's palette, in an order that keeps neighbours apart; black is for what has no privacy.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "figure.dpi": 150,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.bbox": "tight",
}


def new_figure(columns: int = 1, *, width: float = 9.0, height: float = 3.6) -> tuple[Any, Any]:
    """A figure and its row of axes, drawn without a screen."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(1, columns, figsize=(width, height), squeeze=False, layout="constrained")
    return figure, axes[0]


def save_figure(figure: Any, path: Any) -> None:
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        figure.savefig(path)
    pyplot.close(figure)
