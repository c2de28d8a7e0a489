"""What came out of a sweep: the runs by parameterization and learning rate, and which is best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from statistics import fmean, stdev

from rich.table import Table

from weightnorm.lab.errors import require
from weightnorm.lab.runs.records import RunRecord


@dataclass(frozen=True)
class SweepResult:
    """What became of a sweep."""

    records: list[RunRecord]
    """One for each run of the grid, in its order; those that did not finish have no result."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Label and reason of each run that failed."""
    interrupted: bool = False
    """Whether it was stopped before every run had ended."""
    metric: str = "test_error"
    highest: bool = False
    """Whether the highest metric is the best."""
    axes: tuple[str, ...] = ()
    """Fields that the grid ranges over besides parameterization, learning rate and seed."""


@dataclass(frozen=True)
class Cell:
    """One parameterization at one learning rate: the metric over the seeds."""

    parameterization: str
    """With the values of further axes before it."""
    learning_rate: float
    n: int
    """Runs that finished with a number."""
    mean: float | None
    std: float | None
    """Sample standard deviation; None below two runs."""
    diverged: int = 0
    """Runs that finished with no finite number."""
    unfinished: int = 0
    best: bool = False
    """Whether this learning rate is the parameterization's best."""


def summarize(
    records: Iterable[RunRecord],
    metric: str = "test_error",
    highest: bool = False,
    axes: Sequence[str] = (),
) -> list[Cell]:
    """The cells of a grid, parameterizations as they come, learning rates ascending.

    Best is the lowest mean, or the `highest`, among the learning rates at which no run diverged,
    or else among all; of equal ones the one with more runs, then the smaller rate.
    """
    groups: dict[str, dict[float, list[RunRecord]]] = {}
    for record in records:
        place = " ".join(str(record.config[field]) for field in (*axes, "parameterization"))
        rates = groups.setdefault(place, {})
        rates.setdefault(float(record.config["learning_rate"]), []).append(record)
    cells = []
    for how, rates in groups.items():
        row = [_cell(how, rate, rates[rate], metric) for rate in sorted(rates)]
        rank = partial(_rank, sign=-1 if highest else 1)
        best = min((cell for cell in row if cell.n), key=rank, default=None)
        cells += [replace(cell, best=cell is best) for cell in row]
    return cells


def _cell(how: str, rate: float, records: Sequence[RunRecord], metric: str) -> Cell:
    results = [record.result for record in records if record.result is not None]
    for result in results:
        known = [k for k, v in result.items() if v is None or isinstance(v, float | int)]
        require(metric in known, "metric", metric, f"one of {', '.join(known)}")
    values = [result[metric] for result in results if result[metric] is not None]
    return Cell(
        how,
        rate,
        n=len(values),
        mean=fmean(values) if values else None,
        std=stdev(values) if len(values) > 1 else None,
        diverged=len(results) - len(values),
        unfinished=len(records) - len(results),
    )


def _rank(cell: Cell, sign: int) -> tuple[bool, float, int, float]:
    assert cell.mean is not None
    return cell.diverged > 0, sign * cell.mean, -cell.n, cell.learning_rate


def render(result: SweepResult) -> Table:
    """The cells as a table, the metric that decides first; the best learning rate of each
    parameterization stands out."""
    metrics = [result.metric, *_others(result)]
    names = [metric.replace("_", " ") for metric in metrics]
    table = Table("parameterization", "learning rate", *names, "n", "")
    columns = [summarize(result.records, metric, result.highest, result.axes) for metric in metrics]
    for how, rows in groupby(zip(*columns, strict=True), key=lambda row: row[0].parameterization):
        for i, row in enumerate(rows):
            style = "bold" if row[0].best else ""
            table.add_row("" if i else how, *_cells(row), style=style)
        table.add_section()
    return table


def _others(result: SweepResult) -> list[str]:
    """The other numbers that every finished run has, but for its time."""
    results = [set(record.result) for record in result.records if record.result is not None]
    common = set.intersection(*results) if results else set()
    return sorted(common - {result.metric, "seconds"})


def _cells(row: Sequence[Cell]) -> tuple[str, ...]:
    cell = row[0]
    values = ["–" if x.mean is None else f"{shown(x.mean)} ± {shown(x.std, 2)}" for x in row]
    notes = {"diverged": cell.diverged, "unfinished": cell.unfinished}
    words = ["best"] * cell.best + [f"{n} {word}" for word, n in notes.items() if n]
    return f"{cell.learning_rate:g}", *values, str(cell.n), ", ".join(words)


def shown(value: object, digits: int = 4) -> str:
    """A number in a few digits; a dash for anything else."""
    return f"{value:.{digits}g}" if isinstance(value, float | int) else "–"
