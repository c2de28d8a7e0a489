"""Tables that every comparison of parameterizations has."""

from __future__ import annotations

from collections.abc import Mapping

from weightnorm.lab.reports.aggregate import epoch_seconds, stat
from weightnorm.lab.reports.curves import progress
from weightnorm.lab.reports.document import Table
from weightnorm.lab.reports.provenance import MACHINE, differing_fields
from weightnorm.lab.reports.run_grid import RunGrid, finished
from weightnorm.lab.reports.style import style_of


def unfinished(runs: RunGrid) -> list[Table]:
    """The runs that are in no other table, if any."""
    rows = tuple(
        (style_of(kind).name, f"{rate:g}", str(record.config.get("seed", "?")), progress(record))
        for kind, rates in runs.grid.items()
        for rate, records in rates.items()
        for record in records
        if not record.finished
    )
    head = ("parameterization", "lr", "seed", "how far")
    notes = ("Not counted in any n.",)
    return [Table("Not finished", head, rows, notes, numeric=False)] if rows else []


def times(runs: RunGrid, paper: Mapping[str, str] | None = None) -> Table:
    """Time of an epoch, relative to standard, beside what the paper says of it if it does."""
    done = {
        kind: finished(record for records in rates.values() for record in records)
        for kind, rates in runs.grid.items()
    }
    seconds = {kind: stat(map(epoch_seconds, records)) for kind, records in done.items()}
    standard = seconds.get("standard", stat([]))
    rows = [
        (
            style_of(kind).name,
            time.text(),
            f"{time.mean / standard.mean:.2f}" if time.n and standard.mean > 0 else "—",
            str(time.runs),
            *([paper.get(kind, "—")] if paper else []),
        )
        for kind, time in seconds.items()
    ]
    notes = ["Seconds: mean over the epochs of a run, then mean ± standard deviation over n runs."]
    if differing := differing_fields(finished(runs.records), MACHINE):
        notes.append(f"Runs differ in {', '.join(differing)}: their times do not compare.")
    words = ("parameterization", "seconds per epoch", "relative to standard", "n")
    head = (*words, "paper") if paper else words
    return Table("Time per epoch", head, tuple(rows), tuple(notes))
