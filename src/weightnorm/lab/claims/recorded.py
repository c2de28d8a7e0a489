"""Claims 18 and 20: what the experiments' own records say."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

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
from weightnorm.lab.claims.workbench import Workbench
from weightnorm.lab.records import RunRecord, find_records

Means = dict[str, float]
"""Parameterization → a result at its best learning rate, mean over seeds; lower is better."""


@claim(
    18, "5.1", "On CIFAR-10 all normalized parameterizations train faster than standard, and "
    "weight norm with mean-only batch norm has the lowest test error",
    paper="test error 7.31 % against 8.05–8.52 %",
    measured="test error in the records, at the learning rate with the lowest training error",
)  # fmt: skip
def cifar_orderings(bench: Workbench) -> Measured:
    found = best(bench.runs, "classify", "train_error")
    trains, tests = (means(found, metric) for metric in ("train_error", "test_error"))
    presets = {record.preset for group in found.values() for record in group}
    said = ", ".join(f"{way} {100 * error:.2f} %" for way, error in sorted(tests.items()))
    value = f"{', '.join(sorted(presets))}: {said}" if found else "no records"
    verdict = orderings_verdict(trains, tests, "paper" in presets)
    numbers = {"train_error": trains, "test_error": tests}
    return Measured(value, verdict, sum(map(len, found.values())), numbers)


def orderings_verdict(trains: Means, tests: Means, at_scale: bool) -> Verdict:
    """Both orderings; a smaller run than the paper's can show them no more than qualitatively."""
    if len(trains) < 5:
        return NOT_MEASURED
    faster = all(error < trains["standard"] for way, error in trains.items() if way != "standard")
    lowest = min(tests, key=tests.__getitem__) == "weight-norm-mean-only"
    if faster and lowest:
        return HOLDS if at_scale else QUALITATIVELY
    return FAILS if at_scale else (QUALITATIVELY if faster or lowest else FAILS)


EXPERIMENTS = {"vae": "test_negative_elbo", "draw": "test_negative_elbo", "dqn": "best_score"}


@claim(
    20, "5.2–5.4", "With weight norm the auto-encoder reaches a better bound, and DRAW and DQN "
    "learn faster and reach better results",
    paper="better, faster",
    measured="the result in the records, at the best learning rate",
)  # fmt: skip
def other_experiments(bench: Workbench) -> Measured:
    numbers: dict[str, Means] = {}
    for experiment, metric in EXPERIMENTS.items():
        sign = -1.0 if metric == "best_score" else 1.0  # a score is better if it is higher
        found = best(bench.runs, experiment, metric, sign)
        numbers[experiment] = {way: sign * x for way, x in means(found, metric).items()}
    said = [
        f"{experiment}: {', '.join(f'{way} {-x:.2f}' for way, x in found.items())}"
        for experiment, found in numbers.items()
        if found
    ]
    n = sum(len(found) for found in numbers.values())
    return Measured("; ".join(said) or "no records", better_verdict(numbers), n, {**numbers})


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


def means(found: dict[str, list[RunRecord]], metric: str) -> Means:
    return {way: fmean((x.result or {})[metric] for x in group) for way, group in found.items()}


def best(runs: Path, experiment: str, metric: str, sign: float = 1.0) -> dict[str, list[RunRecord]]:
    """Finished runs of each parameterization at the learning rate with the lowest mean."""
    groups: dict[str, dict[float, list[RunRecord]]] = {}
    for record in find_records(runs)[0] if runs.is_dir() else []:
        result = record.result or {}
        if record.experiment == experiment and record.preset != "demo" and metric in result:
            way, rate = record.config["parameterization"], record.config["learning_rate"]
            groups.setdefault(way, {}).setdefault(rate, []).append(record)

    def mean(group: list[RunRecord]) -> float:
        return fmean(sign * (record.result or {})[metric] for record in group)

    return {way: min(rates.values(), key=mean) for way, rates in groups.items()}
