"""Claims 4 and 5: growth of ‖v‖, and its dependence on gradient noise (section 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm.diagnostics import effective_step, v_norms
from weightnorm.inspection import find_normalized
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Figure,
    Measured,
    Verdict,
    claim,
    series,
    undecided,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.statistics import Interval, mean_interval

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
    4, "2.1", "Under gradient descent ‖v‖ never decreases: ‖v′‖ = √(1+c²)·‖v‖ with c = ‖Δv‖/‖v‖; "
    "with momentum or Adam it grows too",
    paper="exact; qualitative with momentum or Adam",
    measured="unit-steps at which ‖v‖ shrinks, and its growth in training, float64",
)  # fmt: skip
def monotone_growth(context: Context) -> Measured:
    parts = [(name, seed) for name in OPTIMIZERS for seed in context.seeds]
    found = dict(zip(parts, context.map(growth_in_training, parts), strict=True))
    numbers: dict[str, Any] = {}
    lines = []
    for name in OPTIMIZERS:
        rows = [found[name, seed] for seed in context.seeds]
        numbers[name] = {key: [row[key] for row in rows] for key in rows[0] if key != "curve"}
        curves = [row["curve"] for row in rows]
        lines.append(series(name, range(len(curves[0])), zip(*curves, strict=True)))
    said = [
        f"{name}: {100 * max(x['shrinking']):.2g} % of unit-steps shrink, ‖v‖ {gain(x['growth'])}"
        for name, x in numbers.items()
    ]
    exact = max(numbers["gradient descent"]["pythagoras"])
    value = f"{'; '.join(said)}; deviation from √(1+c²) {exact:.1e}"
    figure = Figure("‖v‖ over training", "step", "mean ‖v‖ / initial", tuple(lines))
    return Measured(value, growth_verdict(numbers), len(context.seeds), numbers, (figure,))


def growth_in_training(context: Context, name: str, seed: int) -> dict[str, Any]:
    """Share of unit-steps that shrink ‖v‖, growth of the median unit, deviation from √(1+c²)."""
    lengths, off = lengths_in_training(context, name, 60 if context.quick else 150, seed)
    return {
        "shrinking": (lengths.diff(dim=0) < -ROUNDING * lengths[:-1]).double().mean().item(),
        "growth": (lengths[-1] / lengths[0]).median().item(),
        "pythagoras": off,
        "curve": (lengths.mean(1) / lengths[0].mean()).tolist(),
    }


def gain(factors: list[float]) -> str:
    """Format the mean growth and its interval in per cent.

    >>> gain([1.5, 1.5])
    '+50 % [50, 50]'
    """
    mean, low, high = mean_interval([100 * (factor - 1) for factor in factors])
    return f"{mean:+.2g} % [{low:.2g}, {high:.2g}]"


def growth_verdict(numbers: dict[str, Any]) -> Verdict:
    """Exact with gradient descent; with the other optimizers ‖v‖ must grow."""
    plain = numbers["gradient descent"]
    if max(plain["shrinking"]) > 0 or max(plain["pythagoras"]) > 1e-9:
        return FAILS
    others = [x["growth"] for name, x in numbers.items() if name != "gradient descent"]
    return HOLDS if all(mean_interval(growth).low > 1 for growth in others) else QUALITATIVELY


def make_optimizer(context: Context, model: nn.Module, name: str) -> torch.optim.Optimizer:
    rates = QUICK_RATES if context.quick else FULL_RATES
    return OPTIMIZERS[name](model.parameters(), rates[name])


def lengths_in_training(context: Context, name: str, steps: int, seed: int) -> tuple[Tensor, float]:
    """‖v‖ of every unit at every step, (steps + 1, units), and the largest relative deviation from
    √(‖v‖² + ‖Δv‖²)."""
    model = context.network("weight-norm", seed).double()
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

    context.train(model, optimizer, steps=steps, batch=50, seed=seed, after_step=after_step)
    return torch.stack(rows), worst


@claim(
    5, "2.1", "Noisier gradients make ‖v‖ grow faster, and so the effective step g/‖v‖ smaller",
    paper="qualitative",
    measured="growth of ‖v‖ at one rate for three batch sizes (smaller ones are noisier), "
    "starting from a partly trained network",
)  # fmt: skip
def noise_and_growth(context: Context) -> Measured:
    rows = context.map(growth_by_noise, [(seed,) for seed in context.seeds])
    growth = {batch: [row["growth"][i] for row in rows] for i, batch in enumerate(BATCHES)}
    shrinking = {batch: [row["shrinking"][i] for row in rows] for i, batch in enumerate(BATCHES)}
    said = ", ".join(f"batch {b}: ‖v‖ {gain(growth[b])}" for b in BATCHES)
    step = ", ".join(f"{1 / mean_interval(shrinking[b]).value:.3g}" for b in BATCHES)
    value = f"{said}; effective step × {step}"
    line = series("weight norm", BATCHES, growth.values())
    title = "Growth of ‖v‖ against the noise of the gradient"
    figure = Figure(title, "batch size", "final ‖v‖ / initial ‖v‖", (line,), log_x=True)
    numbers = {"growth": growth, "shrinking_of_the_effective_step": shrinking}
    verdict = noise_verdict(differences(growth), differences(shrinking))
    return Measured(value, verdict, len(context.seeds), numbers, (figure,))


def growth_by_noise(context: Context, seed: int) -> dict[str, list[float]]:
    """By batch size, the factors by which ‖v‖ grows and the effective step shrinks; unit means."""
    steps = 100 if context.quick else 200
    # At first the mean gradient makes v grow; noise dominates once it has become small.
    pretrained = context.network("weight-norm", seed)
    optimizer = make_optimizer(context, pretrained, "gradient descent")
    context.train(pretrained, optimizer, steps=steps, batch=BATCHES[0], seed=seed)
    found: dict[str, list[float]] = {"growth": [], "shrinking": []}
    for batch in BATCHES:
        model = deepcopy(pretrained)
        start, first = lengths(model), steps_of(model)
        optimizer = make_optimizer(context, model, "gradient descent")
        context.train(model, optimizer, steps=steps, batch=batch, seed=seed + 1000)
        found["growth"].append((lengths(model) / start).mean().item())
        found["shrinking"].append((first / steps_of(model)).mean().item())
    return found


def differences(values: dict[int, list[float]]) -> list[Interval]:
    """Difference between each batch size and the next larger one, paired by seed."""
    batches = sorted(values, reverse=True)
    return [
        mean_interval([b - a for a, b in zip(values[larger], values[smaller], strict=True)])
        for larger, smaller in pairwise(batches)
    ]


def noise_verdict(faster: list[Interval], smaller: list[Interval]) -> Verdict:
    """Holds if ‖v‖ grows faster and the effective step is smaller at each smaller batch size;
    qualitatively if it only grows faster."""
    if any(x.low <= 0 for x in faster):
        return undecided(*faster)
    return HOLDS if all(x.low > 0 for x in smaller) else QUALITATIVELY


def lengths(model: nn.Module) -> Tensor:
    return torch.cat([*v_norms(model).values()])


def steps_of(model: nn.Module) -> Tensor:
    return torch.cat([*effective_step(model).values()])


def directions(model: nn.Module) -> list[Tensor]:
    return [weight.stored.v.detach().clone() for weight in find_normalized(model)]
