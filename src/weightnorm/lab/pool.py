"""Worker processes that end with their parent.

Note [workers end with their parent]
    A parent that is killed cannot stop its workers. Each has a thread that waits for the parent
    and then ends the process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch

from weightnorm.lab.environment import prepare_process
from weightnorm.lab.errors import RunError


@contextmanager
def worker_processes(
    size: int,
    make: Callable[[], object] | None = None,
    *,
    threads: int = 1,
    keep_memory: bool = True,
) -> Iterator[ProcessPoolExecutor]:
    """Start processes that run what is submitted to them; terminate them at the end, at once.

    Spawned, not forked: a fork would share torch's threads. A process that dies raises RunError
    here.

    Args:
        size: number of processes.
        make: called once in each process; `call_state` calls its result.
        threads: torch's threads in each process.
        keep_memory: whether freed memory is kept and denormal numbers are 0, as in runs.
    """
    context = multiprocessing.get_context("spawn")
    before = {*multiprocessing.active_children()}
    setup = (threads, keep_memory, make)
    pool = ProcessPoolExecutor(size, context, initializer=_set_up, initargs=setup)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise RunError(f"a worker process ended: {error}") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        started = {*multiprocessing.active_children()} - before
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def call_state(*arguments: Any) -> Any:
    """Submit this to call what `make` returned in a worker process."""
    return _state(*arguments)


def _set_up(threads: int, keep_memory: bool, make: Callable[[], Any] | None) -> None:
    global _state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when workers stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if keep_memory:
        prepare_process(threads)
    else:
        torch.set_num_threads(threads)
    if make is not None:
        _state = make()


def _state(*arguments: Any) -> Any:
    raise RuntimeError("this process was started without a state")


def _end_with_parent() -> None:
    """See Note [workers end with their parent]."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
