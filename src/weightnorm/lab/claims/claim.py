"""A claim of the paper and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch

from weightnorm.lab.claims.context import Workbench

Verdict = Literal[
    "holds", "holds qualitatively", "does not hold here", "needs a GPU-scale run", "not measured"
]
HOLDS: Verdict = "holds"
QUALITATIVELY: Verdict = "holds qualitatively"
FAILS: Verdict = "does not hold here"
NEEDS_SCALE: Verdict = "needs a GPU-scale run"
NOT_MEASURED: Verdict = "not measured"


@dataclass(frozen=True)
class Series:
    """A line of a figure: y over x, with an interval around it."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Figure:
    """What a claim looks like."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Measured:
    """What a measurement gave."""

    value: str
    verdict: Verdict
    n: int
    """How many independent measurements stand behind the verdict."""
    numbers: dict[str, Any] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()


Measure = Callable[[Workbench], Measured]


@dataclass(frozen=True)
class Claim:
    """Something the paper states, and how it is measured."""

    number: int
    """In the fact sheet's list of checkable claims."""
    section: str
    """Of the paper."""
    statement: str
    paper: str
    """What the paper says of it."""
    measured: str
    """What is measured here."""
    measure: Measure

    def row(self, found: Measured) -> dict[str, Any]:
        """A line of the record."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "measure"}
        return {**head, **asdict(found)}


CLAIMS: dict[int, Claim] = {}


def claim(
    number: int, section: str, statement: str, *, paper: str, measured: str
) -> Callable[[Measure], Measure]:
    """Enter the function below into the table of claims."""

    def enter(measure: Measure) -> Measure:
        CLAIMS[number] = Claim(number, section, statement, paper, measured, measure)
        return measure

    return enter


class Interval(NamedTuple):
    """A mean and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 2000) -> Interval:
    """The mean and its 95 % percentile interval, over resamples of independent values.

    >>> bootstrap([2.0, 2.0, 2.0])
    Interval(mean=2.0, low=2.0, high=2.0)
    """
    x = torch.tensor(values, dtype=torch.float64)
    rows = torch.randint(len(x), (draws, len(x)), generator=torch.Generator().manual_seed(seed))
    means = x[rows].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(x.mean().item(), low, high)


def series(name: str, x: Iterable[float], columns: Iterable[Sequence[float]]) -> Series:
    """At each x the mean of a column of independent values, and its interval."""
    y, low, high = zip(*map(bootstrap, columns), strict=True)
    return Series(name, tuple(map(float, x)), y, low, high)


def exactly(deviation: float, tolerance: float) -> Verdict:
    """For identities: they hold to rounding, or they do not.

    >>> exactly(1e-12, 1e-9), exactly(1e-3, 1e-9), exactly(float("nan"), 1e-9)
    ('holds', 'does not hold here', 'does not hold here')
    """
    return HOLDS if deviation <= tolerance else FAILS


def above(interval: Interval, threshold: float, zero: float = 0.0) -> Verdict:
    """Holds if the whole interval lies above the threshold that the claim's words ask for;
    qualitatively if it lies above what no effect would give.

    >>> [above(Interval(m, m - 0.1, m + 0.1), threshold=0.5) for m in (0.7, 0.4, 0.05)]
    ['holds', 'holds qualitatively', 'does not hold here']
    """
    if interval.low > threshold:
        return HOLDS
    return QUALITATIVELY if interval.low > zero else FAILS


def weakest(*verdicts: Verdict) -> Verdict:
    """A claim of several parts is as true as its weakest part.

    >>> weakest(HOLDS, QUALITATIVELY)
    'holds qualitatively'
    """
    order: list[Verdict] = [FAILS, NOT_MEASURED, NEEDS_SCALE, QUALITATIVELY, HOLDS]
    return min(verdicts, key=order.index)
