"""Goals: upper limits for what is measured, fixed before measuring. Lower is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from weightnorm.lab.bench.statistics import Rounds
from weightnorm.lab.statistics import Array, Interval

Verdict = Literal["met", "within noise", "missed"]


class Goal(Protocol):
    """A value of the measurement that should not exceed a limit."""

    @property
    def limit(self) -> float: ...

    @property
    def text(self) -> str:
        """The goal as a formula in words."""

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers from which the value is computed."""

    def value(self, rounds: Rounds) -> Array:
        """The value that should not exceed the limit."""


def verdict(value: Interval, limit: float) -> Verdict:
    """Met if the whole interval is at most the limit, missed if none of it is.

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
    def text(self) -> str:
        return f"{self.ours} ≤ {self.limit:.3g} × {self.theirs}"

    @property
    def peers(self) -> tuple[str, ...]:
        return self.ours, self.theirs

    def value(self, rounds: Rounds) -> Array:
        return rounds.ratio(self.ours, self.theirs)


@dataclass(frozen=True)
class RelativelyAtMost:
    """(ours / its base) ≤ limit × (theirs / its base)."""

    ours: tuple[str, str]
    limit: float
    theirs: tuple[str, str]

    @property
    def text(self) -> str:
        (ours, base), (theirs, other) = self.ours, self.theirs
        return f"{ours} / {base} ≤ {self.limit:g} × {theirs} / {other}"

    @property
    def peers(self) -> tuple[str, ...]:
        return (*self.ours, *self.theirs)

    def value(self, rounds: Rounds) -> Array:
        return rounds.ratio(*self.ours) / rounds.ratio(*self.theirs)


@dataclass(frozen=True)
class ExtraAtMost:
    """ours − base ≤ limit × (theirs − base)."""

    ours: str
    limit: float
    theirs: str
    base: str

    @property
    def text(self) -> str:
        return f"extra cost of {self.ours} ≤ {self.limit:g} × that of {self.theirs}"

    @property
    def peers(self) -> tuple[str, ...]:
        return self.ours, self.theirs, self.base

    def value(self, rounds: Rounds) -> Array:
        ours, theirs = (rounds.ratio(x, self.base) - 1 for x in (self.ours, self.theirs))
        without_cost = np.where(ours > 0, np.inf, 0.0)  # where theirs has no extra cost
        return np.where(theirs > 0, ours / np.where(theirs > 0, theirs, 1.0), without_cost)


@dataclass(frozen=True)
class CopiesAtMost:
    """ours ≤ base + limit × size, in bytes."""

    ours: str
    limit: float
    base: str
    size: int
    what: str

    @property
    def text(self) -> str:
        return f"{self.ours} ≤ {self.base} + {self.limit:g} × {self.what}"

    @property
    def peers(self) -> tuple[str, ...]:
        return self.ours, self.base

    def value(self, rounds: Rounds) -> Array:
        return (rounds.mean(self.ours) - rounds.mean(self.base)) / self.size


@dataclass(frozen=True)
class GrowthAtMost:
    """The extra cost grows at most like size^limit.

    The exponent is the slope of the least-squares line through log(ours − base) over log(size).
    """

    what: str
    limit: float
    over: str
    sizes: Mapping[int, tuple[str, str | None]]
    """Size → (ours, base); without a base all of ours is extra."""

    @property
    def text(self) -> str:
        return f"{self.what} grows at most like {self.over}^{self.limit:g}"

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for pair in self.sizes.values() for name in pair if name is not None)

    def value(self, rounds: Rounds) -> Array:
        reference = self.peers[0]  # the slope does not depend on it
        extra = [
            rounds.ratio(ours, reference) - (0.0 if base is None else rounds.ratio(base, reference))
            for ours, base in self.sizes.values()
        ]
        y = np.log(np.maximum(np.stack(extra), 1e-9))  # (sizes, ...)
        x = np.log(np.array([*self.sizes], dtype=np.float64))
        slope: Array = np.tensordot(x - x.mean(), y, 1) / np.square(x - x.mean()).sum()
        return slope
