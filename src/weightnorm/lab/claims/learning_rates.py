"""Claim 6 over ten epochs: the range of learning rates at which MNIST is learned (section 2.1).

Started by ``weightnorm claims --long``. In the 200 steps of `robustness`, ‖v‖ grows by a few per
cent; the paper's argument for robustness is that ‖v‖ grows until the effective step is right, which
needs longer training.

The rule, fixed before the first run: a learning rate works if its final training loss, the mean of
the last 300 steps, is at most √10 times the lowest of all parameterizations and rates with the same
optimizer (means over seeds). The width is the number of rates that work times the half decade
between them. The verdict compares weight norm with standard, for both optimizers; batch norm is
reported beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from statistics import fmean
from typing import Any

import torch

from weightnorm.lab.claims.claim import (
    LONG_CLAIMS,
    Figure,
    Measured,
    above,
    claim,
    series,
    weakest,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.claims.robustness import MUCH_WIDER
from weightnorm.lab.statistics import Interval, mean_interval

PARAMETERIZATIONS = ("standard", "weight-norm", "batch-norm")
HALF_DECADE = 0.5
RATES = {
    "Adam": tuple(10 ** (x / 2) for x in range(-10, 0)),  # 10⁻⁵ … 10⁻⁰·⁵
    "momentum 0.9": tuple(10 ** (x / 2) for x in range(-8, 2)),  # 10⁻⁴ … 10⁰·⁵
}
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True),
    "momentum 0.9": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, fused=True),
}
QUICK_RATES = {name: rates[2::3] for name, rates in RATES.items()}
EPOCHS, BATCH, LAST_STEPS = 10, 100, 300
FACTOR = 10**0.5
"""A learning rate works if its final loss is at most this times the lowest of all."""
OTHER_FACTORS = (1.5, 2.0, 5.0, 10.0)
"""Recorded as well; the verdict does not depend on them."""
CHANCE = math.log(10)
"""Loss of ten equally likely classes."""

Losses = dict[str, list[list[float]]]
"""Parameterization → seeds → learning rates → final loss."""


@claim(
    6, "2.1", "Weight norm works well over a much wider range of learning rates than the standard "
    "parameterization, like batch norm",
    paper="much wider",
    measured="MNIST, 784–256–256–256–10, ten epochs: decades of learning rates whose mean training "
    f"loss of the last {LAST_STEPS} steps is at most √10 times the lowest of all; much wider: "
    f"{MUCH_WIDER} decades more than standard",
    registry=LONG_CLAIMS,
)  # fmt: skip
def long_learning_rates(context: Context) -> Measured:
    rates = QUICK_RATES if context.quick else RATES
    parts = [
        (name, how, seed, rate)
        for name in rates
        for how, seed in product(PARAMETERIZATIONS, context.seeds)
        for rate in rates[name]
    ]
    found = dict(zip(parts, context.map(final_result, parts), strict=True))
    numbers: dict[str, Any] = {}
    figures, wider, texts = [], {}, []
    for name in rates:

        def table(key: str, name: str = name) -> Losses:
            return {
                how: [
                    [found[name, how, seed, rate][key] for rate in rates[name]]
                    for seed in context.seeds
                ]
                for how in PARAMETERIZATIONS
            }

        losses = table("loss")
        decades = widths(losses)
        numbers[name] = {
            "rates": rates[name],
            "losses": losses,
            "test errors": table("test_error"),
            "decades": decades,
            "mean decades by factor": {
                f"{factor:g}": {how: fmean(x) for how, x in widths(losses, factor).items()}
                for factor in OTHER_FACTORS
            },
        }
        figures.append(_figure(context, name, rates[name], losses))
        for how in PARAMETERIZATIONS[1:]:
            wider[f"{how}, {name}"] = difference(decades[how], decades["standard"])
        means = (f"{how} {fmean(x):.2g}" for how, x in decades.items())
        texts.append(f"{name}: {', '.join(means)} decades")
    more = ", ".join(f"{key} {interval}" for key, interval in wider.items())
    verdict = weakest(*(above(wider[f"weight-norm, {name}"], MUCH_WIDER) for name in rates))
    value = f"{'; '.join(texts)}. More than standard: {more}"
    return Measured(value, verdict, len(context.seeds), numbers, tuple(figures))


def final_result(
    context: Context, optimizer: str, how: str, seed: int, rate: float
) -> dict[str, float]:
    """Train for ten epochs; final training loss and test error, those of chance if diverged."""
    model = context.network(how, seed)
    steps = len(context.data.train) // BATCH * EPOCHS
    losses = context.train(
        model,
        OPTIMIZERS[optimizer](model.parameters(), rate),
        steps=steps,
        batch=BATCH,
        seed=seed,
        may_diverge=True,
        epochs=True,
    )
    if len(losses) < steps or not math.isfinite(loss := fmean(losses[-LAST_STEPS:])):
        return {"loss": CHANCE, "test_error": 0.9}
    return {"loss": min(loss, CHANCE), "test_error": context.test_error(model)}


def widths(losses: Losses, factor: float = FACTOR) -> dict[str, list[float]]:
    """Decades of learning rates that work, by parameterization and seed.

    >>> widths({"a": [[0.1, 0.02, 0.3]], "b": [[0.06, 0.05, 0.01]]}, factor=2.0)
    {'a': [0.5], 'b': [0.5]}
    """
    lowest = min(fmean(by_seed) for rows in losses.values() for by_seed in zip(*rows, strict=True))
    return {
        how: [HALF_DECADE * sum(loss <= factor * lowest for loss in row) for row in rows]
        for how, rows in losses.items()
    }


def difference(a: list[float], b: list[float]) -> Interval:
    """Interval of a − b, paired by seed."""
    return mean_interval([x - y for x, y in zip(a, b, strict=True)])


def _figure(context: Context, optimizer: str, rates: tuple[float, ...], losses: Losses) -> Figure:
    lines = tuple(series(how, rates, zip(*rows, strict=True)) for how, rows in losses.items())
    data = "digits" if context.quick else "MNIST"
    return Figure(
        optimizer,
        "learning rate",
        "final training loss",
        lines,
        log_x=True,
        log_y=True,
        panels=f"Final training loss against the learning rate, {data}, ten epochs",
    )
