"""Where the runs of a sweep are executed: processes on this machine, or tasks on a Ray cluster.

Either way a run is a process of its own that appends what it prints to ``output.log`` in its
folder. It dies with whoever started it (on Linux; elsewhere it runs on alone, and the lock in its
folder keeps a second one out).
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

from weightnorm.lab.errors import ConfigError, RunError
from weightnorm.lab.runs.config import RunConfig

POLL_SECONDS = 0.1
TAIL_LINES = 5
"""How much of a failed run's output is shown."""

# Note [the guard]: what has to happen inside the new process before it becomes the run. Popen's
# preexec_fn could do it but is not safe where there are threads. The run is to die with its parent
# (PR_SET_PDEATHSIG = 1), which must not have died already; and it must hear SIGINT, which Ray
# blocks and a shell's `&` ignores.
GUARD = """
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
    """One run of a sweep: what it is called and computes, the command, and its folder."""

    label: str
    experiment: str
    config: RunConfig
    words: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "output.log"


class Task(Protocol):
    """A job that was handed out."""

    @property
    def started(self) -> bool:
        """Whether it is, or was, at work; else it waits for its turn."""

    @property
    def ended(self) -> bool:
        """Whether it is over, well or not."""

    @property
    def failure(self) -> str:
        """Once it has ended: how, and the last that it said."""

    def interrupt(self) -> None:
        """Ask it to save and stop."""

    def kill(self) -> None:
        """End it now."""


class Workers(AbstractContextManager["Workers"], Protocol):
    """Those who execute jobs."""

    slots: int
    """Jobs to hand out at a time."""

    def start(self, job: Job) -> Task:
        """Hand out a job; OSError if it cannot be started."""


def workers(jobs: int, cluster: str | None) -> Workers:
    """`jobs` processes on this machine, or on each machine of a cluster."""
    return Local(jobs) if cluster is None else Cluster(cluster, jobs)


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

    def pass_on(self, tasks: Iterable[Task]) -> bool:
        """Interrupt the runs once, and say so; kill them if asked again or if it takes too long."""
        first = bool(self.asked) and self.deadline is None
        if first:
            self.deadline = time.monotonic() + self.patience
            for task in tasks:
                task.interrupt()
        elif self.deadline and (self.asked > 1 or time.monotonic() > self.deadline):
            for task in tasks:
                task.kill()
        return first


class Process:
    """A run as a process, in a session of its own so that a terminal's Ctrl-C does not reach it."""

    started = True

    def __init__(self, words: Sequence[str], log: Path, threads: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        count = str(threads)
        guard = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid())]
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(words)}\n".encode())
            file.flush()
            self.log, self.began = log, file.tell()
            self.child = subprocess.Popen(
                [*guard, *words],
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


class Local(Workers):
    """This machine: so many processes at a time, its cores split between them."""

    def __init__(self, jobs: int) -> None:
        self.slots, self.threads = jobs, max(1, cores() // jobs)

    def start(self, job: Job) -> Task:
        return Process(job.words, job.log, self.threads)

    def __exit__(self, *_: object) -> None: ...


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Cluster(Workers):
    """A Ray cluster: all jobs at once, in Ray's queue, each on the cores of its threads.

    The runs' folder must be shared by all machines under the same path, and weightnorm installed on
    each. Data is found as on any machine: --data-dir, or the worker's own $WEIGHTNORM_DATA. A run
    with --device cuda is given one GPU. If its worker is lost, a run goes on elsewhere, once.
    """

    slots = sys.maxsize

    def __init__(self, address: str, jobs: int) -> None:
        try:
            self.ray: Any = importlib.import_module("ray")  # an extra: not there for type checkers
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cluster is {address}, but {error.name} is missing: pip install 'weightnorm[ray]'"
            ) from None
        self.ours = not self.ray.is_initialized()
        if self.ours:
            self._connect(address)
        sizes = [int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]]
        smallest = min(filter(None, sizes), default=1)
        self.threads = max(1, smallest // jobs)
        # By value, so that the worker, which only waits, imports no torch.
        self.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.remote = self.ray.remote(max_retries=1)(on_worker)

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
            signal.signal(signal.SIGTERM, before)  # which Ray takes over

    def start(self, job: Job) -> Task:
        gpus = float(job.config.device.startswith("cuda"))
        remote = self.remote.options(name=job.label, num_cpus=self.threads, num_gpus=gpus)
        size = job.log.stat().st_size if job.log.exists() else 0
        reference = remote.remote(job.words, sys.executable, job.log, self.threads)
        return RayTask(self.ray, reference, job.log, size)

    def __exit__(self, *_: object) -> None:
        if self.ours:
            self.ray.shutdown()


@dataclass(frozen=True)
class RayTask:
    """A job in Ray's hands."""

    ray: Any
    reference: Any
    log: Path
    size: int
    """Of the log, when the job was handed out."""

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


def on_worker(words: Sequence[str], python: str, log: Path, threads: int) -> str:
    """The Ray task: run a job to its end and say how it ended. The driver's `python` is the
    worker's own here; cancelling the task interrupts the run."""
    here = [sys.executable if word == python else word for word in words]
    try:
        process = Process(here, log, threads)
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
    """Refuse an address where nothing listens: Ray would try for minutes."""
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
