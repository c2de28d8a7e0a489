"""Claims 18, 20 and 24: read from the records of the experiments (sections 5.1 to 5.4).

Runs are compared if they have equal settings, except those in `COMPARED`. Each parameterization is
taken at its best learning rate by the experiment's own criterion; seeds that chose the rate are not
averaged into the result, unless there are no others. Differences are paired by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from weightnorm.lab import classify, dqn, draw, vae
from weightnorm.lab.claims.claim import (
    NOT_MEASURED,
    NOT_SHOWN,
    Context,
    Outcome,
    Statement,
    Verdict,
    above,
    at_least,
    below,
    claim,
    equivalent,
    interval,
    percent,
    weakest,
)
from weightnorm.lab.claims.learning_rates import MARGIN
from weightnorm.lab.config import completed, find_preset, scientific_fields
from weightnorm.lab.records import (
    RunRecord,
    distinct_runs,
    find_records,
)
from weightnorm.lab.results import PARTS, best_learning_rate, run_frame
from weightnorm.lab.statistics import (
    Interval,
    paired_differences,
    variance_ratio_interval,
)

STANDARD, WEIGHT_NORM, BATCH_NORM = "standard", "weight-norm", "batch-norm"
MEAN_ONLY, BOTH = "mean-only-batch-norm", "weight-norm-mean-only"
INITIAL_G = "initial_g"
"""A setting of DRAW's weight norm, which the paper does not give: every value is compared with the
same standard runs, and the best counts."""
COMPARED = ("parameterization", "learning_rate", "seed", INITIAL_G)
"""Fields in which the runs of a comparison may differ. All others must be equal."""
BOUND, TRAINING, SCORE = "test_negative_elbo", "train_error", "train_score"
GAMES = ("breakout", "enduro", "seaquest", "space-invaders")
TENFOLD = 10.0

BySeed = Mapping[int, float]
"""Seed → the result of a run; infinite if it diverged."""
Value = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class Runs:
    """Finished runs of one experiment that differ in the fields of `COMPARED` only."""

    label: str
    """Preset, data or game, what differs from the preset, and whether it is the paper's size."""
    at_scale: bool
    """Whether all settings but the compared ones are the paper's."""
    arms: dict[str, list[RunRecord]]
    """Parameterization → runs at its best learning rate; weight norm once for each `INITIAL_G`."""
    rates: dict[str, tuple[float, int]]
    """Parameterization → its best learning rate, and how many were tried."""

    @property
    def subject(self) -> str:
        """The data set or game."""
        config = next(iter(self.arms.values()))[0].config
        return str(config.get("game", config.get("data", "")))

    @property
    def n(self) -> int:
        return sum(map(len, self.arms.values()))

    def by_seed(self, arm: str, value: Value) -> BySeed:
        """Seed → value, infinite where there is none."""
        return {
            record.config["seed"]: math.inf if (x := value(record)) is None else x
            for record in self.arms[arm]
        }

    def difference(self, a: str, b: str, value: Value) -> Interval:
        """a − b, unbounded with fewer than two common seeds."""
        return interval(paired_differences(self.by_seed(a, value), self.by_seed(b, value)))

    def ratio(self, a: str, b: str, value: Value) -> Interval:
        """a / b − 1, paired by seed; unbounded with fewer than two common seeds."""
        x, y = self.by_seed(a, value), self.by_seed(b, value)
        return interval([x[seed] / y[seed] - 1 for seed in sorted(x.keys() & y.keys())])


def comparable_runs(folder: Path, experiment: ModuleType) -> list[Runs]:
    """Group the finished runs of an experiment below a folder, except those of the demo."""
    settings: dict[str, list[RunRecord]] = {}
    for record in distinct_runs(find_records(folder)[0])[0] if folder.is_dir() else []:
        mine = record.experiment == experiment.NAME and record.preset != "demo"
        if mine and record.finished and _is_complete(record):
            config = completed(record.config, experiment.Config)
            fields = {k: v for k, v in config.items() if k not in COMPARED}
            settings.setdefault(json.dumps(fields, sort_keys=True), []).append(record)
    return [_runs(records, experiment) for _, records in sorted(settings.items())]


def _is_complete(record: RunRecord) -> bool:
    """Whether the config says what is compared; a damaged one may not."""
    kinds = {"parameterization": str, "learning_rate": float | int, "seed": int}
    return all(isinstance(record.config.get(field), kind) for field, kind in kinds.items())


def _runs(records: Sequence[RunRecord], experiment: ModuleType) -> Runs:
    highest = experiment.METRIC in getattr(experiment, "HIGHER_IS_BETTER", ())
    runs = run_frame(records)
    runs["arm"] = [_arm(record) for record in records]
    arms, rates = {}, {}
    for arm, tried in runs.groupby("arm"):
        found = best_learning_rate(tried, experiment.METRIC, highest)
        rate = tried["learning_rate"].min() if found is None else found
        own = tried[tried["learning_rate"] == rate]
        chose = tried.loc[tried["learning_rate"] != rate, "seed"]
        fresh = own[~own["seed"].isin(chose)]
        arms[str(arm)] = [*(fresh if len(fresh) > 1 else own)["record"]]
        rates[str(arm)] = float(rate), tried["learning_rate"].nunique()
    at_scale = is_at_scale(records[0], experiment)
    size = "" if at_scale else ", smaller than the paper's"
    return Runs(f"{experiment.NAME} {_label(records[0], experiment)}{size}", at_scale, arms, rates)


def _arm(record: RunRecord) -> str:
    """The parameterization, with the initial g of weight norm unless it is ‖v‖."""
    how, g = record.config["parameterization"], record.config.get(INITIAL_G, "norm")
    return str(how) if g == "norm" or how != WEIGHT_NORM else f"{how}, {INITIAL_G}={g}"


def is_at_scale(record: RunRecord, experiment: ModuleType) -> bool:
    """Whether a run has the paper's settings, except those that are compared, and the game."""
    config = completed(record.config, experiment.Config)
    paper = scientific_fields(find_preset(experiment.PRESETS, "paper", str(config.get("data", ""))))
    return all(config[k] == v for k, v in paper.items() if k not in (*COMPARED, "preset", "game"))


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


def most_complete(found: Sequence[Runs], arms: Sequence[str], subject: str = "") -> Runs | None:
    """The setting with all of these arms that has most runs; the paper's size if there is one."""
    having = [
        runs
        for runs in found
        if {*arms} <= runs.arms.keys() and (not subject or runs.subject == subject)
    ]
    return max(having, key=lambda runs: (runs.at_scale, runs.n), default=None)


def final(metric: str) -> Value:
    """Return a function that reads a metric of the result."""
    return lambda record: record.final(metric)


def over_epochs(column: str, part: str) -> Value:
    """Return a function that averages a metric over a part of the epochs; None with a gap."""

    def mean(record: RunRecord) -> float | None:
        values = record.column(column)
        complete = values and None not in values and record.diverged is None
        numbers = [x for x in values[PARTS[part](len(values))] if x is not None]
        return fmean(numbers) if complete else None

    return mean


def not_measured(count: int, reason: str = "no records") -> list[Outcome]:
    return [Outcome(reason, NOT_MEASURED, 0)] * count


# CIFAR-10


EARLY = over_epochs(TRAINING, "first quarter")
LATE, TEST = final(TRAINING), final("test_error")
SIMILAR = f"within ±{100 * MARGIN:g} % of each other"
PAIRED = "errors relative to each other, paired by seed, at the rate with the lowest training error"


@claim(
    18,
    "5.1",
    Statement(
        "Weight norm and batch norm train faster than standard",
        "a significant speed-up",
        f"training error, mean over all epochs: both below standard's; {PAIRED}",
    ),
    Statement(
        "Batch norm makes slightly more progress per epoch than weight norm early on",
        "slightly more",
        "training error, first quarter of the epochs: batch norm's below weight norm's",
    ),
    Statement(
        "In the later stage they optimize at about the same speed",
        "about the same",
        f"final training error of batch norm and weight norm {SIMILAR}",
    ),
    Statement(
        "Mean-only batch norm with plain weights lags behind",
        "still lagging behind",
        "final training error of mean-only batch norm with plain weights above that of weight norm "
        "and that of batch norm",
    ),
    Statement(
        "Weight norm, standard and mean-only batch norm have similar test errors",
        "8.46, 8.43 and 8.52 %",
        f"final test errors {SIMILAR}, all three pairs",
    ),
    Statement(
        "Batch norm does significantly better than these",
        "8.05 %",
        "final test error below that of each of the three",
    ),
    Statement(
        "Weight norm with mean-only batch norm does much better than mean-only batch norm with "
        "plain weights",
        "7.31 against 8.52 %",
        f"final test error lower by at least {100 * MARGIN:g} %",
    ),
    Statement(
        "Weight norm with mean-only batch norm has the lowest test error",
        "7.31 %, the others 8.05 to 8.52 %",
        "final test error below that of each of the other four",
    ),
    Statement(
        "The best learning rate of weight norm is ten times that of standard",
        "0.003 and 0.0003",
        "the ratio of the rates with the lowest training error, of at least four tried, is 10 or "
        "more (to within a factor of 1.2)",
    ),
    records=True,
)
def cifar10_ordering(context: Context) -> list[Outcome]:
    arms = (STANDARD, WEIGHT_NORM, BATCH_NORM, MEAN_ONLY, BOTH)
    runs = most_complete(comparable_runs(context.records, classify), arms, "cifar10")
    if runs is None:
        return not_measured(9, "no records of all parameterizations")
    return [*cifar10_statements(runs), rate_statement(runs)]


def cifar10_statements(runs: Runs) -> list[Outcome]:
    def judged(
        pairs: Sequence[tuple[str, str]], value: Value, rule: Callable[[Interval], Verdict]
    ) -> Outcome:
        found = {f"{a} / {b}": runs.ratio(a, b, value) for a, b in pairs}
        n = min(len(runs.by_seed(a, value).keys() & runs.by_seed(b, value)) for a, b in pairs)
        text = ", ".join(f"{name} {percent(x)}" for name, x in found.items())
        return Outcome(f"{runs.label}: {text}", weakest(*map(rule, found.values())), n, found)

    lower, behind = partial(below, threshold=0.0), partial(above, threshold=0.0)
    similar = partial(equivalent, margin=MARGIN)

    def much_lower(x: Interval) -> Verdict:
        return at_least(Interval(-x.value, -x.high, -x.low), MARGIN)

    three = (STANDARD, WEIGHT_NORM, MEAN_ONLY)
    speed = over_epochs(TRAINING, "all epochs")
    return [
        judged([(WEIGHT_NORM, STANDARD), (BATCH_NORM, STANDARD)], speed, lower),
        judged([(BATCH_NORM, WEIGHT_NORM)], EARLY, lower),
        judged([(BATCH_NORM, WEIGHT_NORM)], LATE, similar),
        judged([(MEAN_ONLY, WEIGHT_NORM), (MEAN_ONLY, BATCH_NORM)], LATE, behind),
        judged([*zip(three, (*three[1:], three[0]), strict=True)], TEST, similar),
        judged([(BATCH_NORM, other) for other in three], TEST, lower),
        judged([(BOTH, MEAN_ONLY)], TEST, much_lower),
        judged([(BOTH, other) for other in (*three, BATCH_NORM)], TEST, lower),
    ]


def rate_statement(runs: Runs) -> Outcome:
    (ours, tried), (plain, others) = runs.rates[WEIGHT_NORM], runs.rates[STANDARD]
    text = f"{runs.label}: {ours:g} and {plain:g}, of {tried} and {others} tried"
    if min(tried, others) < 4:
        return Outcome(text, NOT_MEASURED, 0)
    exact = Interval(ours / plain, ours / plain, ours / plain)
    return Outcome(text, at_least(exact, TENFOLD / 1.2), 1)


# Auto-encoders, DRAW, DQN


@claim(
    20,
    "5.2–5.4",
    Statement(
        "With weight norm the auto-encoder converges to a better bound",
        "better, on MNIST and CIFAR-10",
        "final bound on the test set minus standard's, in nats: below 0 (negative bound) on both",
    ),
    Statement(
        "…with lower variance",
        "lower, between seeds, on MNIST",
        "ratio of the variances between seeds of the final bound on MNIST, F interval: below 1",
    ),
    Statement(
        "With weight norm DRAW converges significantly faster",
        "significantly",
        "negative bound on the test set, mean over all epochs, minus standard's, in nats: below 0",
    ),
    Statement(
        "With weight norm DQN progresses more quickly on Space Invaders",
        "more quickly",
        "score of the games in training, mean over all epochs, minus standard's: above 0",
    ),
    Statement(
        "…and reaches a better final result",
        "best score 2,179 against 1,779",
        "the same for the last quarter of the epochs",
    ),
    records=True,
)
def other_experiments(context: Context) -> list[Outcome]:
    auto_encoders = comparable_runs(context.records, vae)
    bounds = [
        compared(most_complete(auto_encoders, (STANDARD, WEIGHT_NORM), data), final(BOUND), below)
        for data in ("mnist", "cifar10")
    ]
    drawn = most_complete(comparable_runs(context.records, draw), (STANDARD,))
    games = comparable_runs(context.records, dqn)
    invaders = most_complete(games, (STANDARD, WEIGHT_NORM), "space-invaders")
    return [
        together(bounds),
        variance_outcome(most_complete(auto_encoders, (STANDARD, WEIGHT_NORM), "mnist")),
        compared(drawn, over_epochs(BOUND, "all epochs"), below),
        compared(invaders, over_epochs(SCORE, "all epochs"), above),
        compared(invaders, over_epochs(SCORE, "last quarter"), above),
    ]


def compared(
    runs: Runs | None, value: Value, rule: Callable[[Interval, float], Verdict]
) -> Outcome:
    """Weight norm minus standard; of several initial values of g the best counts."""
    arms = runs.arms if runs is not None else {}
    names = [arm for arm in arms if arm.startswith(WEIGHT_NORM) and arm != BOTH]
    if runs is None or not names:
        return not_measured(1)[0]
    found = {arm: runs.difference(arm, STANDARD, value) for arm in names}
    order: list[Verdict] = ["not reproduced", NOT_SHOWN, "reproduced"]
    verdict = max((rule(x, 0.0) for x in found.values()), key=order.index)
    seeds = [len(runs.by_seed(arm, value).keys() & runs.by_seed(STANDARD, value)) for arm in names]
    text = ", ".join(f"{arm} {x}" for arm, x in found.items())
    return Outcome(f"{runs.label}: {text}", verdict, max(seeds), found)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """One statement about several data sets: the weakest verdict."""
    return Outcome(
        "; ".join(outcome.value for outcome in outcomes),
        weakest(*(outcome.verdict for outcome in outcomes)),
        min(outcome.n for outcome in outcomes),
    )


def variance_outcome(runs: Runs | None) -> Outcome:
    if runs is None:
        return not_measured(1)[0]
    ours, plain = ([*runs.by_seed(arm, final(BOUND)).values()] for arm in (WEIGHT_NORM, STANDARD))
    ratio = variance_ratio_interval(ours, plain)
    verdict = below(ratio, 1.0)
    return Outcome(f"{runs.label}: {ratio}", verdict, min(len(ours), len(plain)), {"ratio": ratio})


@claim(
    24,
    "5.4",
    Statement(
        "On average over four games weight norm improves DQN",
        "Breakout 403 against 410, Enduro 1,448 : 1,250, Seaquest 7,375 : 7,188, Space Invaders "
        "2,179 : 1,779",
        "score of the games in training, last quarter of the epochs: mean over four games of "
        "weight norm / standard − 1 above 0, by game a mean over seeds",
    ),
    records=True,
)
def four_games(context: Context) -> list[Outcome]:
    found: dict[str, Any] = {}
    for game in GAMES:
        runs = most_complete(comparable_runs(context.records, dqn), (STANDARD, WEIGHT_NORM), game)
        if runs is not None:
            value = over_epochs(SCORE, "last quarter")
            found[game] = runs.ratio(WEIGHT_NORM, STANDARD, value)
    text = ", ".join(f"{game} {percent(x)}" for game, x in found.items()) or "no records"
    if len(found) < len(GAMES):
        return [Outcome(f"{text}; {len(found)} of 4 games", NOT_MEASURED, len(found))]
    mean = interval([x.value for x in found.values()])
    return [Outcome(f"{text}; mean {percent(mean)}", above(mean, 0.0), len(found), found)]
