"""Measures the claims one after the other and records each; the same command resumes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightnorm.lab.claims import (
    algebra,
    cost,
    covariance,
    from_records,
    initialization,
    learning_rates,
    noise,
    norm_growth,
    reinforcement,
    robustness,
)
from weightnorm.lab.claims.claim import CLAIMS, LONG_CLAIMS, Claim
from weightnorm.lab.claims.context import Context
from weightnorm.lab.claims.parts import PartRunner
from weightnorm.lab.environment import environment, prepare_process
from weightnorm.lab.errors import ConfigError, Interrupted, RunError, require
from weightnorm.lab.files import lock_folder
from weightnorm.lab.progress import ProgressBars
from weightnorm.lab.records import Row, append_row, load_record, read_rows, write_json

SEEDS = {"quick": (1, 2, 3), "full": (1, 2, 3, 4, 5), "long": (1, 2, 3), "long-quick": (1, 2)}
DATA = {"quick": "digits", "full": "cifar10", "long": "mnist", "long-quick": "digits"}
FROM_RECORDS = (18, 20)
"""Measured again each time, because the experiments' records may have changed."""

MODULES = (
    algebra,
    cost,
    covariance,
    from_records,
    initialization,
    learning_rates,
    noise,
    norm_growth,
    reinforcement,
    robustness,
)
"""Importing them registers their claims."""


def measure(
    context: Context,
    only: Sequence[int] = (),
    console: Console | None = None,
    workers: int | None = None,
) -> Path:
    """Measure the claims that are not in the record yet and return its folder."""
    claims = LONG_CLAIMS if context.long else CLAIMS
    context = replace(context, seeds=context.seeds or SEEDS[context.preset])
    require(workers is None or workers >= 1, "jobs", workers, "1 or more")
    workers = workers or (1 if context.quick else os.cpu_count() or 1)
    folder = context.runs / "claims" / context.preset
    if unknown := [number for number in only if number not in claims]:
        numbers = ", ".join(map(str, sorted(claims)))
        raise ConfigError(f"there is no claim {unknown[0]}; expected one of {numbers}")
    expected = "two or more, for an interval, each once"
    require(len({*context.seeds}) == len(context.seeds) > 1, "seeds", context.seeds, expected)
    with lock_folder(folder):
        return _measure(context, claims, only, folder, console, workers)


def _measure(
    context: Context,
    claims: Mapping[int, Claim],
    only: Sequence[int],
    folder: Path,
    console: Console | None,
    workers: int,
) -> Path:
    open_record(folder, context)
    recorded = latest_rows(folder)
    missing = [n for n in sorted(set(only or claims)) if n not in recorded or n in FROM_RECORDS]
    # As in the workers: results do not depend on their number.
    prepare_process(threads=1 if context.long else None)
    progress = ProgressBars(console or Console(stderr=True))
    failed: list[str] = []
    try:
        bar = progress.add("claims", len(missing))
        for index, number in enumerate(missing):
            progress.update(bar, index)
            progress.print(
                f"claim {number} ({index + 1} of {len(missing)}): {claims[number].statement}"
            )
            try:
                row = _measure_one(claims[number], context, workers, folder, progress)
            except RunError as error:  # the others can still be measured
                failed.append(f"claim {number}: {error}")
                continue
            append_row(folder / "metrics.jsonl", row)
            progress.print(f"  {row['verdict']}: {row['value']}")
    except KeyboardInterrupt:
        raise Interrupted(folder) from None
    finally:
        progress.close()
    if failed:
        raise RunError(f"{'; '.join(failed)}. The others are in {folder}")
    rows = latest_rows(folder)
    if set(rows) >= set(claims):
        write_json(folder / "result.json", Counter(row["verdict"] for row in rows.values()))
    return folder


def _measure_one(
    claim: Claim, context: Context, workers: int, folder: Path, progress: ProgressBars
) -> Row:
    """Measure a claim with a progress bar for its parts."""
    bar = progress.add("parts", None)

    def on_progress(done: int, total: int) -> None:
        progress.update(bar, done, total=total)
        progress.status(lambda: f"  {done} of {total} parts")

    parts = PartRunner(workers, folder / "parts.jsonl", on_progress)
    try:
        return claim.row(claim.measure(replace(context, parts=parts)))
    finally:
        progress.remove(bar)


def open_record(folder: Path, context: Context) -> None:
    """Create the record, or check that an existing one has the same settings."""
    config = {"seeds": list(context.seeds), "data": DATA[context.preset]}
    head = {"experiment": "claims", "preset": folder.name, "config": config}
    if (folder / "config.json").exists():
        before = load_record(folder).config
        if before != config:
            raise ConfigError(
                f"{folder} was measured with other settings: got {config}, recorded {before}; "
                "delete it or choose another --runs"
            )
    else:
        write_json(folder / "config.json", head)
    append_row(folder / "sessions.jsonl", environment(torch.device("cpu"), 1))


def latest_rows(folder: Path) -> dict[int, Row]:
    """The latest row of each claim, by number."""
    rows = read_rows(folder / "metrics.jsonl")
    known = {field.name for field in fields(Claim)} - {"measure"} | {"value", "verdict", "n"}
    return dict(sorted({row["number"]: row for row in rows if row.keys() >= known}.items()))


def table(folder: Path) -> Table:
    """The record as a table for a terminal of 80 columns."""
    found = Table("claim", "n", "verdict", show_lines=True)
    for row in latest_rows(folder).values():
        text = f"{row['number']}. {row['statement']} (section {row['section']})"
        text += f"\n→ {row['value']}; paper: {row['paper']}"
        found.add_row(escape(text), str(row["n"]), row["verdict"])
    return found
