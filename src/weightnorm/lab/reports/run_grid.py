"""The runs of one preset, sorted out: parameterization → learning rate → seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

from weightnorm.lab.reports.aggregate import best_rate, finite_or_nan
from weightnorm.lab.reports.style import ordered
from weightnorm.lab.runs.records import RunRecord

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class RunGrid:
    """Runs that differ in parameterization, learning rate and seed."""

    label: str
    records: list[RunRecord]
    metric: str
    """Judges a learning rate by its mean at the end."""
    highest: bool = False
    """Whether the highest is the best; else the lowest."""

    @cached_property
    def grid(self) -> dict[str, dict[float, list[RunRecord]]]:
        kinds = grouped(self.records, parameterization)
        return {kind: dict(sorted(grouped(kinds[kind], rate).items())) for kind in ordered(kinds)}

    @cached_property
    def best(self) -> dict[str, tuple[float, list[RunRecord]]]:
        """Each parameterization's best learning rate, and the runs at it."""
        best = partial(best_rate, metric=self.metric, highest=self.highest)
        chosen = {kind: best(rates) for kind, rates in self.grid.items()}
        return {kind: (rate, self.grid[kind][rate]) for kind, rate in chosen.items()}


def run_grids(records: list[RunRecord], metric: str) -> list[RunGrid]:
    """One for each preset, or departure from one."""
    return [RunGrid(*group, metric) for group in sorted(grouped(records, label).items())]


def parameterization(record: RunRecord) -> str:
    return str(record.config.get("parameterization", "unknown"))


def rate(record: RunRecord) -> float:
    """The learning rate; 0 where a record does not say."""
    value = finite_or_nan(record.config.get("learning_rate"))
    return 0.0 if math.isnan(value) else value


def finished(records: Iterable[RunRecord]) -> list[RunRecord]:
    return [record for record in records if record.finished]


def grouped(
    records: Iterable[RunRecord], key: Callable[[RunRecord], K]
) -> dict[K, list[RunRecord]]:
    """Records by key, in order of appearance."""
    groups: dict[K, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def label(record: RunRecord) -> str:
    """The preset, with what departs from it, as the run's folder says: ``cpu+epochs=3``.

    The folder below the experiment's name, if it is that preset's; else the preset alone.
    """
    parts = record.folder.parts
    for above, below in reversed([*pairwise(parts)]):
        if above == record.experiment and below.partition("+")[0] == record.preset:
            return below
    return record.preset
