"""All claims, one after the other: kept as they come, so that the same command goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from weightnorm.lab.claims import (
    algebra,
    cost,
    covariance,
    growth,
    initialization,
    noise,
    recorded,
    robustness,
)
from weightnorm.lab.claims.claim import CLAIMS
from weightnorm.lab.claims.workbench import Workbench
from weightnorm.lab.experiments.config import ConfigError
from weightnorm.lab.experiments.environment import environment
from weightnorm.lab.records import Row, append_row, load_record, read_rows, write_json

FROM_RECORDS = (18, 20)
"""Read anew each time: the records may have grown."""

ROOMS = (algebra, cost, covariance, growth, initialization, noise, recorded, robustness)
"""Whose claims are in the table: importing enters them."""


def measure(
    bench: Workbench,
    only: Sequence[int] = (),
    console: Console | None = None,
) -> Path:
    """Measure what is not measured yet; the record's folder."""
    console = console or Console(stderr=True)
    folder = bench.runs / "claims" / ("quick" if bench.quick else "full")
    if unknown := [number for number in only if number not in CLAIMS]:
        raise ConfigError(
            f"there is no claim {unknown[0]}; there are {', '.join(map(str, CLAIMS))}"
        )
    open_record(folder, bench)
    done = {row["number"]: row for row in read_rows(folder / "metrics.jsonl")}
    wanted = sorted(set(only or CLAIMS))
    for count, number in enumerate(wanted, 1):
        if number in done and number not in FROM_RECORDS:
            continue
        claim = CLAIMS[number]
        console.print(f"claim {number} ({count} of {len(wanted)}): {claim.statement}", markup=False)
        found = claim.measure(bench)
        console.print(f"  {found.verdict}: {found.value}", markup=False, highlight=False)
        append_row(folder / "metrics.jsonl", claim.row(found))
    rows = newest(folder)
    if set(rows) >= set(CLAIMS):
        write_json(folder / "result.json", tally(rows))
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


def tally(rows: dict[int, Row]) -> dict[str, int]:
    """How many claims have each verdict."""
    counts: dict[str, int] = {}
    for row in rows.values():
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    return counts
