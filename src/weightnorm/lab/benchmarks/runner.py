"""Runs benchmarks one after the other into one record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from weightnorm.lab.benchmarks.benchmark import Benchmark, Settings
from weightnorm.lab.benchmarks.machine import cpu
from weightnorm.lab.benchmarks.measurement import measure
from weightnorm.lab.benchmarks.roofline import RooflineProbe
from weightnorm.lab.runs.environment import environment
from weightnorm.lab.runs.progress import ProgressBars
from weightnorm.lab.runs.records import append_row, write_json

Record = dict[str, Any]


def run(
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    console: Console,
    on_benchmark: Callable[[Record], None] = lambda benchmark: None,
) -> Record:
    """Measure the machine's limits, then every benchmark, and return the record.

    `on_benchmark` is called with the part of the record that each benchmark adds."""
    progress = ProgressBars(console)
    try:
        bar = progress.add("benchmarks", len(benchmarks))
        progress.print("limits of the machine")
        roofline = RooflineProbe(settings).measure()
        found = []
        for index, benchmark in enumerate(benchmarks):
            progress.update(bar, index)
            cases = _measure_cases(benchmark, settings, roofline, progress)
            found.append({"name": benchmark.name, "title": benchmark.title, "cases": cases})
            on_benchmark(found[-1])
    finally:
        progress.close()
    return {
        "environment": {**environment(settings.device, 1), "cpu": cpu()},
        "settings": {
            "quick": settings.quick,
            "rounds": settings.rounds,
            "seconds": settings.seconds,
            "precision": settings.precision,
        },
        "limits": asdict(roofline),
        "benchmarks": found,
    }


def _measure_cases(
    benchmark: Benchmark, settings: Settings, roofline: Any, progress: ProgressBars
) -> list[Record]:
    cases = []
    for case in benchmark.cases(settings):
        progress.print(f"{benchmark.name}: {case.name}")
        bar = progress.add("rounds", settings.rounds)

        def on_round(done: int, total: int, bar: Any = bar) -> None:
            progress.update(bar, done, total=total)
            progress.status(lambda: f"  {done} of {total} rounds")

        cases.append(measure(case, settings, roofline, on_round).row())
        progress.remove(bar)
    return cases


def write(record: Record, folder: Path) -> Path:
    """Write a record as that of a run, so that the report finds it; result.json has all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    preset = "quick" if record["settings"]["quick"] else "full"
    names = [benchmark["name"] for benchmark in record["benchmarks"]]
    config = {"rounds": record["settings"]["rounds"], "benchmarks": names}
    write_json(folder / "config.json", {"experiment": "bench", "preset": preset, "config": config})
    (folder / "sessions.jsonl").unlink(missing_ok=True)
    append_row(folder / "sessions.jsonl", record["environment"])
    write_json(folder / "result.json", record)
    return folder / "result.json"
