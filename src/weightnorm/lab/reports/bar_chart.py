"""Horizontal bar and dot charts with intervals, in groups."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from weightnorm.lab.reports.document import BarChart
from weightnorm.lab.reports.style import INK

WIDTH, BAR, GROUP, LINE, FRAME = 6.4, 0.24, 0.34, 0.16, 0.8
"""Inches: width of the figure; heights of a bar, a heading, its further lines, the frame."""
ROW = 0.27
"""Inches: height of a row of dots."""
LETTERS = 80
"""Characters that fit on a line of a heading."""


def dot_figure(chart: BarChart) -> Figure:
    """Draw one row of dots for each group, with a dashed line at the reference."""
    drawing = Figure(figsize=(WIDTH, FRAME + 0.4 + ROW * len(chart.groups)), layout="constrained")
    axes = drawing.add_subplot(xlabel=chart.x)
    axes.axvline(1, linestyle="--", color=INK, linewidth=1)
    handles: dict[str, Any] = {}
    for row, group in enumerate(chart.groups):
        for index, bar in enumerate(group.bars):
            y = row + 0.18 * (index - (len(group.bars) - 1) / 2)
            axes.plot([bar.low, bar.high], [y, y], color=bar.style.color, linewidth=1.2)
            (handles[bar.name],) = axes.plot(
                bar.value, y, bar.style.marker, color=bar.style.color, markersize=5
            )
    axes.set_yticks(range(len(chart.groups)), [group.name for group in chart.groups], size=9)
    axes.set_ylim(len(chart.groups) - 0.4, -0.6)
    drawing.legend([*handles.values()], [*handles], loc="outside lower center", ncols=4)
    return drawing


def bar_figure(bars: BarChart) -> Figure:
    """Draw the groups from top to bottom, with a dashed line at the reference."""
    count = sum(len(group.bars) for group in bars.groups)
    titles = [wrap(group.name, LETTERS) for group in bars.groups]
    extra = [LINE * (len(lines) - 1) for lines in titles]
    height = FRAME + BAR * count + GROUP * len(bars.groups) + sum(extra)
    drawing = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = drawing.add_subplot(xlabel=bars.x)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    longest = max([1.0, *(bar.high for group in bars.groups for bar in group.bars)])
    across = blended_transform_factory(drawing.transFigure, axes.transData)
    label: dict[str, Any] = {"va": "center", "size": 9, "in_layout": False}
    names: dict[float, str] = {}
    down = 0.0
    for group, lines, more in zip(bars.groups, titles, extra, strict=True):
        down += (GROUP + more) / BAR
        # Starts at the left edge of the figure and is ignored by the layout of the axes.
        bold: dict[str, Any] = {"weight": "bold", "transform": across, "backgroundcolor": "white"}
        axes.text(0.01, down - 0.25 - more / BAR / 2, "\n".join(lines), **bold, **label)
        axes.plot([1, 1], [down + 0.5, down + len(group.bars) + 0.5], "--", color=INK, linewidth=1)
        for bar in group.bars:
            down += 1
            names[down] = bar.name
            axes.barh(down, bar.value, color=bar.style.color, height=0.72)
            axes.plot([bar.low, bar.high], [down, down], color=INK, linewidth=1.2)
            axes.text(bar.high + longest / 60, down, f"{bar.value:.3g}", **label)
    axes.set_yticks([*names], [*names.values()])
    axes.set_ylim(down + 0.8, 0.4)
    axes.set_xlim(0, 1.15 * longest)
    return drawing
