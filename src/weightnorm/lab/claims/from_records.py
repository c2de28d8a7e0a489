"""Claims 18 and 20: read from the records of the experiments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any, Literal

from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    NOT_MEASURED,
    NOT_SHOWN,
    QUALITATIVELY,
    Measured,
    Verdict,
    claim,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.experiments import classify, dqn, draw, vae
from weightnorm.lab.runs.config import completed
from weightnorm.lab.runs.records import RunRecord, by_seed, distinct_runs, find_records
from weightnorm.lab.runs.selection import best_learning_rate
from weightnorm.lab.statistics import mean_interval, paired_differences

STANDARD, WEIGHT_NORM, MEAN_ONLY = "standard", "weight-norm", "weight-norm-mean-only"
INITIAL_G = "initial_g"
"""A setting of weight norm alone: runs of all its values are compared with the same standard runs.
Records from before it existed have its default."""
COMPARED = ("parameterization", "learning_rate", "seed", INITIAL_G)
"""Fields in which the runs of a comparison may differ. All others must be equal."""

BySeed = dict[int, float]
"""Seed → the result of a run, with the sign that makes lower better."""
Outcome = Literal["ahead", "behind", "not shown"]


@dataclass(frozen=True)
class Runs:
    """Finished runs of one experiment that differ in the fields of `COMPARED` only."""

    label: str
    """Preset, data or game, and what differs from the experiment's preset."""
    preset: str
    by_parameterization: dict[str, list[RunRecord]]
    """Each at its best learning rate; weight norm once for each value of `INITIAL_G`."""

    def results(self, metric: str, sign: float = 1.0) -> dict[str, BySeed]:
        """Parameterization → seed → result; a diverged run has an infinite one."""
        return {
            how: {
                record.config["seed"]: math.inf if (x := record.final(metric)) is None else sign * x
                for record in records
            }
            for how, records in self.by_parameterization.items()
        }

    @property
    def n(self) -> int:
        return sum(map(len, self.by_parameterization.values()))


def comparable_runs(folder: Path, experiment: ModuleType) -> list[Runs]:
    """Group the finished runs of an experiment below a folder, except those of the demo.

    Of each parameterization the runs at the best learning rate are kept, by the experiment's own
    criterion.
    """
    settings: dict[str, list[RunRecord]] = {}
    for record in distinct_runs(find_records(folder)[0])[0] if folder.is_dir() else []:
        mine = record.experiment == experiment.NAME and record.preset != "demo"
        if mine and record.finished and _is_complete(record):
            config = completed(record.config, experiment.Config)
            fields = {k: v for k, v in config.items() if k not in COMPARED}
            settings.setdefault(json.dumps(fields, sort_keys=True), []).append(record)
    return [
        Runs(_label(records[0], experiment), records[0].preset, _at_best_rate(records, experiment))
        for _, records in sorted(settings.items())
    ]


def _is_complete(record: RunRecord) -> bool:
    """Whether the config says what is compared; a damaged one may not."""
    kinds = {"parameterization": str, "learning_rate": float | int, "seed": int}
    return all(isinstance(record.config.get(field), kind) for field, kind in kinds.items())


def _label(record: RunRecord, experiment: ModuleType) -> str:
    """For instance ``cpu mnist`` or ``cpu cifar10 epochs=60``."""
    subjects = [str(record.config[f]) for f in ("data", "game") if f in record.config]
    name = " ".join([record.preset, *subjects[:1]])
    preset = experiment.PRESETS.get(name) or experiment.PRESETS.get(record.preset)
    defaults = json.loads(json.dumps(vars(preset), default=str)) if preset else {}
    differing = [
        f"{field}={value}"
        for field, value in record.config.items()
        if field not in (*COMPARED, "data", "game", "preset")
        and value != defaults.get(field, value)
    ]
    return " ".join([name, *differing])


def _at_best_rate(
    records: Iterable[RunRecord], experiment: ModuleType
) -> dict[str, list[RunRecord]]:
    groups: dict[str, dict[float, list[RunRecord]]] = {}
    for record in records:
        how, default = record.config["parameterization"], "norm"
        if how == WEIGHT_NORM and record.config.get(INITIAL_G, default) != default:
            how = f"{how}, {INITIAL_G}={record.config[INITIAL_G]}"
        rates = groups.setdefault(how, {})
        rates.setdefault(record.config["learning_rate"], []).append(record)
    metric = experiment.METRIC
    highest = metric in getattr(experiment, "HIGHER_IS_BETTER", ())
    best = {}
    for how, rates in sorted(groups.items()):
        results = {rate: by_seed(runs, metric) for rate, runs in rates.items()}
        chosen = best_learning_rate(results, highest)
        best[how] = rates[min(rates) if chosen is None else chosen]
    return best


def outcome(differences: list[float]) -> Outcome:
    """Whether the first of two is lower: ahead or behind if the interval of the mean difference
    excludes 0. One seed shows nothing."""
    if len(differences) < 2:
        return "not shown"
    interval = mean_interval(differences)
    return "ahead" if interval.high < 0 else "behind" if interval.low > 0 else "not shown"


@claim(
    18, "5.1", "On CIFAR-10 all normalized parameterizations train faster than standard, and "
    "weight norm with mean-only batch norm has the lowest test error",
    paper="test error 7.31 % against 8.05–8.52 %",
    measured="training and test error in the records, at the learning rate with the lowest "
    "training error, paired by seed",
)  # fmt: skip
def cifar10_ordering(context: Context) -> Measured:
    """Judge the setting with all parameterizations that has most runs, the paper's if there is."""
    found = comparable_runs(context.records, classify)
    complete = [runs for runs in found if len(runs.by_parameterization) >= 5]
    if not complete:
        return Measured("no records of all parameterizations", NOT_MEASURED, 0)
    runs = max(complete, key=lambda runs: (runs.preset == "paper", runs.n))
    train, test = (runs.results(metric) for metric in ("train_error", "test_error"))
    faster = {
        how: outcome(paired_differences(errors, train[STANDARD]))
        for how, errors in train.items()
        if how != STANDARD
    }
    lowest = {
        how: outcome(paired_differences(test[MEAN_ONLY], errors))
        for how, errors in test.items()
        if how != MEAN_ONLY
    }
    texts = [f"{how} {_percent(train[how])} and {_percent(test[how])}" for how in test]
    value = (
        f"{runs.label}, training and test error: {', '.join(texts)}. Trains faster than standard: "
        f"{_listed(faster)}. Test error of {MEAN_ONLY} below the others': {_listed(lowest)}"
    )
    numbers = {"train_error": train, "test_error": test, "faster": faster, "lowest": lowest}
    verdict = ordering_verdict(faster.values(), lowest.values(), runs.preset == "paper")
    return Measured(value, verdict, runs.n, numbers)


def ordering_verdict(
    faster: Iterable[Outcome], lowest: Iterable[Outcome], at_scale: bool
) -> Verdict:
    """Holds if every comparison of both statements is ahead at the paper's size; qualitatively at a
    smaller size, or if this is so for one statement and no comparison is behind. Does not hold if a
    comparison is behind."""
    faster, lowest = [*faster], [*lowest]
    shown = [all(x == "ahead" for x in statement) for statement in (faster, lowest)]
    if all(shown):
        return HOLDS if at_scale else QUALITATIVELY
    if "behind" in (*faster, *lowest):
        return FAILS
    return QUALITATIVELY if any(shown) else NOT_SHOWN


EXPERIMENTS: dict[ModuleType, tuple[str, str, float]] = {
    vae: ("test_negative_elbo", "test_negative_elbo", 1.0),
    draw: ("test_negative_elbo", "test_negative_elbo", 1.0),
    dqn: ("best_score", "score", -1.0),
}
"""Experiment → result that is judged, the same by epoch, and −1 where higher is better."""


@claim(
    20, "5.2–5.4", "With weight norm the auto-encoder reaches a better bound, and DRAW and DQN "
    "learn faster and reach better results",
    paper="better, faster",
    measured="final results in the records at the best learning rate, paired by seed; and the "
    "epoch at which weight norm reaches the standard parameterization's final result",
)  # fmt: skip
def other_experiments(context: Context) -> Measured:
    outcomes: dict[str, dict[str, list[tuple[int, Outcome]]]] = {}
    numbers: dict[str, Any] = {}
    texts, n, at_scale = [], 0, True
    for experiment, (metric, by_epoch, sign) in EXPERIMENTS.items():
        judged = outcomes.setdefault(experiment.NAME, {})
        for runs in comparable_runs(context.records, experiment):
            results = runs.results(metric, sign)
            if STANDARD not in results or len(results) < 2:
                continue
            name = f"{experiment.NAME} {runs.label}"
            parts = []
            for how, values in results.items():
                text = f"{how} {_mean_and_std([sign * x for x in values.values()])}"
                if how.startswith(WEIGHT_NORM):
                    differences = paired_differences(values, results[STANDARD])
                    judged.setdefault(name, []).append((len(differences), outcome(differences)))
                    epoch = epoch_reached(runs, how, by_epoch, sign)
                    text += f" ({judged[name][-1][1]}{epoch})"
                parts.append(text)
            texts.append(f"{name}: {', '.join(parts)}")
            numbers[name] = {how: {**values} for how, values in results.items()}
            n += runs.n
            at_scale &= runs.preset == "paper"
    verdict = better_verdict({name: judged_outcomes(x) for name, x in outcomes.items()}, at_scale)
    return Measured("; ".join(texts) or "no records", verdict, n, numbers)


def judged_outcomes(comparisons: Mapping[str, list[tuple[int, Outcome]]]) -> list[Outcome]:
    """The outcome on each data set or game of an experiment.

    Several initial values of g are alternatives, of which the paper names none: the best outcome
    counts. A comparison of one seed counts only if there is no other.
    """
    several = {k: x for k, x in comparisons.items() if max(n for n, _ in x) > 1}
    order: list[Outcome] = ["ahead", "not shown", "behind"]
    return [
        min((found for _, found in alternatives), key=order.index)
        for alternatives in (several or comparisons).values()
    ]


def better_verdict(outcomes: Mapping[str, list[Outcome]], at_scale: bool) -> Verdict:
    """Holds if every experiment was run and is ahead everywhere, qualitatively if the runs are
    smaller than the paper's; does not hold if none is ahead and one is behind; else not shown."""
    found = [x for experiment in outcomes.values() for x in experiment]
    if not found:
        return NOT_MEASURED
    if all(outcomes.values()) and set(found) == {"ahead"}:
        return HOLDS if at_scale else QUALITATIVELY
    return FAILS if "ahead" not in found and "behind" in found else NOT_SHOWN


def epoch_reached(runs: Runs, how: str, column: str, sign: float) -> str:
    """At which epoch, in the mean over seeds, the standard's last result is reached; as text."""
    ends = {x.config["seed"]: x.column(column) for x in runs.by_parameterization[STANDARD]}
    epochs = []
    for record in runs.by_parameterization[how]:
        last = (ends.get(record.config["seed"]) or [None])[-1]
        curve = record.column(column)
        if last is not None:
            reached = [
                i for i, y in enumerate(curve, 1) if y is not None and sign * y <= sign * last
            ]
            epochs.append((reached or [len(curve) + 1])[0])
    total = max((len(column) for column in ends.values()), default=0)
    if not epochs or fmean(epochs) > total:
        return ""
    return f"; reaches standard's final result after {fmean(epochs):.3g} of {total} epochs"


def _percent(values: BySeed) -> str:
    return _mean_and_std([100 * x for x in values.values()], " %")


def _mean_and_std(values: list[float], unit: str = "") -> str:
    finite = [x for x in values if math.isfinite(x)]
    diverged = f", {len(values) - len(finite)} diverged" if len(finite) < len(values) else ""
    if not finite:
        return f"(n = 0{diverged})"
    spread = f" ± {stdev(finite):.2g}" if len(finite) > 1 else ""
    return f"{fmean(finite):.2f}{spread}{unit} (n = {len(finite)}{diverged})"


def _listed(outcomes: Mapping[str, Outcome]) -> str:
    return ", ".join(f"{how} {found}" for how, found in outcomes.items())
