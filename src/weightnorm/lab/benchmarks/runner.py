"""`weightnorm bench`: all rows, one after the other, into one record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from weightnorm.lab.benchmarks.benchmark import Row, Setting
from weightnorm.lab.benchmarks.measurement import measure
from weightnorm.lab.benchmarks.roofline import RooflineProbe
from weightnorm.lab.runs.environment import environment
from weightnorm.lab.runs.records import append_row, write_json

Record = dict[str, Any]


def bench(
    rows: Sequence[Row],
    setting: Setting,
    console: Console,
    show: Callable[[Record], None] = lambda row: None,
) -> Record:
    """Measure the machine, then every row; each is shown as soon as it is done."""
    with _telling(console, "the machine's limits"):
        roofline = RooflineProbe(setting).measure()
    found = []
    for row in rows:
        with _telling(console, f"{row.name}: {row.title}") as tell:
            cases = []
            for case in row.cases(setting):
                tell(f"{row.name}: {case.name}")
                cases.append(measure(case, setting, roofline).row())
        found.append({"name": row.name, "title": row.title, "cases": cases})
        show(found[-1])
    return {
        "environment": environment(setting.device, 1),
        "setting": {"quick": setting.quick, "rounds": setting.rounds},
        "limits": asdict(roofline),
        "rows": found,
    }


@contextmanager
def _telling(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Say what is measured at the moment."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(what)
        if not console.is_terminal:
            console.print(what, markup=False, highlight=False)
        yield lambda text: progress.update(task, description=text)


def write(record: Record, folder: Path) -> Path:
    """As a run's record, so that the report finds it; all of it is in result.json."""
    folder.mkdir(parents=True, exist_ok=True)
    preset = "quick" if record["setting"]["quick"] else "full"
    config = {"rounds": record["setting"]["rounds"], "rows": [r["name"] for r in record["rows"]]}
    write_json(folder / "config.json", {"experiment": "bench", "preset": preset, "config": config})
    (folder / "sessions.jsonl").unlink(missing_ok=True)
    append_row(folder / "sessions.jsonl", record["environment"])
    write_json(folder / "result.json", record)
    return folder / "result.json"
