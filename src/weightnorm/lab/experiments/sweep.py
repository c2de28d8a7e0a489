"""Many runs: a grid of parameterizations × learning rates × seeds, and which learning rate is best.

Each run is the command a person would type, executed by the workers of workers.py. What a sweep
knows of a run is its record: a finished run is not run again, so the same sweep goes on where it
was stopped.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from statistics import fmean, stdev
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightnorm import Parameterization
from weightnorm.lab.experiments.config import ConfigError, RunConfig, folder, require, what
from weightnorm.lab.experiments.workers import POLL_SECONDS, Job, Task, Workers, workers
from weightnorm.lab.records import RecordError, RunRecord, load_record, read_rows

COMMAND = (sys.executable, "-m", "weightnorm", "run")
ALWAYS_SAID = ("preset", "parameterization", "learning_rate", "seed")
"""Fields that a run's command names even where the preset has the same."""


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

    def plan(self, command: Sequence[str] = COMMAND) -> list[Job]:
        """The runs in order; ConfigError if one is impossible or two are the same."""
        require(bool(self.parameterizations), "parameterizations", "empty", "one or more")
        require(bool(self.seeds), "seeds", "empty", "one or more")
        module = importlib.import_module(f"weightnorm.lab.experiments.{self.experiment}")
        preset = module.PRESETS[self.base.preset]
        jobs: dict[Path, Job] = {}
        for how, seed in product(self.parameterizations, self.seeds):
            for rate in self.learning_rates or [module.LEARNING_RATES[how]]:
                config = replace(self.base, parameterization=how, learning_rate=rate, seed=seed)
                place = folder(self.experiment, config, preset)
                if place in jobs:
                    raise ConfigError(f"two runs of the grid are {place}; name each value once")
                words = (*command, self.experiment, *flags(config, preset))
                jobs[place] = Job(f"{how} lr {rate:g} seed {seed}", config, words, place)
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
        if name not in ALWAYS_SAID and value == getattr(preset, name):
            continue
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            words += [f"--{flag}", str(value)]
    return words


# — the sweep —


@dataclass(frozen=True)
class SweepResult:
    """What became of a sweep."""

    records: list[RunRecord]
    """One for each run of the grid, in its order; those that did not finish have no result."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Label and reason of each run that failed."""
    interrupted: bool = False
    """Whether it was stopped before every run had ended."""
    metric: str = "test_error"


def sweep(
    grid: Grid,
    *,
    jobs: int = 1,
    cluster: str | None = None,
    metric: str = "test_error",
    console: Console | None = None,
    command: Sequence[str] = COMMAND,
    patience: float = 60.0,
) -> SweepResult:
    """Execute what is not finished of a grid: `jobs` runs at a time here, or on each machine of the
    Ray cluster at the address `cluster` (see workers.Cluster for what its machines share).

    A run that fails does not stop the others. After Ctrl-C or SIGTERM the runs are asked to save
    and stop; after another, or when `patience` seconds have passed, they are killed.
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
    return SweepResult([recorded(job) for job in plan], failed, interrupted, metric)


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
            stop.pass_on([task for _, task in running])
            for job, task in [pair for pair in running if pair[1].ended]:
                running.remove((job, task))
                if (record := recorded(job)).finished:
                    board.say("done", job, shown(record, board.metric))
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


class Stop:
    """Ctrl-C and SIGTERM, as a request that is passed on to the runs."""

    def __init__(self, patience: float) -> None:
        self.patience, self.asked = patience, 0
        self.deadline: float | None = None
        self.handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self.handlers[which] = signal.signal(which, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self.handlers.items():
            signal.signal(which, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1

    def pass_on(self, tasks: Iterable[Task]) -> None:
        """Interrupt the runs once; kill them if asked again or if it takes too long."""
        if not self.asked:
            return
        if self.deadline is None:
            self.deadline = time.monotonic() + self.patience
            for task in tasks:
                task.interrupt()
        elif self.asked > 1 or time.monotonic() > self.deadline:
            for task in tasks:
                task.kill()


def recorded(job: Job) -> RunRecord:
    """The record of a job; an empty one if there is none, or only one of other settings."""
    settings = json.loads(json.dumps(what(job.config), default=str))
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
        self.begun: set[str] = set()
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self.last = time.monotonic()

    def __enter__(self) -> Board:
        done = self.counts["done"]
        self._print(f"{self.total} runs" + (f", {done} of them finished before" if done else ""))
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.update("", refresh=True)
            self.live.stop()
        self._print(self._tally(0))

    def say(self, event: str, job: Job, more: str = "") -> None:
        """Something happened to a run."""
        self.counts[event] += 1
        self._print("  ".join(filter(None, [f"{event:7}", job.label, more])).replace("\n", "\n    "))

    def show(self, tasks: Sequence[tuple[Job, Task]]) -> None:
        """The state of those that were handed out."""
        running = [job for job, task in tasks if task.started]
        for job in running:
            if job.label not in self.begun:
                self.begun.add(job.label)
                self.say("started", job, str(job.folder))
        every = LIVE_SECONDS if self.live else LINE_SECONDS
        if time.monotonic() - self.last < every:
            return
        self.last = time.monotonic()
        tally, epochs = self._tally(len(running)), {job.label: _epoch(job) for job in running}
        if self.live:
            rows = Table.grid(padding=(0, 2))
            for label, (epoch, total) in epochs.items():
                bar = ProgressBar(total=total, completed=epoch, width=20)
                rows.add_row(label, bar, f"epoch {epoch}/{total}")
            self.live.update(Group(rows, tally), refresh=True)
        else:
            where = (f"{label}: epoch {epoch}/{total}" for label, (epoch, total) in epochs.items())
            self._print("; ".join([tally, *where]))
