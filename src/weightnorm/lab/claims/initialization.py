"""Claims 12 and 23: what data-dependent initialization does, and that it matters (section 3)."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import torch
from torch import Tensor, nn

from weightnorm.lab.claims.claim import (
    NOT_REPRODUCED,
    REPRODUCED,
    Context,
    Outcome,
    Statement,
    Verdict,
    below,
    claim,
    figure,
    percent,
    relative,
    series,
)
from weightnorm.lab.claims.learning_rates import best_rate
from weightnorm.lab.claims.probes import pre_activations
from weightnorm.lab.records import Row

BATCH = 100
RATES = (0.0003, 0.001, 0.003, 0.01)
"""The paper's grid, with Adam."""
INITIALIZED, DRAWN = "data-dependent", "as drawn"


@claim(
    12,
    "3",
    Statement(
        "After the initialization every pre-activation has mean 0 and variance 1 on the init batch",
        "exact",
        "500 images: largest |mean| and |std − 1| of a unit below 0.001, float32",
    ),
    Statement(
        "…and approximately on other batches",
        "slightly different statistics",
        "500 other images: |mean| and |std − 1|, averaged over units, below 0.25",
    ),
)
def unit_pre_activations(context: Context) -> list[Outcome]:
    problem, seed = context.problem("cifar10 at 16×16"), context.seeds[0]
    model = problem.network("weight-norm", seed)
    own = moments(model, problem.init_images(seed))
    others = moments(model, problem.other_images(seed))
    exact = [own[0].abs().max().item(), (own[1] - 1).abs().max().item()]
    near = [others[0].abs().mean().item(), (others[1] - 1).abs().mean().item()]
    n = own[0].numel()
    return [
        Outcome(f"|mean| {x[0]:.2g}, |std − 1| {x[1]:.2g}", verdict, n, {"values": x})
        for x, verdict in ((exact, within(exact, 1e-3)), (near, within(near, 0.25)))
    ]


def within(values: list[float], tolerance: float) -> Verdict:
    return REPRODUCED if max(values) < tolerance else NOT_REPRODUCED


def moments(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every unit's pre-activation, layers concatenated."""
    found = [t.transpose(0, 1).flatten(1) for t in pre_activations(model, x)]
    means, stds = ([f(t) for t in found] for f in (_mean, _std))
    return torch.cat(means), torch.cat(stds)


def _mean(t: Tensor) -> Tensor:
    return t.mean(1)


def _std(t: Tensor) -> Tensor:
    return t.std(1, correction=0)


@claim(
    23,
    "3",
    Statement(
        "With weight norm it is important to initialize the parameters properly",
        "important; batch norm needs it less",
        "ConvPool-CNN-C at an eighth of its width, 300 steps: mean training loss with "
        "data-dependent initialization relative to v, g = ‖v‖ and b = 0 as drawn, each at its best "
        "rate of the paper's grid by the first seed; below 0 on the other seeds. Standard and "
        "batch norm beside it",
    ),
)
def initialization_matters(context: Context) -> list[Outcome]:
    hows = ("weight-norm", "standard", "batch-norm")
    parts = [*product(hows, (INITIALIZED, DRAWN), context.seeds, RATES)]
    found = dict(zip(parts, context.map(training_curve, parts), strict=True))
    values, lines = {}, []
    for how in hows:
        means = {}
        for start in (INITIALIZED, DRAWN):
            first = [fmean(found[how, start, context.seeds[0], rate]) for rate in RATES]
            rate = RATES[best_rate(first)]
            curves = [found[how, start, seed, rate] for seed in context.seeds[1:]]
            means[start] = [fmean(curve) for curve in curves]
            lines.append(_smooth(f"{how}, {start}, rate {rate:g}", curves))
        values[how] = relative(means[INITIALIZED], means[DRAWN])
    text = "; ".join(f"{how}: {percent(x)}" for how, x in values.items())
    title = "Training loss with data-dependent initialization, and as drawn"
    chart = figure(title, "step", "training loss", lines)
    verdict = below(values["weight-norm"], 0.0)
    return [Outcome(text, verdict, len(context.seeds) - 1, values, (chart,))]


def training_curve(context: Context, how: str, start: str, seed: int, rate: float) -> list[float]:
    """Training loss of every step; after divergence that of the first step."""
    problem, steps = context.problem("cifar10 at 16×16"), context.size(300, 40)
    model = problem.network(how, seed, init=start == INITIALIZED)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses = problem.train(model, optimizer, steps=steps, batch=BATCH, seed=seed, may_diverge=True)
    return losses + [max(losses[:1], default=1e3)] * (steps - len(losses))


def _smooth(name: str, curves: list[list[float]], window: int = 10) -> Row:
    """The mean of every ten steps, over seeds."""
    starts = range(0, len(curves[0]), window)
    columns = [[fmean(curve[i : i + window]) for curve in curves] for i in starts]
    return series(name, starts, columns)
