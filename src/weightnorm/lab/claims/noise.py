"""Claim 15: noise of batch statistics (section 4)."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm.diagnostics import batch_statistics, excess_kurtosis
from weightnorm.lab.claims.claim import (
    HOLDS,
    QUALITATIVELY,
    Figure,
    Measured,
    Series,
    Verdict,
    claim,
    series,
    undecided,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.statistics import Interval, mean_interval
from weightnorm.layers import weight_names

BATCHES = (16, 32, 100)
LIGHT = 0.5
"""Excess kurtosis below which noise counts as nearly Gaussian; tails count as much heavier if their
excess kurtosis is more than this above the batch mean's."""
NAMES = {"mean": "batch mean", "variance": "batch variance", "inverse_std": "1/σ of the batch"}
EDGES = [x / 4 for x in range(-24, 25)]
"""Edges of the histograms' bins, in standard deviations."""
RAREST = 1e-5
"""Smallest density that is plotted."""

Found = list[dict[str, Any]]
"""One result of `tails` per seed."""
Rows = dict[int, dict[str, list[float]]]
"""Batch size → statistic → excess kurtosis by seed."""


@claim(
    15, "4", "The noise of the batch mean is nearly Gaussian; that of the batch variance has much "
    "heavier tails",
    paper="qualitative",
    measured="excess kurtosis over batches of real activations of a network with batch norm, mean "
    "over layers and channels",
)  # fmt: skip
def noise_tails(context: Context) -> Measured:
    found: Found = context.map(tails, [(seed,) for seed in context.seeds])
    rows: Rows = {}
    for batch in BATCHES:
        layers = {name: by_layer(found, batch, name) for name in NAMES}
        rows[batch] = {n: [fmean(x) for x in zip(*c, strict=True)] for n, c in layers.items()}
    means = {batch: mean_interval(row["mean"]) for batch, row in rows.items()}
    gaps = {
        batch: [
            mean_interval(_differences(row[name], row["mean"]))
            for name in ("variance", "inverse_std")
        ]
        for batch, row in rows.items()
    }
    said = [
        f"batch {batch}: " + ", ".join(f"{NAMES[key]} {mean_interval(x)}" for key, x in row.items())
        for batch, row in rows.items()
    ]
    figures = (_sizes(rows), _layers(found), *(_histogram(found, b) for b in (16, 100)))
    verdict = noise_verdict(means, gaps)
    return Measured("; ".join(said), verdict, len(found), {"by seed": rows}, figures)


def by_layer(found: Found, batch: int, name: str) -> list[tuple[float, ...]]:
    """Excess kurtosis, layers × seeds."""
    return [*zip(*(seed["kurtosis"][str(batch)][name] for seed in found), strict=True)]


def noise_verdict(means: dict[int, Interval], gaps: dict[int, list[Interval]]) -> Verdict:
    """Holds if at every batch size the mean is nearly Gaussian and the tails of the others are much
    heavier; qualitatively if they are heavier at the smallest size."""
    light = all(mean.high < LIGHT for mean in means.values())
    if light and all(gap.low > LIGHT for pair in gaps.values() for gap in pair):
        return HOLDS
    smallest = gaps[min(gaps)]
    return QUALITATIVELY if all(gap.low > 0 for gap in smallest) else undecided(*smallest)


def tails(context: Context, seed: int) -> dict[str, Any]:
    """By batch size, statistic and layer the kurtosis, mean over channels; and the middle layer's
    histograms."""
    context = context.at_full_size
    model = context.network("batch-norm", seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    context.train(model, optimizer, steps=100, batch=64, seed=seed)
    layers = activations(model, context.data.train[:1000])
    batches = 1000 if context.quick else 4000
    kurtosis: dict[int, dict[str, list[float]]] = {b: {name: [] for name in NAMES} for b in BATCHES}
    histograms: dict[int, dict[str, list[float]]] = {b: {} for b in BATCHES}
    for index, t in enumerate(layers):
        for batch in BATCHES:
            generator = torch.Generator().manual_seed(seed)
            for name, noise in batch_statistics(t, batch, batches, generator)._asdict().items():
                kurtosis[batch][name].append(excess_kurtosis(noise).nanmean().item())
                if index == len(layers) // 2:
                    histograms[batch][name] = histogram(noise)
    return {"kurtosis": {str(b): k for b, k in kurtosis.items()},
            "histograms": {str(b): h for b, h in histograms.items()}}  # fmt: skip


def histogram(noise: Tensor) -> list[float]:
    """Density of standardized noise, over all channels."""
    z = (noise - noise.mean(0)) / noise.std(0)
    counts, edges = torch.histogram(z.flatten().double(), torch.tensor(EDGES).double())
    found: list[float] = (counts / z.numel() / edges.diff()).clamp_min(RAREST).tolist()
    return found


def _differences(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _sizes(rows: Rows) -> Figure:
    lines = [
        series(name, BATCHES, [rows[batch][key] for batch in BATCHES])
        for key, name in NAMES.items()
    ]
    title = "Tails of the noise of batch statistics"
    return Figure(title, "batch size", "excess kurtosis", tuple(lines), log_x=True)


def _layers(found: Found) -> Figure:
    lines = []
    for key, name in NAMES.items():
        columns = by_layer(found, 16, key)
        lines.append(series(name, range(1, len(columns) + 1), columns))
    title = "Tails of the noise of batch statistics by layer, batches of 16"
    return Figure(title, "layer", "excess kurtosis", tuple(lines))


def _histogram(found: Found, batch: int) -> Figure:
    x = tuple((a + b) / 2 for a, b in pairwise(EDGES))
    lines = []
    for key, name in NAMES.items():
        columns = zip(*(seed["histograms"][str(batch)][key] for seed in found), strict=True)
        lines.append(Series(name, x, tuple(map(fmean, columns))))
    normal = (math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) for z in x)
    lines.append(Series("normal distribution", x, tuple(max(y, RAREST) for y in normal)))
    title = f"Noise of batch statistics, batches of {batch}, the middle layer"
    return Figure(title, "standard deviations", "density", tuple(lines), log_y=True)


@torch.no_grad()
def activations(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Pre-activations of every layer with weights, before batch norm."""
    found: list[Tensor] = []
    layers = [module for module in model.modules() if weight_names(module)]
    handles = [m.register_forward_hook(lambda _, __, t: found.append(t)) for m in layers]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return found
