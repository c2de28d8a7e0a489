"""What a report says, as plain values: sections of plots, pictures, tables. Not drawn here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightnorm.lab.reports.style import Style


@dataclass(frozen=True)
class Line:
    """A line of a plot: y over x, with a band around it: ± spread, or from low to high."""

    name: str
    style: Style
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()
    """Half the band's width at each x; empty for no band."""
    unfinished: bool = False
    """Dashed: the run has not come to its end."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """The band's edges, where it is not even; empty for no such band."""


@dataclass(frozen=True)
class Plot:
    """A figure with one pair of axes."""

    name: str
    """Its file name, without the ending."""
    title: str
    caption: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log_x: bool = False
    """Logarithmic; else x counts epochs."""
    log_y: bool = False
    from_zero: bool = False

    @property
    def alt(self) -> str:
        """The plot in words, for those who do not see it."""
        ends = []
        for line in self.lines:
            known = [y for y in line.y if math.isfinite(y)]
            ends.append(f"{line.name}: {known[0]:.3g} to {known[-1]:.3g}" if known else line.name)
        return f"{self.title}: {self.y} against {self.x}. {'; '.join(ends)}."


@dataclass(frozen=True, eq=False)
class Picture:
    """Something to look at, pixel by pixel: one frame, or several that move."""

    name: str
    """Its file name, without the ending."""
    title: str
    caption: str
    frames: NDArray[np.uint8]
    """(frames, height, width) in grey, or (frames, height, width, 3) in color."""
    seconds: float = 0.1
    """For each frame."""

    @property
    def alt(self) -> str:
        return f"{self.title}. {self.caption}"


@dataclass(frozen=True)
class Bar:
    """A value and its interval."""

    name: str
    style: Style
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BarGroup:
    """BarChart that belong together."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class BarChart:
    """A bar chart of ratios; what they are ratios to is at 1."""

    name: str
    """Its file name, without the ending."""
    title: str
    caption: str
    x: str
    groups: tuple[BarGroup, ...]

    @property
    def alt(self) -> str:
        texts = []
        for group in self.groups:
            values = ", ".join(f"{bar.name} {bar.value:.3g}" for bar in group.bars)
            texts.append(f"{group.name}: {values}")
        return f"{self.title}: {self.x}. {'; '.join(texts)}."


FigureSpec = Plot | BarChart | Picture
"""Whatever becomes a file."""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    numeric: bool = True
    """Cells are numbers, to be set right; else words."""


@dataclass(frozen=True)
class Section:
    """A title, some words, and what is shown below them."""

    title: str
    intro: str
    content: tuple[FigureSpec | Table | Section, ...] = ()

    @property
    def figures(self) -> tuple[FigureSpec, ...]:
        """Every figure, at any depth, in order."""
        found: list[FigureSpec] = []
        for item in self.content:
            if isinstance(item, FigureSpec):
                found.append(item)
            elif isinstance(item, Section):
                found.extend(item.figures)
        return tuple(found)


LONGEST = 150
"""Characters; file systems take no more than 255."""


def slug(text: str) -> str:
    """Text as a file name or anchor.

    >>> slug("classify cpu+epochs=3 ‖v‖")
    'classify-cpu-epochs-3-v'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:LONGEST].strip("-.") or "unnamed"
