"""What a report says, as plain values: sections of plots and tables. Nothing is drawn here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from weightnorm.lab.reports.looks import Look


@dataclass(frozen=True)
class Line:
    """A line of a plot: y over x, with a band of ± spread around it."""

    name: str
    look: Look
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()
    """Half the band's width at each x; empty for no band."""
    unfinished: bool = False
    """Dashed: the run has not come to its end."""


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
    """Logarithmic, with a tick at each x that occurs; else x counts epochs."""
    from_zero: bool = False

    @property
    def alt(self) -> str:
        """The plot in words, for those who do not see it."""
        ends = []
        for line in self.lines:
            known = [y for y in line.y if math.isfinite(y)]
            ends.append(f"{line.name}: {known[0]:.3g} to {known[-1]:.3g}" if known else line.name)
        return f"{self.title}: {self.y} against {self.x}. {'; '.join(ends)}."


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
    content: tuple[Plot | Table | Section, ...] = ()

    @property
    def plots(self) -> tuple[Plot, ...]:
        """Every plot, at any depth, in order."""
        found: list[Plot] = []
        for item in self.content:
            if isinstance(item, Plot):
                found.append(item)
            elif isinstance(item, Section):
                found.extend(item.plots)
        return tuple(found)


LONGEST = 150
"""Characters; file systems take no more than 255."""


def slug(text: str) -> str:
    """Text as a file name or anchor.

    >>> slug("classify cpu+epochs=3 ‖v‖")
    'classify-cpu-epochs-3-v'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:LONGEST].strip("-.") or "unnamed"
