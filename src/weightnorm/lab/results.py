"""Records of runs as two data frames, and everything that is computed from them.

`run_frame` has a row for each run, `epoch_frame` one for each epoch. A `Comparison` holds the runs
of one setting: methods at several learning rates and seeds. Reports, tables and the summary of a
sweep read the best learning rates, curves and paired differences from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from weightnorm.lab.records import RunRecord, is_number
from weightnorm.lab.statistics import Interval, mean_interval, paired_differences

FINISHED, DIVERGED, UNFINISHED = "finished", "diverged", "unfinished"
ALWAYS_VARIED = ("preset", "parameterization", "learning_rate", "seed")
"""Fields in which the runs of one setting differ by design."""
PARTS: dict[str, Callable[[int], slice]] = {
    "first quarter": lambda n: slice(max(n // 4, 1)),
    "all epochs": lambda n: slice(n),
    "last quarter": lambda n: slice(max(n - max(n // 4, 1), 0), n),
    "last epoch": lambda n: slice(max(n - 1, 0), n),
    "first half": lambda n: slice(n // 2),
    "second half": lambda n: slice(n // 2, n),
    "last five": lambda n: slice(max(n - 5, 0), n),
}
"""Parts of training, as epochs of all n."""


def run_frame(records: Iterable[RunRecord]) -> pd.DataFrame:
    """Return one row per run: its config, ``state``, and every final metric as ``final_…``.

    A final metric is the result's, or else that of the last epoch. It is NaN if it is not a finite
    number, and for runs that diverged or are not finished.
    """
    rows = []
    for i, record in enumerate(records):
        state = DIVERGED if record.diverged else FINISHED if record.finished else UNFINISHED
        last = {**(record.metrics[-1] if record.metrics else {}), **(record.result or {})}
        rate, seed = (record.config.get(name) for name in ("learning_rate", "seed"))
        row = {
            **record.config,
            **{f"final_{k}": number(v) if state == FINISHED else math.nan for k, v in last.items()},
            "run": i,
            "record": record,
            "state": state,
            "learning_rate": float(rate) if is_number(rate) and rate is not None else 0.0,
            # A damaged config must not hide a result.
            "seed": seed if isinstance(seed, int) else -1 - i,
        }
        rows.append(row)
    frame = pd.DataFrame(rows, dtype=object).set_index("run")
    finals = [name for name in frame if str(name).startswith("final_")]
    typed: pd.DataFrame = frame.astype(
        {**dict.fromkeys(finals, float), "learning_rate": float, "seed": int}
    )
    return typed


def epoch_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per run and epoch of a `run_frame`: every metric, NaN where it is missing."""
    rows = [
        {**{k: number(v) for k, v in row.items()}, "run": run, "epoch": epoch(row, count)}
        for run, record in runs["record"].items()
        for count, row in enumerate(record.metrics, 1)
    ]
    frame = pd.DataFrame(rows, columns=None if rows else ["run", "epoch"])
    last: pd.DataFrame = frame.drop_duplicates(["run", "epoch"], keep="last")
    return last


def epoch(row: Mapping[str, Any], count: int) -> float:
    found = number(row.get("epoch", count))
    return float(count) if math.isnan(found) else found


def number(value: Any) -> float:
    """Return a value of a record as a float, NaN if it is not a finite number."""
    return float(value) if is_number(value) else math.nan


def text(value: Any) -> str:
    """Return a config value as text.

    >>> text(0.25), text(None), text("mnist"), text(float("nan"))
    ('0.25', 'none', 'mnist', 'not recorded')
    """
    if isinstance(value, float):
        return "not recorded" if math.isnan(value) else f"{value:g}"
    return "none" if value is None else str(value)


def progress(record: RunRecord) -> str:
    """Return how many epochs of a run are done."""
    return f"epoch {len(record.metrics)} of {record.config.get('epochs', '?')}"


def best_learning_rate(runs: pd.DataFrame, metric: str, highest: bool = False) -> float | None:
    """Return the learning rate with the lowest mean final metric over seeds, or the highest.

    Rates are compared on the seeds that all of them have, if there are any. A rate at which a run
    diverged is chosen only if a run diverged at every rate: its mean over the other seeds is not
    the mean of the grid's other rates. Equal means are decided by the number of runs, then by the
    smaller rate.

    Args:
        runs: the runs of one method, of a `run_frame`.
        metric: the final metric.
        highest: whether a higher metric is better.

    Returns None if no run finished with a number.
    """
    ended = runs[runs["state"] != UNFINISHED].drop_duplicates(
        ["seed", "learning_rate"], keep="last"
    )
    if (column := f"final_{metric}") not in ended or not ended[column].notna().any():
        return None
    table = ended.pivot(index="seed", columns="learning_rate", values=column)
    count = table.count()
    lost = count < ended.groupby("learning_rate").size()
    table = table.loc[:, count > 0]
    whole = table.loc[:, ~lost[table.columns]]
    common = (table if whole.empty else whole).dropna().index
    means = table.loc[common].mean().fillna(table.mean())
    order = pd.DataFrame({"lost": lost, "mean": -means if highest else means, "count": -count})
    return float(order.loc[table.columns].sort_values([*order]).index[0])


# — settings —


def folder_label(record: RunRecord) -> str:
    """Return the preset and the settings changed from it, such as ``cpu+epochs=3``.

    This is the folder below the experiment's name if it is the preset's; else the preset alone.
    """
    for above, below in reversed([*pairwise(record.folder.parts)]):
        if above == record.experiment and below.partition("+")[0] == record.preset:
            return below
    return record.preset


def setting_labels(
    runs: pd.DataFrame, method_fields: Iterable[str] = (), free_fields: Iterable[str] = ()
) -> pd.Series[str]:
    """Return the setting of each run: its preset and what differs from it.

    Where runs of one label have several settings, because folders were copied or a preset has
    changed, the fields that differ are appended.

    Args:
        runs: of one experiment.
        method_fields: fields that belong to the method, such as the optimizer.
        free_fields: further fields whose default depends on the method.
    """
    own = {name.replace("_", "-") for name in method_fields}

    def without_method(record: RunRecord) -> str:
        preset, _, changes = folder_label(record).partition("+")
        kept = [x for x in changes.split(",") if x and x.partition("=")[0] not in own]
        return "+".join([preset, ",".join(kept)]) if kept else preset

    labels = runs["record"].map(without_method)
    for label, group in runs.groupby(labels):
        configs = [record.config for record in group["record"]]
        common = set.intersection(*map(set, configs))  # older ones have fewer
        differing = sorted(
            field
            for field in common.difference(ALWAYS_VARIED, method_fields, free_fields)
            if any(config[field] != configs[0][field] for config in configs)
        )
        for run, config in zip(group.index, configs, strict=True) if differing else ():
            changes = ",".join(f"{field}={config[field]}" for field in differing)
            labels[run] = f"{label}{',' if '+' in str(label) else '+'}{changes}"
    return labels


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs of one setting that differ in method, learning rate and seed.

    Every method is compared at its best learning rate: that with the best final value of `metric`.
    A column is named by its metric, for the final value, or by ``metric:part`` for the mean over a
    part of training, such as ``score:last quarter``.
    """

    runs: pd.DataFrame
    """A `run_frame` with a column ``method``; methods in the order in which they are listed."""
    metric: str
    highest: bool = False
    """Whether the highest metric is the best; else the lowest."""

    @cached_property
    def epochs(self) -> pd.DataFrame:
        return epoch_frame(self.runs)

    @cached_property
    def methods(self) -> list[str]:
        return [*dict.fromkeys(self.runs["method"])]

    @cached_property
    def rates(self) -> list[tuple[str, float]]:
        """Every method and learning rate, in order."""
        pairs = {*zip(self.runs["method"], self.runs["learning_rate"], strict=True)}
        return sorted(pairs, key=lambda pair: (self.methods.index(pair[0]), pair[1]))

    @cached_property
    def best(self) -> dict[str, float]:
        """Best learning rate of each method; while nothing has finished, that with most epochs."""
        chosen = {}
        for method in self.methods:
            runs = self.runs[self.runs["method"] == method]
            best = best_learning_rate(runs, self.metric, self.highest)
            if best is None:
                done = runs["record"].map(lambda record: len(record.metrics))
                best = float(runs.loc[done.astype(int).idxmax(), "learning_rate"])
            chosen[method] = best
        return chosen

    def at(self, method: str, rate: float | None = None) -> pd.DataFrame:
        """Return the runs of a method at a learning rate, by default its best."""
        rate = self.best[method] if rate is None else rate
        where = (self.runs["method"] == method) & (self.runs["learning_rate"] == rate)
        found: pd.DataFrame = self.runs[where]
        return found

    def finished(self, method: str, rate: float | None = None) -> pd.DataFrame:
        """Return the runs of `at` that have ended, whether or not they diverged."""
        runs = self.at(method, rate)
        found: pd.DataFrame = runs[runs["state"] != UNFINISHED]
        return found

    @cached_property
    def done(self) -> dict[str, pd.DataFrame]:
        """Finished runs of each method at its best learning rate, of the methods that have any."""
        found = {method: self.finished(method) for method in self.methods}
        return {method: runs for method, runs in found.items() if len(runs)}

    # — numbers of runs —

    def has(self, column: str) -> bool:
        """Whether any run has a number in a column."""
        metric, _, part = column.partition(":")
        frame, name = (self.epochs, metric) if part else (self.runs, f"final_{metric}")
        return name in frame and bool(frame[name].notna().any())

    def values(self, column: str, runs: pd.DataFrame) -> dict[int, float]:
        """Return seed → the number of a run in a column, NaN if it diverged."""
        metric, _, part = column.partition(":")
        if part:
            numbers = [self._over(run, metric, part) for run in runs.index]
        else:
            numbers = [*runs.get(f"final_{metric}", pd.Series(math.nan, runs.index))]
        return dict(zip(runs["seed"], numbers, strict=True))

    def _over(self, run: int, metric: str, part: str) -> float:
        if self.runs.loc[run, "state"] == DIVERGED:
            return math.nan
        values = self.series(run, metric)
        return float(values.iloc[PARTS[part](len(values))].mean())

    def series(self, run: int, metric: str) -> pd.Series[float]:
        """Return epoch → value of a metric, without the epochs that lack it."""
        rows = self.epochs[self.epochs["run"] == run]
        if metric not in rows:
            return pd.Series(dtype=float)
        found: pd.Series[float] = rows.set_index("epoch")[metric].dropna()
        return found

    def shortest_epoch(self, runs: pd.DataFrame) -> float:
        """Return the seconds of the shortest epoch: others share the machine with other work."""
        return min((self.series(run, "seconds").min() for run in runs.index), default=math.nan)

    def curve(self, metric: str, runs: pd.DataFrame) -> tuple[pd.DataFrame, int]:
        """Return mean and standard deviation of a metric over epochs, and the number of runs.

        Where one run has the metric and another does not, the mean is NaN, so that a line has a gap
        instead of a jump. Runs that never have the metric are not counted.
        """
        columns = {run: x for run in runs.index if len(x := self.series(run, metric))}
        table = pd.DataFrame(columns).sort_index()
        curve = {"mean": table.mean(axis=1, skipna=False), "std": table.std(axis=1, skipna=False)}
        return pd.DataFrame(curve), len(columns)

    def difference(self, column: str, method: str, baseline: str) -> tuple[Interval, int] | None:
        """Return how a method differs from another: the mean over the seeds that both have, with
        its 95 % interval, and the number of these seeds. None without a common seed.

        Seeds share the order of the data, so runs are paired.
        """
        if not {method, baseline} <= self.done.keys():
            return None
        ours, theirs = (self.values(column, self.done[m]) for m in (method, baseline))
        change = paired_differences(ours, theirs)
        return (mean_interval(change), len(change)) if change else None

    def epochs_to_common(self, metric: str) -> tuple[float, dict[str, list[float]]]:
        """Return the lowest value that all finished runs reach, and the epochs each run needs.

        Runs that diverged do not set the value. With fewer than two methods it is NaN.
        """
        curves = {
            method: {run: self.series(run, metric) for run in runs.index}
            for method, runs in self.done.items()
        }
        lowest = [
            min(values, default=math.nan)
            for each in curves.values()
            for run, values in each.items()
            if self.runs.loc[run, "state"] != DIVERGED
        ]
        if len(curves) < 2 or not lowest or any(map(math.isnan, lowest)):
            return math.nan, {}
        target = max(lowest)
        return target, {
            method: [float(min(x.index[x <= target], default=math.nan)) for x in each.values()]
            for method, each in curves.items()
        }


def mean_and_std(values: Iterable[float], scale: float = 1, digits: int = 2) -> str:
    """Format mean ± sample standard deviation, and n where some values are NaN.

    >>> nan = float("nan")
    >>> mean_and_std([0.1, 0.2], scale=100), mean_and_std([0.1]), mean_and_std([0.1, nan])
    ('15.00 ± 7.07', '0.10', '0.10 (n = 1 of 2)')
    """
    every = np.asarray([*values], dtype=float)
    finite = every[np.isfinite(every)]
    if not len(finite):
        return "—"
    spread = f" ± {finite.std(ddof=1) * abs(scale):.{digits}f}" if len(finite) > 1 else ""
    missing = f" (n = {len(finite)} of {len(every)})" if len(finite) < len(every) else ""
    return f"{finite.mean() * scale:.{digits}f}".replace("-", "−") + spread + missing


def signed(change: Interval, digits: int = 3) -> str:
    """Format a difference with its sign, and its interval if it has one; a dash if a run diverged.

    >>> signed(Interval(-0.0123, -0.02, -0.004)), signed(Interval(0.5, 0.5, 0.5), digits=1)
    ('−0.012 [−0.020, −0.004]', '+0.5')
    """
    if math.isnan(change.value):
        return "—"
    value, low, high = (f"{x:+.{digits}f}" for x in (change.value, change.low, change.high))
    low_to_high = f" [{low}, {high}]" if change.low < change.high else ""
    return f"{value}{low_to_high}".replace("-", "−")
