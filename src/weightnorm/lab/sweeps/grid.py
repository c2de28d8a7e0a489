"""Grids of runs: parameterizations × learning rates × seeds, and their execution.

Each run is the command a user would type, executed by an executor of executors.py. The state of a
run is its record: a finished run is not run again, so a sweep that was stopped is resumed by the
same command.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from weightnorm import Parameterization
from weightnorm.lab.config import (
    RunConfig,
    completed,
    folder,
    preset_of,
    scientific_fields,
)
from weightnorm.lab.environment import pick_device
from weightnorm.lab.errors import ConfigError, RecordError, require
from weightnorm.lab.progress import ProgressBars
from weightnorm.lab.records import RunRecord, load_record, read_rows
from weightnorm.lab.sweeps.executors import (
    POLL_SECONDS,
    Executor,
    Job,
    StopSignals,
    Task,
    make_executor,
)
from weightnorm.lab.sweeps.summary import SweepResult, check_metric, format_number

COMMAND = (sys.executable, "-m", "weightnorm", "run")
LIVE_SECONDS, STATUS_SECONDS = 0.5, 60.0
"""Time between updates in a terminal, and between status lines elsewhere."""
EXPLICIT_FIELDS = ("preset", "learning_rate", "seed")
"""Fields that a run's command states even if they are the preset's, besides `FOLDER_FIELDS`."""


# — the grid —


@dataclass(frozen=True)
class Grid:
    """Runs that differ from `base` in parameterization, learning rate and seed."""

    experiment: str
    base: RunConfig
    parameterizations: Sequence[Parameterization] = tuple(Parameterization)
    learning_rates: Sequence[float] = ()
    """Empty: the preset's learning rate for each parameterization."""
    seeds: Sequence[int] = (1,)
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Further fields to vary: field → values."""

    def plan(self, command: Sequence[str] = COMMAND) -> list[Job]:
        """Return the runs, seed by seed. Raises ConfigError if one is invalid or two are equal."""
        require(bool(self.parameterizations), "parameterizations", "empty", "one or more")
        require(bool(self.seeds), "seeds", "empty", "one or more")
        module = importlib.import_module(f"weightnorm.lab.{self.experiment}")
        preset = preset_of(self.base, module.PRESETS)
        known = self.base.COMPARED
        expected = f"one or more of {', '.join(map(str, known))}"
        for how in self.parameterizations:
            require(how in known, "parameterizations", how, expected)
        leaves_out = getattr(module, "leaves_out", lambda fields: False)
        jobs: dict[Path, Job] = {}
        for seed, how, *more in product(self.seeds, self.parameterizations, *self.axes.values()):
            fields = dict(zip(self.axes, more, strict=True)) | {"parameterization": how}
            if leaves_out({**vars(self.base), **fields}):
                continue
            base = replace(self.base, **fields, seed=seed)
            for rate in self.learning_rates or [base.rate]:
                config = replace(base, learning_rate=rate)
                place = folder(self.experiment, config, module.PRESETS)
                if place in jobs:
                    raise ConfigError(f"two runs of the grid are {place}; give each value once")
                words = (*command, self.experiment, *flags(config, preset))
                label = " ".join([*map(str, more), f"{how} lr {rate:g} seed {seed}"])
                jobs[place] = Job(label, self.experiment, config, words, place)
        if not jobs:
            raise ConfigError("the grid has no run: its values cannot be combined")
        return list(jobs.values())

    def with_absolute_paths(self) -> Grid:
        """Return the same grid with paths that do not depend on the working directory."""
        runs, data_dir = self.base.runs, self.base.data_dir
        data_dir = data_dir and data_dir.absolute()
        return replace(self, base=replace(self.base, runs=runs.absolute(), data_dir=data_dir))


def flags(config: RunConfig, preset: RunConfig) -> list[str]:
    """Return the command-line flags that turn a preset into a config.

    >>> flags(RunConfig(learning_rate=0.003, seed=2, compile=True), RunConfig())[4:]
    ['--learning-rate', '0.003', '--seed', '2', '--compile']
    """
    words = []
    for name in (f.name for f in dataclasses.fields(config)):
        value, flag = getattr(config, name), {"runs": "out"}.get(name, name.replace("_", "-"))
        explicit = name in (*EXPLICIT_FIELDS, *config.FOLDER_FIELDS)
        if not explicit and value == getattr(preset, name):
            continue
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            words += [f"--{flag}", str(value)]
    return words


# — the sweep —


def sweep(
    grid: Grid,
    *,
    jobs: int = 1,
    cluster: str | None = None,
    metric: str = "test_error",
    highest: bool = False,
    console: Console | None = None,
    command: Sequence[str] = COMMAND,
    grace_seconds: float = 60.0,
) -> SweepResult:
    """Execute the unfinished runs of a grid.

    A run that fails or diverges does not stop the others. After Ctrl-C or SIGTERM the runs are
    asked to save and stop; after another signal, or after `grace_seconds`, they are killed.

    Args:
        grid: the runs.
        jobs: number of processes on this machine, or on each machine of the cluster.
        cluster: address of a Ray cluster; see `RayExecutor` for what its machines must share.
        metric: the result that decides which learning rate is best.
        highest: whether a higher metric is better.
        console: where progress is shown; standard error by default.
        command: command line that an experiment's name and flags are appended to.
        grace_seconds: time that interrupted runs have to save.
    """
    require(jobs >= 1, "jobs", jobs, "1 or more")
    plan = (grid if cluster is None else grid.with_absolute_paths()).plan(command)
    if cluster is None:
        pick_device(grid.base.device)  # raises if this machine does not have it
    records = [job_record(job) for job in plan]
    module = importlib.import_module(f"weightnorm.lab.{grid.experiment}")
    check_metric(records, metric, (*module.RESULTS, "seconds"))
    left = deque(job for job, record in zip(plan, records, strict=True) if not record.finished)
    failed: list[tuple[str, str]] = []
    interrupted = False
    if left:
        with make_executor(jobs, cluster) as executor, StopSignals(grace_seconds) as stop:
            progress = SweepProgress(console or Console(stderr=True), records, metric)
            try:
                failed = execute(left, executor, stop, progress)
            finally:
                progress.close()
            interrupted = bool(left or progress.counts["stopped"])
    records = [job_record(job) for job in plan]
    return SweepResult(records, failed, interrupted, metric, highest, tuple(grid.axes))


def execute(
    left: deque[Job], executor: Executor, stop: StopSignals, progress: SweepProgress
) -> list[tuple[str, str]]:
    """Execute the jobs. Returns label and reason of those that failed.

    After a signal, jobs that were not submitted yet stay in `left`.
    """
    failed: list[tuple[str, str]] = []
    running: list[tuple[Job, Task]] = []

    def fail(job: Job, reason: str) -> None:
        failed.append((job.label, reason))
        progress.event("failed", job, reason)

    try:
        while running or (left and not stop.received):
            while left and len(running) < executor.slots and not stop.received:
                job = left.popleft()
                try:
                    running.append((job, executor.start(job)))
                except OSError as error:
                    fail(job, str(error))
            if stop.forward([task for _, task in running]):
                progress.print("stopping: the runs save first; repeat to kill them")
            for job, task in [pair for pair in running if pair[1].ended]:
                running.remove((job, task))
                record = job_record(job)
                if record.diverged is not None:
                    message = str(record.diverged.get("message", ""))
                    progress.event("diverged", job, message.partition("\n")[0])
                elif record.finished:
                    progress.event("done", job, progress.describe(record))
                elif stop.received:
                    progress.event("stopped", job)
                else:
                    fail(job, task.failure)
            progress.update(running)
            time.sleep(POLL_SECONDS)
    finally:
        for _, task in running:
            task.kill()
    return failed


def job_record(job: Job) -> RunRecord:
    """Read the record of a job; an empty one if there is none, or one of other settings."""
    fields = scientific_fields(job.config)
    try:
        record = load_record(job.folder)
        recorded = completed(record.config, type(job.config))
        if all(recorded[name] == value for name, value in fields.items()):
            return record
    except (RecordError, OSError):
        pass  # the run itself reports what is wrong
    return RunRecord(job.folder, job.experiment, job.config.preset, fields)


# — on the screen —


class SweepProgress:
    """Progress of a sweep: a line per event and, in a terminal, a bar per running job."""

    def __init__(self, console: Console, records: Sequence[RunRecord], metric: str) -> None:
        self.total, self.metric = len(records), metric
        self.counts: Counter[str] = Counter()
        self.counts["diverged"] = sum(r.diverged is not None for r in records)
        self.counts["done"] = sum(r.finished for r in records) - self.counts["diverged"]
        self.started: set[Path] = set()
        self._updated = 0.0
        self._job_bars: dict[Path, TaskID] = {}
        self._bars = ProgressBars(console, STATUS_SECONDS)
        finished = self.counts["done"] + self.counts["diverged"]
        self._total_bar = self._bars.add("runs", self.total, finished)
        self.print(f"{self.total} runs, {finished} of them finished before")

    def close(self) -> None:
        """Remove the bars and print the final counts."""
        self._bars.close()
        self.print(self._counts(running=0))

    def event(self, name: str, job: Job, text: str = "") -> None:
        """Count and print an event of a job."""
        self.counts[name] += 1
        self.print(f"{name:9}{job.label}  {text}".rstrip().replace("\n", "\n         "))

    def describe(self, record: RunRecord) -> str:
        """Return the deciding metric of a finished run."""
        return f"{self.metric.replace('_', ' ')} {format_number(record.final(self.metric))}"

    def update(self, tasks: Sequence[tuple[Job, Task]]) -> None:
        """Show the state of the submitted jobs."""
        running = [job for job, task in tasks if task.started]
        for job in running:
            if job.folder not in self.started:
                self.started.add(job.folder)
                self.event("started", job)
        if time.monotonic() - self._updated < LIVE_SECONDS:
            return
        self._updated = time.monotonic()
        for place in self._job_bars.keys() - {job.folder for job in running}:
            self._bars.remove(self._job_bars.pop(place))
        for job in running:
            done, total = epochs(job)
            if job.folder not in self._job_bars:
                self._job_bars[job.folder] = self._bars.add(job.label, total)
            self._bars.update(self._job_bars[job.folder], done, "epochs")
        ended = self.counts["done"] + self.counts["diverged"] + self.counts["failed"]
        self._bars.update(self._total_bar, ended, self._counts(len(running)))
        self._bars.status(lambda: self._status(running))

    def print(self, text: str) -> None:
        """Print a line."""
        self._bars.print(text)

    def _status(self, running: Sequence[Job]) -> str:
        at = [f"{job.label} at epoch {epochs(job)[0]}" for job in running]
        return ", ".join([self._counts(len(running)), *at])

    def _counts(self, running: int) -> str:
        done, diverged, failed = (self.counts[name] for name in ("done", "diverged", "failed"))
        left = self.total - done - diverged - failed - running
        lost = f"{diverged} diverged · " if diverged else ""
        return f"{done} done · {lost}{running} running · {failed} failed · {left} left"


def epochs(job: Job) -> tuple[int, int | None]:
    """Return how many epochs a run has finished, and of how many, if its config has epochs."""
    return len(read_rows(job.folder / "metrics.jsonl")), getattr(job.config, "epochs", None)
