"""Benchmarks in the terminal: each is printed when it has been measured, then compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightnorm.files.errors import printable
from weightnorm.lab.bench.benchmark import (
    Benchmark,
    Settings,
    compare,
    differing_conditions,
    load,
    run,
)
from weightnorm.lab.environment import pick_device
from weightnorm.lab.errors import require
from weightnorm.lab.report.bench import about, amount, interval, relative

COLORS = {"met": "green", "within noise": "yellow", "missed": "red"}


def settings(
    quick: bool, rounds: int | None, seconds: float, threads: int | None, device: str
) -> Settings:
    """Return the settings of a measurement; the number of threads is set at once."""
    rounds = (2 if quick else 10) if rounds is None else rounds
    require(rounds >= 1, "rounds", rounds, "1 or more")
    require(seconds >= 0, "seconds", seconds, "0 or more")
    if threads is not None:
        require(threads >= 1, "threads", threads, "1 or more")
        torch.set_num_threads(threads)
    return Settings(pick_device(device), quick, rounds, seconds)


def measure(
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    folder: Path,
    older: Path | None,
    out: Console,
    progress: Console,
) -> bool:
    """Measure and print benchmarks; returns whether one is slower than in the older record."""
    before = load(older) if older else None
    path = run(benchmarks, settings, progress, folder, lambda found: _print(found, out))
    record = load(path)
    print(f"\n{printable(about(record))}\nrecord: {path}")
    return before is not None and _print_changes(before, record)


def _print(benchmark: dict[str, Any], out: Console) -> None:
    out.print(f"\n[bold]{benchmark['name']}[/]: {escape(benchmark['title'])}", highlight=False)
    for case in benchmark["cases"]:
        table = Table("", "", "relative", title=escape(case["case"]), box=None)
        table.title_justify = "left"
        for peer in case["results"]:
            table.add_row(peer, amount(case, peer), relative(case, peer, 3))
        out.print(table)
        for goal in case["goals"]:
            text = escape(f"{goal['goal']}: {interval(goal, 3)}")
            out.print(f"  [{COLORS[goal['verdict']]}]{goal['verdict']}[/]: {text}", highlight=False)


def _print_changes(before: dict[str, Any], now: dict[str, Any]) -> bool:
    if differing := differing_conditions(before, now):
        print(f"the records are of different conditions: other {', '.join(differing)}")
    changes = compare(before, now)
    for word in ("slower", "faster"):
        for (benchmark, case, _), row in changes[changes[word]].iterrows():
            place = printable(f"{benchmark}, {case}: {row['goal']}")
            old = f"{row['value_old']:.3f} [{row['low_old']:.3f}, {row['high_old']:.3f}]"
            new = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            print(f"{word}: {place}: was {old}, is {new}")
    print(f"{len(changes)} goals compared, {changes['slower'].sum()} slower")
    return bool(changes["slower"].any())
