"""Tables and sentences that all comparisons of parameterizations share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import (
    Stat,
    common_target,
    epoch_seconds,
    epochs_to_reach,
    final,
    series,
    stat,
)
from weightnorm.lab.reports.curves import progress
from weightnorm.lab.reports.document import Table
from weightnorm.lab.reports.provenance import MACHINE, differing_fields
from weightnorm.lab.reports.run_grid import RunGrid, finished, rate
from weightnorm.lab.statistics import Interval, mean_interval, paired_differences

PARTS: dict[str, Callable[[int], slice]] = {
    "first quarter": lambda n: slice(max(n // 4, 1)),
    "all epochs": lambda n: slice(n),
    "last quarter": lambda n: slice(n - max(n // 4, 1), n),
    "last epoch": lambda n: slice(n - 1, n),
}
"""Parts of training, as epochs of all n."""


def unfinished(runs: RunGrid) -> list[Table]:
    """List the unfinished runs, which no other table counts, and the runs that diverged."""
    head = ("parameterization", "lr", "seed", "progress")
    running = tuple(_run_row(runs, record) for record in runs.records if not record.finished)
    diverged = tuple(_run_row(runs, record) for record in runs.records if record.diverged)
    tables = [
        Table("Not finished", head, running, ("Not counted in any n.",), numeric=False),
        Table("Diverged", head, diverged, numeric=False),
    ]
    return [table for table in tables if table.rows]


def _run_row(runs: RunGrid, record: RunRecord) -> tuple[str, ...]:
    kind, seed = runs.name(runs.kind(record)), str(record.config.get("seed", "?"))
    return kind, f"{rate(record):g}", seed, progress(record)


def epochs_to_common(runs: RunGrid, metric: str) -> tuple[float, dict[str, Stat]]:
    """Return the lowest value that all finished runs reach, and the epochs each kind needs for it.

    The target is nan with fewer than two kinds.
    """
    done = runs.best_finished
    target = common_target([r for records in done.values() for r in records], metric)
    if len(done) < 2 or math.isnan(target):
        return math.nan, {}
    return target, {
        kind: stat(epochs_to_reach(record, metric, target) for record in records)
        for kind, records in done.items()
    }


def epochs_table(
    runs: RunGrid, metric: str, what: str, scale: float = 1, unit: str = ""
) -> list[Table]:
    """Tabulate the epochs that each parameterization needs to the same value of a metric."""
    target, needed = epochs_to_common(runs, metric)
    if math.isnan(target):
        return []
    rows = tuple(
        (runs.name(kind), epochs.text(digits=1), str(epochs.n)) for kind, epochs in needed.items()
    )
    value = f"{scale * target:.2f}{unit}".replace("-", "−")
    head = ("parameterization", f"epochs to {value}", "n")
    notes = (
        f"First epoch with a {what} of {value} or better, which every finished run "
        "reaches; mean ± standard deviation over n runs.",
    )
    return [Table(f"Epochs to the same {what}", head, rows, notes)]


def difference_table(
    runs: RunGrid, metric: str, what: str, scale: float = 1, digits: int = 2
) -> list[Table]:
    """Tabulate how each parameterization differs from standard over parts of training.

    Seeds share the order of the data, so runs are paired by seed.
    """
    means = {
        kind: [
            {
                seed: scale * _mean_of(record, metric, part)
                for record in records
                if isinstance(seed := record.config.get("seed"), int)
            }
            for part in PARTS.values()
        ]
        for kind, records in runs.best_finished.items()
    }
    standard = means.pop("standard", [])
    rows = []
    for kind, parts in means.items():
        changes = [paired_differences(*pair) for pair in zip(parts, standard, strict=False)]
        if any(changes):
            texts = (signed(mean_interval(change), digits) for change in changes)
            rows.append((runs.name(kind), *texts, str(len(changes[0]))))
    head = ("parameterization", *PARTS, "n")
    note = (
        f"Mean {what} of these epochs minus that of the standard parameterization with the same "
        "seed: mean over n seeds [95 % interval]."
    )
    return [Table("Difference to standard", head, tuple(rows), (note,))] if rows else []


def _mean_of(record: RunRecord, metric: str, part: Callable[[int], slice]) -> float:
    """Return the mean of a metric over a part of training, nan if the run diverged."""
    values = [*series(record, metric).values()]
    return stat(values[part(len(values))]).mean if record.diverged is None else math.nan


def signed(change: Interval, digits: int = 3) -> str:
    """Format a difference with its sign, and its interval if it has one; a dash if a run diverged.

    >>> signed(Interval(-0.0123, -0.02, -0.004)), signed(Interval(0.5, 0.5, 0.5), digits=1)
    ('−0.012 [−0.020, −0.004]', '+0.5')
    """
    if math.isnan(change.value):
        return "—"
    value, low, high = (f"{x:+.{digits}f}" for x in (change.value, change.low, change.high))
    low_to_high = f" [{low}, {high}]" if change.low < change.high else ""
    return f"{value}{low_to_high}".replace("-", "−")


def final_values(runs: RunGrid, metric: str, scale: float = 1, digits: int = 2) -> str:
    """Return final values as a phrase, ``32.1 ± 0.2 (standard), 19.8 (weight norm); n = 3``."""
    ends = {
        kind: stat(final(record, metric) for record in records)
        for kind, records in runs.best_finished.items()
    }
    return phrase(runs, ends, scale, digits)


def epochs_sentence(
    runs: RunGrid, metric: str, what: str, scale: float = 1, unit: str = ""
) -> tuple[str, ...]:
    """Return a sentence on the epochs to the same value; none if there is nothing to compare."""
    target, needed = epochs_to_common(runs, metric)
    if math.isnan(target):
        return ()
    value = f"{scale * target:.1f}{unit}".replace("-", "−")
    return (f"Epochs to a {what} of {value}: {phrase(runs, needed, digits=1)}.",)


def phrase(runs: RunGrid, stats: Mapping[str, Stat], scale: float = 1, digits: int = 2) -> str:
    """List the values of each kind; n is named once if it is the same for all."""
    counts = {one.n for one in stats.values()}
    same = len(counts) == 1
    texts = [
        f"{one.text(scale, digits)} ({runs.name(kind)}{'' if same else f', n = {one.n}'})"
        for kind, one in stats.items()
    ]
    return ", ".join(texts) + (f"; n = {counts.pop()}" if same else "")


def times(runs: RunGrid, paper: Mapping[str, str] | None = None) -> Table:
    """Tabulate the time of an epoch, relative to standard, beside the paper's statement if any."""
    done = {
        kind: finished(record for records in rates.values() for record in records)
        for kind, rates in runs.grid.items()
    }
    seconds = {kind: stat(map(epoch_seconds, records)) for kind, records in done.items()}
    standard = seconds.get("standard", stat([]))
    rows = [
        (
            runs.name(kind),
            time.text(),
            f"{time.mean / standard.mean:.2f}" if time.n and standard.mean > 0 else "—",
            str(time.runs),
            *([paper.get(kind, "—")] if paper else []),
        )
        for kind, time in seconds.items()
    ]
    notes = ["Seconds: mean over the epochs of a run, then mean ± standard deviation over n runs."]
    if names := differing_fields(finished(runs.records), MACHINE):
        notes.append(f"Runs differ in {', '.join(names)}: their times are not comparable.")
    words = ("parameterization", "seconds per epoch", "relative to standard", "n")
    head = (*words, "paper") if paper else words
    return Table("Time per epoch", head, tuple(rows), tuple(notes))
