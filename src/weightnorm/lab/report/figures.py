"""Draw figures with matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from weightnorm.lab.report.experiments import FROM_ZERO, metric_of
from weightnorm.lab.report.style import INK, MATPLOTLIB, Style
from weightnorm.lab.report.tables import Setting
from weightnorm.lab.results import UNFINISHED, number, progress

WIDTH, HEIGHT, LEGEND_ROW = 4.4, 2.9, 0.2
"""Inches; narrow enough that text stays readable on a phone."""
PANEL_WIDTH = 4.0
LETTERS, HANDLE_LETTERS = 12.5, 6
"""Characters of a legend in an inch, and those that the line before a name takes."""
LABEL = 32
"""Characters of a y label in a line."""
TICKS = 6
"""On a logarithmic axis with at most this many values, one tick at each; else one per decade."""
MARKERS = 8
"""Number of markers on a long line."""
NARROW = 3
"""Ratio of highest to lowest value below which a logarithmic axis has too few ticks."""
REFERENCE = "#7a7f87"
BAND = "line: mean over n finished runs; band: ± standard deviation"
LINE = "line: mean over n finished runs"


def panels(titles: Sequence[str] = ("",)) -> tuple[Figure, list[Axes]]:
    """Create a figure with one pair of axes for each title, side by side, with a common y axis."""
    count = len(titles)
    width = WIDTH if count == 1 else PANEL_WIDTH * count
    figure = Figure(figsize=(width, HEIGHT), layout="constrained")
    grid = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, title in zip(grid, titles, strict=True):
        axes.set_title(title, fontsize=11)
    return figure, [*grid]


def draw(
    axes: Axes, x: Any, y: Any, style: Style, band: tuple[Any, Any] | None = None, **how: Any
) -> Line2D:
    """Draw a line with markers, and a band from low to high if there is one."""
    if band is not None:
        axes.fill_between(x, *band, color=style.color, alpha=0.18, linewidth=0)
    usual = {"linewidth": 1.8, "marker": style.marker, "markersize": 4.5}
    every = max(1, len(x) // MARKERS)
    return axes.plot(x, y, color=style.color, **{**usual, "markevery": every, **how})[0]


def legend(figure: Figure, names: dict[str, Line2D], note: str) -> None:
    """Put the legend below the axes, where it hides nothing, and say what lines and bands are."""
    width, height = figure.get_size_inches()
    letters = int(LETTERS * width)
    longest = max(map(len, names), default=0) + HANDLE_LETTERS
    columns = max(1, min(len(names), letters // longest))
    lines = [textwrap.fill(name, max(letters // columns, 20)) for name in names]
    rows = sum(line.count("\n") + 1 for line in lines) / columns + 1
    figure.set_size_inches(width, height + LEGEND_ROW * math.ceil(rows))
    for name, line in names.items():
        line.set_label(name)
    how: dict[str, Any] = {"loc": "outside lower left", "ncols": columns, "handlelength": 3}
    found = figure.legend([*names.values()], lines, title=note, **how)
    found.set_alignment("left")


def scale(axes: Axes, log_x: bool = False, log_y: bool = False, from_zero: bool = False) -> None:
    """Choose the scales of the axes and readable ticks; x counts epochs unless it is `log_x`."""
    axes.set_ylabel(textwrap.fill(axes.get_ylabel(), LABEL))
    if from_zero:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    if log_y and not 0 < low < high < NARROW * low:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if log_x:
        axes.set_xscale("log")
        ticks = sorted({float(x) for line in axes.lines for x in np.asarray(line.get_xdata())})
        if len(ticks) <= TICKS:
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:.3g}")
    else:  # labels from 1000 on are wider
        most: Any = 5 if axes.get_xlim()[1] >= 1000 else "auto"
        axes.xaxis.set_major_locator(MaxNLocator(most, integer=True))


def curve_figure(one: Setting, metric: str) -> Figure:
    """Draw a metric over training, for each method at its best learning rate.

    Unfinished runs are dashed. Where the paper's own learning rate differs from the best one, its
    line is thin. A dotted line marks where the learning rate begins to fall.
    """
    about, (label, factor, _) = one.about, metric_of(metric)
    units = about.units if metric in about.curves else about.units[:1]
    figure, grid = panels([f"at equal {unit}s" for unit in units] if len(units) > 1 else ("",))
    names: dict[str, Line2D] = {}

    def mean(method: str, runs: pd.DataFrame, name: str, **how: Any) -> None:
        """Draw the mean over runs, and its band if there are several and no other style."""
        values, n = one.curve(metric, runs)
        if n:
            style = one.style(method)
            y, std = factor * values["mean"], abs(factor) * values["std"]
            band = (y - std, y + std) if n > 1 and not how else None
            drawn = draw(axes, values.index * per_epoch(one, unit, runs), y, style, band, **how)
            names.setdefault(f"{style.name}, {name.format(n=n)}", drawn)

    left_out = about.not_drawn.get(metric)
    for axes, unit in zip(grid, units, strict=True):
        for method in (m for m in one.methods if left_out is None or left_out not in m):
            best, papers = one.best[method], about.paper_rates.get(method)
            mean(method, one.finished(method), f"lr {best:g}, n = {{n}}")
            if papers is not None and papers != best:
                thin = {"linewidth": 0.9, "marker": "", "linestyle": "-."}
                name = f"lr {papers:g} (the paper's), n = {{n}}"
                mean(method, one.finished(method, papers), name, **thin)
            tried = one.at(method)
            for run in tried.index[tried["state"] == UNFINISHED]:
                runs = tried.loc[[run]]
                state = f"unfinished, {progress(runs['record'].iloc[0])}"
                mean(method, runs, f"seed {runs['seed'].iloc[0]}: {state}", linestyle="--")
        if metric == about.curves[-1] and (values := one.reference()):
            y = factor * sum(values) / len(values)
            dotted = axes.axhline(y, color=REFERENCE, linestyle=":", linewidth=1.5)
            names[f"{about.reference[0]}, n = {len(values)}"] = dotted
        if unit == "epoch":
            mark_decay(axes, one)
        axes.set_xlabel({"minute": "minutes of training"}.get(unit, unit))
    grid[0].set_ylabel(label)
    for axes in grid:
        scale(axes, from_zero=metric in FROM_ZERO)
    legend(figure, names, BAND if any(axes.collections for axes in grid) else LINE)
    return figure


def per_epoch(one: Setting, unit: str, runs: pd.DataFrame) -> float:
    """Return how many epochs, steps or minutes are in an epoch; the minutes of the shortest one."""
    if unit == "minute":
        return one.shortest_epoch(runs) / 60
    return number(runs["record"].iloc[0].config.get("steps")) if unit == "step" else 1.0


def mark_decay(axes: Axes, one: Setting) -> None:
    """Mark the last epoch before the learning rate falls, if it is constant before that."""
    if "learning_rate" not in one.epochs:
        return
    rates = one.epochs.groupby("epoch")["learning_rate"].max()
    flat = rates.index[rates == rates.iloc[0]]
    if 1 < len(flat) < len(rates) and rates.iloc[-1] < rates.iloc[0]:
        last = float(flat[-1])
        axes.axvline(last, color=INK, linestyle=":", linewidth=1)
        at = axes.get_xaxis_transform()
        axes.text(last, 0.97, " learning rate falls", va="top", fontsize=9, transform=at)


def rate_figure(one: Setting) -> Figure:
    """Draw the final value of the metric that chooses the learning rate against the rate."""
    label, factor, _ = metric_of(one.metric)
    figure, (axes,) = panels()
    names: dict[str, Line2D] = {}
    for method in one.methods:
        rates = [rate for name, rate in one.rates if name == method and rate > 0]
        ends = pd.DataFrame(
            {rate: pd.Series(one.values(one.metric, one.finished(method, rate))) for rate in rates},
            dtype=float,
        ).dropna(axis=1, how="all")
        if len(ends.columns):
            y, std, n = factor * ends.mean(), abs(factor) * ends.std().fillna(0), ends.count()
            band = (y - std, y + std) if n.max() > 1 else None
            counts = "–".join(dict.fromkeys(f"{count}" for count in (n.min(), n.max())))
            drawn = draw(axes, y.index, y, one.style(method), band)
            names[f"{one.style(method).name}, n = {counts} at each rate"] = drawn
    axes.set(xlabel="learning rate", ylabel=f"final {label}")
    scale(axes, log_x=True, from_zero=one.metric in FROM_ZERO)
    legend(figure, names, BAND if axes.collections else LINE)
    return figure


def save(function: Callable[[], Figure], kind: str) -> bytes:
    """Draw a figure as SVG or PNG. The same figure gives the same bytes."""
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    metadata = nothing if kind == "svg" else {"Software": None}
    buffer = io.BytesIO()
    with matplotlib.style.context(MATPLOTLIB):
        function().savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()
