"""Where the runs of a sweep are executed: processes of this machine, or tasks of a Ray cluster.

On Linux a run is killed when its parent exits; elsewhere it continues, and the lock in its folder
prevents a second process from running there.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightnorm.lab.errors import RunError

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


class RunProcess:
    """A command in a new session, which a terminal's Ctrl-C does not reach.

    Args:
        words: the command.
        log: file to which its output is appended.
        threads: torch's threads.
    """

    started = True

    def __init__(self, words: Sequence[str], log: Path, threads: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid())]
        variables = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL")}
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(words)}\n".encode())
            file.flush()
            self.log, self.began = log, file.tell()
            self.child = subprocess.Popen(
                [*launcher, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
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
        return "\n".join([how, *[line.rstrip() for line in lines if line.strip()][-TAIL_LINES:]])

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

    def start(self, words: Sequence[str], log: Path, name: str, gpus: int) -> RunProcess:
        """Start a command. Raises OSError if it cannot be started."""
        return RunProcess(words, log, self.threads)

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
        self.ray: Any = importlib.import_module("ray")  # an optional dependency
        self.connected = not self.ray.is_initialized()
        if self.connected:
            self._connect(address)
        sizes = [int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]]
        smallest = min(filter(None, sizes), default=1)
        self.threads = max(1, smallest // jobs)
        reserved = max(1, -(-smallest // jobs))  # whole CPUs, so at most `jobs` runs fit
        # Pickled by value: the worker process only waits and need not import torch.
        self.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.remote = self.ray.remote(max_retries=1, num_cpus=reserved)(run_on_worker)

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

    def start(self, words: Sequence[str], log: Path, name: str, gpus: int) -> RayTask:
        """Submit a command."""
        size = log.stat().st_size if log.exists() else 0
        remote = self.remote.options(name=name, num_gpus=gpus)
        reference = remote.remote(words, sys.executable, log, self.threads)
        return RayTask(self.ray, reference, log, size)

    def close(self) -> None:
        """Leave the cluster if it was joined here."""
        if self.connected:
            self.ray.shutdown()


@dataclass(frozen=True)
class RayTask:
    """A command submitted to Ray, with the methods of `RunProcess`."""

    ray: Any
    reference: Any
    log: Path
    size: int
    """Size of the log when the command was submitted."""

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
    """Run a command in a Ray task and return how it ended. Cancelling the task interrupts the run.

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
                time.sleep(0.1)
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
