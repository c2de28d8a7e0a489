"""The parts of a measurement: made by several processes, counted, and none made twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from weightnorm.lab.malloc import keep_freed_memory
from weightnorm.lab.runs.records import append_row, read_rows

Part = tuple[str | int | float, ...]
"""What tells one part from another, as JSON knows it."""
Tell = Callable[[int, int], None]


class Crew:
    """Makes the parts of measurements. What a part gives must be JSON.

    Args:
        workers: processes; with 1, this one.
        file: where every part is kept as it comes, to be read again after a stop.
        tell: called with (parts done, parts in all) as they come.
    """

    def __init__(
        self, workers: int = 1, file: Path | None = None, tell: Tell | None = None
    ) -> None:
        self.workers, self.file, self._tell = workers, file, tell
        rows = read_rows(file) if file is not None else []
        self.known: dict[str, Any] = {row["part"]: row["found"] for row in rows}
        self._pool: ProcessPoolExecutor | None = None

    def tell(self, done: int, total: int) -> None:
        """How far a measurement is."""
        if self._tell is not None:
            self._tell(done, total)

    def each(self, bench: Any, measure: Callable[..., Any], parts: Iterable[Part]) -> list[Any]:
        """measure(bench, *part) of every part, in order."""
        named = {json.dumps([measure.__name__, *part]): part for part in parts}
        missing = {name: part for name, part in named.items() if name not in self.known}
        done = len(named) - len(missing)
        self.tell(done, len(named))
        made = self._made(bench, measure, [*missing.values()])
        for name, found in zip(missing, made, strict=True):
            self.known[name] = found
            if self.file is not None:
                append_row(self.file, {"part": name, "found": found})
            done += 1
            self.tell(done, len(named))
        return [self.known[name] for name in named]

    def _made(self, bench: Any, measure: Callable[..., Any], parts: list[Part]) -> Iterator[Any]:
        if self.workers == 1 or len(parts) < 2:
            return (measure(bench, *part) for part in parts)
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")  # a fork would share torch's threads
            self._pool = ProcessPoolExecutor(self.workers, spawn, _begin, (bench.alone(),))
        return self._pool.map(_made_here, repeat(measure), parts)

    def close(self) -> None:
        """Send the workers home, at once."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            self._pool = None


_bench: Any = None
"""A worker's own: data is loaded once."""


def _begin(bench: Any) -> None:
    global _bench
    _bench = bench
    torch.set_num_threads(1)
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started the workers decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _made_here(measure: Callable[..., Any], part: Part) -> Any:
    return measure(_bench, *part)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
