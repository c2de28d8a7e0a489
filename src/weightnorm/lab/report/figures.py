"""Draw figures with matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
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

from weightnorm.lab.report.experiments import FROM_ZERO, metric_of
from weightnorm.lab.report.style import INK, MATPLOTLIB, Style
from weightnorm.lab.report.tables import Setting
from weightnorm.lab.results import UNFINISHED, number, progress

WIDTH, HEIGHT, LEGEND_ROW = 4.4, 2.9, 0.2
"""Inches; narrow enough that text stays readable on a phone."""
PANEL_WIDTH = 4.0
LETTERS, HANDLE_LETTERS = 12.5, 6
"""Characters of a legend in an inch, and those that the line before a name takes."""
TICKS = 6
"""On a logarithmic axis with at most this many values, one tick at each; else one per decade."""
MARKERS = 8
"""Number of markers on a long line."""
LARGE = 1000
"""An x axis that reaches this value has fewer ticks, since their labels are wider."""
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
    axes: Axes,
    x: Any,
    y: Any,
    style: Style,
    band: tuple[Any, Any] | None = None,
    **how: Any,
) -> Line2D:
    """Draw a line with markers, and a band from low to high if there is one."""
    if band is not None:
        axes.fill_between(x, *band, color=style.color, alpha=0.18, linewidth=0)
    usual = {"linewidth": 1.8, "marker": style.marker, "markersize": 4.5}
    every = max(1, len(x) // MARKERS)
    return axes.plot(x, y, color=style.color, **{**usual, "markevery": every, **how})[0]


def legend(figure: Figure, names: dict[str, Line2D], note: str = "") -> None:
    """Put the legend below the axes, where it hides nothing, and say what lines and bands are."""
    width, height = figure.get_size_inches()
    letters = int(LETTERS * width)
    longest = max(map(len, names), default=0) + HANDLE_LETTERS
    columns = max(1, min(len(names), letters // longest))
    lines = [textwrap.fill(name, max(letters // columns, 20)) for name in names]
    rows = sum(line.count("\n") + 1 for line in lines) / columns + bool(note)
    figure.set_size_inches(width, height + LEGEND_ROW * math.ceil(rows))
    for name, line in names.items():
        line.set_label(name)
    how: dict[str, Any] = {"loc": "outside lower left", "ncols": columns, "handlelength": 3}
    found = figure.legend([*names.values()], lines, title=note or None, **how)
    found.set_alignment("left")


def scale(axes: Axes, log_x: bool = False, log_y: bool = False, from_zero: bool = False) -> None:
    """Choose the scales of the axes and readable ticks; x counts epochs unless it is `log_x`."""
    if from_zero:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    if log_y and not 0 < low < high < NARROW * low:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if log_x:
        axes.set_xscale("log")
        ticks = sorted({float(x) for line in axes.lines for x in np.asarray(line.get_xdata())})
        if len(ticks) <= TICKS:
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        large = axes.get_xlim()[1] >= LARGE
        axes.xaxis.set_major_locator(MaxNLocator(5 if large else "auto", integer=True))


def curve_figure(one: Setting, metric: str) -> Figure:
    """Draw a metric over training, for each method at its best learning rate.

    Unfinished runs are dashed. Where the paper's own learning rate differs from the best one, its
    line is thin. A dotted line marks where the learning rate begins to fall.
    """
    about, (label, factor, _) = one.about, metric_of(metric)
    units = about.units if metric in about.curves else about.units[:1]
    figure, grid = panels([f"at equal {unit}s" for unit in units] if len(units) > 1 else ("",))
    left_out = about.not_drawn.get(metric)
    methods = [m for m in one.methods if left_out is None or left_out not in m]
    names: dict[str, Line2D] = {}
    for axes, unit in zip(grid, units, strict=True):
        draw_mean = partial(_draw_mean, axes, names, one, metric, unit)
        for method in methods:
            best, papers = one.best[method], about.paper_rates.get(method)
            draw_mean(method, one.finished(method), f"lr {best:g}, n = {{n}}")
            if papers is not None and papers != best:
                name = f"lr {papers:g} (the paper's), n = {{n}}"
                runs = one.finished(method, papers)
                draw_mean(method, runs, name, linewidth=0.9, marker="", linestyle="-.")
            tried = one.at(method)
            for run in tried.index[tried["state"] == UNFINISHED]:
                runs = tried.loc[[run]]
                state = f"unfinished, {progress(runs['record'].iloc[0])}"
                draw_mean(method, runs, f"seed {runs['seed'].iloc[0]}: {state}", linestyle="--")
        if metric == about.curves[-1] and (values := one.reference()):
            y = factor * sum(values) / len(values)
            dotted = axes.axhline(y, color=REFERENCE, linestyle=":", linewidth=1.5)
            names[f"{about.reference[0]}, n = {len(values)}"] = dotted
        mark_decay(axes, one, unit)
        axes.set_xlabel({"minute": "minutes of training"}.get(unit, unit))
        scale(axes, from_zero=metric in FROM_ZERO)
    grid[0].set_ylabel(label)
    legend(figure, names, BAND if any(axes.collections for axes in grid) else LINE)
    return figure


def _draw_mean(
    axes: Axes,
    names: dict[str, Line2D],
    one: Setting,
    metric: str,
    unit: str,
    method: str,
    runs: pd.DataFrame,
    name: str,
    **how: Any,
) -> None:
    """Draw the mean of a metric over runs, and its band if there are several and no other style."""
    values, n = one.curve(metric, runs)
    if n:
        factor, style = metric_of(metric).scale, one.style(method)
        y, std = factor * values["mean"], abs(factor) * values["std"]
        band = (y - std, y + std) if n > 1 and not how else None
        drawn = draw(axes, values.index * per_epoch(one, unit, runs), y, style, band, **how)
        names.setdefault(f"{style.name}, {name.format(n=n)}", drawn)


def per_epoch(one: Setting, unit: str, runs: pd.DataFrame) -> float:
    """Return how many epochs, steps or minutes are in an epoch; the minutes of the shortest one."""
    if unit == "minute":
        return one.shortest_epoch(runs) / 60
    return number(runs["record"].iloc[0].config.get("steps")) if unit == "step" else 1.0


def mark_decay(axes: Axes, one: Setting, unit: str) -> None:
    """Mark the last epoch before the learning rate falls, if it is constant before that."""
    if "learning_rate" not in one.epochs or unit != "epoch":
        return
    rates = one.epochs.groupby("epoch")["learning_rate"].max()
    flat = rates.index[rates == rates.iloc[0]]
    if 1 < len(flat) < len(rates) and rates.iloc[-1] < rates.iloc[0]:
        axes.axvline(float(flat[-1]), color=INK, linestyle=":", linewidth=1)
        axes.annotate(
            "learning rate falls",
            (float(flat[-1]), 0.97),
            xytext=(3, 0),
            va="top",
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=9,
        )


def rate_figure(one: Setting) -> Figure:
    """Draw the final value of the metric that chooses the learning rate against the rate."""
    label, factor, _ = metric_of(one.metric)
    figure, (axes,) = panels()
    names: dict[str, Line2D] = {}
    for method in one.methods:
        ends = {}
        for rate in (rate for name, rate in one.rates if name == method and rate > 0):
            values = pd.Series(one.values(one.metric, one.finished(method, rate)), dtype=float)
            if values.notna().any():
                ends[rate] = factor * values.mean(), abs(factor) * values.std(), values.count()
        if ends:
            table = pd.DataFrame.from_dict(ends, "index", columns=["mean", "std", "n"]).fillna(0)
            y, std, n = (table[name] for name in ("mean", "std", "n"))
            band = (y - std, y + std) if max(n) > 1 else None
            drawn = draw(axes, y.index, y, one.style(method), band)
            counts = "–".join(dict.fromkeys(f"{count:.0f}" for count in (min(n), max(n))))
            names[f"{one.style(method).name}, n = {counts} at each rate"] = drawn
    axes.set(xlabel="learning rate", ylabel=f"final {label}")
    scale(axes, log_x=True, from_zero=one.metric in FROM_ZERO)
    legend(figure, names, BAND if axes.collections else LINE)
    return figure


# — files —


def save(function: Callable[[], Figure], kind: str) -> tuple[bytes, str]:
    """Draw a figure as SVG or PNG; returns the file and a text alternative.

    The same figure gives the same bytes.
    """
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    metadata = nothing if kind == "svg" else {"Software": None}
    buffer = io.BytesIO()
    with matplotlib.style.context(MATPLOTLIB):
        figure = function()
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue(), alternative(figure)


def alternative(figure: Figure) -> str:
    """Return a text alternative of a figure: first and last value of each named line."""
    texts = []
    for axes in figure.axes:
        texts.append(f"{axes.get_ylabel()} against {axes.get_xlabel()}.")
        for line in axes.lines:
            y = [value for value in np.asarray(line.get_ydata(), float) if math.isfinite(value)]
            if len(y) > 1 and not (name := str(line.get_label())).startswith("_"):
                texts.append(f"{name}: {y[0]:.3g} to {y[-1]:.3g}.")
    return " ".join(texts).strip()
