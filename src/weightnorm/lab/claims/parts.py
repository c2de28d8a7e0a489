"""Computes the independent parts of a claim in worker processes and stores each result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from weightnorm.lab.pool import worker_processes
from weightnorm.lab.records import append_row, read_rows

Part = tuple[str | int | float, ...]
"""Arguments that identify a part; JSON values."""
OnProgress = Callable[[int, int], None]


class PartRunner:
    """Computes parts, each once: results are read from the file when a measurement is resumed.

    Args:
        workers: number of processes, of one thread each; with 1, parts run in this process.
        file: JSON lines, one result each, appended as soon as it is there.
        on_progress: called with (parts done, parts in total).
    """

    def __init__(
        self, workers: int = 1, file: Path | None = None, on_progress: OnProgress | None = None
    ) -> None:
        self.workers, self.file, self._on_progress = workers, file, on_progress
        rows = read_rows(file) if file is not None else []
        whole = (row for row in rows if row.keys() >= {"part", "found"})
        self.results: dict[str, Any] = {row["part"]: row["found"] for row in whole}

    def progress(self, done: int, total: int) -> None:
        """Report how many parts are done."""
        if self._on_progress is not None:
            self._on_progress(done, total)

    def map(self, context: Any, function: Callable[..., Any], parts: Iterable[Part]) -> list[Any]:
        """Return ``function(context, *part)`` for every part; the values must be JSON."""
        names = {json.dumps([function.__name__, *part]): part for part in parts}
        missing = [name for name in names if name not in self.results]
        done = len(names) - len(missing)
        self.progress(done, len(names))
        for index, found in self._compute(context, function, [names[name] for name in missing]):
            name = missing[index]
            self.results[name] = found
            if self.file is not None:
                append_row(self.file, {"part": name, "found": found})
            done += 1
            self.progress(done, len(names))
        return [self.results[name] for name in names]

    def _compute(
        self, context: Any, function: Callable[..., Any], parts: list[Part]
    ) -> Iterator[tuple[int, Any]]:
        if self.workers == 1 or len(parts) < 2:
            return ((index, function(context, *part)) for index, part in enumerate(parts))
        return self._in_workers(context.detached(), function, parts)

    def _in_workers(
        self, context: Any, function: Callable[..., Any], parts: list[Part]
    ) -> Iterator[tuple[int, Any]]:
        with worker_processes(self.workers) as pool:
            indices = {pool.submit(function, context, *part): i for i, part in enumerate(parts)}
            for future in as_completed(indices):
                yield indices[future], future.result()
