"""Claims 4 and 5: growth of ‖v‖, and its dependence on gradient noise (section 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm import normalized_weights
from weightnorm.diagnostics import effective_step, v_norms
from weightnorm.lab.claims.claim import (
    NOT_REPRODUCED,
    REPRODUCED,
    Context,
    Outcome,
    Statement,
    Verdict,
    above,
    claim,
    figure,
    paired,
    percent,
    series,
    weakest,
)
from weightnorm.lab.statistics import mean_interval

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "gradient descent": lambda p, rate: torch.optim.SGD(p, lr=rate),
    "momentum 0.9": lambda p, rate: torch.optim.SGD(p, lr=rate, momentum=0.9),
    "Adam": lambda p, rate: torch.optim.Adam(p, lr=rate),
}
QUICK_RATES = {"gradient descent": 0.1, "momentum 0.9": 0.02, "Adam": 0.003}
FULL_RATES = {"gradient descent": 0.003, "momentum 0.9": 0.001, "Adam": 0.003}
"""Learning rates at which no seed diverges (plain gradient descent at 0.01 lost one of five)."""
BATCHES = (128, 32, 8)
"""Smaller batches have noisier gradients with the same mean."""
ROUNDING = 1e-12


@claim(
    4,
    "2.1",
    Statement(
        "Under gradient descent ‖v‖ never decreases: ‖v′‖ = √(1+c²)·‖v‖ with c = ‖Δv‖/‖v‖",
        "exact",
        "no unit shrinks in any step of training, and the relative deviation from √(1+c²) is below "
        "10⁻⁹, float64",
    ),
    Statement(
        "With momentum or Adam ‖v‖ grows too",
        "qualitative",
        "growth of the median unit in training, relative to its start: above 0 with both",
    ),
)
def monotone_growth(context: Context) -> list[Outcome]:
    parts = [(name, seed) for name in OPTIMIZERS for seed in context.seeds]
    found = dict(zip(parts, context.map(growth_in_training, parts), strict=True))
    rows = {name: [found[name, seed] for seed in context.seeds] for name in OPTIMIZERS}
    lines = [
        series(name, range(len(x[0]["curve"])), zip(*(row["curve"] for row in x), strict=True))
        for name, x in rows.items()
    ]
    chart = figure("‖v‖ over training", "step", "mean ‖v‖ / initial", lines)
    plain = rows.pop("gradient descent")
    shrinking, off = (max(row[key] for row in plain) for key in ("shrinking", "pythagoras"))
    growth = {name: [row["growth"] for row in x] for name, x in rows.items()}
    texts = [
        f"{name}: {percent(mean_interval(growth[name]))}, "
        f"{100 * max(row['shrinking'] for row in x):.2g} % of unit-steps shrink"
        for name, x in rows.items()
    ]
    exact = REPRODUCED if shrinking == 0 and off <= 1e-9 else NOT_REPRODUCED
    value = f"{100 * shrinking:.2g} % of unit-steps shrink; deviation {off:.1e}"
    numbers = {name: [{**row, "curve": None} for row in x] for name, x in rows.items()}
    n = len(context.seeds)
    return [
        Outcome(value, exact, n, {"shrinking": shrinking, "deviation": off}),
        Outcome("; ".join(texts), growth_verdict(growth), n, numbers, (chart,)),
    ]


def growth_verdict(growth: Mapping[str, Sequence[float]]) -> Verdict:
    """‖v‖ must grow with every optimizer."""
    return weakest(*(above(mean_interval(x), 0.0) for x in growth.values()))


def growth_in_training(context: Context, name: str, seed: int) -> dict[str, Any]:
    """Share of unit-steps that shrink ‖v‖, growth of the median unit, deviation from √(1+c²)."""
    found, off = lengths_in_training(context, name, context.size(150, 60), seed)
    return {
        "shrinking": (found.diff(dim=0) < -ROUNDING * found[:-1]).double().mean().item(),
        "growth": (found[-1] / found[0]).median().item() - 1,
        "pythagoras": off,
        "curve": (found.mean(1) / found[0].mean()).tolist(),
    }


def make_optimizer(context: Context, model: nn.Module, name: str) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](model.parameters(), context.size(FULL_RATES, QUICK_RATES)[name])


def lengths_in_training(context: Context, name: str, steps: int, seed: int) -> tuple[Tensor, float]:
    """‖v‖ of every unit at every step, (steps + 1, units), and the largest relative deviation from
    √(‖v‖² + ‖Δv‖²)."""
    problem = context.problem("cifar10 at 16×16")
    model = problem.network("weight-norm", seed).double()
    optimizer = make_optimizer(context, model, name)
    rows, worst = [lengths(model)], 0.0
    before = directions(model)

    def after_step(_: int, model: nn.Module) -> None:
        nonlocal before, worst
        now = directions(model)
        rows.append(lengths(model))
        moved = torch.cat(
            [(b - a).flatten(1).norm(dim=1) for a, b in zip(before, now, strict=True)]
        )
        expected = (rows[-2].square() + moved.square()).sqrt()
        worst = max(worst, ((rows[-1] - expected).abs() / expected).max().item())
        before = now

    problem.train(model, optimizer, steps=steps, batch=50, seed=seed, after_step=after_step)
    return torch.stack(rows), worst


@claim(
    5,
    "2.1",
    Statement(
        "Noisier gradients make ‖v‖ grow faster",
        "qualitative",
        f"growth of ‖v‖ at one rate from a partly trained network, batches of "
        f"{', '.join(map(str, BATCHES))}: above "
        "that of the next larger batch, at each",
    ),
    Statement(
        "…and so the effective step g/‖v‖ smaller",
        "qualitative",
        "the same for the factor by which g/‖v‖ shrinks",
    ),
)
def noise_and_growth(context: Context) -> list[Outcome]:
    rows = context.map(growth_by_noise, [(seed,) for seed in context.seeds])
    growth, shrinking = (
        {batch: [row[key][i] for row in rows] for i, batch in enumerate(BATCHES)}
        for key in ("growth", "shrinking")
    )
    line = series("weight norm", BATCHES, growth.values())
    title = "Growth of ‖v‖ against the noise of the gradient"
    chart = figure(title, "batch size", "final ‖v‖ / initial ‖v‖ − 1", (line,), log_x=True)
    grown = ", ".join(f"batch {b}: {percent(mean_interval(growth[b]))}" for b in BATCHES)
    step = ", ".join(f"batch {b}: × {1 / (1 + fmean(shrinking[b])):.3g}" for b in BATCHES)
    n = len(context.seeds)
    return [
        Outcome(grown, noise_verdict(growth), n, {"growth": growth}, (chart,)),
        Outcome(f"effective step: {step}", noise_verdict(shrinking), n, {"shrinking": shrinking}),
    ]


def noise_verdict(values: Mapping[int, Sequence[float]]) -> Verdict:
    """At each batch size more than at the next larger one, paired by seed."""
    batches = sorted(values, reverse=True)
    steps = [paired(values[smaller], values[larger]) for larger, smaller in pairwise(batches)]
    return weakest(*(above(step, 0.0) for step in steps))


def growth_by_noise(context: Context, seed: int) -> dict[str, list[float]]:
    """By batch size, by how much ‖v‖ grows and the effective step shrinks; means over units."""
    steps, problem = context.size(200, 100), context.problem("cifar10 at 16×16")
    # At first the mean gradient makes v grow; noise dominates once it has become small.
    pretrained = problem.network("weight-norm", seed)
    optimizer = make_optimizer(context, pretrained, "gradient descent")
    problem.train(pretrained, optimizer, steps=steps, batch=BATCHES[0], seed=seed)
    found: dict[str, list[float]] = {"growth": [], "shrinking": []}
    for batch in BATCHES:
        model = deepcopy(pretrained)
        start, first = lengths(model), steps_of(model)
        optimizer = make_optimizer(context, model, "gradient descent")
        problem.train(model, optimizer, steps=steps, batch=batch, seed=seed + 1000)
        found["growth"].append((lengths(model) / start).mean().item() - 1)
        found["shrinking"].append((first / steps_of(model)).mean().item() - 1)
    return found


def lengths(model: nn.Module) -> Tensor:
    return torch.cat([*v_norms(model).values()])


def steps_of(model: nn.Module) -> Tensor:
    return torch.cat([*effective_step(model).values()])


def directions(model: nn.Module) -> list[Tensor]:
    return [pair.v.detach().clone() for pair in normalized_weights(model).values()]
