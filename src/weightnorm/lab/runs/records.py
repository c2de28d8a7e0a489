"""RunRecord: a run on disk, and the only format of one. Standard library only.

A run's folder holds

- ``config.json``: experiment, preset and every field of the config;
- ``sessions.jsonl``: a line for each time it was started: commit, versions, device, threads;
- ``metrics.jsonl``: a line for each epoch;
- ``result.json``: the outcome; there only once the run has finished;
- ``*.npz``: arrays to be shown as pictures, samples for instance, where the experiment keeps some.

Whole files are replaced atomically. Lines are appended; a half-written one is dropped on reading.
A number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightnorm.lab.errors import RecordError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run, as its files tell it."""

    folder: Path
    experiment: str
    preset: str
    config: Row
    sessions: list[Row] = field(default_factory=list)
    metrics: list[Row] = field(default_factory=list)
    result: Row | None = None

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def environment(self) -> Row:
        """Machine and versions of the newest start."""
        return self.sessions[-1] if self.sessions else {}

    def column(self, name: str) -> list[float | None]:
        """One metric over the epochs; None where it is missing or was not finite."""
        return [row.get(name) for row in self.metrics]


def load_record(folder: Path) -> RunRecord:
    """Read a run's folder; RecordError if its config or result is damaged."""
    head = _read_json(folder / "config.json")
    fields = {"experiment": str, "preset": str, "config": dict}
    if not isinstance(head, dict) or not all(
        isinstance(head.get(name), kind) for name, kind in fields.items()
    ):
        raise RecordError(f"{folder / 'config.json'} is not a run's config")
    path = folder / "result.json"
    result = _read_json(path) if path.exists() else None
    if path.exists() and not isinstance(result, dict):
        raise RecordError(f"{path} is not a run's result")
    return RunRecord(
        folder=folder,
        experiment=head["experiment"],
        preset=head["preset"],
        config=head["config"],
        sessions=read_rows(folder / "sessions.jsonl"),
        metrics=read_rows(folder / "metrics.jsonl"),
        result=result,
    )


def find_records(root: Path) -> tuple[list[RunRecord], list[str]]:
    """Every run below a folder, and what was wrong with those that could not be read."""
    records, problems = [], []
    for folder in sorted(_run_folders(root)):
        try:
            records.append(load_record(folder))
        except RecordError as error:  # noqa: PERF203
            problems.append(str(error))
    return records, problems


def _run_folders(root: Path) -> Iterator[Path]:
    return (path.parent for path in root.rglob("config.json"))


def write_json(path: Path, value: Any) -> None:
    """Replace a file by the value as JSON, whole or not at all."""
    write_atomically(path, (json.dumps(_finite(value), indent=2, default=str) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file; whoever reads it sees the old content or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_row(path: Path, row: Row) -> None:
    """Add a line and see it to the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(row), default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """The whole lines of a file of rows. What was cut off in writing is not a row."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def keep_rows(path: Path, count: int) -> None:
    """Go back to the first `count` rows, as a run does that resumes from before the later ones."""
    rows = read_rows(path)[:count]
    if len(rows) < count:
        raise RecordError(f"{path} has {len(rows)} rows, but the checkpoint was made after {count}")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(path, text.encode())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RecordError(f"{path} is missing") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
