"""Worker processes: one that keeps state between calls, and a pool of them.

Note [workers end with their parent]
    A parent that is killed cannot stop its workers. Each has a thread that waits for the parent
    and then ends the process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from weightnorm.lab.errors import LabError, RunError

Arguments = tuple[Any, ...]


class Worker:
    """A spawned process that holds ``make(*arguments)`` and calls functions with it.

    Spawned, not forked: a fork would share torch's threads. One call at a time: `submit` sends it
    and `result` waits for it. An exception in the process is raised by `result`.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, make, arguments), daemon=True)
        self._process.start()
        remote.close()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start ``function(state, *arguments)`` in the process."""
        self.connection.send((function, arguments))

    def result(self) -> Any:
        """Wait for the function that was submitted and return its value."""
        try:
            error, value = self.connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RunError(f"a worker process ended with exit code {code}") from None
        if error is not None:
            raise error
        return value

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(state, *arguments)``."""
        self.submit(function, *arguments)
        return self.result()

    def close(self) -> None:
        """Terminate the process, at once."""
        self.connection.close()
        self._process.terminate()
        self._process.join()


class Pool:
    """Workers with equal state that share calls between them; started when first needed."""

    def __init__(self, size: int, make: Callable[..., Any], *arguments: Any) -> None:
        self.size, self._make, self._arguments = size, make, arguments
        self._workers: list[Worker] = []

    def map(
        self, function: Callable[..., Any], arguments: Sequence[Arguments]
    ) -> Iterator[tuple[int, Any]]:
        """Yield (index, ``function(state, *arguments[index])``) in the order of completion."""
        while len(self._workers) < min(self.size, len(arguments)):
            self._workers.append(Worker(self._make, *self._arguments))
        waiting = iter(enumerate(arguments))
        busy: dict[Connection, tuple[Worker, int]] = {}

        def submit(worker: Worker) -> None:
            for index, call in waiting:
                worker.submit(function, *call)
                busy[worker.connection] = worker, index
                return

        for worker in self._workers:
            submit(worker)
        while busy:
            for connection in wait([*busy]):
                assert isinstance(connection, Connection)
                worker, index = busy.pop(connection)
                value = worker.result()
                submit(worker)
                yield index, value

    def close(self) -> None:
        """Terminate the workers, at once."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()


def one_thread(make: Callable[..., Any], *arguments: Any) -> Any:
    """``make(*arguments)`` in a process whose torch uses one thread."""
    torch.set_num_threads(1)
    return make(*arguments)


def _serve(connection: Connection, make: Callable[..., Any], arguments: Arguments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when workers stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    state: Any = None
    failure: Exception | None = None
    reply: tuple[Exception | None, Any]
    try:
        state = make(*arguments)
    except Exception as error:
        failure = _sendable(error)
    while True:
        try:
            function, call = connection.recv()
        except EOFError:
            return
        if failure is not None:
            connection.send((failure, None))
            continue
        try:
            reply = None, function(state, *call)
        except Exception as error:
            reply = _sendable(error), None
        connection.send(reply)


def _sendable(error: Exception) -> Exception:
    """The error, or a RunError with its text if it cannot be pickled. Its traceback, which pickling
    loses, is printed."""
    if not isinstance(error, LabError):
        traceback.print_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """See Note [workers end with their parent]."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
