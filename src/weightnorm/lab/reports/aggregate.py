"""From runs to numbers: mean, standard deviation and n over seeds. No words, no drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightnorm.lab.runs.records import RunRecord


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
        spread = f" ± {self.std * scale:.{digits}f}" if self.n > 1 else ""
        missing = f" (n = {self.n} of {self.runs})" if self.n < self.runs else ""
        return f"{self.mean * scale:.{digits}f}{spread}{missing}"


@dataclass(frozen=True)
class Curve:
    """A metric over epochs: mean and standard deviation over n runs."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    n: int


def finite_or_nan(value: Any) -> float:
    """A finite number, or nan for whatever else a record may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def stat(values: Iterable[Any]) -> Stat:
    """Over the numbers among the values; the others count as runs without one."""
    all_values = [finite_or_nan(value) for value in values]
    finite = [value for value in all_values if not math.isnan(value)]
    mean = float(np.mean(finite)) if finite else math.nan
    std = float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan
    return Stat(mean, std, len(finite), len(all_values))


def curve(records: Iterable[RunRecord], metric: str) -> Curve:
    """A metric over the epochs that have it.

    Where one run has it and another has not, the mean is nan, a gap: a line must not jump because
    a run dropped out of it. A run that never has it is not counted.
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
    """Epoch → value, where there is one."""
    pairs = (
        (finite_or_nan(row.get("epoch", count)), finite_or_nan(row.get(metric)))
        for count, row in enumerate(record.metrics, 1)
    )
    return {epoch: value for epoch, value in pairs if not (math.isnan(epoch) or math.isnan(value))}


def final(record: RunRecord, metric: str) -> float:
    """A metric at the end of a run: its result's, else the newest row's."""
    if record.result is not None and metric in record.result:
        return finite_or_nan(record.result[metric])
    return finite_or_nan(record.metrics[-1].get(metric)) if record.metrics else math.nan


def epoch_seconds(record: RunRecord) -> float:
    """Mean time of an epoch."""
    return stat(series(record, "seconds").values()).mean


def best_rate(rates: dict[float, list[RunRecord]], metric: str, highest: bool = False) -> float:
    """The learning rate whose finished runs end lowest in the mean, or highest.

    A rate at which a run ended without a number comes after all others. While no run has finished,
    the rate that has come furthest stands in.
    """

    def rank(rate: float) -> tuple[bool, float, float, float]:
        done = [record for record in rates[rate] if record.finished]
        end = stat(final(record, metric) for record in done or rates[rate])
        epochs = 0 if done else max(len(record.metrics) for record in rates[rate])
        mean = -end.mean if highest else end.mean
        return not done, -epochs, mean if end.complete else math.inf, rate

    return min(rates, key=rank)
