"""All claims, one after the other: kept as they come, so that the same command goes on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
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
    noise,
    norm_growth,
    reinforcement,
    robustness,
)
from weightnorm.lab.claims.claim import CLAIMS
from weightnorm.lab.claims.context import Workbench
from weightnorm.lab.claims.pool import Crew
from weightnorm.lab.claims.progress import Shown
from weightnorm.lab.errors import ConfigError, Interrupted, RunError, require
from weightnorm.lab.malloc import keep_freed_memory
from weightnorm.lab.runs.environment import environment
from weightnorm.lab.runs.records import Row, append_row, load_record, read_rows, write_json

SEEDS, QUICK_SEEDS = (1, 2, 3, 4, 5), (1, 2, 3)
FROM_RECORDS = (18, 20)
"""Read anew each time: the records may have grown."""

MODULES = (
    algebra,
    cost,
    covariance,
    from_records,
    initialization,
    noise,
    norm_growth,
    reinforcement,
    robustness,
)
"""Importing them registers their claims."""


def measure(
    bench: Workbench,
    only: Sequence[int] = (),
    console: Console | None = None,
    workers: int | None = None,
) -> Path:
    """Measure what is not measured yet; the record's folder."""
    bench = replace(bench, seeds=bench.seeds or (QUICK_SEEDS if bench.quick else SEEDS))
    workers = workers or (1 if bench.quick else os.cpu_count() or 1)
    folder = bench.runs / "claims" / ("quick" if bench.quick else "full")
    if unknown := [number for number in only if number not in CLAIMS]:
        there = ", ".join(map(str, sorted(CLAIMS)))
        raise ConfigError(f"there is no claim {unknown[0]}; there are {there}")
    require(len(set(bench.seeds)) > 1, "seeds", bench.seeds, "two or more, for an interval")
    open_record(folder, bench)
    done = newest(folder)
    wanted = sorted(set(only or CLAIMS))
    left = [n for n in wanted if n not in done or n in FROM_RECORDS]
    keep_freed_memory()
    shown = Shown(console or Console(stderr=True), len(left))
    crew = Crew(workers, folder / "parts.jsonl", shown.part)
    bench = replace(bench, crew=crew)
    failed: list[str] = []
    try:
        for number in left:
            shown.begin(CLAIMS[number])
            try:
                found = CLAIMS[number].measure(bench)
            except RunError as error:  # the others can still be measured
                failed.append(f"claim {number}: {error}")
                continue
            append_row(folder / "metrics.jsonl", CLAIMS[number].row(found))
            shown.end(found)
    except KeyboardInterrupt:
        raise Interrupted(folder) from None
    finally:
        shown.close()
        crew.close()
    if failed:
        raise RunError(f"{'; '.join(failed)}. The others are in {folder}")
    rows = newest(folder)
    if set(rows) >= set(CLAIMS):
        write_json(folder / "result.json", Counter(row["verdict"] for row in rows.values()))
    return folder


def open_record(folder: Path, bench: Workbench) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"seeds": list(bench.seeds), "data": "digits" if bench.quick else "cifar10"}
    head = {"experiment": "claims", "preset": folder.name, "config": config}
    if (folder / "config.json").exists():
        before = load_record(folder).config
        if before != config:
            raise ConfigError(f"{folder} was measured with other settings ({before}); delete it")
    else:
        write_json(folder / "config.json", head)
    append_row(folder / "sessions.jsonl", environment(torch.device("cpu"), 1))


def newest(folder: Path) -> dict[int, Row]:
    """Each claim's newest row, in order."""
    rows = {row["number"]: row for row in read_rows(folder / "metrics.jsonl")}
    return dict(sorted(rows.items()))


def table(folder: Path) -> Table:
    """The record, for a terminal."""
    shown = Table("claim", "section", "value", "the paper says", "n", "verdict", show_lines=True)
    for row in newest(folder).values():
        name = f"{row['number']}. {row['statement']}"
        words = (name, *(str(row[key]) for key in ("section", "value", "paper", "n", "verdict")))
        shown.add_row(*map(escape, words))
    return shown
