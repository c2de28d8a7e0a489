"""Summarize a sweep: mean and standard deviation over seeds, and the best learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, stdev

from rich.table import Column, Table

from weightnorm.lab.errors import require
from weightnorm.lab.records import RunRecord, by_seed, is_number
from weightnorm.lab.runs.selection import best_learning_rate


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


@dataclass(frozen=True)
class GridCell:
    """A metric over the seeds of one parameterization and learning rate."""

    parameterization: str
    """Preceded by the values of further axes."""
    learning_rate: float
    n: int
    """Runs that finished with a number."""
    mean: float | None
    std: float | None
    """Sample standard deviation; None below two runs."""
    diverged: int = 0
    """Runs that ended without a finite number."""
    unfinished: int = 0
    best: bool = False
    """Whether this is the parameterization's best learning rate."""


def summarize(
    records: Iterable[RunRecord],
    metric: str = "test_error",
    highest: bool = False,
    axes: Sequence[str] = (),
) -> list[GridCell]:
    """Return the cells of a grid: parameterizations in their order, learning rates ascending.

    The best learning rate is that of `best_learning_rate`.
    """
    groups: dict[str, dict[float, list[RunRecord]]] = {}
    for record in records:
        name = " ".join(str(record.config[field]) for field in (*axes, "parameterization"))
        rates = groups.setdefault(name, {})
        rates.setdefault(float(record.config["learning_rate"]), []).append(record)
    cells = []
    for name, rates in groups.items():
        results = {rate: by_seed(rates[rate], metric) for rate in sorted(rates)}
        best = best_learning_rate(results, highest)
        for rate in results:
            check_metric(rates[rate], metric)
            cell = _cell(name, rate, [*results[rate].values()], len(rates[rate]))
            cells.append(replace(cell, best=rate == best))
    return cells


def check_metric(records: Iterable[RunRecord], metric: str, known: Sequence[str] = ()) -> None:
    """Raise a ConfigError unless the metric is `known` or in the results of the finished runs."""
    results = [r.result for r in records if r.result is not None and r.diverged is None]
    for result in results:
        names = [k for k, v in result.items() if v is None or isinstance(v, float | int)]
        require(metric in names, "metric", metric, f"one of {', '.join(names)}")
    if known and not results:
        require(metric in known, "metric", metric, f"one of {', '.join(known)}")


def _cell(name: str, rate: float, results: Sequence[float | None], runs: int) -> GridCell:
    values = [value for value in results if value is not None]
    return GridCell(
        name,
        rate,
        n=len(values),
        mean=fmean(values) if values else None,
        std=stdev(values) if len(values) > 1 else None,
        diverged=len(results) - len(values),
        unfinished=runs - len(results),
    )


def render(result: SweepResult) -> Table:
    """Return a table of the cells, with the deciding metric first and the best rates in bold."""
    metrics = [result.metric, *_other_metrics(result)]
    names = [metric.replace("_", " ") for metric in metrics]
    # Nothing is cut: where the terminal is narrow, words and numbers are wrapped.
    others = (Column(name, overflow="fold") for name in ("lr", *names, "n", ""))
    table = Table(Column("parameterization", no_wrap=True), *others, box=None)
    cells = [summarize(result.records, metric, result.highest, result.axes) for metric in metrics]
    for how, rows in groupby(zip(*cells, strict=True), key=lambda row: row[0].parameterization):
        for i, row in enumerate(rows):
            style = "bold" if row[0].best else ""
            table.add_row("" if i else how, *_columns(row), style=style)
    return table


def _other_metrics(result: SweepResult) -> list[str]:
    """Return the other metrics that every finished run has, except its time."""
    results = [
        {name for name, value in record.result.items() if is_number(value)}
        for record in result.records
        if record.result is not None and record.diverged is None
    ]
    common = set.intersection(*results) if results else set()
    return sorted(common - {result.metric, "seconds"})


def _columns(row: Sequence[GridCell]) -> tuple[str, ...]:
    cell = row[0]
    values = [
        format_number(x.mean) + (f" ± {format_number(x.std, 2)}" if x.std is not None else "")
        for x in row
    ]
    notes = {"diverged": cell.diverged, "unfinished": cell.unfinished}
    words = ["best"] * cell.best + [f"{n} {word}" for word, n in notes.items() if n]
    return f"{cell.learning_rate:g}", *values, str(cell.n), ", ".join(words)


def format_number(value: object, digits: int = 4) -> str:
    """Format a number with a few significant digits; a dash for anything else."""
    return f"{value:.{digits}g}" if isinstance(value, float | int) else "–"
