"""Goals: rules on what was measured, fixed before measuring. A lower value is always better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from weightnorm.lab.benchmarks.statistics import Interval, Medians

Verdict = Literal["met", "within noise", "missed"]


class Goal(Protocol):
    """A value of the measurement that should not exceed a limit."""

    @property
    def limit(self) -> float: ...

    @property
    def says(self) -> str:
        """The goal in words."""

    def value(self, of: Medians) -> Tensor:
        """The value, for the rounds as they were and for each resample."""


def verdict(value: Interval, limit: float) -> Verdict:
    """Met if the whole interval keeps the limit, missed if none of it does.

    >>> [verdict(Interval(x, x - 0.1, x + 0.1), 1.0) for x in (0.8, 0.95, 1.2)]
    ['met', 'within noise', 'missed']
    """
    if value.high <= limit:
        return "met"
    return "within noise" if value.low <= limit else "missed"


@dataclass(frozen=True)
class AtMost:
    """ours ≤ limit × theirs."""

    ours: str
    limit: float
    theirs: str

    @property
    def says(self) -> str:
        return f"{self.ours} ≤ {self.limit:g} × {self.theirs}"

    def value(self, of: Medians) -> Tensor:
        return of[self.ours] / of[self.theirs]


@dataclass(frozen=True)
class RelativelyAtMost:
    """(ours / its base) ≤ limit × (theirs / its base)."""

    ours: tuple[str, str]
    limit: float
    theirs: tuple[str, str]

    @property
    def says(self) -> str:
        (ours, base), (theirs, other) = self.ours, self.theirs
        return f"{ours} to {base} ≤ {self.limit:g} × {theirs} to {other}"

    def value(self, of: Medians) -> Tensor:
        (ours, base), (theirs, other) = self.ours, self.theirs
        return of[ours] / of[base] / (of[theirs] / of[other])


@dataclass(frozen=True)
class ExtraAtMost:
    """ours − base ≤ limit × (theirs − base)."""

    ours: str
    limit: float
    theirs: str
    base: str

    @property
    def says(self) -> str:
        return f"extra cost of {self.ours} ≤ {self.limit:g} × that of {self.theirs}"

    def value(self, of: Medians) -> Tensor:
        ours, theirs = of[self.ours] - of[self.base], of[self.theirs] - of[self.base]
        free = torch.where(ours > 0, torch.inf, 0.0)  # where theirs costs nothing
        return torch.where(theirs > 0, ours / theirs, free)


@dataclass(frozen=True)
class CopiesAtMost:
    """ours ≤ base + limit × size, in bytes."""

    ours: str
    limit: float
    base: str
    size: int
    what: str

    @property
    def says(self) -> str:
        return f"{self.ours} ≤ {self.base} + {self.limit:g} × {self.what}"

    def value(self, of: Medians) -> Tensor:
        return (of[self.ours] - of[self.base]) / self.size


@dataclass(frozen=True)
class GrowthAtMost:
    """The extra cost grows no faster than size to the power of `limit`.

    The power is the slope of a line through log(ours − base) over log(size).
    """

    what: str
    limit: float
    over: str
    sizes: Mapping[int, tuple[str, str | None]]
    """Size → (ours, base); without a base all of ours is extra."""

    @property
    def says(self) -> str:
        return f"{self.what} grows at most like {self.over}^{self.limit:g}"

    def value(self, of: Medians) -> Tensor:
        x = torch.tensor([*self.sizes], dtype=torch.float64).log()
        extra = [of[a] - (0.0 if b is None else of[b]) for a, b in self.sizes.values()]
        y = torch.stack(extra).clamp_min(1e-9).log()  # (sizes, 1 + draws)
        x = (x - x.mean()).unsqueeze(1)
        return (x * y).sum(0) / x.square().sum()
