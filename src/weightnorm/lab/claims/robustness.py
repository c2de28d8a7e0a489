"""Claims 6 and 19: the range of learning rates that work, and the log-scale of g."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Figure,
    Interval,
    Measured,
    Series,
    Verdict,
    above,
    bootstrap,
    claim,
    weakest,
)
from weightnorm.lab.claims.workbench import Workbench

WAYS = ("standard", "weight-norm", "weight-norm-log", "batch-norm")
RATES = {
    "momentum": tuple(10 ** (x / 2) for x in range(-6, 4)),  # 0.001 … 30
    "Adam": tuple(10 ** (x / 2) for x in range(-8, 2)),  # 0.0001 … 3
}
"""Four and a half decades, two rates to a decade."""
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}
WITHIN = 0.1
"""A rate works if its final loss has come at least this near to the best of its parameterization,
as a part of the way from the start."""
MUCH_WIDER = 0.5
"""Decades."""

Losses = dict[str, list[list[float]]]
"""Way → seeds → rates → final loss."""


@claim(
    6, "2.1", "Weight norm, like batch norm, works well over a much wider range of learning rates "
    "than the standard parameterization",
    paper="much wider",
    measured=f"decades of rates whose final loss comes within {100 * WITHIN:.0f} % of the way to "
    f"the best; much wider: {MUCH_WIDER} decades more than standard",
)  # fmt: skip
def learning_rates(bench: Workbench) -> Measured:
    numbers: dict[str, Any] = {}
    figures, wider = [], {}
    for name in OPTIMIZERS:
        losses = final_losses(bench, name)
        widths = {way: [width(row, RATES[name]) for row in losses[way]] for way in WAYS}
        numbers[name] = {"losses": losses, "decades": widths}
        figures.append(figure(name, losses))
        for way in ("weight-norm", "batch-norm"):
            pairs = zip(widths[way], widths["standard"], strict=True)
            wider[f"{way}, {name}"] = bootstrap([a - b for a, b in pairs])
    said = [
        f"{name}: " + ", ".join(f"{way} {bootstrap(w).mean:.2g}" for way, w in x["decades"].items())
        for name, x in numbers.items()
    ]
    more = ", ".join(f"{key} {interval}" for key, interval in wider.items())
    verdict = weakest(*(above(interval, MUCH_WIDER) for interval in wider.values()))
    value = f"{'; '.join(said)}. More than standard: {more}"
    return Measured(value, verdict, len(bench.seeds), numbers, tuple(figures))


@claim(
    19, "2", "g = eˢ works no better than g itself, and is slightly slower to train",
    paper="no better, slightly slower",
    measured="final training loss at the best rate after equally many steps, log-scale less linear",
)  # fmt: skip
def log_scale(bench: Workbench) -> Measured:
    """At each one's best rate, the log-scale's final loss less the linear's."""
    differences = {}
    for name in OPTIMIZERS:
        losses = final_losses(bench, name)
        differences[name] = best_losses(losses["weight-norm-log"], losses["weight-norm"])
    value = ", ".join(f"{name} {interval}" for name, interval in differences.items())
    numbers = {name: tuple(interval) for name, interval in differences.items()}
    return Measured(value, log_verdict(list(differences.values())), len(bench.seeds), numbers)


def log_verdict(differences: list[Interval]) -> Verdict:
    """Better anywhere refutes it; worse everywhere is the claim; else no better, but no slower."""
    if any(x.high < 0 for x in differences):
        return FAILS
    return HOLDS if all(x.low > 0 for x in differences) else QUALITATIVELY


def best_losses(log: list[list[float]], linear: list[list[float]]) -> Interval:
    return bootstrap([min(a) - min(b) for a, b in zip(log, linear, strict=True)])


@cache
def final_losses(bench: Workbench, name: str) -> Losses:
    """Both claims look at the same runs."""
    steps, batch = (80, 64) if bench.quick else (150, 50)
    found: Losses = {way: [] for way in WAYS}
    for way in WAYS:
        for seed in bench.seeds:
            row = []
            for rate in RATES[name]:
                model = bench.network(way, seed)
                losses = bench.train(
                    model,
                    OPTIMIZERS[name](model.parameters(), rate),
                    steps=steps,
                    batch=batch,
                    seed=seed,
                )
                row.append(at_the_end(losses, steps))
            found[way].append(row)
    return found


def at_the_end(losses: list[float], steps: int) -> float:
    """Mean loss over the last fifth; a run that broke off or rose above chance counts as chance."""
    chance = math.log(10)
    if len(losses) < steps:
        return chance
    tail = losses[-max(1, steps // 5) :]
    mean = sum(tail) / len(tail)
    return min(mean, chance) if math.isfinite(mean) else chance


def width(losses: list[float], rates: tuple[float, ...]) -> float:
    """Decades that the working rates span: each stands for the gap to its neighbours.

    >>> round(width([2.3, 0.1, 0.12, 2.3], (0.01, 0.1, 1.0, 10.0)), 6)
    2.0
    """
    best, chance = min(losses), math.log(10)
    works = [loss <= best + WITHIN * (chance - best) for loss in losses]
    gap = math.log10(rates[-1] / rates[0]) / (len(rates) - 1)
    return gap * sum(works)


def figure(name: str, losses: Losses) -> Figure:
    series = []
    for way, rows in losses.items():
        stats = [bootstrap(list(column)) for column in zip(*rows, strict=True)]
        mean, low, high = zip(*stats, strict=True)
        series.append(Series(way, RATES[name], mean, low, high))
    title = f"Final training loss against the learning rate, {name}"
    return Figure(title, "learning rate", "training loss", tuple(series), log_x=True)
