"""Runs benchmarks one after the other into one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from weightnorm.lab.bench.benchmark import Benchmark, Settings
from weightnorm.lab.bench.compare import differing_conditions, load
from weightnorm.lab.bench.machine import cpu
from weightnorm.lab.bench.measurement import measure
from weightnorm.lab.bench.roofline import RooflineProbe
from weightnorm.lab.errors import RecordError
from weightnorm.lab.files import lock_folder
from weightnorm.lab.records import read_rows, write_json, write_rows
from weightnorm.lab.runs.environment import environment
from weightnorm.lab.runs.progress import ProgressBars

Record = dict[str, Any]


def run(
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    console: Console,
    folder: Path,
    on_benchmark: Callable[[Record], None] = lambda benchmark: None,
) -> Path:
    """Measure the machine's limits, then every benchmark; write the record after each of them.

    Other benchmarks in a record that the folder has are kept. `on_benchmark` is called with the
    part of the record that each benchmark adds. Returns the path of the record.
    """
    with lock_folder(folder):  # two commands would each keep the other's older benchmarks
        return _run(benchmarks, settings, console, folder, on_benchmark)


def _run(
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    console: Console,
    folder: Path,
    on_benchmark: Callable[[Record], None],
) -> Path:
    session = {**environment(settings.device, 1), "cpu": cpu()}
    kept = kept_benchmarks(folder, [each.name for each in benchmarks], settings, session)
    progress = ProgressBars(console)
    try:
        bar = progress.add("benchmarks", len(benchmarks))
        progress.print("limits of the machine")
        roofline = RooflineProbe(settings).measure()
        for index, benchmark in enumerate(benchmarks):
            progress.update(bar, index)
            kept[benchmark.name] = {
                "name": benchmark.name,
                "title": benchmark.title,
                "started": session["started"],
                "seconds": settings.seconds,
                "cases": _measure_cases(benchmark, settings, roofline, progress),
            }
            path = write(_record(kept, settings, session, roofline), folder)
            on_benchmark(kept[benchmark.name])
    finally:
        progress.close()
    return path


def kept_benchmarks(
    folder: Path, names: Sequence[str], settings: Settings, session: Record
) -> dict[str, Record]:
    """Return the benchmarks of the folder's record, if they can be in one table with these."""
    path = folder / "result.json"
    if not path.exists():
        return {}
    old = load(path)
    found = {benchmark["name"]: benchmark for benchmark in old["benchmarks"]}
    differences = differing_conditions(old["environment"], session)
    if old["settings"]["quick"] != settings.quick:
        differences.append("sizes")
    if not differences:
        return found
    if found.keys() <= {*names}:
        return {}
    raise RecordError(
        f"{path} was measured under other conditions: {', '.join(differences)}; "
        "run all of its benchmarks, or pass another folder with --out"
    )


def _record(
    benchmarks: Mapping[str, Record], settings: Settings, session: Record, roofline: Any
) -> Record:
    return {
        "environment": session,
        "settings": {
            "quick": settings.quick,
            "rounds": settings.rounds,
            "seconds": settings.seconds,
            "precision": settings.precision,
        },
        "limits": asdict(roofline),
        "benchmarks": [*benchmarks.values()],
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
    sessions = folder / "sessions.jsonl"
    used = {benchmark.get("started") for benchmark in record["benchmarks"]}
    used.discard(record["environment"].get("started"))
    rows = [row for row in read_rows(sessions) if row.get("started") in used]
    write_rows(sessions, [*rows, record["environment"]])
    write_json(folder / "result.json", record)
    return folder / "result.json"
