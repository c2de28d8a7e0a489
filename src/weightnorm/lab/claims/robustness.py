"""Claims 6 and 19: the range of learning rates that work, and the log-scale of g."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from statistics import fmean
from typing import Any

import torch

from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Figure,
    Interval,
    Measured,
    Verdict,
    above,
    bootstrap,
    claim,
    series,
    weakest,
)
from weightnorm.lab.claims.context import Workbench

WAYS = ("standard", "weight-norm", "weight-norm-log", "batch-norm")
RATES = tuple(10 ** (x / 2) for x in range(-9, 2))
"""Five decades around the best rate of each, two to a decade: 0.00003 … 3."""
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}
WITHIN = 0.1
"""A rate works if its final loss has come at least this near to the best of its parameterization,
as a part of the way from chance."""
OTHERS = (0.05, 0.2, 0.4)
"""What a reader may want instead; recorded, without a say in the verdict."""
MUCH_WIDER = 0.5
"""Decades."""

Table = dict[str, list[list[float]]]
"""Way → seeds → rates → a number at the end of the run."""


@claim(
    6, "2.1", "Weight norm, like batch norm, works well over a much wider range of learning rates "
    "than the standard parameterization",
    paper="much wider",
    measured=f"decades of rates whose final loss comes within {100 * WITHIN:.0f} % of the way to "
    f"the best; much wider: {MUCH_WIDER} decades more than standard",
)  # fmt: skip
def learning_rates(bench: Workbench) -> Measured:
    numbers: dict[str, Any] = {"rates": RATES}
    figures, wider = [], {}
    for name, (losses, _) in final_tables(bench).items():
        widths = {way: [width(row) for row in losses[way]] for way in WAYS}
        others = {
            f"{100 * within:.0f} %": {
                way: fmean(width(row, within=within) for row in losses[way]) for way in WAYS
            }
            for within in OTHERS
        }
        numbers[name] = {"losses": losses, "decades": widths, "mean decades within": others}
        figures.append(figure(name, losses))
        for way in ("weight-norm", "batch-norm"):
            pairs = zip(widths[way], widths["standard"], strict=True)
            wider[f"{way}, {name}"] = bootstrap([a - b for a, b in pairs])
    said = [
        f"{name}: "
        + ", ".join(f"{way} {fmean(w):.2g}" for way, w in numbers[name]["decades"].items())
        for name in OPTIMIZERS
    ]
    more = ", ".join(f"{key} {interval}" for key, interval in wider.items())
    verdict = weakest(*(above(interval, MUCH_WIDER) for interval in wider.values()))
    value = f"{'; '.join(said)}. More than standard: {more}"
    return Measured(value, verdict, len(bench.seeds), numbers, tuple(figures))


@claim(
    19, "2", "g = eˢ works no better than g itself, and is slightly slower to train",
    paper="test error not significantly different, training slightly slower",
    measured="after equally many steps at the best rate of each, log-scale less linear: training "
    "loss, and test error",
)  # fmt: skip
def log_scale(bench: Workbench) -> Measured:
    """From the runs of claim 6."""
    slower, worse = {}, {}
    for name, (losses, errors) in final_tables(bench).items():
        rates = {way: best_rate(losses[way]) for way in ("weight-norm-log", "weight-norm")}
        slower[name], worse[name] = (
            bootstrap(
                [
                    log[rates["weight-norm-log"]] - linear[rates["weight-norm"]]
                    for log, linear in zip(
                        table["weight-norm-log"], table["weight-norm"], strict=True
                    )
                ]
            )
            for table in (losses, errors)
        )
    value = "; ".join(
        f"{name}: loss {slower[name]}, test error {100 * worse[name].mean:+.2g} % "
        f"[{100 * worse[name].low:.2g}, {100 * worse[name].high:.2g}]"
        for name in OPTIMIZERS
    )
    verdict = log_verdict([*slower.values()], [*worse.values()])
    numbers = {"loss": slower, "test error": worse}
    return Measured(value, verdict, len(bench.seeds), numbers)


def log_verdict(slower: list[Interval], worse: list[Interval]) -> Verdict:
    """Better anywhere, in training or in the test, refutes it; slower to train everywhere is the
    claim; else it is no better, but no slower."""
    if any(x.high < 0 for x in (*slower, *worse)):
        return FAILS
    return HOLDS if all(x.low > 0 for x in slower) else QUALITATIVELY


def best_rate(losses: list[list[float]]) -> int:
    """Which rate has the lowest mean over seeds."""
    means = [fmean(column) for column in zip(*losses, strict=True)]
    return means.index(min(means))


def final_tables(bench: Workbench) -> dict[str, tuple[Table, Table]]:
    """Optimizer → losses and test errors. Claims 6 and 19 look at the same runs."""
    parts = [(*run, rate) for run in product(OPTIMIZERS, WAYS, bench.seeds) for rate in RATES]
    ends = iter(bench.each(short_run, parts))
    found: dict[str, tuple[Table, Table]] = {}
    for name in OPTIMIZERS:
        found[name] = {way: [] for way in WAYS}, {way: [] for way in WAYS}
        for way, _ in product(WAYS, bench.seeds):
            row = [next(ends) for _ in RATES]
            for table, key in zip(found[name], ("loss", "error"), strict=True):
                table[way].append([end[key] for end in row])
    return found


def short_run(
    bench: Workbench, optimizer: str, way: str, seed: int, rate: float
) -> dict[str, float]:
    """Where a network stands after so many steps at this rate."""
    steps, batch = (40, 64) if bench.quick else (200, 50)
    model = bench.network(way, seed)
    losses = bench.train(
        model,
        OPTIMIZERS[optimizer](model.parameters(), rate),
        steps=steps,
        batch=batch,
        seed=seed,
        may_break=True,
    )
    broke = len(losses) < steps
    return {
        "loss": at_the_end(losses, steps),
        "error": 0.9 if broke else bench.test_error(model),
    }


def at_the_end(losses: list[float], steps: int) -> float:
    """Mean loss over the last fifth; a run that broke off or rose above chance counts as chance."""
    chance = math.log(10)
    if len(losses) < steps:
        return chance
    tail = losses[-max(1, steps // 5) :]
    mean = sum(tail) / len(tail)
    return min(mean, chance) if math.isfinite(mean) else chance


def width(losses: list[float], *, within: float = WITHIN) -> float:
    """Decades that the working rates span: each stands for the gap to its neighbours.

    >>> round(width([2.3, 2.3, 0.1, 0.12, 0.2, *[2.3] * 6]), 6)
    1.5
    """
    best, chance = min(losses), math.log(10)
    works = [loss <= best + within * (chance - best) for loss in losses]
    gap = math.log10(RATES[-1] / RATES[0]) / (len(RATES) - 1)
    return gap * sum(works) if best < chance else 0.0


def figure(name: str, losses: Table) -> Figure:
    spoken = {"weight-norm-log": "log-scale weight norm"}
    lines = [
        series(spoken.get(way, way), RATES, zip(*rows, strict=True)) for way, rows in losses.items()
    ]
    title = f"Final training loss against the learning rate, {name}"
    return Figure(title, "learning rate", "training loss", tuple(lines), log_x=True)
