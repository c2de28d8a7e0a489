"""Compares two records of `weightnorm bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightnorm.lab.errors import RecordError
from weightnorm.lab.statistics import Interval

Record = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """The value of a goal in two records."""

    benchmark: str
    case: str
    goal: str
    old: Interval
    new: Interval

    @property
    def slower(self) -> bool:
        """The intervals do not overlap and the new one is higher."""
        return self.new.low > self.old.high

    @property
    def faster(self) -> bool:
        """The intervals do not overlap and the new one is lower."""
        return self.new.high < self.old.low


@dataclass(frozen=True)
class RecordComparison:
    """Changes of all goals that both records have."""

    changes: tuple[Change, ...]
    caution: str
    """Differences between the machines or versions; empty if there are none."""

    @property
    def slower(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.slower)

    @property
    def faster(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.faster)


def load(path: Path) -> Record:
    """Read a record; RecordError if the file is not one."""
    try:
        record = json.loads(path.read_bytes())
        record["settings"]["quick"], record["environment"]["machine"], list(_values(record))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path} is not a record of weightnorm bench (its result.json)") from None
    return record  # type: ignore[no-any-return]


def compare(old: Record, new: Record) -> RecordComparison:
    """Compare the goals of two records. Sizes must be equal; machines may differ, because goals are
    ratios within one run."""
    if old["settings"]["quick"] != new["settings"]["quick"]:
        raise RecordError("one of the records is --quick and the other is not: sizes differ")
    before, after = dict(_values(old)), dict(_values(new))
    if not before.keys() & after.keys():
        raise RecordError("the records have no goal in common")
    changes = [Change(*key, before[key], after[key]) for key in after if key in before]
    differing = differing_conditions(old["environment"], new["environment"])
    return RecordComparison(tuple(changes), f"other {', '.join(differing)}" if differing else "")


def differing_conditions(old: Record, new: Record) -> list[str]:
    """List what differs between two environments, of what may change ratios."""
    return [
        f"{field} ({old.get(field)}, now {new.get(field)})"
        for field in ("machine", "device", "threads", "torch")
        if old.get(field) != new.get(field)
    ]


def _values(record: Record) -> Iterator[tuple[tuple[str, str, str], Interval]]:
    for benchmark in record["benchmarks"]:
        for case in benchmark["cases"]:
            for goal in case["goals"]:
                # JSON has null for a number that is not finite: no bound.
                value, low, high = goal["value"], goal["low"], goal["high"]
                interval = Interval(
                    float("nan") if value is None else value,
                    float("-inf") if low is None else low,
                    float("inf") if high is None else high,
                )
                yield (benchmark["name"], case["case"], goal["goal"]), interval
