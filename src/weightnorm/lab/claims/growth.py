"""Claims 4 and 5: the length of v grows, faster the noisier the gradient (section 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm.diagnostics import effective_step, weight_norms
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Figure,
    Interval,
    Measured,
    Series,
    Verdict,
    bootstrap,
    claim,
)
from weightnorm.lab.claims.workbench import Workbench
from weightnorm.sites import sites

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "gradient descent": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.003),
}
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
    steps = 60 if bench.quick else 200
    numbers: dict[str, Any] = {}
    series = []
    for name, make in OPTIMIZERS.items():
        shrunk, growth, worst, lines = [], [], 0.0, []
        for seed in bench.seeds:
            lengths, off = lengths_in_training(bench, make, steps, seed)
            shrunk.append((lengths.diff(dim=0) < -ROUNDING * lengths[:-1]).double().mean().item())
            growth.append((lengths[-1] / lengths[0]).median().item())
            worst = max(worst, off)
            lines.append(lengths.mean(1) / lengths[0].mean())
        numbers[name] = {"shrinking": shrunk, "growth": growth, "pythagoras": worst}
        mean = torch.stack(lines).mean(0)
        series.append(Series(name, tuple(map(float, range(steps + 1))), tuple(mean.tolist())))
    said = [
        f"{name}: {100 * max(x['shrinking']):.2g} % of unit-steps shrink, ‖v‖ × "
        f"{bootstrap(x['growth']).mean:.3g}"
        for name, x in numbers.items()
    ]
    exact = numbers["gradient descent"]["pythagoras"]
    value = f"{'; '.join(said)}; deviation from √(1+c²) {exact:.1e}"
    figure = Figure("‖v‖ over training", "step", "mean ‖v‖ / at the start", tuple(series))
    return Measured(value, growth_verdict(numbers), len(bench.seeds), numbers, (figure,))


def growth_verdict(numbers: dict[str, Any]) -> Verdict:
    """Exact for gradient descent; with the others v must at least grow in every seed."""
    plain = numbers["gradient descent"]
    if max(plain["shrinking"]) > 0 or plain["pythagoras"] > 1e-9:
        return FAILS
    others = [min(x["growth"]) > 1 for name, x in numbers.items() if name != "gradient descent"]
    return HOLDS if all(others) else QUALITATIVELY


def lengths_in_training(
    bench: Workbench, make: Callable[[Any], torch.optim.Optimizer], steps: int, seed: int
) -> tuple[Tensor, float]:
    """‖v‖ of every unit before and after every step, (steps + 1, units), and the largest relative
    deviation from √(‖v‖² + ‖Δv‖²)."""
    model = bench.network("weight-norm", seed, noise=False).double()
    optimizer = make(model.parameters())
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

    bench.train(model, optimizer, steps=steps, batch=64, seed=seed, watch=watch)
    return torch.stack(rows), worst


@claim(
    5, "2.1", "Noisier gradients make ‖v‖ grow faster, and so the effective step g/‖v‖ smaller",
    paper="qualitative",
    measured="growth of ‖v‖ at one rate for three batch sizes (smaller ones are noisier), from one "
    "network trained for a while",
)  # fmt: skip
def noise_and_growth(bench: Workbench) -> Measured:
    steps = 100 if bench.quick else 300
    growth: dict[int, list[float]] = {}
    effective: dict[int, list[float]] = {}
    for seed in bench.seeds:
        # At first the gradient itself makes v grow; the noise shows once it has become small.
        settled = bench.network("weight-norm", seed, noise=False)
        optimizer = torch.optim.SGD(settled.parameters(), lr=0.1)
        bench.train(settled, optimizer, steps=steps, batch=BATCHES[0], seed=seed)
        for batch in BATCHES:
            model = deepcopy(settled)
            start, first = lengths(model), steps_of(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            bench.train(model, optimizer, steps=steps, batch=batch, seed=seed + 1)
            growth.setdefault(batch, []).append((lengths(model) / start).mean().item())
            effective.setdefault(batch, []).append((steps_of(model) / first).mean().item())
    faster, smaller = ordered(growth), ordered({b: [-x for x in e] for b, e in effective.items()})
    means = {batch: bootstrap(growth[batch]) for batch in BATCHES}
    said = ", ".join(f"batch {b}: ‖v‖ × {means[b].mean:.3g}" for b in BATCHES)
    value = f"{said}; smallest less largest: growth {faster}, shrinking of the step {smaller}"
    lines = Series(
        "weight norm",
        tuple(map(float, BATCHES)),
        tuple(m.mean for m in means.values()),
        tuple(m.low for m in means.values()),
        tuple(m.high for m in means.values()),
    )
    title = "Growth of ‖v‖ against the noise of the gradient"
    figure = Figure(title, "batch size", "‖v‖ at the end / at the start", (lines,), log_x=True)
    numbers = {"growth": growth, "effective_step": effective}
    return Measured(
        value, noise_verdict(faster, smaller), len(bench.seeds) * len(BATCHES), numbers, (figure,)
    )


def ordered(values: dict[int, list[float]]) -> Interval:
    """Seed by seed, the noisiest less the quietest, as a bootstrap interval."""
    quiet, noisy = values[BATCHES[0]], values[BATCHES[-1]]
    return bootstrap([b - a for a, b in zip(quiet, noisy, strict=True)])


def noise_verdict(faster: Interval, smaller: Interval) -> Verdict:
    """Both intervals above 0, or only that of the growth, or neither."""
    if faster.low > 0:
        return HOLDS if smaller.low > 0 else QUALITATIVELY
    return FAILS


def lengths(model: nn.Module) -> Tensor:
    return torch.cat([*weight_norms(model).values()])


def steps_of(model: nn.Module) -> Tensor:
    return torch.cat([*effective_step(model).values()])


def directions(model: nn.Module) -> list[Tensor]:
    return [site.stored.v.detach().clone() for site in sites(model)]
