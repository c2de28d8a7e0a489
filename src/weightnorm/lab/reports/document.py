"""Content of a report as plain values: sections of plots, pictures and tables."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightnorm.lab.reports.style import Style


@dataclass(frozen=True)
class Line:
    """A line of a plot: y over x, with a band of ± spread, or from low to high."""

    name: str
    style: Style
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()
    """Half the width of the band at each x; empty for no band."""
    unfinished: bool = False
    """Whether the run is unfinished; drawn dashed."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Edges of an asymmetric band; empty for none."""


@dataclass(frozen=True)
class Plot:
    """A figure with one pair of axes."""

    name: str
    """File name without extension."""
    title: str
    caption: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log_x: bool = False
    """Whether x is logarithmic; else it counts epochs."""
    log_y: bool = False
    from_zero: bool = False

    @property
    def alt(self) -> str:
        """Text alternative: first and last value of each line."""
        ends = []
        for line in self.lines:
            known = [y for y in line.y if math.isfinite(y)]
            ends.append(f"{line.name}: {known[0]:.3g} to {known[-1]:.3g}" if known else line.name)
        return f"{self.title}: {self.y} against {self.x}. {'; '.join(ends)}."


@dataclass(frozen=True)
class PlotPanels:
    """Plots of the same lines side by side, with a common y axis and legend."""

    name: str
    """File name without extension."""
    title: str
    caption: str
    plots: tuple[Plot, ...]

    @property
    def alt(self) -> str:
        """Text alternative: those of the panels."""
        return f"{self.title}. {' '.join(plot.alt for plot in self.plots)}"


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, or an animation if there are several frames."""

    name: str
    """File name without extension."""
    title: str
    caption: str
    frames: NDArray[np.uint8]
    """(frames, height, width) in grayscale, or (frames, height, width, 3) in color."""
    seconds: float = 0.1
    """Duration of a frame."""

    @property
    def alt(self) -> str:
        return f"{self.title}. {self.caption}"


@dataclass(frozen=True)
class Bar:
    """A bar of a chart: a value and its interval."""

    name: str
    style: Style
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BarGroup:
    """Bars under one heading."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class BarChart:
    """A bar chart of ratios, with a line at 1, the reference."""

    name: str
    """File name without extension."""
    title: str
    caption: str
    x: str
    groups: tuple[BarGroup, ...]
    dots: bool = False
    """Draw dots, one row for each group, instead of bars."""

    @property
    def alt(self) -> str:
        texts = []
        for group in self.groups:
            values = ", ".join(f"{bar.name} {bar.value:.3g}" for bar in group.bars)
            texts.append(f"{group.name}: {values}")
        return f"{self.title}: {self.x}. {'; '.join(texts)}."


FigureSpec = Plot | PlotPanels | BarChart | Picture
"""Description of a figure; figures.py renders it to files."""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its heading."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    numeric: bool = True
    """Whether cells are numbers, aligned right; else text."""


@dataclass(frozen=True)
class Section:
    """A title, an introduction, and the figures, tables and subsections below them."""

    title: str
    intro: str
    content: tuple[FigureSpec | Table | Section, ...] = ()
    findings: tuple[str, ...] = ()
    """Sentences for the summary: what was found, with numbers."""

    @property
    def figures(self) -> tuple[FigureSpec, ...]:
        """All figures, at any depth, in order."""
        found: list[FigureSpec] = []
        for item in self.content:
            if isinstance(item, FigureSpec):
                found.append(item)
            elif isinstance(item, Section):
                found.extend(item.figures)
        return tuple(found)

    @property
    def all_findings(self) -> tuple[str, ...]:
        """The findings of this section and all below it, in order."""
        below = [item.all_findings for item in self.content if isinstance(item, Section)]
        return (*self.findings, *(sentence for sentences in below for sentence in sentences))


LONGEST = 150
"""Characters; file systems allow 255."""


def slug(text: str) -> str:
    """Convert text to a file name or anchor.

    >>> slug("classify cpu+epochs=3 ‖v‖")
    'classify-cpu-epochs-3-v'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:LONGEST].strip("-.") or "unnamed"
