"""Grids of runs: parameterizations × learning rates × seeds, their execution and its summary.

Each run is the command a user would type, in a process of its own: on this machine, or in a task of
a Ray cluster. Its output is appended to ``output.log`` in its folder. The state of a run is its
record: a finished run is not run again, so a sweep that was stopped is resumed by the same command.
"""

from __future__ import annotations

import dataclasses
import importlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import TaskID
from rich.table import Column, Table

from weightnorm import Parameterization
from weightnorm.lab.config import RunConfig, completed, folder, preset_of, scientific_fields
from weightnorm.lab.environment import pick_device
from weightnorm.lab.errors import ConfigError, RecordError, require
from weightnorm.lab.executors import LocalExecutor, RayExecutor, RayTask, RunProcess
from weightnorm.lab.progress import ProgressBars
from weightnorm.lab.records import RunRecord, is_number, load_record, read_rows
from weightnorm.lab.results import UNFINISHED, Comparison, run_frame

COMMAND = (sys.executable, "-m", "weightnorm", "run")
POLL_SECONDS, LIVE_SECONDS = 0.1, 0.5
"""Time between looks at the processes, and between updates of the bars."""
EXPLICIT_FIELDS = ("preset", "learning_rate", "seed")
"""Fields that a run's command states even if they are the preset's, besides `FOLDER_FIELDS`."""


# — the grid —


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    label: str
    experiment: str
    config: RunConfig
    words: tuple[str, ...]
    """The command."""
    folder: Path

    @property
    def log(self) -> Path:
        """File that the run's output is appended to."""
        return self.folder / "output.log"

    def record(self) -> RunRecord:
        """Read the record; an empty one if there is none, or one of other settings."""
        fields = scientific_fields(self.config)
        try:
            record = load_record(self.folder)
            recorded = completed(record.config, type(self.config))
            if all(recorded[name] == value for name, value in fields.items()):
                return record
        except (RecordError, OSError):
            pass  # the run itself reports what is wrong
        return RunRecord(self.folder, self.experiment, self.config.preset, fields)


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
        for name in ("parameterizations", "seeds"):
            require(bool(getattr(self, name)), name, "empty", "one or more")
        known = self.base.COMPARED
        expected = f"one or more of {', '.join(map(str, known))}"
        for how in self.parameterizations:
            require(how in known, "parameterizations", how, expected)
        module = importlib.import_module(f"weightnorm.lab.{self.experiment}")
        preset = preset_of(self.base, module.PRESETS)
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


def flags(config: RunConfig, preset: RunConfig) -> list[str]:
    """Return the command-line flags that turn a preset into a config.

    >>> flags(RunConfig(learning_rate=0.003, seed=2, compile=True), RunConfig())[4:]
    ['--learning-rate', '0.003', '--seed', '2', '--compile']
    """
    words = []
    for name in (f.name for f in dataclasses.fields(config)):
        value, flag = getattr(config, name), name.replace("_", "-")
        explicit = name in (*EXPLICIT_FIELDS, *config.FOLDER_FIELDS)
        if not explicit and value == getattr(preset, name):
            continue
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            words += [f"--{flag}", str(value)]
    return words


# — execution —


@dataclass(frozen=True)
class SweepResult:
    """Outcome of a sweep."""

    records: list[RunRecord]
    """One per run of the grid, in its order; unfinished runs have no result."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Label → reason of each run that failed. Diverged runs are not among them."""
    interrupted: bool = False
    """Whether the sweep was stopped before every run had ended."""
    metric: str = "test_error"
    highest: bool = False
    """Whether a higher metric is better."""
    axes: tuple[str, ...] = ()
    """Fields that the grid varies besides parameterization, learning rate and seed."""

    def comparison(self) -> Comparison:
        """Return the runs as a comparison; a method is a parameterization, preceded by the values
        of further axes."""
        runs = run_frame(self.records)
        fields = (*self.axes, "parameterization")
        runs["method"] = [" ".join(str(r.config[f]) for f in fields) for r in self.records]
        return Comparison(runs, self.metric, self.highest)


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
    results = (*importlib.import_module(f"weightnorm.lab.{grid.experiment}").RESULTS, "seconds")
    require(metric in results, "metric", metric, f"one of {', '.join(results)}")
    if cluster is None:
        pick_device(grid.base.device)  # raises if this machine does not have it
    else:  # its machines have other working directories
        paths = {name: path.absolute() for name in ("out", "data_dir")
                 if (path := getattr(grid.base, name))}  # fmt: skip
        grid = replace(grid, base=replace(grid.base, **paths))
    plan = grid.plan(command)
    running = _Execution(plan, metric, console or Console(stderr=True))
    if running.left:
        executor = LocalExecutor(jobs) if cluster is None else RayExecutor(cluster, jobs)
        try:
            running.run(executor, grace_seconds)
        finally:
            executor.close()
    return SweepResult(
        [running.records[job.folder] for job in plan],
        running.failed,
        bool(running.left or running.stopped),
        metric,
        highest,
        tuple(grid.axes),
    )


class _Execution:
    """Executes the unfinished runs of a plan, and shows their state."""

    def __init__(self, plan: Sequence[Job], metric: str, console: Console) -> None:
        self.metric = metric
        self.records = {job.folder: job.record() for job in plan}
        self.left = deque(job for job in plan if not self.records[job.folder].finished)
        """Jobs that were not submitted yet."""
        self.running: list[tuple[Job, RunProcess | RayTask]] = []
        self.failed: dict[str, str] = {}
        self.stopped: list[Job] = []
        self.console = console
        self._bars: dict[Path, TaskID] = {}
        """Bars of the jobs that have started."""
        self._shown = 0.0

    def run(self, executor: LocalExecutor | RayExecutor, grace_seconds: float) -> None:
        """Execute the jobs; after a signal none is started, and `left` holds the others."""
        with ProgressBars(self.console) as self.bars, collected_signals() as signals:
            self._run(executor, signals, grace_seconds)
        self.bars.print(self._counts())

    def _run(
        self, executor: LocalExecutor | RayExecutor, signals: Sequence[int], grace_seconds: float
    ) -> None:
        before = len(self.records) - len(self.left)
        self.bars.print(f"{len(self.records)} runs, {before} of them finished before")
        total = self.bars.add("runs", len(self.records), before)
        deadline = None
        try:
            while self.running or (self.left and not signals):
                while self.left and len(self.running) < executor.slots and not signals:
                    self._start(self.left.popleft(), executor)
                if signals and deadline is None:
                    deadline = time.monotonic() + grace_seconds
                    for _, task in self.running:
                        task.interrupt()
                    self.bars.print("stopping: the runs save first; repeat to kill them")
                elif deadline and (len(signals) > 1 or time.monotonic() > deadline):
                    for _, task in self.running:
                        task.kill()
                for job, task in [pair for pair in self.running if pair[1].ended]:
                    self.running.remove((job, task))
                    self._end(job, task, bool(signals))
                self._show(total)
                time.sleep(POLL_SECONDS)
        finally:
            for _, task in self.running:
                task.kill()

    def _start(self, job: Job, executor: LocalExecutor | RayExecutor) -> None:
        gpus = int(job.config.device.startswith("cuda"))
        try:
            self.running.append((job, executor.start(job.words, job.log, job.label, gpus)))
        except OSError as error:
            self._fail(job, str(error))

    def _end(self, job: Job, task: RunProcess | RayTask, asked: bool) -> None:
        """Read the record of a job that has ended, and say how it ended."""
        record = self.records[job.folder] = job.record()
        if job.folder in self._bars:
            self.bars.remove(self._bars.pop(job.folder))
        if record.diverged is not None:
            self._say("diverged", job, str(record.diverged.get("message", "")).partition("\n")[0])
        elif record.finished:
            metric = self.metric.replace("_", " ")
            self._say("done", job, f"{metric} {format_number(record.final(self.metric))}")
        elif asked:
            self.stopped.append(job)
            self._say("stopped", job)
        else:
            self._fail(job, task.failure)

    def _fail(self, job: Job, reason: str) -> None:
        self.failed[job.label] = reason
        self._say("failed", job, reason)

    def _say(self, event: str, job: Job, text: str = "") -> None:
        self.bars.print(f"{event:9}{job.label}  {text}".rstrip().replace("\n", "\n         "))

    def _counts(self) -> str:
        diverged = sum(record.diverged is not None for record in self.records.values())
        done = sum(record.finished for record in self.records.values()) - diverged
        running, failed = len(self._bars), len(self.failed)
        left = len(self.records) - done - diverged - failed - running
        lost = f"{diverged} diverged · " if diverged else ""
        return f"{done} done · {lost}{running} running · {failed} failed · {left} left"

    def _show(self, total: TaskID) -> None:
        """Update the bars: one for all runs, one for each that is running."""
        for job, task in self.running:
            if task.started and job.folder not in self._bars:
                self._bars[job.folder] = self.bars.add(
                    job.label, getattr(job.config, "epochs", None)
                )
                self._say("started", job)
        if self.bars.live and time.monotonic() - self._shown >= LIVE_SECONDS:
            self._shown = time.monotonic()
            for place, bar in self._bars.items():
                self.bars.update(bar, len(read_rows(place / "metrics.jsonl")))
            ended = sum(record.finished for record in self.records.values()) + len(self.failed)
            self.bars.update(total, ended, description=self._counts())


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Append Ctrl-C and SIGTERM to the returned list instead of ending the process."""
    received: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for which in (signal.SIGINT, signal.SIGTERM):
            handlers[which] = signal.signal(which, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for which, handler in handlers.items():
            signal.signal(which, handler)


# — the summary —


def summary_table(result: SweepResult) -> Table:
    """Tabulate every method and learning rate: mean and standard deviation over seeds, the deciding
    metric first, and the best rates in bold."""
    finished = [r.result for r in result.records if r.result is not None and r.diverged is None]
    common = [{name for name, value in row.items() if is_number(value)} for row in finished]
    others = sorted(set.intersection(*common) - {"seconds", result.metric}) if common else []
    metrics = [result.metric, *others]
    heads = ("lr", *(metric.replace("_", " ") for metric in metrics), "n", "")
    # Nothing is cut: where the terminal is narrow, words and numbers are wrapped.
    columns = [Column(name, overflow="fold") for name in heads]
    table = Table(Column("parameterization", no_wrap=True), *columns, box=None)
    sweep, above = result.comparison(), ""
    for method, rate in sweep.rates:
        runs = sweep.at(method, rate)
        numbers = [
            [x for x in sweep.values(metric, runs).values() if np.isfinite(x)] for metric in metrics
        ]
        n, unfinished = len(numbers[0]), [*runs["state"]].count(UNFINISHED)
        best = bool(n) and rate == sweep.best[method]
        notes = {"diverged": len(runs) - unfinished - n, "unfinished": unfinished}
        words = ["best"] * best + [f"{count} {word}" for word, count in notes.items() if count]
        cells = (f"{rate:g}", *map(_mean, numbers), f"{n}", ", ".join(words))
        table.add_row("" if method == above else method, *cells, style="bold" if best else "")
        above = method
    return table


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {format_number(float(np.std(values, ddof=1)), 2)}" if len(values) > 1 else ""
    return format_number(float(np.mean(values)) if values else None) + spread


def format_number(value: float | None, digits: int = 4) -> str:
    """Format a number with a few significant digits; a dash for None."""
    return "–" if value is None else f"{value:.{digits}g}"
