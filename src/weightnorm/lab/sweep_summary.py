"""Summarize a sweep: mean and standard deviation over seeds, and the best learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Column, Table

from weightnorm.lab.errors import require
from weightnorm.lab.records import RunRecord, is_number
from weightnorm.lab.results import UNFINISHED, Comparison, run_frame


@dataclass(frozen=True)
class SweepResult:
    """Outcome of a sweep."""

    records: list[RunRecord]
    """One per run of the grid, in its order; unfinished runs have no result."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Label and reason of each run that failed. Diverged runs are not among them."""
    interrupted: bool = False
    """Whether the sweep was stopped before every run had ended."""
    metric: str = "test_error"
    highest: bool = False
    """Whether a higher metric is better."""
    axes: tuple[str, ...] = ()
    """Fields that the grid varies besides parameterization, learning rate and seed."""

    def comparison(self) -> Comparison:
        """Return the runs as a comparison; a method is a parameterization, preceded by the values
        of further axes."""
        runs = run_frame(self.records)
        fields = (*self.axes, "parameterization")
        runs["method"] = [" ".join(str(r.config[f]) for f in fields) for r in self.records]
        return Comparison(runs, self.metric, self.highest)


def check_metric(records: Iterable[RunRecord], metric: str, known: Sequence[str] = ()) -> None:
    """Raise a ConfigError unless the metric is `known` or in the results of the finished runs."""
    results = [r.result for r in records if r.result is not None and r.diverged is None]
    for result in results:
        names = [k for k, v in result.items() if v is None or isinstance(v, float | int)]
        require(metric in names, "metric", metric, f"one of {', '.join(names)}")
    if known and not results:
        require(metric in known, "metric", metric, f"one of {', '.join(known)}")


def render(result: SweepResult) -> Table:
    """Return a table of every method and learning rate, with the deciding metric first and the best
    rates in bold."""
    check_metric(result.records, result.metric)
    metrics = [*dict.fromkeys([result.metric, *_other_metrics(result.records)])]
    names = [metric.replace("_", " ") for metric in metrics]
    # Nothing is cut: where the terminal is narrow, words and numbers are wrapped.
    others = (Column(name, overflow="fold") for name in ("lr", *names, "n", ""))
    table = Table(Column("parameterization", no_wrap=True), *others, box=None)
    sweep, above = result.comparison(), ""
    for method, rate in sweep.rates:
        runs = sweep.at(method, rate)
        numbers = [_finite(sweep.values(metric, runs).values()) for metric in metrics]
        states = [*runs["state"]]
        ended = len(runs) - states.count(UNFINISHED)
        best = bool(numbers[0]) and rate == sweep.best[method]
        notes = {"diverged": ended - len(numbers[0]), "unfinished": states.count(UNFINISHED)}
        words = ["best"] * best + [f"{n} {word}" for word, n in notes.items() if n]
        cells = (f"{rate:g}", *map(_mean, numbers), f"{len(numbers[0])}", ", ".join(words))
        table.add_row("" if method == above else method, *cells, style="bold" if best else "")
        above = method
    return table


def _other_metrics(records: Iterable[RunRecord]) -> list[str]:
    """Return the metrics that every finished run has, except its time."""
    results = [
        {name for name, value in record.result.items() if is_number(value)}
        for record in records
        if record.result is not None and record.diverged is None
    ]
    return sorted(set.intersection(*results) - {"seconds"}) if results else []


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if np.isfinite(value)]


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {format_number(float(np.std(values, ddof=1)), 2)}" if len(values) > 1 else ""
    return format_number(float(np.mean(values)) if values else None) + spread


def format_number(value: object, digits: int = 4) -> str:
    """Format a number with a few significant digits; a dash for anything else."""
    return f"{value:.{digits}g}" if isinstance(value, float | int) else "–"
