"""Grids of runs: parameterizations × learning rates × seeds, and their execution.

Each run is the command a user would type, in a process of its own: on this machine, or in a task of
a Ray cluster. Its output is appended to ``output.log`` in its folder. On Linux it is killed when
its parent exits; elsewhere it continues, and the lock in its folder prevents a second process from
running there.

The state of a run is its record: a finished run is not run again, so a sweep that was stopped is
resumed by the same command.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from weightnorm import Parameterization
from weightnorm.lab.config import RunConfig, completed, folder, preset_of, scientific_fields
from weightnorm.lab.environment import pick_device
from weightnorm.lab.errors import ConfigError, RecordError, RunError, require
from weightnorm.lab.records import RunRecord, load_record, read_rows
from weightnorm.lab.sweep_summary import SweepResult, check_metric, format_number

COMMAND = (sys.executable, "-m", "weightnorm", "run")
POLL_SECONDS, LIVE_SECONDS = 0.1, 0.5
"""Time between looks at the processes, and between updates of the bars."""
TAIL_LINES = 5
"""Lines of a failed run's output that are shown."""
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

    def epochs(self) -> tuple[int, int | None]:
        """Return how many epochs are finished, and of how many, if the config has epochs."""
        rows = read_rows(self.folder / "metrics.jsonl")
        return len(rows), getattr(self.config, "epochs", None)


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
    records = [job.record() for job in plan]
    module = importlib.import_module(f"weightnorm.lab.{grid.experiment}")
    check_metric(records, metric, (*module.RESULTS, "seconds"))
    left = deque(job for job, record in zip(plan, records, strict=True) if not record.finished)
    failed: list[tuple[str, str]] = []
    interrupted = False
    if left:
        executor = LocalExecutor(jobs) if cluster is None else RayExecutor(cluster, jobs)
        progress = SweepProgress(console or Console(stderr=True), records, metric)
        stop = StopSignals(grace_seconds)
        try:
            failed = execute(left, executor, stop, progress)
        finally:
            progress.close()
            stop.close()
            executor.close()
        interrupted = bool(left or progress.counts["stopped"])
    records = [job.record() for job in plan]
    return SweepResult(records, failed, interrupted, metric, highest, tuple(grid.axes))


def execute(
    left: deque[Job],
    executor: LocalExecutor | RayExecutor,
    stop: StopSignals,
    progress: SweepProgress,
) -> list[tuple[str, str]]:
    """Execute the jobs. Returns label and reason of those that failed.

    After a signal, jobs that were not submitted yet stay in `left`.
    """
    failed: list[tuple[str, str]] = []
    running: list[tuple[Job, RunProcess | RayTask]] = []

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
                record = job.record()
                if record.diverged is not None:
                    message = str(record.diverged.get("message", ""))
                    progress.event("diverged", job, message.partition("\n")[0])
                elif record.finished:
                    progress.event("done", job, progress.describe(record))
                elif stop.received:
                    progress.event("stopped", job)
                else:
                    fail(job, task.failure)
            progress.update([job for job, task in running if task.started])
            time.sleep(POLL_SECONDS)
    finally:
        for _, task in running:
            task.kill()
    return failed


class StopSignals:
    """Handles Ctrl-C and SIGTERM by interrupting the runs."""

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds, self.received = grace_seconds, 0
        self.deadline: float | None = None
        self.handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self.handlers[which] = signal.signal(which, self._receive)

    def close(self) -> None:
        """Restore the handlers."""
        for which, handler in self.handlers.items():
            signal.signal(which, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.received += 1

    def forward(self, tasks: Sequence[RunProcess | RayTask]) -> bool:
        """Interrupt the tasks after the first signal; kill them after another or a timeout.

        Returns whether they were interrupted by this call.
        """
        first = bool(self.received) and self.deadline is None
        if first:
            self.deadline = time.monotonic() + self.grace_seconds
            for task in tasks:
                task.interrupt()
        elif self.deadline and (self.received > 1 or time.monotonic() > self.deadline):
            for task in tasks:
                task.kill()
        return first


# — on the screen —


class SweepProgress:
    """Progress of a sweep: a line per event and, in a terminal, a bar per running job."""

    def __init__(self, console: Console, records: Sequence[RunRecord], metric: str) -> None:
        self.console, self.total, self.metric = console, len(records), metric
        self.counts: Counter[str] = Counter()
        self.counts["diverged"] = sum(r.diverged is not None for r in records)
        self.counts["done"] = sum(r.finished for r in records) - self.counts["diverged"]
        self.started: set[Path] = set()
        self._updated = 0.0
        self._job_bars: dict[Path, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bars.start()
        finished = self.counts["done"] + self.counts["diverged"]
        self._total_bar = self._bars.add_task("runs", total=self.total, completed=finished)
        self.print(f"{self.total} runs, {finished} of them finished before")

    def close(self) -> None:
        """Remove the bars and print the final counts."""
        self._bars.stop()
        self.print(self._counts(running=0))

    def event(self, name: str, job: Job, text: str = "") -> None:
        """Count and print an event of a job."""
        self.counts[name] += 1
        self.print(f"{name:9}{job.label}  {text}".rstrip().replace("\n", "\n         "))

    def describe(self, record: RunRecord) -> str:
        """Return the deciding metric of a finished run."""
        return f"{self.metric.replace('_', ' ')} {format_number(record.final(self.metric))}"

    def update(self, running: Sequence[Job]) -> None:
        """Show the state of the running jobs."""
        for job in running:
            if job.folder not in self.started:
                self.started.add(job.folder)
                self.event("started", job)
        if not self.console.is_terminal or time.monotonic() - self._updated < LIVE_SECONDS:
            return
        self._updated = time.monotonic()
        for place in self._job_bars.keys() - {job.folder for job in running}:
            self._bars.remove_task(self._job_bars.pop(place))
        for job in running:
            done, total = job.epochs()
            if job.folder not in self._job_bars:
                self._job_bars[job.folder] = self._bars.add_task(job.label, total=total)
            self._bars.update(self._job_bars[job.folder], completed=done)
        ended = self.counts["done"] + self.counts["diverged"] + self.counts["failed"]
        text = self._counts(len(running))
        self._bars.update(self._total_bar, completed=ended, description=text)

    def print(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _counts(self, running: int) -> str:
        done, diverged, failed = (self.counts[name] for name in ("done", "diverged", "failed"))
        left = self.total - done - diverged - failed - running
        lost = f"{diverged} diverged · " if diverged else ""
        return f"{done} done · {lost}{running} running · {failed} failed · {left} left"


# — processes —

# Note [launcher]: runs in the new process before it becomes the run; Popen's preexec_fn is not safe
# with threads. The run is killed when its parent exits (PR_SET_PDEATHSIG = 1), so the parent must
# not have exited already. SIGINT is enabled, which Ray blocks and a shell's `&` ignores.
LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class RunProcess:
    """A run in a new session, which a terminal's Ctrl-C does not reach."""

    started = True

    def __init__(self, words: Sequence[str], log: Path, threads: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        count = str(threads)
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(words)}\n".encode())
            file.flush()
            self.log, self.began = log, file.tell()
            self.child = subprocess.Popen(
                [*launcher, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count},
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        """Whether it has ended, with or without success."""
        return self.child.poll() is not None

    @property
    def failure(self) -> str:
        """How it ended, and the last lines of its output."""
        code = self.child.wait()
        if code < 0:
            how = f"killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"exit code {code}" if code else "ended without a result"
        with self.log.open("rb") as file:
            file.seek(max(self.began, self.log.stat().st_size - 10_000))
            lines = file.read().decode(errors="replace").splitlines()
        tail = [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]
        return "\n".join([how, *tail])

    def interrupt(self) -> None:
        """Ask the run to save and stop."""
        self.child.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the run and its children."""
        if not self.ended:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()


class LocalExecutor:
    """Runs `jobs` processes at a time on this machine, each with an equal share of its cores."""

    def __init__(self, jobs: int) -> None:
        self.slots, self.threads = jobs, max(1, cores() // jobs)

    def start(self, job: Job) -> RunProcess:
        """Start a job. Raises OSError if it cannot be started."""
        return RunProcess(job.words, job.log, self.threads)

    def close(self) -> None:
        """There is nothing to free."""


def cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# — a Ray cluster —


class RayExecutor:
    """Submits all jobs to a Ray cluster's queue.

    All machines must have weightnorm installed and share the runs' folder under the same path. Data
    is found through --data-dir or the worker's own $WEIGHTNORM_DATA. A run with --device cuda gets
    one GPU. If its worker is lost, a run is resumed on another one, once.
    """

    slots = sys.maxsize

    def __init__(self, address: str, jobs: int) -> None:
        try:
            self.ray: Any = importlib.import_module("ray")  # an optional dependency
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cluster is {address}, but {error.name} is missing: pip install 'weightnorm[ray]'"
            ) from None
        self.connected = not self.ray.is_initialized()
        if self.connected:
            self._connect(address)
        sizes = [int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]]
        smallest = min(filter(None, sizes), default=1)
        self.threads = max(1, smallest // jobs)
        self.reserved = max(1, -(-smallest // jobs))  # whole CPUs, so at most `jobs` runs fit
        # Pickled by value: the worker process only waits and need not import torch.
        self.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.remote = self.ray.remote(max_retries=1)(run_on_worker)

    def _connect(self, address: str) -> None:
        check_reachable(address)
        before = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(address, log_to_driver=False, logging_level="warning")
        except (OSError, RuntimeError) as error:
            raise RunError(
                f"cannot join the Ray cluster at {address}: {error}. Start one with "
                "ray start --head, or leave --cluster out"
            ) from error
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray replaces the handler

    def start(self, job: Job) -> RayTask:
        """Submit a job."""
        gpus = float(job.config.device.startswith("cuda"))
        remote = self.remote.options(name=job.label, num_cpus=self.reserved, num_gpus=gpus)
        size = job.log.stat().st_size if job.log.exists() else 0
        reference = remote.remote(job.words, sys.executable, job.log, self.threads)
        return RayTask(self.ray, reference, job.log, size)

    def close(self) -> None:
        """Leave the cluster if it was joined here."""
        if self.connected:
            self.ray.shutdown()


@dataclass(frozen=True)
class RayTask:
    """A job submitted to Ray, with the methods of `RunProcess`."""

    ray: Any
    reference: Any
    log: Path
    size: int
    """Size of the log when the job was submitted."""

    @property
    def started(self) -> bool:
        """Whether it has started; False while it is queued."""
        return self.log.exists() and self.log.stat().st_size > self.size

    @property
    def ended(self) -> bool:
        return bool(self.ray.wait([self.reference], timeout=0)[0])

    @property
    def failure(self) -> str:
        try:
            return str(self.ray.get(self.reference))
        except self.ray.exceptions.RayError as error:
            return f"lost by Ray: {(str(error) or type(error).__name__).splitlines()[0]}"

    def interrupt(self) -> None:
        self.ray.cancel(self.reference)

    def kill(self) -> None:
        self.ray.cancel(self.reference, force=True)


def run_on_worker(words: Sequence[str], python: str, log: Path, threads: int) -> str:
    """Run a job in a Ray task and return how it ended. Cancelling the task interrupts the run.

    The driver's interpreter, `python`, is replaced by the worker's.
    """
    here = [sys.executable if word == python else word for word in words]
    try:
        process = RunProcess(here, log, threads)
    except OSError as error:
        return str(error)
    while True:
        try:
            while not process.ended:
                time.sleep(POLL_SECONDS)
            return process.failure
        except KeyboardInterrupt:  # noqa: PERF203
            process.interrupt()


def check_reachable(address: str) -> None:
    """Raise an error at once if nothing listens at the address: Ray would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError, ValueError) as error:
        raise RunError(
            f"there is no Ray cluster at {address} ({error}); expected auto or HOST:PORT. Start "
            "one with ray start --head, or leave --cluster out"
        ) from None
