"""Two records of the benchmark: what got slower by more than noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightnorm.lab.benchmarks.statistics import Interval
from weightnorm.lab.errors import RecordError

Record = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A goal's value in two records."""

    row: str
    case: str
    goal: str
    old: Interval
    new: Interval

    @property
    def slower(self) -> bool:
        """Beyond noise: the intervals do not overlap."""
        return self.new.low > self.old.high

    @property
    def faster(self) -> bool:
        return self.new.high < self.old.low


@dataclass(frozen=True)
class Comparison:
    """Every goal that both records have, and what keeps them from being comparable."""

    changes: tuple[Change, ...]
    caution: str

    @property
    def slower(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.slower)

    @property
    def faster(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.faster)


def load(path: Path) -> Record:
    """A record of the benchmark; RecordError if it is none."""
    try:
        record = json.loads(path.read_bytes())
        record["setting"]["quick"], record["environment"]["machine"], list(_values(record))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path} is not a record of weightnorm bench (its result.json)") from None
    return record  # type: ignore[no-any-return]


def compare(old: Record, new: Record) -> Comparison:
    """Goals are ratios within one run, so they carry over; sizes must be the same."""
    if old["setting"]["quick"] != new["setting"]["quick"]:
        raise RecordError("one of the records is --quick and the other is not: sizes differ")
    before, after = dict(_values(old)), dict(_values(new))
    if not before.keys() & after.keys():
        raise RecordError("the records have no goal in common")
    changes = [Change(*key, before[key], after[key]) for key in after if key in before]
    fields = ("machine", "device", "threads", "torch")
    differing = [
        f"{field} ({old['environment'].get(field)}, now {new['environment'].get(field)})"
        for field in fields
        if old["environment"].get(field) != new["environment"].get(field)
    ]
    return Comparison(tuple(changes), f"other {', '.join(differing)}" if differing else "")


def _values(record: Record) -> Iterator[tuple[tuple[str, str, str], Interval]]:
    for row in record["rows"]:
        for case in row["cases"]:
            for goal in case["goals"]:
                # A number that was not finite is null in a record: no bound.
                middle, low, high = goal["value"]
                ends = (
                    float("-inf") if low is None else low,
                    float("inf") if high is None else high,
                )
                value = Interval(float("nan") if middle is None else middle, *ends)
                yield (row["name"], case["case"], goal["says"]), value
