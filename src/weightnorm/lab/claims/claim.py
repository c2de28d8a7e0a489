"""Claims, their statements, rules that turn numbers into verdicts, and cached parts.

Two lists. *Identities* are theorems and tests of the implementation: they hold to rounding.
*Findings* are empirical: what the paper states, our rule, fixed before measuring, the numbers, and
the verdict.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

import torch

from weightnorm.lab.claims.problem import DataName, Problem
from weightnorm.lab.pool import worker_processes
from weightnorm.lab.records import Row, append_row, read_rows
from weightnorm.lab.statistics import Interval, mean_interval

T = TypeVar("T")


Kind = Literal["identity", "finding"]
Verdict = Literal[
    "holds", "does not hold", "reproduced", "not reproduced", "not shown", "not measured"
]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
REPRODUCED: Verdict = "reproduced"
NOT_REPRODUCED: Verdict = "not reproduced"
NOT_SHOWN: Verdict = "not shown"
"""The measurement decides neither way, for instance with too few seeds."""
NOT_MEASURED: Verdict = "not measured"


@dataclass(frozen=True)
class Statement:
    """One statement of the paper and the rule of its verdict."""

    statement: str
    paper: str
    """The paper's value or wording."""
    rule: str
    """What is measured here, and from which numbers the verdict follows."""


@dataclass(frozen=True)
class Outcome:
    """What was measured for one statement."""

    value: str
    verdict: Verdict
    n: int
    """Number of independent measurements, usually seeds."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Row] = ()
    """Curves as numbers, see `figure`; the report draws them."""


@dataclass(frozen=True)
class Claim:
    """Statements that are measured together."""

    number: int
    """In the list of `docs/experiments/claims.md`."""
    section: str
    """Of the paper."""
    kind: Kind
    statements: tuple[Statement, ...]
    measure: Callable[[Context], Sequence[Outcome]]
    """Returns an outcome for each statement."""
    from_records: bool
    """Whether it reads other records, which may change, so that it is measured every time."""

    def ids(self) -> list[str]:
        """Return the number, with the statement's place where there are several: 18.1, 18.2."""
        if len(self.statements) == 1:
            return [str(self.number)]
        return [f"{self.number}.{i}" for i in range(1, len(self.statements) + 1)]


CLAIMS: dict[int, Claim] = {}
"""All claims, by number."""


def claim(
    number: int, section: str, *statements: Statement, kind: Kind = "finding", records: bool = False
) -> Callable[[Callable[[Context], Sequence[Outcome]]], Callable[[Context], Sequence[Outcome]]]:
    """Register the decorated function as the measurement of a claim."""

    def register(
        measure: Callable[[Context], Sequence[Outcome]],
    ) -> Callable[[Context], Sequence[Outcome]]:
        CLAIMS[number] = Claim(number, section, kind, statements, measure, records)
        return measure

    return register


# Rules


def identity(deviation: float, tolerance: float) -> Verdict:
    """Verdict on an identity: it holds to rounding or not.

    >>> identity(1e-12, 1e-9), identity(1e-3, 1e-9), identity(float("nan"), 1e-9)
    ('holds', 'does not hold', 'does not hold')
    """
    return HOLDS if deviation <= tolerance else FAILS


def above(x: Interval, threshold: float) -> Verdict:
    """Verdict on "x is above the threshold": whether all of its interval is.

    >>> [above(Interval(m, m - 0.2, m + 0.2), threshold=0.5) for m in (0.8, 0.6, 0.2)]
    ['reproduced', 'not shown', 'not reproduced']
    >>> above(Interval(0.5, 0.5, 0.5), threshold=0.5)
    'not reproduced'
    """
    return REPRODUCED if x.low > threshold else NOT_REPRODUCED if x.high <= threshold else NOT_SHOWN


def at_least(x: Interval, threshold: float) -> Verdict:
    """Verdict on "x is at least the threshold": whether all of its interval is.

    >>> at_least(Interval(0.5, 0.5, 0.5), threshold=0.5)
    'reproduced'
    """
    return REPRODUCED if x.low >= threshold else NOT_REPRODUCED if x.high < threshold else NOT_SHOWN


def below(x: Interval, threshold: float) -> Verdict:
    """Verdict on "x is below the threshold"."""
    return above(Interval(-x.value, -x.high, -x.low), -threshold)


def equivalent(x: Interval, margin: float) -> Verdict:
    """Verdict on "x is zero, but for a margin": whether all of its interval is within ± margin.

    An interval that includes zero shows no equality: it may be wide.

    >>> [equivalent(Interval(m, m - w, m + w), 0.1) for m, w in ((0, 0.05), (0, 0.5), (0.3, 0.1))]
    ['reproduced', 'not shown', 'not reproduced']
    """
    if -margin <= x.low and x.high <= margin:
        return REPRODUCED
    return NOT_REPRODUCED if x.low > margin or x.high < -margin else NOT_SHOWN


def weakest(*verdicts: Verdict) -> Verdict:
    """Verdict on a statement of several parts: the weakest of theirs.

    >>> weakest(REPRODUCED, NOT_SHOWN), weakest(NOT_MEASURED, NOT_REPRODUCED)
    ('not shown', 'not reproduced')
    """
    order: list[Verdict] = [NOT_REPRODUCED, NOT_MEASURED, NOT_SHOWN, REPRODUCED]
    return min(verdicts, key=order.index)


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values; one value, or one that is not finite, shows nothing.

    >>> interval([0.5])
    Interval(value=0.5, low=-inf, high=inf)
    """
    if len(values) > 1 and all(map(math.isfinite, values)):
        return mean_interval(values)
    return Interval(fmean(values) if values else math.nan, -math.inf, math.inf)


def paired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Interval of a − b, paired by seed."""
    return interval([x - y for x, y in zip(a, b, strict=True)])


def relative(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Interval of a/b − 1, paired by seed."""
    return interval([x / y - 1 for x, y in zip(a, b, strict=True)])


def percent(x: Interval) -> str:
    """Format a share and its interval in per cent.

    >>> percent(Interval(0.123, 0.1, 0.15))
    '12.3 % [10, 15]'
    """
    return f"{100 * x.value:.3g} % [{100 * x.low:.3g}, {100 * x.high:.3g}]"


# Figures


def series(name: str, x: Iterable[float], columns: Iterable[Sequence[float]]) -> Row:
    """Return a curve: at each x the mean of independent values, and their range."""
    y, low, high = zip(*((fmean(c), min(c), max(c)) for c in columns), strict=True)
    return {"name": name, "x": [*map(float, x)], "y": y, "low": low, "high": high}


def figure(
    title: str,
    x: str,
    y: str,
    series: Sequence[Row],
    *,
    log_x: bool = False,
    log_y: bool = False,
    panels: str = "",
) -> Row:
    """Return curves on one pair of axes.

    Figures of a claim with the same `panels` are panels of one figure with that title.
    """
    axes = {"title": title, "x": x, "y": y, "log_x": log_x, "log_y": log_y, "panels": panels}
    return {**axes, "series": series}


# Measuring


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


Part = tuple[str | int | float, ...]
"""Arguments that identify a part; JSON values."""


@dataclass(frozen=True)
class Context:
    """Settings of a measurement, and the parts that are already computed."""

    quick: bool = True
    """Embedded digits and small networks instead of the real data."""
    seeds: tuple[int, ...] = (1, 2, 3)
    data_dir: Path | None = None
    records: Path = Path("runs")
    """Folder of the experiments' and benchmarks' records."""
    workers: int = 1
    """Processes, of one thread each; with 1, parts run in this process."""
    parts_file: Path | None = None
    """JSON lines, one computed part each, appended as soon as it is there."""
    on_progress: Callable[[int, int], None] = no_progress
    """Called with (parts done, parts in total)."""

    def size(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def problem(self, data: DataName) -> Problem:
        """The data set with its network; the embedded digits if quick."""
        return Problem("digits" if self.quick else data, self.data_dir)

    def map(self, function: Callable[..., Any], parts: Iterable[Part]) -> list[Any]:
        """Return ``function(context, *part)`` for every part; the values must be JSON.

        Each is computed once: results are read from the file when a measurement is resumed. They
        are keyed by the settings and by the code of the whole package, so a result of other code or
        of other settings is never returned.
        """
        keys = {self._key(function, part): part for part in parts}
        rows = read_rows(self.parts_file) if self.parts_file is not None else []
        results = {row["key"]: row["found"] for row in rows if row.keys() >= {"key", "found"}}
        missing = [key for key in keys if key not in results]
        self.on_progress(len(keys) - len(missing), len(keys))
        for done, (i, found) in enumerate(
            self._compute(function, [keys[key] for key in missing]), len(keys) - len(missing) + 1
        ):
            results[missing[i]] = found
            if self.parts_file is not None:
                append_row(self.parts_file, {"key": missing[i], "found": found})
            self.on_progress(done, len(keys))
        return [results[key] for key in keys]

    def _key(self, function: Callable[..., Any], part: Part) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        return json.dumps([name, *part, self.quick, code_digest()])

    def _compute(
        self, function: Callable[..., Any], parts: list[Part]
    ) -> Iterator[tuple[int, Any]]:
        if self.workers == 1 or len(parts) < 2:
            yield from ((index, function(self, *part)) for index, part in enumerate(parts))
            return
        alone = Context(self.quick, self.seeds, self.data_dir, self.records)
        with worker_processes(self.workers) as pool:
            indices = {pool.submit(function, alone, *part): i for i, part in enumerate(parts)}
            for future in as_completed(indices):
                yield indices[future], future.result()


@cache
def code_digest(root: Path = Path(__file__).parents[2]) -> str:
    """Return a digest of every source file of the package, and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
