"""Claims, measurements and the rules that turn numbers into verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any, Literal

from weightnorm.lab.claims.context import Context
from weightnorm.lab.statistics import Interval

Verdict = Literal["holds", "holds qualitatively", "does not hold here", "not shown", "not measured"]
HOLDS: Verdict = "holds"
QUALITATIVELY: Verdict = "holds qualitatively"
FAILS: Verdict = "does not hold here"
NOT_SHOWN: Verdict = "not shown"
"""The measurement decides neither way, for instance with too few seeds."""
NOT_MEASURED: Verdict = "not measured"


@dataclass(frozen=True)
class Series:
    """A curve of a figure: y over x, with the range over seeds at each x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Figure:
    """Curves on one pair of axes, as values; the report draws them."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    panels: str = ""
    """Figures of a claim with the same text here are panels of one figure with this title."""


@dataclass(frozen=True)
class Measured:
    """The outcome of a measurement."""

    value: str
    verdict: Verdict
    n: int
    """Number of independent measurements, usually seeds."""
    numbers: dict[str, Any] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()


Measure = Callable[[Context], Measured]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and the function that measures it."""

    number: int
    """In the list of `docs/experiments/claims.md`."""
    section: str
    """Of the paper."""
    statement: str
    paper: str
    """The paper's value or wording."""
    measured: str
    """What is measured here."""
    measure: Measure

    def row(self, found: Measured) -> dict[str, Any]:
        """The claim and its outcome, for the record."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "measure"}
        return {**head, **asdict(found)}


CLAIMS: dict[int, Claim] = {}
"""Claims of ``weightnorm claims``, by number."""
LONG_CLAIMS: dict[int, Claim] = {}
"""Claims of ``weightnorm claims --long``."""


def claim(
    number: int,
    section: str,
    statement: str,
    *,
    paper: str,
    measured: str,
    registry: dict[int, Claim] = CLAIMS,
) -> Callable[[Measure], Measure]:
    """Register the decorated function as the measurement of a claim."""

    def register(measure: Measure) -> Measure:
        registry[number] = Claim(number, section, statement, paper, measured, measure)
        return measure

    return register


def series(name: str, x: Iterable[float], columns: Iterable[Sequence[float]]) -> Series:
    """Return a curve: at each x the mean of independent values, and their range."""
    y, low, high = zip(*((fmean(c), min(c), max(c)) for c in columns), strict=True)
    return Series(name, tuple(map(float, x)), y, low, high)


def exactly(deviation: float, tolerance: float) -> Verdict:
    """Verdict on an identity: it holds to rounding or not.

    >>> exactly(1e-12, 1e-9), exactly(1e-3, 1e-9), exactly(float("nan"), 1e-9)
    ('holds', 'does not hold here', 'does not hold here')
    """
    return HOLDS if deviation <= tolerance else FAILS


def above(interval: Interval, threshold: float, zero: float = 0.0) -> Verdict:
    """Verdict on an effect: holds if the whole interval is at least the threshold, qualitatively if
    it exceeds `zero`, the value without an effect; does not hold if all of it is below the
    threshold.

    >>> [above(Interval(m, m - 0.2, m + 0.2), threshold=0.5) for m in (0.8, 0.4, 0.05)]
    ['holds', 'holds qualitatively', 'does not hold here']
    >>> above(Interval(0.4, -0.1, 0.9), threshold=0.5)
    'not shown'
    >>> above(Interval(0.5, 0.5, 0.5), threshold=0.5)
    'holds'
    """
    if interval.low >= threshold:
        return HOLDS
    if interval.low > zero:
        return QUALITATIVELY
    return FAILS if interval.high < threshold else NOT_SHOWN


def undecided(*effects: Interval) -> Verdict:
    """Verdict where not all effects are shown to be positive: does not hold if one is shown not to
    be, else not shown.

    >>> undecided(Interval(1.0, -0.5, 2.5)), undecided(Interval(-1.0, -1.5, -0.5))
    ('not shown', 'does not hold here')
    """
    return FAILS if any(effect.high <= 0 for effect in effects) else NOT_SHOWN


def weakest(*verdicts: Verdict) -> Verdict:
    """Verdict on a claim of several parts: the weakest of theirs.

    >>> weakest(HOLDS, QUALITATIVELY)
    'holds qualitatively'
    """
    order: list[Verdict] = [FAILS, NOT_MEASURED, NOT_SHOWN, QUALITATIVELY, HOLDS]
    return min(verdicts, key=order.index)
