"""Claims 4 and 5: the length of v grows, faster the noisier the gradient (section 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm.diagnostics import effective_step, weight_norms
from weightnorm.inspection import find_normalized
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Figure,
    Interval,
    Measured,
    Verdict,
    bootstrap,
    claim,
    series,
)
from weightnorm.lab.claims.context import Workbench

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "gradient descent": lambda p, rate: torch.optim.SGD(p, lr=rate),
    "momentum 0.9": lambda p, rate: torch.optim.SGD(p, lr=rate, momentum=0.9),
    "Adam": lambda p, rate: torch.optim.Adam(p, lr=rate),
}
QUICK_RATES = {"gradient descent": 0.1, "momentum 0.9": 0.02, "Adam": 0.003}
FULL_RATES = {"gradient descent": 0.003, "momentum 0.9": 0.001, "Adam": 0.003}
"""At which training is stable for every seed (plain gradient descent at 0.01 lost one of five)."""
BATCHES = (128, 32, 8)
"""Smaller batches have noisier gradients; the mean gradient is the same."""
ROUNDING = 1e-12


@claim(
    4, "2.1", "Under gradient descent ‖v‖ never decreases: ‖v′‖ = √(1+c²)·‖v‖ with c = ‖Δv‖/‖v‖; "
    "with momentum or Adam it grows too",
    paper="exact; qualitative with momentum or Adam",
    measured="unit-steps at which ‖v‖ shrinks, and its growth in training, float64",
)  # fmt: skip
def monotone_growth(bench: Workbench) -> Measured:
    parts = [(name, seed) for name in OPTIMIZERS for seed in bench.seeds]
    found = dict(zip(parts, bench.each(growth_in_training, parts), strict=True))
    numbers: dict[str, Any] = {}
    lines = []
    for name in OPTIMIZERS:
        rows = [found[name, seed] for seed in bench.seeds]
        numbers[name] = {key: [row[key] for row in rows] for key in rows[0] if key != "curve"}
        curves = [row["curve"] for row in rows]
        lines.append(series(name, range(len(curves[0])), zip(*curves, strict=True)))
    said = [
        f"{name}: {100 * max(x['shrinking']):.2g} % of unit-steps shrink, ‖v‖ {gain(x['growth'])}"
        for name, x in numbers.items()
    ]
    exact = max(numbers["gradient descent"]["pythagoras"])
    value = f"{'; '.join(said)}; deviation from √(1+c²) {exact:.1e}"
    figure = Figure("‖v‖ over training", "step", "mean ‖v‖ / at the start", tuple(lines))
    return Measured(value, growth_verdict(numbers), len(bench.seeds), numbers, (figure,))


def growth_in_training(bench: Workbench, name: str, seed: int) -> dict[str, Any]:
    """How often ‖v‖ shrinks, how much it grows in the median unit, how far it is from √(1+c²)."""
    lengths, off = lengths_in_training(bench, name, 60 if bench.quick else 150, seed)
    return {
        "shrinking": (lengths.diff(dim=0) < -ROUNDING * lengths[:-1]).double().mean().item(),
        "growth": (lengths[-1] / lengths[0]).median().item(),
        "pythagoras": off,
        "curve": (lengths.mean(1) / lengths[0].mean()).tolist(),
    }


def gain(factors: list[float]) -> str:
    """By how much more, with its interval.

    >>> gain([1.5, 1.5])
    '+50 % [50, 50]'
    """
    mean, low, high = bootstrap([100 * (factor - 1) for factor in factors])
    return f"{mean:+.2g} % [{low:.2g}, {high:.2g}]"


def growth_verdict(numbers: dict[str, Any]) -> Verdict:
    """Exact for gradient descent; with the others v must at least grow."""
    plain = numbers["gradient descent"]
    if max(plain["shrinking"]) > 0 or max(plain["pythagoras"]) > 1e-9:
        return FAILS
    others = [x["growth"] for name, x in numbers.items() if name != "gradient descent"]
    return HOLDS if all(bootstrap(growth).low > 1 for growth in others) else QUALITATIVELY


def make(bench: Workbench, model: nn.Module, name: str) -> torch.optim.Optimizer:
    rates = QUICK_RATES if bench.quick else FULL_RATES
    return OPTIMIZERS[name](model.parameters(), rates[name])


def lengths_in_training(bench: Workbench, name: str, steps: int, seed: int) -> tuple[Tensor, float]:
    """‖v‖ of every unit before and after every step, (steps + 1, units), and the largest relative
    deviation from √(‖v‖² + ‖Δv‖²)."""
    model = bench.network("weight-norm", seed).double()
    optimizer = make(bench, model, name)
    rows, worst = [lengths(model)], 0.0
    before = directions(model)

    def watch(_: int, model: nn.Module) -> None:
        nonlocal before, worst
        now = directions(model)
        rows.append(lengths(model))
        moved = torch.cat(
            [(b - a).flatten(1).norm(dim=1) for a, b in zip(before, now, strict=True)]
        )
        expected = (rows[-2].square() + moved.square()).sqrt()
        worst = max(worst, ((rows[-1] - expected).abs() / expected).max().item())
        before = now

    bench.train(model, optimizer, steps=steps, batch=50, seed=seed, watch=watch)
    return torch.stack(rows), worst


@claim(
    5, "2.1", "Noisier gradients make ‖v‖ grow faster, and so the effective step g/‖v‖ smaller",
    paper="qualitative",
    measured="growth of ‖v‖ at one rate for three batch sizes (smaller ones are noisier), from one "
    "network trained for a while",
)  # fmt: skip
def noise_and_growth(bench: Workbench) -> Measured:
    rows = bench.each(growth_by_noise, [(seed,) for seed in bench.seeds])
    growth = {batch: [row["growth"][i] for row in rows] for i, batch in enumerate(BATCHES)}
    shrinking = {batch: [row["shrinking"][i] for row in rows] for i, batch in enumerate(BATCHES)}
    said = ", ".join(f"batch {b}: ‖v‖ {gain(growth[b])}" for b in BATCHES)
    step = ", ".join(f"{1 / bootstrap(shrinking[b]).mean:.3g}" for b in BATCHES)
    value = f"{said}; effective step × {step}"
    line = series("weight norm", BATCHES, growth.values())
    title = "Growth of ‖v‖ against the noise of the gradient"
    figure = Figure(title, "batch size", "‖v‖ at the end / at the start", (line,), log_x=True)
    numbers = {"growth": growth, "shrinking_of_the_effective_step": shrinking}
    verdict = noise_verdict(steps_up(growth), steps_up(shrinking))
    return Measured(value, verdict, len(bench.seeds), numbers, (figure,))


def growth_by_noise(bench: Workbench, seed: int) -> dict[str, list[float]]:
    """By batch size, what ‖v‖ is multiplied and the effective step divided by; mean over units."""
    steps = 100 if bench.quick else 200
    # At first the gradient itself makes v grow; the noise shows once it has become small.
    settled = bench.network("weight-norm", seed)
    optimizer = make(bench, settled, "gradient descent")
    bench.train(settled, optimizer, steps=steps, batch=BATCHES[0], seed=seed)
    found: dict[str, list[float]] = {"growth": [], "shrinking": []}
    for batch in BATCHES:
        model = deepcopy(settled)
        start, first = lengths(model), steps_of(model)
        optimizer = make(bench, model, "gradient descent")
        bench.train(model, optimizer, steps=steps, batch=batch, seed=seed + 1000)
        found["growth"].append((lengths(model) / start).mean().item())
        found["shrinking"].append((first / steps_of(model)).mean().item())
    return found


def steps_up(values: dict[int, list[float]]) -> list[Interval]:
    """Seed by seed, each batch size less the next larger one."""
    quiet_first = sorted(values, reverse=True)
    return [
        bootstrap([b - a for a, b in zip(values[quiet], values[noisy], strict=True)])
        for quiet, noisy in pairwise(quiet_first)
    ]


def noise_verdict(faster: list[Interval], smaller: list[Interval]) -> Verdict:
    """Noisier is faster at every step, and the effective step smaller; or only faster."""
    if any(x.low <= 0 for x in faster):
        return FAILS
    return HOLDS if all(x.low > 0 for x in smaller) else QUALITATIVELY


def lengths(model: nn.Module) -> Tensor:
    return torch.cat([*weight_norms(model).values()])


def steps_of(model: nn.Module) -> Tensor:
    return torch.cat([*effective_step(model).values()])


def directions(model: nn.Module) -> list[Tensor]:
    return [site.stored.v.detach().clone() for site in find_normalized(model)]
