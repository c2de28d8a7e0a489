"""Statistics over runs: mean, standard deviation and n over seeds, curves, epochs to a target."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightnorm.lab.records import RunRecord, by_seed
from weightnorm.lab.runs.selection import best_learning_rate


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation of the n runs, among `runs`, that have the number."""

    mean: float
    std: float
    n: int
    runs: int

    @property
    def complete(self) -> bool:
        return 0 < self.n == self.runs

    def text(self, scale: float = 1, digits: int = 2) -> str:
        """Mean ± standard deviation, and n if some runs lack the number.

        >>> stat([0.1, 0.2]).text(scale=100), stat([0.1]).text(), stat([0.1, None]).text()
        ('15.00 ± 7.07', '0.10', '0.10 (n = 1 of 2)')
        """
        if not self.n:
            return "—"
        spread = f" ± {self.std * abs(scale):.{digits}f}" if self.n > 1 else ""
        missing = f" (n = {self.n} of {self.runs})" if self.n < self.runs else ""
        mean = f"{self.mean * scale:.{digits}f}".replace("-", "−")
        return f"{mean}{spread}{missing}"


@dataclass(frozen=True)
class Curve:
    """A metric over epochs: mean and standard deviation over n runs."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    n: int


def finite_or_nan(value: Any) -> float:
    """Return a value of a record as a float, nan if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def stat(values: Iterable[Any]) -> Stat:
    """Compute mean and standard deviation; values that are not finite only count in `runs`."""
    all_values = [finite_or_nan(value) for value in values]
    finite = [value for value in all_values if not math.isnan(value)]
    mean = float(np.mean(finite)) if finite else math.nan
    std = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    return Stat(mean, std, len(finite), len(all_values))


def curve(records: Iterable[RunRecord], metric: str) -> Curve:
    """Compute the mean curve of a metric over epochs.

    Where one run has the metric and another does not, the mean is nan, so that the line has a gap
    instead of a jump. Runs that never have the metric are not counted.
    """
    runs = [series(record, metric) for record in records]
    runs = [values for values in runs if values]
    x = sorted({epoch for values in runs for epoch in values})
    table = np.array([[values.get(epoch, math.nan) for epoch in x] for values in runs])
    if not runs:
        return Curve((), (), (), 0)
    mean = table.mean(0)
    std = table.std(0, ddof=1) if len(runs) > 1 else np.zeros_like(mean)
    return Curve(tuple(x), tuple(mean.tolist()), tuple(std.tolist()), len(runs))


def series(record: RunRecord, metric: str) -> dict[float, float]:
    """Return epoch → value of a metric, without the epochs that lack it."""
    pairs = (
        (finite_or_nan(row.get("epoch", count)), finite_or_nan(row.get(metric)))
        for count, row in enumerate(record.metrics, 1)
    )
    return {epoch: value for epoch, value in pairs if not (math.isnan(epoch) or math.isnan(value))}


def final(record: RunRecord, metric: str) -> float:
    """Return the final value of a metric: from the result, else from the last epoch.

    NaN if the run diverged.
    """
    if record.diverged is not None:
        return math.nan
    if metric in (record.result or {}):
        return finite_or_nan((record.result or {}).get(metric))
    return finite_or_nan(record.metrics[-1].get(metric)) if record.metrics else math.nan


def epochs_to_reach(record: RunRecord, metric: str, target: float) -> float:
    """Return the first epoch whose value is at most `target`, nan if there is none."""
    reached = (epoch for epoch, value in series(record, metric).items() if value <= target)
    return min(reached, default=math.nan)


def common_target(records: Iterable[RunRecord], metric: str) -> float:
    """Return the lowest value of a metric that every run reaches, nan if a run lacks the metric.

    Runs that diverged are left out: they reach less than they would have.
    """
    whole = [record for record in records if record.diverged is None]
    lowest = [min(series(record, metric).values(), default=math.nan) for record in whole]
    return max(lowest, default=math.nan) if not any(map(math.isnan, lowest)) else math.nan


def epoch_seconds(record: RunRecord) -> float:
    """Return the mean time of an epoch."""
    return stat(series(record, "seconds").values()).mean


def best_rate(rates: dict[float, list[RunRecord]], metric: str, highest: bool = False) -> float:
    """Return the best learning rate by the rule of `best_learning_rate`.

    While no run has finished with a number, return the rate with the most epochs.
    """
    results = {rate: by_seed(records, metric) for rate, records in rates.items()}
    best = best_learning_rate(results, highest)
    if best is not None:
        return best
    return min(rates, key=lambda rate: (-max(len(x.metrics) for x in rates[rate]), rate))
