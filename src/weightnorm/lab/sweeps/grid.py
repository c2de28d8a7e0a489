"""Many runs: a grid of parameterizations × learning rates × seeds, and which learning rate is best.

Each run is the command a person would type, executed by the workers of workers.py. What a sweep
knows of a run is its record: a finished run is not run again, so the same sweep goes on where it
was stopped.
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

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightnorm import Parameterization
from weightnorm.lab.errors import ConfigError, RecordError, require
from weightnorm.lab.runs.config import RunConfig, folder, start_of
from weightnorm.lab.runs.config import recorded as recorded_config
from weightnorm.lab.runs.records import RunRecord, load_record, read_rows
from weightnorm.lab.sweeps.executors import POLL_SECONDS, Job, Stop, Task, Workers, workers
from weightnorm.lab.sweeps.summary import SweepResult, shown, summarize

COMMAND = (sys.executable, "-m", "weightnorm", "run")
LIVE_SECONDS, LINE_SECONDS = 0.5, 60.0
"""How often the state of the runs is shown in a terminal, and in a pipe."""
ALWAYS_SAID = ("preset", "learning_rate", "seed")
"""Fields that a run's command names even where the preset has the same, beside the folders'."""


# — the grid —


@dataclass(frozen=True)
class Grid:
    """Runs that differ from `base` in parameterization, learning rate and seed."""

    experiment: str
    base: RunConfig
    parameterizations: Sequence[Parameterization] = tuple(Parameterization)
    learning_rates: Sequence[float] = ()
    """Empty: for each parameterization, what the paper chose."""
    seeds: Sequence[int] = (1,)
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """More that it ranges over: field → values."""

    def plan(self, command: Sequence[str] = COMMAND) -> list[Job]:
        """The runs, seed by seed; ConfigError if one is impossible or two are the same."""
        require(bool(self.parameterizations), "parameterizations", "empty", "one or more")
        require(bool(self.seeds), "seeds", "empty", "one or more")
        module = importlib.import_module(f"weightnorm.lab.experiments.{self.experiment}")
        preset = start_of(self.base, module.PRESETS)
        jobs: dict[Path, Job] = {}
        for seed, how, *more in product(self.seeds, self.parameterizations, *self.axes.values()):
            base = replace(self.base, **dict(zip(self.axes, more, strict=True)))
            for rate in self.learning_rates or [module.LEARNING_RATES[self.base.preset][how]]:
                config = replace(base, parameterization=how, learning_rate=rate, seed=seed)
                place = folder(self.experiment, config, module.PRESETS)
                if place in jobs:
                    raise ConfigError(f"two runs of the grid are {place}; name each value once")
                words = (*command, self.experiment, *flags(config, preset))
                label = " ".join([*map(str, more), f"{how} lr {rate:g} seed {seed}"])
                jobs[place] = Job(label, self.experiment, config, words, place)
        return list(jobs.values())

    def anywhere(self) -> Grid:
        """The same with paths that do not depend on the working directory."""
        runs, data_dir = self.base.runs, self.base.data_dir
        data_dir = data_dir and data_dir.absolute()
        return replace(self, base=replace(self.base, runs=runs.absolute(), data_dir=data_dir))


def flags(config: RunConfig, preset: RunConfig) -> list[str]:
    """The command-line words that turn a preset into a config.

    >>> flags(RunConfig(seed=2, compile=True), RunConfig())[4:]
    ['--learning-rate', '0.003', '--seed', '2', '--compile']
    """
    words = []
    for name in (f.name for f in dataclasses.fields(config)):
        value, flag = getattr(config, name), name.replace("_", "-")
        if name not in (*ALWAYS_SAID, *config.PLACE) and value == getattr(preset, name):
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
    patience: float = 60.0,
) -> SweepResult:
    """Execute what is not finished of a grid: `jobs` runs at a time here, or on each machine of the
    Ray cluster at the address `cluster` (see workers.Cluster for what its machines share).

    A run that fails does not stop the others. After Ctrl-C or SIGTERM the runs are asked to save
    and stop; after another, or when `patience` seconds have passed, they are killed.

    The `metric` decides which learning rate is best: the lowest, or the `highest`.
    """
    require(jobs >= 1, "jobs", jobs, "1 or more")
    plan = (grid if cluster is None else grid.anywhere()).plan(command)
    summarize(map(recorded, plan), metric)  # refuses a metric that finished runs do not have
    left = deque(job for job in plan if not recorded(job).finished)
    board = Board(console or Console(stderr=True), len(plan), len(plan) - len(left), metric)
    failed, interrupted = [], False
    if left:
        with workers(jobs, cluster) as crew, Stop(patience) as stop, board:
            failed = execute(left, crew, stop, board)
            interrupted = bool(left or board.counts["stopped"])
    records = [recorded(job) for job in plan]
    return SweepResult(records, failed, interrupted, metric, highest, tuple(grid.axes))


def execute(left: deque[Job], crew: Workers, stop: Stop, board: Board) -> list[tuple[str, str]]:
    """Hand the jobs out and see them to their end; label and reason of those that failed.

    If asked to stop, what has not been handed out stays in `left`.
    """
    failed: list[tuple[str, str]] = []
    running: list[tuple[Job, Task]] = []

    def fail(job: Job, reason: str) -> None:
        failed.append((job.label, reason))
        board.say("failed", job, reason)

    try:
        while running or (left and not stop.asked):
            while left and len(running) < crew.slots and not stop.asked:
                job = left.popleft()
                try:
                    running.append((job, crew.start(job)))
                except OSError as error:
                    fail(job, str(error))
            if stop.pass_on([task for _, task in running]):
                board.note("stopping: the runs save first; once more to kill them")
            for job, task in [pair for pair in running if pair[1].ended]:
                running.remove((job, task))
                if (result := recorded(job).result) is not None:
                    value = shown(result.get(board.metric))
                    board.say("done", job, f"{board.metric.replace('_', ' ')} {value}")
                elif stop.asked:
                    board.say("stopped", job)
                else:
                    fail(job, task.failure)
            board.show(running)
            time.sleep(POLL_SECONDS)
    finally:
        for _, task in running:
            task.kill()
    return failed


def recorded(job: Job) -> RunRecord:
    """The record of a job; an empty one if there is none, or only one of other settings."""
    settings = recorded_config(job.config)
    try:
        record = load_record(job.folder)
        if all(record.config.get(name) == value for name, value in settings.items()):
            return record
    except (RecordError, OSError):
        pass  # the run itself will say what is wrong
    return RunRecord(job.folder, job.experiment, job.config.preset, settings)


# — on the screen —


class Board:
    """How far a sweep is: a line for each event; below them, in a terminal, the runs at work."""

    def __init__(self, console: Console, total: int, done: int, metric: str) -> None:
        self.console, self.total, self.metric = console, total, metric
        self.counts = Counter(done=done)
        self.begun: set[Path] = set()
        live = Live(console=console, auto_refresh=False, transient=True)
        self.live = live if console.is_terminal else None
        self.last = time.monotonic()

    def __enter__(self) -> Board:
        self.note(f"{self.total} runs, {self.counts['done']} of them finished before")
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()
        self.note(self._tally(0))

    def say(self, event: str, job: Job, more: str = "") -> None:
        """Something happened to a run."""
        self.counts[event] += 1
        self.note(f"{event:8}{job.label}  {more}".rstrip().replace("\n", "\n        "))

    def show(self, tasks: Sequence[tuple[Job, Task]]) -> None:
        """The state of those that were handed out."""
        running = [job for job, task in tasks if task.started]
        for job in running:
            if job.folder not in self.begun:
                self.begun.add(job.folder)
                self.say("started", job)
        if time.monotonic() - self.last < (LIVE_SECONDS if self.live else LINE_SECONDS):
            return
        self.last = time.monotonic()
        tally = self._tally(len(running))
        if self.live:
            rows = Table.grid(padding=(0, 2))
            for job in running:
                done, total = epochs(job)
                bar = ProgressBar(total=total, completed=done, width=20)
                rows.add_row(job.label, bar, f"epoch {done}/{total or '?'}")
            self.live.update(Group(rows, Text(tally)), refresh=True)
        else:
            at = [f"{job.label} at epoch {epochs(job)[0]}" for job in running]
            self.note(", ".join([tally, *at]))

    def _tally(self, running: int) -> str:
        done, failed = self.counts["done"], self.counts["failed"]
        left = self.total - done - failed - running
        return f"{done} done · {running} running · {failed} failed · {left} left"

    def note(self, text: str) -> None:
        """A line, as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def epochs(job: Job) -> tuple[int, int | None]:
    """How many epochs a run has done, and of how many, if its config says."""
    return len(read_rows(job.folder / "metrics.jsonl")), getattr(job.config, "epochs", None)
