"""Benchmarks: cases, limits, measurement, the record, and comparison of two records.

The implementations of a case are measured in alternation. Those of a round are measured within
seconds of each other, so their ratio is little affected by changes of the machine's speed. A ratio
is the geometric interquartile mean of the ratios of all rounds, which is insensitive to outliers in
up to a quarter of the rounds on either side, with a bootstrap interval.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
import scipy.stats  # type: ignore[import-untyped]
import torch
from rich.console import Console

from weightnorm.lab.environment import environment, prepare_process, processor
from weightnorm.lab.errors import RecordError
from weightnorm.lab.files import lock_folder
from weightnorm.lab.interleaved import Call, OnRound, Samples, interleaved
from weightnorm.lab.progress import ProgressBars
from weightnorm.lab.records import read_rows, write_json, write_rows
from weightnorm.lab.statistics import Array, Interval, bootstrap

T = TypeVar("T")
Record = dict[str, Any]
Verdict = Literal["met", "within noise", "missed"]


@dataclass(frozen=True)
class Settings:
    """How benchmarks are measured."""

    device: torch.device
    quick: bool = False
    """Tiny sizes and few rounds, to see that everything works."""
    rounds: int = 10
    """Least number of rounds."""
    seconds: float = 240.0
    """Time in which a case of the summary may add rounds until its ratios are precise; the other
    cases have a tenth of it."""
    most: int = 400
    """Largest number of rounds."""
    precision: float = 0.02
    """Half width of a ratio's interval at which no more rounds are added, relative to the ratio."""

    def size(self, full: T, quick: T) -> T:
        """The size to measure, or that of a quick run."""
        return quick if self.quick else full


# Limits


Arrays = Mapping[str, Array]
"""Implementation → its measurements; the last axis is that of the rounds."""


def ratio(samples: Arrays, peer: str, base: str) -> Array:
    """Geometric interquartile mean of peer / base."""
    return np.exp(interquartile_mean(np.log(samples[peer]) - np.log(samples[base])))


def interquartile_mean(values: Array) -> Array:
    """Mean over the last axis without the lowest and the highest quarter.

    >>> float(interquartile_mean(np.array([1.0, 2.0, 3.0, 100.0])))
    2.5
    """
    return np.asarray(scipy.stats.trim_mean(values, 0.25, axis=-1))


@dataclass(frozen=True)
class Limit:
    """An upper limit for what is measured, fixed before measuring."""

    text: str
    """The limit as a formula in words."""
    limit: float
    peers: tuple[str, ...]
    """Implementations from which the value is computed."""
    value: Callable[[Arrays], Array]
    """The value that must not exceed the limit."""


def at_most(ours: str, limit: float, theirs: str) -> Limit:
    """ours ≤ limit × theirs."""
    text = f"{ours} ≤ {limit:g} × {theirs}"
    return Limit(text, limit, (ours, theirs), lambda samples: ratio(samples, ours, theirs))


def extra_at_most(ours: str, limit: float, theirs: str, base: str) -> Limit:
    """ours − base ≤ limit × (theirs − base), where theirs costs at least 0.001 × base."""

    def value(samples: Arrays) -> Array:
        extra, other = (ratio(samples, x, base) - 1 for x in (ours, theirs))
        return extra / np.maximum(other, 0.001)

    text = f"extra cost of {ours} ≤ {limit:g} × that of {theirs}"
    return Limit(text, limit, (ours, theirs, base), value)


def added_at_most(ours: str, limit: float, base: str, size: float, what: str) -> Limit:
    """ours ≤ base + limit × size, for bytes and counts."""

    def value(samples: Arrays) -> Array:
        return (interquartile_mean(samples[ours]) - interquartile_mean(samples[base])) / size

    return Limit(f"{ours} ≤ {base} + {limit:g} × {what}", limit, (ours, base), value)


def verdict(value: Interval, limit: float) -> Verdict:
    """Met if the whole interval is at most the limit, missed if none of it is.

    >>> [verdict(Interval(x, x - 0.1, x + 0.1), 1.0) for x in (0.8, 0.95, 1.2)]
    ['met', 'within noise', 'missed']
    """
    if value.high <= limit:
        return "met"
    return "within noise" if value.low <= limit else "missed"


# Cases


@dataclass(frozen=True)
class Summary:
    """A line of the summary: which implementation is in which column."""

    work: str
    ours: str
    torch_parametrization: str = ""
    torch_hook: str = ""
    batch_norm: str = ""
    goal: int = 0
    """Index of the case's limit."""


@dataclass(frozen=True)
class Case:
    """Implementations that do the same work, or more of it than the base."""

    name: str
    peers: Mapping[str, Call]
    base: str
    """The implementation to which the others are compared."""
    limits: tuple[Limit, ...]
    examples: int | None = None
    """Examples that one call processes, where examples per second are of interest."""
    unit: str = "s"
    """s, B, or what a call counts."""
    rounds: int | None = None
    """Exact number of rounds, for measurements without noise."""
    summary: tuple[Summary, ...] = ()
    at_least_base: tuple[str, ...] = ()
    """Implementations that do at least the base's work. If one measures faster than the base by
    more than its interval or the precision, that is noise and not a result."""


@dataclass(frozen=True)
class Benchmark:
    """Cases that answer one question about cost."""

    name: str
    """On the command line."""
    title: str
    cases: Callable[[Settings], Iterable[Case]]
    """Yields the cases; each is measured before the next is built."""


# Measurement


def estimate(
    samples: Mapping[str, Sequence[float]],
    peers: Iterable[str],
    statistic: Callable[[Arrays], Array],
) -> Interval:
    """A statistic of some implementations and its interval; rounds are resampled whole.

    >>> estimate({"a": [2.0, 4.0], "b": [1.0, 2.0]}, "ab", lambda samples: ratio(samples, *"ab"))
    Interval(value=2.0, low=2.0, high=2.0)
    """
    names = [*dict.fromkeys(peers)]
    return bootstrap(
        lambda *arrays: statistic(dict(zip(names, arrays, strict=True))),
        *(samples[name] for name in names),
    )


def ratio_interval(samples: Mapping[str, Sequence[float]], peer: str, base: str) -> Interval:
    """The ratio of an implementation to the base and its interval."""
    return estimate(samples, (peer, base), lambda arrays: ratio(arrays, peer, base))


def is_precise(samples: Samples, base: str, precision: float) -> bool:
    """Whether the interval of every ratio to the base is within ± precision, relative to ratios
    above 1 and absolute for those below."""
    intervals = (ratio_interval(samples, peer, base) for peer in samples if peer != base)
    return all(x.half_width <= precision * max(1.0, x.value) for x in intervals)


def measure(
    case: Case, settings: Settings, on_round: OnRound = lambda round, rounds: None
) -> Record:
    """Measure the implementations of a case until the ratios are precise or time is up; return the
    case's part of the record."""
    samples = interleaved(
        case.peers,
        case.rounds or settings.rounds,
        shortest=settings.size(0.02, 0.0),
        most=case.rounds or settings.size(settings.most, settings.rounds),
        seconds=settings.seconds if case.summary else settings.seconds / 10,
        done=lambda samples: is_precise(samples, case.base, settings.precision),
        on_round=on_round,
    )
    ratios = {peer: ratio_interval(samples, peer, case.base) for peer in samples}
    noise = {
        peer: peer in case.at_least_base and (x.high < 1 or x.value < 1 - settings.precision)
        for peer, x in ratios.items()
    }
    return {
        "case": case.name,
        "base": case.base,
        "unit": case.unit,
        "rounds": len(samples[case.base]),
        "results": {
            peer: {"median": median(samples[peer]), **x._asdict(), "noise": noise[peer]}
            for peer, x in ratios.items()
        },
        "goals": [judged(limit, samples, noise) for limit in case.limits],
        "samples": samples,
        "examples": case.examples,
        "summary": [asdict(line) for line in case.summary],
    }


def judged(limit: Limit, samples: Samples, noise: Mapping[str, bool]) -> Record:
    """The value of a limit and its verdict; undecided if a ratio can only be noise."""
    value = estimate(samples, limit.peers, limit.value)
    any_noise = any(noise[peer] for peer in limit.peers)
    found: Verdict = "within noise" if any_noise else verdict(value, limit.limit)
    return {"goal": limit.text, "limit": limit.limit, **value._asdict(), "verdict": found}


# The record


def run(
    benchmarks: Sequence[Benchmark],
    settings: Settings,
    console: Console,
    folder: Path,
    on_benchmark: Callable[[Record], None] = lambda benchmark: None,
) -> Path:
    """Measure benchmarks one after the other; write the record after each of them.

    Other benchmarks in a record that the folder has are kept. `on_benchmark` is called with the
    part of the record that each benchmark adds. Returns the path of the record.
    """
    prepare_process()
    fields = ("quick", "rounds", "seconds", "precision")
    with lock_folder(folder):  # two commands would each keep the other's older benchmarks
        session = {**environment(settings.device, 1), "cpu": cpu(), "load": load_average()}
        head = {
            "environment": session,
            "settings": {name: getattr(settings, name) for name in fields},
        }
        kept = kept_benchmarks(folder, [each.name for each in benchmarks], head)
        progress = ProgressBars(console)
        try:
            bar = progress.add("benchmarks", len(benchmarks))
            for index, benchmark in enumerate(benchmarks):
                progress.update(bar, index)
                kept[benchmark.name] = {
                    "name": benchmark.name,
                    "title": benchmark.title,
                    "started": session["started"],
                    "load": load_average(),
                    "seconds": settings.seconds,
                    "cases": measured_cases(benchmark, settings, progress),
                }
                write({**head, "benchmarks": [*kept.values()]}, folder)
                on_benchmark(kept[benchmark.name])
        finally:
            progress.close()
    return folder / "result.json"


def measured_cases(
    benchmark: Benchmark, settings: Settings, progress: ProgressBars
) -> list[Record]:
    cases = []
    for case in benchmark.cases(settings):
        progress.print(f"{benchmark.name}: {case.name}")
        bar = progress.add("rounds", settings.rounds)

        def on_round(done: int, total: int, bar: Any = bar) -> None:
            progress.update(bar, done, total=total)
            progress.status(lambda: f"  {done} of {total} rounds")

        cases.append(measure(case, settings, on_round))
        progress.remove(bar)
    return cases


def kept_benchmarks(folder: Path, names: Sequence[str], head: Record) -> dict[str, Record]:
    """Return the benchmarks of the folder's record, if they can be in one table with these."""
    path = folder / "result.json"
    if not path.exists():
        return {}
    old = load(path)
    found = {benchmark["name"]: benchmark for benchmark in old["benchmarks"]}
    differences = differing_conditions(old, head)
    if not differences:
        return found
    if found.keys() <= {*names}:
        return {}
    raise RecordError(
        f"{path} was measured under other conditions: {', '.join(differences)}; "
        "run all of its benchmarks, or pass another folder with --out"
    )


def write(record: Record, folder: Path) -> None:
    """Write a record as that of a run, so that the report finds it; result.json has all of it."""
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


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Record:
    """The CPU: model, cores, vector instruction sets if the system lists them, torch's choice."""
    try:
        flags = re.search(r"^(flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        flags = None
    vector = re.compile(r"(avx|amx|sse4|fma|f16c|neon|asimd|sve|bf16)")
    return {
        "model": processor(),
        "cores": os.cpu_count(),
        "instruction_sets": sorted(filter(vector.match, flags[2].split())) if flags else [],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
    }


def load_average() -> float | None:
    """Processes that wanted to run in the last minute, on average; None where it is not known."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


# Comparison


def load(path: Path) -> Record:
    """Read a record; RecordError if the file is not one."""
    try:
        record: Record = json.loads(path.read_bytes())
        record["settings"]["quick"], record["environment"]["machine"], goals(record)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path} is not a record of weightnorm bench (its result.json)") from None
    return record


def goals(record: Record) -> pd.DataFrame:
    """Tabulate the value and interval of every goal, by benchmark, case and what is compared."""
    rows = [
        # What is compared does not depend on the limit.
        (benchmark["name"], case["case"], re.sub(r"≤ [\d.e-]+ ×", "≤", goal["goal"]), goal["goal"],
         goal["value"], goal["low"], goal["high"])
        for benchmark in record["benchmarks"]
        for case in benchmark["cases"]
        for goal in case["goals"]
    ]  # fmt: skip
    index, numbers = ["benchmark", "case", "compared"], ["value", "low", "high"]
    table = pd.DataFrame(rows, columns=[*index, "goal", *numbers]).set_index(index)
    # JSON has null for a number that is not finite: no bound.
    found: pd.DataFrame = table.astype(dict.fromkeys(numbers, float)).fillna(
        {"low": -np.inf, "high": np.inf}
    )
    return found


def compare(old: Record, new: Record) -> pd.DataFrame:
    """Compare the goals that both records have: ``slower`` or ``faster`` where the intervals do not
    overlap.

    Sizes must be equal; machines may differ, because the values are ratios within one run.
    """
    if old["settings"]["quick"] != new["settings"]["quick"]:
        raise RecordError("one of the records is --quick and the other is not: sizes differ")
    found: pd.DataFrame = goals(old).add_suffix("_old").join(goals(new), how="inner")
    if found.empty:
        raise RecordError("the records have no goal in common")
    found["slower"] = found["low"] > found["high_old"]
    found["faster"] = found["high"] < found["low_old"]
    return found


def differing_conditions(old: Record, new: Record) -> list[str]:
    """List what differs between two records, of what may change ratios."""
    before, now = ({**record["environment"], "sizes": record["settings"]["quick"]}
                   for record in (old, new))  # fmt: skip
    return [
        f"{field} ({before.get(field)}, now {now.get(field)})"
        for field in ("machine", "device", "threads", "torch", "sizes")
        if before.get(field) != now.get(field)
    ]
