"""Claims 6 and 19: the range of learning rates that work in short runs, and the log-scale of g.

For claim 6 in longer training see `learning_rates`.
"""

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
    Measured,
    Verdict,
    above,
    claim,
    series,
    weakest,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.runs.selection import best_learning_rate
from weightnorm.lab.statistics import Interval, mean_interval

PARAMETERIZATIONS = ("standard", "weight-norm", "weight-norm-log", "batch-norm")
RATES = tuple(10 ** (x / 2) for x in range(-9, 2))
"""Five decades around the best rates, two per decade: 0.00003 … 3."""
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}
WITHIN = 0.1
"""A learning rate works if its final loss is within this share of the way from the best loss of its
parameterization to that of chance."""
OTHERS = (0.05, 0.2, 0.4)
"""Recorded as well; the verdict does not depend on them."""
MUCH_WIDER = 0.5
"""Decades."""

Table = dict[str, list[list[float]]]
"""Parameterization → seeds → learning rates → a number at the end of the run."""


@claim(
    6, "2.1", "Weight norm, like batch norm, works well over a much wider range of learning rates "
    "than the standard parameterization",
    paper="much wider",
    measured=f"decades of rates whose final loss is within {100 * WITHIN:.0f} % of the best, as a "
    f"share of the way to chance; much wider: {MUCH_WIDER} decades more than standard",
)  # fmt: skip
def learning_rates(context: Context) -> Measured:
    numbers: dict[str, Any] = {"rates": RATES}
    figures, wider = [], {}
    for name, (losses, _) in final_tables(context).items():
        widths = {how: [width(row) for row in losses[how]] for how in PARAMETERIZATIONS}
        others = {
            f"{100 * within:.0f} %": {
                how: fmean(width(row, within=within) for row in losses[how])
                for how in PARAMETERIZATIONS
            }
            for within in OTHERS
        }
        numbers[name] = {"losses": losses, "decades": widths, "mean decades within": others}
        figures.append(figure(name, losses))
        for how in ("weight-norm", "batch-norm"):
            pairs = zip(widths[how], widths["standard"], strict=True)
            wider[f"{how}, {name}"] = mean_interval([a - b for a, b in pairs])
    texts = [
        f"{name}: "
        + ", ".join(f"{how} {fmean(w):.2g}" for how, w in numbers[name]["decades"].items())
        for name in OPTIMIZERS
    ]
    more = ", ".join(f"{key} {interval}" for key, interval in wider.items())
    verdict = weakest(*(above(interval, MUCH_WIDER) for interval in wider.values()))
    value = f"{'; '.join(texts)}. More than standard: {more}"
    return Measured(value, verdict, len(context.seeds), numbers, tuple(figures))


@claim(
    19, "2", "g = eˢ works no better than g itself, and is slightly slower to train",
    paper="test error not significantly different, training slightly slower",
    measured="difference between log-scale and linear after the same number of steps, each at its "
    "best learning rate: training loss and test error",
)  # fmt: skip
def log_scale(context: Context) -> Measured:
    """Uses the runs of claim 6."""
    slower, worse = {}, {}
    for name, (losses, errors) in final_tables(context).items():
        rates = {how: best_rate(losses[how]) for how in ("weight-norm-log", "weight-norm")}
        slower[name], worse[name] = (
            mean_interval(
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
        f"{name}: loss {slower[name]}, test error {100 * worse[name].value:+.2g} % "
        f"[{100 * worse[name].low:.2g}, {100 * worse[name].high:.2g}]"
        for name in OPTIMIZERS
    )
    verdict = log_verdict([*slower.values()], [*worse.values()])
    numbers = {"loss": slower, "test error": worse}
    return Measured(value, verdict, len(context.seeds), numbers)


def log_verdict(slower: list[Interval], worse: list[Interval]) -> Verdict:
    """Does not hold if log-scale is better in training or test; holds if it is slower with every
    optimizer; else qualitatively: no better, but no slower."""
    if any(x.high < 0 for x in (*slower, *worse)):
        return FAILS
    return HOLDS if all(x.low > 0 for x in slower) else QUALITATIVELY


def best_rate(losses: list[list[float]]) -> int:
    """Return the index of the best rate, by the rule of `best_learning_rate`."""
    columns = (dict(enumerate(column)) for column in zip(*losses, strict=True))
    results = dict(zip(RATES, columns, strict=False))
    best = best_learning_rate(results)
    assert best is not None  # a run that breaks off has the loss of chance
    return RATES.index(best)


def final_tables(context: Context) -> dict[str, tuple[Table, Table]]:
    """Optimizer → losses and test errors; claims 6 and 19 share the runs."""
    parts = [
        (*run, rate)
        for run in product(OPTIMIZERS, PARAMETERIZATIONS, context.seeds)
        for rate in RATES
    ]
    ends = iter(context.map(short_run, parts))
    found: dict[str, tuple[Table, Table]] = {}
    for name in OPTIMIZERS:
        found[name] = {how: [] for how in PARAMETERIZATIONS}, {how: [] for how in PARAMETERIZATIONS}
        for how, _ in product(PARAMETERIZATIONS, context.seeds):
            row = [next(ends) for _ in RATES]
            for table, key in zip(found[name], ("loss", "error"), strict=True):
                table[how].append([end[key] for end in row])
    return found


def short_run(
    context: Context, optimizer: str, how: str, seed: int, rate: float
) -> dict[str, float]:
    """Train for 200 steps; final training loss and test error."""
    steps, batch = (40, 64) if context.quick else (200, 50)
    model = context.network(how, seed)
    losses = context.train(
        model,
        OPTIMIZERS[optimizer](model.parameters(), rate),
        steps=steps,
        batch=batch,
        seed=seed,
        may_diverge=True,
    )
    diverged = len(losses) < steps
    return {
        "loss": final_loss(losses, steps),
        "error": 0.9 if diverged else context.test_error(model),
    }


def final_loss(losses: list[float], steps: int) -> float:
    """Mean loss of the last fifth of the steps, at most that of chance, also after divergence."""
    chance = math.log(10)
    if len(losses) < steps:
        return chance
    tail = losses[-max(1, steps // 5) :]
    mean = sum(tail) / len(tail)
    return min(mean, chance) if math.isfinite(mean) else chance


def width(losses: list[float], *, within: float = WITHIN) -> float:
    """Decades of learning rates that work: their number times the gap between neighbours.

    >>> round(width([2.3, 2.3, 0.1, 0.12, 0.2, *[2.3] * 6]), 6)
    1.5
    """
    best, chance = min(losses), math.log(10)
    works = [loss <= best + within * (chance - best) for loss in losses]
    gap = math.log10(RATES[-1] / RATES[0]) / (len(RATES) - 1)
    return gap * sum(works) if best < chance else 0.0


def figure(name: str, losses: Table) -> Figure:
    names = {"weight-norm-log": "log-scale weight norm"}
    lines = [
        series(names.get(how, how), RATES, zip(*rows, strict=True)) for how, rows in losses.items()
    ]
    title = f"Final training loss against the learning rate, {name}"
    return Figure(title, "learning rate", "training loss", tuple(lines), log_x=True)
