"""Runs of one preset, grouped by parameterization, learning rate and seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import best_rate, finite_or_nan
from weightnorm.lab.reports.style import STYLES, Style, ordered, style_of

K = TypeVar("K", bound=Hashable)


def parameterization(record: RunRecord) -> str:
    return str(record.config.get("parameterization", "unknown"))


@dataclass(frozen=True)
class RunGrid:
    """Runs that differ in parameterization, learning rate and seed."""

    label: str
    records: list[RunRecord]
    metric: str
    """Learning rates are compared by its mean at the end."""
    highest: bool = False
    """Whether the highest metric is the best; else the lowest."""
    kind: Callable[[RunRecord], str] = parameterization
    """What is compared; one curve for each."""
    styles: Mapping[str, Style] = field(default_factory=lambda: STYLES)

    @cached_property
    def grid(self) -> dict[str, dict[float, list[RunRecord]]]:
        kinds = grouped(self.records, self.kind)
        return {
            kind: dict(sorted(grouped(kinds[kind], rate).items()))
            for kind in ordered(kinds, self.styles)
        }

    @cached_property
    def best(self) -> dict[str, tuple[float, list[RunRecord]]]:
        """Best learning rate of each kind, and the runs at it."""
        best = partial(best_rate, metric=self.metric, highest=self.highest)
        chosen = {kind: best(rates) for kind, rates in self.grid.items()}
        return {kind: (rate, self.grid[kind][rate]) for kind, rate in chosen.items()}

    @property
    def best_finished(self) -> dict[str, list[RunRecord]]:
        """Finished runs of each kind at its best learning rate; kinds without any are left out."""
        done = {kind: finished(records) for kind, (_, records) in self.best.items()}
        return {kind: records for kind, records in done.items() if records}

    def style(self, kind: str) -> Style:
        return style_of(kind, styles=self.styles)

    def name(self, kind: str) -> str:
        return self.style(kind).name

    @property
    def progress(self) -> str:
        """One sentence: how many runs have finished."""
        return f"{len(finished(self.records))} of {len(self.records)} runs are finished."


def run_grids(records: list[RunRecord], metric: str) -> list[RunGrid]:
    """Return one grid for each preset, or variant of one."""
    return [RunGrid(*group, metric) for group in by_setting(records).items()]


def rate(record: RunRecord) -> float:
    """Return the learning rate, 0 if the record has none."""
    value = finite_or_nan(record.config.get("learning_rate"))
    return 0.0 if math.isnan(value) else value


def finished(records: Iterable[RunRecord]) -> list[RunRecord]:
    return [record for record in records if record.finished]


def grouped(
    records: Iterable[RunRecord], key: Callable[[RunRecord], K]
) -> dict[K, list[RunRecord]]:
    """Group records by key, in order of appearance."""
    groups: dict[K, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


COMPARED = ("preset", "parameterization", "learning_rate", "seed")
"""Fields of a config in which the runs of a grid differ."""


def by_setting(
    records: Iterable[RunRecord],
    compared: tuple[str, ...] = (),
    name: Callable[[RunRecord], str] | None = None,
) -> dict[str, list[RunRecord]]:
    """Group records by label. Where runs of one label have several settings, because folders were
    copied or a preset has changed, each setting is a group, named by the fields that differ.

    Args:
        records: of one experiment.
        compared: fields in which the runs of a group may differ, besides `COMPARED`.
        name: the label of a record; by default `label`.
    """
    groups: dict[str, list[RunRecord]] = {}
    for text, runs in grouped(records, name or label).items():
        configs = [run.config for run in runs]
        common = set.intersection(*(set(config) for config in configs))  # older ones have fewer
        differing = sorted(
            field
            for field in common.difference(COMPARED, compared)
            if any(config[field] != configs[0][field] for config in configs)
        )

        def setting(run: RunRecord, text: str = text, differing: list[str] = differing) -> str:
            changes = [f"{field}={run.config[field]}" for field in differing]
            return f"{text}{',' if '+' in text else '+'}{','.join(changes)}" if changes else text

        groups.update(grouped(runs, setting))
    return dict(sorted(groups.items()))


def label(record: RunRecord) -> str:
    """Return the preset and the settings changed from it, such as ``cpu+epochs=3``.

    This is the folder below the experiment's name if it is the preset's; else the preset alone.
    """
    parts = record.folder.parts
    for above, below in reversed([*pairwise(parts)]):
        if above == record.experiment and below.partition("+")[0] == record.preset:
            return below
    return record.preset
