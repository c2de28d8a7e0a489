"""Render figures to SVG, PNG and GIF. The same figures give the same bytes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    StrMethodFormatter,
)
from PIL import Image

from weightnorm.lab.reports.bar_chart import bar_figure, dot_figure
from weightnorm.lab.reports.document import (
    BarChart,
    FigureSpec,
    Line,
    Picture,
    Plot,
    PlotPanels,
)
from weightnorm.lab.reports.style import INK

PAPER = "#ffffff"
WIDTH, HEIGHT, LEGEND_ROW = 5.0, 3.5, 0.21
"""Inches; narrow enough that text stays readable on a phone."""
PANEL_WIDTH = 4.0
LEGEND_WIDTH, LEGEND_HANDLE = 57, 6
"""Characters of a row, and those that the line before a name takes."""
PICTURE_WIDTH = 640
"""Pixels; smaller pictures are enlarged up to this width."""
TICKS = 6
"""On a logarithmic axis with at most this many values, one tick at each; else one per decade."""
MARKERS = 8
"""Number of markers on a long line."""
LARGE = 1000
"""An x axis that reaches this value has fewer ticks, since their labels are wider."""
NARROW = 3
"""Ratio of highest to lowest value below which a logarithmic axis has too few ticks."""
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a dollar in a name is a dollar
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "font.size": 11,
    "legend.fontsize": 10,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class RenderedFigure:
    """Files of a figure, and their common name."""

    name: str
    files: dict[str, bytes]
    """Extension → content; the page shows the first."""


def render_figures(figures: Iterable[FigureSpec]) -> dict[FigureSpec, RenderedFigure]:
    """Render each figure under a unique name."""
    drawings: dict[FigureSpec, RenderedFigure] = {}
    names: set[str] = set()
    for item in figures:
        choices = (f"{item.name}-{i}" if i > 1 else item.name for i in range(1, len(names) + 2))
        name = next(choice for choice in choices if choice not in names)
        names.add(name)
        files = picture_files(item) if isinstance(item, Picture) else plot_files(item, name)
        drawings[item] = RenderedFigure(name, files)
    return drawings


def plot_files(plot: Plot | PlotPanels | BarChart, name: str) -> dict[str, bytes]:
    """Render a plot as SVG and PNG, independent of the user's matplotlib style.

    Ids in the SVG are derived from the name.
    """
    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": name}]):
        if isinstance(plot, BarChart):
            drawing = dot_figure(plot) if plot.dots else bar_figure(plot)
        else:
            drawing = plot_figure(plot) if isinstance(plot, Plot) else panel_figure(plot)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        return {
            "svg": _saved(drawing, "svg", nothing),
            "png": _saved(drawing, "png", {"Software": None}),
        }


def picture_files(picture: Picture) -> dict[str, bytes]:
    """Render a picture as PNG, or as a looping GIF if there are several frames.

    Small pictures are enlarged by an integer factor.
    """
    factor = max(1, PICTURE_WIDTH // picture.frames.shape[2])
    frames = [
        Image.fromarray(np.kron(frame, np.ones((factor, factor, 1)[: frame.ndim], np.uint8)))
        for frame in picture.frames
    ]
    buffer, kind = io.BytesIO(), "png" if len(frames) == 1 else "gif"
    moving = {"save_all": True, "append_images": frames[1:], "loop": 0}
    moving["duration"] = round(1000 * picture.seconds)
    frames[0].save(buffer, kind, **(moving if kind == "gif" else {"optimize": True}))
    return {kind: buffer.getvalue()}


def plot_figure(plot: Plot) -> Figure:
    """Draw a plot with its legend below the axes."""
    names = [textwrap.fill(line.name, LEGEND_WIDTH) for line in plot.lines]
    height = HEIGHT + LEGEND_ROW * sum(name.count("\n") + 1 for name in names)
    drawing = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = drawing.add_subplot(xlabel=plot.x, ylabel=plot.y)
    handles = [_draw_line(axes, line) for line in plot.lines]
    _scale(axes, plot)
    drawing.legend(handles, names, loc="outside lower left", handlelength=3)
    return drawing


def panel_figure(panels: PlotPanels) -> Figure:
    """Draw plots side by side, with the legend of the first below them."""
    names, width = [line.name for line in panels.plots[0].lines], PANEL_WIDTH * len(panels.plots)
    columns = _legend_columns(names, width)
    height = HEIGHT + LEGEND_ROW * (math.ceil(len(names) / columns) - 1)
    drawing = Figure(figsize=(width, height), layout="constrained")
    grid = drawing.subplots(1, len(panels.plots), sharey=True, squeeze=False)
    drawn: list[list[Line2D]] = []
    for axes, plot in zip(grid[0], panels.plots, strict=True):
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y if axes is grid[0][0] else "")
        drawn.append([_draw_line(axes, line) for line in plot.lines])
    for axes, plot in zip(grid[0], panels.plots, strict=True):
        _scale(axes, plot)
    if names:
        drawing.legend(drawn[0], names, loc="outside lower center", ncols=columns, handlelength=3)
    return drawing


def _legend_columns(names: list[str], width: float) -> int:
    """Return how many columns of a legend fit into a figure of `width` inches."""
    longest = max(map(len, names), default=0) + LEGEND_HANDLE
    return max(1, min(len(names), int(LEGEND_WIDTH * width / WIDTH) // longest))


def _draw_line(axes: Axes, line: Line) -> Line2D:
    low, high = line.low, line.high
    if line.spread:
        low = tuple(y - spread for y, spread in zip(line.y, line.spread, strict=True))
        high = tuple(y + spread for y, spread in zip(line.y, line.spread, strict=True))
    if low:
        axes.fill_between(line.x, low, high, color=line.style.color, alpha=0.18, linewidth=0)
    return axes.plot(
        line.x,
        line.y,
        color=line.style.color,
        linestyle="--" if line.unfinished else "-",
        linewidth=1.8,
        marker=line.style.marker,
        markersize=4.5,
        markevery=max(1, len(line.x) // MARKERS),
    )[0]


def _scale(axes: Axes, plot: Plot) -> None:
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    if plot.log_y and not 0 < low < high < NARROW * low:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if plot.log_x:
        axes.set_xscale("log")
        ticks = sorted({x for line in plot.lines for x in line.x})
        if len(ticks) <= TICKS:
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        large = axes.get_xlim()[1] >= LARGE
        axes.xaxis.set_major_locator(MaxNLocator(5 if large else "auto", integer=True))


def _saved(drawing: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    drawing.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()
