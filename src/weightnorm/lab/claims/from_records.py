"""Claims 18 and 20: what the experiments' own records say."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    NEEDS_SCALE,
    NOT_MEASURED,
    QUALITATIVELY,
    Measured,
    Verdict,
    claim,
)
from weightnorm.lab.claims.context import Workbench
from weightnorm.lab.runs.records import RunRecord, find_records

Means = dict[str, float]
"""Parameterization → a result at its best learning rate, mean over seeds; lower is better."""
Groups = dict[str, list[RunRecord]]
"""Parameterization → its runs."""
PRESETS = ("paper", "cpu")
"""The larger one counts."""


@claim(
    18, "5.1", "On CIFAR-10 all normalized parameterizations train faster than standard, and "
    "weight norm with mean-only batch norm has the lowest test error",
    paper="test error 7.31 % against 8.05–8.52 %",
    measured="test error in the records, at the learning rate with the lowest training error",
)  # fmt: skip
def cifar_orderings(bench: Workbench) -> Measured:
    found = best(bench.runs, "classify", "train_error")
    preset = next((p for p in PRESETS if p in found), "")
    groups = found.get(preset, {})
    trains, tests = (means(groups, metric) for metric in ("train_error", "test_error"))
    said = ", ".join(f"{way} {100 * error:.2f} %" for way, error in sorted(tests.items()))
    value = f"{preset}: {said}" if groups else "no records"
    verdict = orderings_verdict(trains, tests, preset == "paper")
    numbers = {"train_error": trains, "test_error": tests}
    return Measured(value, verdict, sum(map(len, groups.values())), numbers)


def orderings_verdict(trains: Means, tests: Means, at_scale: bool) -> Verdict:
    """Both orderings; a smaller run than the paper's can show them no more than qualitatively."""
    if len(trains) < 5:
        return NOT_MEASURED
    faster = all(error < trains["standard"] for way, error in trains.items() if way != "standard")
    lowest = min(tests, key=tests.__getitem__) == "weight-norm-mean-only"
    if faster and lowest:
        return HOLDS if at_scale else QUALITATIVELY
    return FAILS if at_scale else (QUALITATIVELY if faster or lowest else FAILS)


EXPERIMENTS = {
    "vae": ("test_negative_elbo", "data", 1.0),
    "draw": ("test_negative_elbo", "", 1.0),
    "dqn": ("best_score", "game", -1.0),
}
"""What each is judged by, what it may be done on, and −1 where higher is better."""


@claim(
    20, "5.2–5.4", "With weight norm the auto-encoder reaches a better bound, and DRAW and DQN "
    "learn faster and reach better results",
    paper="better, faster",
    measured="the result in the records, at the best learning rate",
)  # fmt: skip
def other_experiments(bench: Workbench) -> Measured:
    numbers: dict[str, Means] = {}
    said, n = [], 0
    for experiment, (metric, subject, sign) in EXPERIMENTS.items():
        found = best(bench.runs, experiment, metric, subject, sign)
        for place, groups in found.items():
            name = f"{experiment} {place}"
            numbers[name] = {way: sign * x for way, x in means(groups, metric).items()}
            said.append(f"{name}: {', '.join(_shown(way, g, metric) for way, g in groups.items())}")
            n += sum(map(len, groups.values()))
        if not found:
            numbers[experiment] = {}
    return Measured("; ".join(said) or "no records", better_verdict(numbers), n, {**numbers})


def _shown(way: str, group: list[RunRecord], metric: str) -> str:
    values = [(record.result or {})[metric] for record in group]
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
    return f"{way} {fmean(values):.2f}{spread}"


def better_verdict(numbers: dict[str, Means]) -> Verdict:
    """Weight norm ahead in every experiment that has both; these runs are smaller than the
    paper's."""
    pairs = [x for x in numbers.values() if {"standard", "weight-norm"} <= set(x)]
    if not pairs:
        return NOT_MEASURED
    ahead = [x["weight-norm"] < x["standard"] for x in pairs]
    if not any(ahead):
        return FAILS
    return QUALITATIVELY if all(ahead) and len(pairs) == len(numbers) else NEEDS_SCALE


def means(found: Groups, metric: str) -> Means:
    return {way: fmean((x.result or {})[metric] for x in group) for way, group in found.items()}


def best(
    runs: Path, experiment: str, metric: str, subject: str = "", sign: float = 1.0
) -> dict[str, Groups]:
    """Preset (and subject: data, game) → finished runs of each parameterization at the learning
    rate with the lowest mean."""
    places: dict[str, dict[str, dict[float, list[RunRecord]]]] = {}
    for record in find_records(runs)[0] if runs.is_dir() else []:
        result = record.result or {}
        if record.experiment == experiment and record.preset != "demo" and metric in result:
            place = " ".join([record.preset, *([record.config[subject]] if subject else [])])
            way, rate = record.config["parameterization"], record.config["learning_rate"]
            rates = places.setdefault(place, {}).setdefault(way, {})
            rates.setdefault(rate, []).append(record)

    def mean(group: list[RunRecord]) -> float:
        return fmean(sign * (record.result or {})[metric] for record in group)

    return {
        place: {way: min(rates.values(), key=mean) for way, rates in ways.items()}
        for place, ways in sorted(places.items())
    }
