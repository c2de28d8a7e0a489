"""Claims 18 and 20: read from the records of the experiments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any, Literal

from weightnorm.lab import classify, dqn, draw, vae
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
from weightnorm.lab.config import completed, find_preset, scientific_fields
from weightnorm.lab.records import RunRecord, by_seed, distinct_runs, find_records
from weightnorm.lab.runs.selection import best_learning_rate
from weightnorm.lab.statistics import mean_interval, paired_differences, variance_ratio_interval

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
    at_scale: bool
    """Whether all settings but the compared ones are the paper's."""
    by_parameterization: dict[str, list[RunRecord]]
    """Each at its best learning rate; weight norm once for each value of `INITIAL_G`."""

    def results(self, value: Callable[[RunRecord], float | None]) -> dict[str, BySeed]:
        """Parameterization → seed → value; a diverged run has an infinite one."""
        return {
            how: {
                record.config["seed"]: math.inf if (x := value(record)) is None else x
                for record in records
            }
            for how, records in self.by_parameterization.items()
        }

    @property
    def subject(self) -> str:
        """The data set or game."""
        config = next(iter(self.by_parameterization.values()))[0].config
        return str(config.get("game", config.get("data", "")))

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
        Runs(
            _label(records[0], experiment),
            is_at_scale(records[0], experiment),
            _at_best_rate(records, experiment),
        )
        for _, records in sorted(settings.items())
    ]


def is_at_scale(record: RunRecord, experiment: ModuleType) -> bool:
    """Whether a run has the paper's settings, except those that are compared, and the game."""
    config = completed(record.config, experiment.Config)
    paper = scientific_fields(find_preset(experiment.PRESETS, "paper", str(config.get("data", ""))))
    return all(config[k] == v for k, v in paper.items() if k not in (*COMPARED, "preset", "game"))


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
    cifar10 = [runs for runs in found if runs.subject == "cifar10"]
    complete = [runs for runs in cifar10 if len(runs.by_parameterization) >= 5]
    if not complete:
        return Measured("no records of all parameterizations", NOT_MEASURED, 0)
    runs = max(complete, key=lambda runs: (runs.at_scale, runs.n))
    train, test = (runs.results(final_value(metric)) for metric in ("train_error", "test_error"))
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
    verdict = ordering_verdict(faster.values(), lowest.values(), runs.at_scale)
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


@dataclass(frozen=True)
class Measure:
    """A number of a run by which weight norm is compared; lower is better."""

    name: str
    value: Callable[[RunRecord], float | None]
    sign: float = 1.0
    """−1 if the number is shown with the opposite sign."""


def final_value(metric: str, sign: float = 1.0) -> Callable[[RunRecord], float | None]:
    """Return a function that reads a metric of the result."""
    return lambda record: None if (x := record.final(metric)) is None else sign * x


def over_training(column: str, sign: float = 1.0) -> Callable[[RunRecord], float | None]:
    """Return a function that averages a metric over all epochs: the faster, the lower."""

    def mean(record: RunRecord) -> float | None:
        values = [x for x in record.column(column) if x is not None]
        complete = values and len(values) == len(record.metrics) and record.diverged is None
        return sign * fmean(values) if complete else None

    return mean


BOUND, SCORE = "test_negative_elbo", "score"
MEASURES: dict[ModuleType, tuple[Measure, ...]] = {
    vae: (Measure("final bound", final_value(BOUND)),),
    draw: (Measure("bound over training", over_training(BOUND)),),
    dqn: (
        Measure("best score", final_value("best_score", -1.0), -1.0),
        Measure("score over training", over_training(SCORE, -1.0), -1.0),
    ),
}
"""What the paper states of each experiment."""
JUDGED_GAMES = ("space-invaders",)
"""The paper's curves; on the other games its best scores differ in both directions."""


@claim(
    20, "5.2–5.4", "With weight norm the auto-encoder reaches a better bound, with less variance "
    "between seeds; DRAW learns faster; DQN learns faster and scores higher on Space Invaders",
    paper="better, faster",
    measured="auto-encoder: final bound, and the ratio of its variances; DRAW: mean bound over all "
    "epochs; DQN: best score, and mean score over all epochs; at the best learning rate, paired by "
    "seed",
)  # fmt: skip
def other_experiments(context: Context) -> Measured:
    outcomes: dict[str, dict[str, list[tuple[int, Outcome]]]] = {}
    numbers: dict[str, Any] = {}
    texts, n, at_scale = [], 0, True
    for experiment, measures in MEASURES.items():
        judged = outcomes.setdefault(experiment.NAME, {})
        for runs in comparable_runs(context.records, experiment):
            if STANDARD not in runs.by_parameterization or len(runs.by_parameterization) < 2:
                continue
            for measure in measures:
                name = f"{experiment.NAME} {runs.label}, {measure.name}"
                numbers[name] = runs.results(measure.value)
                found = {
                    how: comparisons(experiment, values, numbers[name][STANDARD])
                    for how, values in numbers[name].items()
                    if how.startswith(WEIGHT_NORM)
                }
                texts.append(f"{name}: {_described(numbers[name], found, measure.sign)}")
                if experiment is not dqn or runs.subject in JUDGED_GAMES:
                    for aspects in found.values():
                        for aspect, compared in aspects.items():
                            judged.setdefault(f"{name}{aspect}", []).append(compared)
            reached = [f"{how} {epochs_to_standard(runs, how, experiment)}" for how in found]
            texts.append(f"standard's best result is reached: {', '.join(reached)}")
            n += runs.n
            at_scale &= runs.at_scale
    verdict = better_verdict({name: judged_outcomes(x) for name, x in outcomes.items()}, at_scale)
    return Measured("; ".join(texts) or "no records", verdict, n, numbers)


def _described(
    values: Mapping[str, BySeed],
    found: Mapping[str, Mapping[str, tuple[int, Outcome]]],
    sign: float,
) -> str:
    """Mean and standard deviation of each parameterization, with the outcomes of weight norm."""
    texts = []
    for how, results in values.items():
        text = f"{how} {_mean_and_std([sign * x for x in results.values()])}"
        aspects = [f"{x}{aspect}" for aspect, (_, x) in found.get(how, {}).items()]
        texts.append(f"{text} ({', '.join(aspects)})" if aspects else text)
    return ", ".join(texts)


def comparisons(
    experiment: ModuleType, values: BySeed, standard: BySeed
) -> dict[str, tuple[int, Outcome]]:
    """Compare the mean, and for the auto-encoder the variance between seeds: number of seeds and
    outcome of each."""
    differences = paired_differences(values, standard)
    found = {"": (len(differences), outcome(differences))}
    if experiment is vae:
        found[" in variance"] = (min(map(len, (values, standard))), spread(values, standard))
    return found


def spread(values: BySeed, standard: BySeed) -> Outcome:
    """Whether the first varies less between seeds: by the interval of the ratio of variances."""
    interval = variance_ratio_interval([*values.values()], [*standard.values()])
    return "ahead" if interval.high < 1 else "behind" if interval.low > 1 else "not shown"


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


def epochs_to_standard(runs: Runs, how: str, experiment: ModuleType) -> str:
    """Describe with how many seeds standard's best result of the same seed is reached, and at which
    epoch in the mean."""
    column, sign = (SCORE, -1.0) if experiment is dqn else (BOUND, 1.0)

    def curve(record: RunRecord) -> list[float]:
        return [math.inf if y is None else sign * y for y in record.column(column)]

    standard = {x.config["seed"]: curve(x) for x in runs.by_parameterization[STANDARD]}
    epochs, seeds = [], 0
    for record in runs.by_parameterization[how]:
        best = min(standard.get(record.config["seed"], []), default=-math.inf)
        seeds += best > -math.inf
        reached = [i for i, y in enumerate(curve(record), 1) if y <= best]
        epochs += reached[:1] if best > -math.inf else []
    if not epochs:
        return f"with none of {seeds} seeds"
    total = max(map(len, standard.values()))
    after = f"after {fmean(epochs):.3g} of {total} epochs"
    return f"with {len(epochs)} of {seeds} seeds, {after}"


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
