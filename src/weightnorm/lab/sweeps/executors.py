"""Execute the runs of a sweep: as processes on this machine, or as tasks on a Ray cluster.

Either way each run is a process that appends its output to ``output.log`` in its folder. On Linux
it is killed when its parent exits; elsewhere it continues, and the lock in its folder prevents a
second process from running there.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from weightnorm.lab.config import RunConfig
from weightnorm.lab.errors import ConfigError, RunError

POLL_SECONDS = 0.1
TAIL_LINES = 5
"""Lines of a failed run's output that are shown."""

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


class Task(Protocol):
    """A job that was submitted."""

    @property
    def started(self) -> bool:
        """Whether it has started; False while it is queued."""

    @property
    def ended(self) -> bool:
        """Whether it has ended, with or without success."""

    @property
    def failure(self) -> str:
        """Why the job ended, and the last lines of its output."""

    def interrupt(self) -> None:
        """Ask the run to save and stop."""

    def kill(self) -> None:
        """Kill the run."""


class Executor(AbstractContextManager["Executor"], Protocol):
    """Executes jobs."""

    slots: int
    """Number of jobs to submit at a time."""

    def start(self, job: Job) -> Task:
        """Submit a job. Raises OSError if it cannot be started."""


def make_executor(jobs: int, cluster: str | None) -> Executor:
    """Return an executor of `jobs` processes on this machine, or per machine of a Ray cluster."""
    return LocalExecutor(jobs) if cluster is None else RayExecutor(cluster, jobs)


class StopSignals:
    """Handles Ctrl-C and SIGTERM by interrupting the runs."""

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds, self.received = grace_seconds, 0
        self.deadline: float | None = None
        self.handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self.handlers[which] = signal.signal(which, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self.handlers.items():
            signal.signal(which, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received += 1

    def forward(self, tasks: Iterable[Task]) -> bool:
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
        return self.child.poll() is not None

    @property
    def failure(self) -> str:
        code = self.child.wait()
        if code < 0:
            how = f"killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"exit code {code}" if code else "ended without a result"
        return "\n".join([how, *self._tail()])

    def _tail(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(self.began, self.log.stat().st_size - 10_000))
            lines = file.read().decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]

    def interrupt(self) -> None:
        self.child.send_signal(signal.SIGINT)

    def kill(self) -> None:
        if not self.ended:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()


class LocalExecutor(Executor):
    """Runs `jobs` processes at a time on this machine, each with an equal share of its cores."""

    def __init__(self, jobs: int) -> None:
        self.slots, self.threads = jobs, max(1, cores() // jobs)

    def start(self, job: Job) -> Task:
        return RunProcess(job.words, job.log, self.threads)

    def __exit__(self, *_: object) -> None: ...


def cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RayExecutor(Executor):
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

    def start(self, job: Job) -> Task:
        gpus = float(job.config.device.startswith("cuda"))
        remote = self.remote.options(name=job.label, num_cpus=self.reserved, num_gpus=gpus)
        size = job.log.stat().st_size if job.log.exists() else 0
        reference = remote.remote(job.words, sys.executable, job.log, self.threads)
        return RayTask(self.ray, reference, job.log, size)

    def __exit__(self, *_: object) -> None:
        if self.connected:
            self.ray.shutdown()


@dataclass(frozen=True)
class RayTask:
    """A job submitted to Ray."""

    ray: Any
    reference: Any
    log: Path
    size: int
    """Size of the log when the job was submitted."""

    @property
    def started(self) -> bool:
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
    if not host or not port.isdigit():
        raise ConfigError(f"cluster is {address}; expected auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"there is no Ray cluster at {address} ({error}). Start one with ray start --head, "
            "or leave --cluster out"
        ) from None
