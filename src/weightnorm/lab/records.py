"""Read and write the record of a run. Standard library only.

A run's folder contains

- ``config.json``: experiment, preset and every scientific field of the config;
- ``sessions.jsonl``: one line per start of the run: commit, versions, device, threads;
- ``metrics.jsonl``: one line per epoch;
- ``result.json``: the final metrics; it exists only once the run has finished or diverged;
- ``*.npz``: arrays that the report draws, such as samples.

Whole files are replaced atomically. Lines are appended; a partially written line is ignored. A
number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.errors import RecordError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """The record of one run."""

    folder: Path
    experiment: str
    preset: str
    config: Row
    sessions: list[Row] = field(default_factory=list)
    metrics: list[Row] = field(default_factory=list)
    result: Row | None = None
    """Final metrics; None until the run has finished or diverged."""
    diverged: Row | None = None
    """``epoch``, ``step`` and ``message`` if the run ended because a number was not finite."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to compute. True for a run that diverged."""
        return self.result is not None

    @property
    def environment(self) -> Row:
        """Machine and versions of the latest session."""
        return self.sessions[-1] if self.sessions else {}

    def column(self, name: str) -> list[float | None]:
        """Return one metric over the epochs; None where it is missing or was not finite."""
        return [row.get(name) for row in self.metrics]

    def final(self, metric: str) -> float | None:
        """Return a metric of the result; None if there is none, it is not a finite number, or the
        run diverged."""
        value = (self.result or {}).get(metric) if self.diverged is None else None
        return value if is_number(value) else None


def is_number(value: Any) -> bool:
    """Return whether a value from a JSON file is a finite number.

    >>> [is_number(x) for x in (1, 0.5, None, True, "1", float("nan"))]
    [True, True, False, False, False, False]
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def load_record(folder: Path) -> RunRecord:
    """Read a run's folder. Raises RecordError if its config or result is damaged."""
    head = read_json(folder / "config.json")
    fields = {"experiment": str, "preset": str, "config": dict}
    if not isinstance(head, dict) or not all(
        isinstance(head.get(name), kind) for name, kind in fields.items()
    ):
        raise RecordError(f"{folder / 'config.json'} is not a run's config")
    result = diverged = None
    if (path := folder / "result.json").exists():
        result = read_json(path)
        if not isinstance(result, dict) or not isinstance(result.get("diverged"), dict | None):
            raise RecordError(f"{path} is not a run's result")
        diverged = result.pop("diverged", None)
    return RunRecord(
        folder=folder,
        experiment=head["experiment"],
        preset=head["preset"],
        config=head["config"],
        sessions=read_rows(folder / "sessions.jsonl"),
        metrics=read_rows(folder / "metrics.jsonl"),
        result=result,
        diverged=diverged,
    )


def find_records(root: Path) -> tuple[list[RunRecord], list[str]]:
    """Read every run below a folder. Returns the records, and a message for each unreadable one.

    Runs in a folder called ``grid`` below it have chosen learning rates: they are no results, and
    are read when they are asked for.
    """
    records, problems = [], []
    for folder in sorted(path.parent for path in root.rglob("config.json")):
        if "grid" in folder.relative_to(root).parts:
            continue
        try:
            records.append(load_record(folder))
        except RecordError as error:
            problems.append(str(error))
    return records, problems


def distinct_runs(
    records: Iterable[RunRecord],
) -> tuple[list[RunRecord], list[tuple[RunRecord, RunRecord]]]:
    """Return each run once, the most complete copy of it, and (copy, kept run) for the others.

    Runs of one config and seed are one sample, wherever they were computed. Records without a seed,
    as those of benchmarks, are one for each machine.
    """
    kept: dict[str, RunRecord] = {}
    copies = []
    for record in sorted(records, key=lambda r: (not r.finished, -len(r.metrics), r.folder)):
        where = [record.environment.get(field) for field in ("machine", "device")]
        what = [record.experiment, record.config, [] if "seed" in record.config else where]
        twin = kept.setdefault(json.dumps(what, sort_keys=True), record)
        if twin is not record:
            copies.append((record, twin))
    return sorted(kept.values(), key=lambda r: r.folder), copies


def to_json(value: Any, indent: int | None = None) -> str:
    """Convert a value to JSON. Paths and enums become strings, non-finite floats null.

    Raises TypeError for anything else that JSON does not have, such as a tensor: a number must
    never be recorded as text.

    >>> to_json({"path": Path("a/b"), "loss": float("nan")})
    '{"path": "a/b", "loss": null}'
    """
    return json.dumps(_nulls(value), indent=indent, default=_path_or_enum, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by `value` as JSON, whole or not at all."""
    write_atomically(path, (to_json(value, indent=2) + "\n").encode())


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace a file by one line per row, whole or not at all."""
    write_atomically(path, "".join(to_json(row) + "\n" for row in rows).encode())


def append_row(path: Path, row: Row) -> None:
    """Append a line and sync it to disk. A partially written line before it is ended first."""
    line = (to_json(row) + "\n").encode()
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """Read the complete lines of a file of rows. Lines that are not a JSON object are skipped."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    rows = []
    for line in content.split(b"\n"):
        try:
            row = _parse(line.strip(b"\0"))  # a crash may leave a block of zeros
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises RecordError if it is missing, damaged or cannot be read."""
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        raise RecordError(f"{path} is missing") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None


def _parse(content: bytes) -> Any:
    """Parse JSON; numbers that are not finite are None."""
    return json.loads(content, parse_float=_finite_float, parse_constant=lambda name: None)


def _finite_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _nulls(value: Any) -> Any:
    """Replace every float that is not finite by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_nulls(item) for item in value]
    return value


def _path_or_enum(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(
        f"a record holds numbers and text, got {type(value).__name__}: {value!r}; "
        "convert a tensor or array with .item() or .tolist()"
    )
