"""Claim 15: the noise that batch statistics put on a pre-activation (section 4)."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm.diagnostics import batch_noise, excess_kurtosis
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
    series,
)
from weightnorm.lab.claims.context import Workbench
from weightnorm.layers import weight_names

BATCHES = (16, 32, 100)
LIGHT = 0.5
"""Excess kurtosis that still passes for nearly Gaussian; what lies more than this above the batch
mean's has much heavier tails."""
NAMES = {"mean": "batch mean", "variance": "batch variance", "inverse_std": "1/σ of the batch"}
EDGES = [x / 4 for x in range(-24, 25)]
"""Of the histograms' bins, in standard deviations."""
RAREST = 1e-5
"""A density below is drawn as this."""

Found = list[dict[str, Any]]
"""Of each seed what `tails` gives."""
Rows = dict[int, dict[str, list[float]]]
"""Batch size → statistic → excess kurtosis by seed."""


@claim(
    15, "4", "The noise of the batch mean is nearly Gaussian; that of the batch variance has much "
    "heavier tails",
    paper="qualitative",
    measured="excess kurtosis over batches of real activations of a network with batch norm, mean "
    "over layers and channels",
)  # fmt: skip
def gentler_noise(bench: Workbench) -> Measured:
    found: Found = bench.each(tails, [(seed,) for seed in bench.seeds])
    rows: Rows = {}
    for batch in BATCHES:
        layers = {name: by_layer(found, batch, name) for name in NAMES}
        rows[batch] = {n: [fmean(x) for x in zip(*c, strict=True)] for n, c in layers.items()}
    means = {batch: bootstrap(row["mean"]) for batch, row in rows.items()}
    gaps = {
        batch: [bootstrap(_less(row[name], row["mean"])) for name in ("variance", "inverse_std")]
        for batch, row in rows.items()
    }
    said = [
        f"batch {batch}: " + ", ".join(f"{NAMES[key]} {bootstrap(x)}" for key, x in row.items())
        for batch, row in rows.items()
    ]
    figures = (_sizes(rows), _layers(found), *(_histogram(found, b) for b in (16, 100)))
    verdict = noise_verdict(means, gaps)
    return Measured("; ".join(said), verdict, len(found), {"by seed": rows}, figures)


def by_layer(found: Found, batch: int, name: str) -> list[tuple[float, ...]]:
    """Layers × seeds."""
    return [*zip(*(seed["kurtosis"][str(batch)][name] for seed in found), strict=True)]


def noise_verdict(means: dict[int, Interval], gaps: dict[int, list[Interval]]) -> Verdict:
    """At every batch size the mean is nearly Gaussian and the others are far from it; or heavier at
    the smallest size at least."""
    light = all(mean.high < LIGHT for mean in means.values())
    if light and all(gap.low > LIGHT for pair in gaps.values() for gap in pair):
        return HOLDS
    return QUALITATIVELY if all(gap.low > 0 for gap in gaps[min(gaps)]) else FAILS


def tails(bench: Workbench, seed: int) -> dict[str, Any]:
    """By batch size, statistic and layer the kurtosis, mean over channels; and the middle layer's
    histograms."""
    bench = bench.at_full_size
    model = bench.network("batch-norm", seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    bench.train(model, optimizer, steps=100, batch=64, seed=seed)
    layers = activations(model, bench.data.train[:1000])
    draws = 1000 if bench.quick else 4000
    kurtosis: dict[int, dict[str, list[float]]] = {b: {name: [] for name in NAMES} for b in BATCHES}
    histograms: dict[int, dict[str, list[float]]] = {b: {} for b in BATCHES}
    for index, t in enumerate(layers):
        for batch in BATCHES:
            draw = torch.Generator().manual_seed(seed)
            for name, noise in batch_noise(t, batch, draws, draw)._asdict().items():
                kurtosis[batch][name].append(excess_kurtosis(noise).nanmean().item())
                if index == len(layers) // 2:
                    histograms[batch][name] = histogram(noise)
    return {"kurtosis": {str(b): k for b, k in kurtosis.items()},
            "histograms": {str(b): h for b, h in histograms.items()}}  # fmt: skip


def histogram(noise: Tensor) -> list[float]:
    """The density of standardized noise, all channels together."""
    z = (noise - noise.mean(0)) / noise.std(0)
    counts, edges = torch.histogram(z.flatten().double(), torch.tensor(EDGES).double())
    found: list[float] = (counts / z.numel() / edges.diff()).clamp_min(RAREST).tolist()
    return found


def _less(a: list[float], b: list[float]) -> list[float]:
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
    """The pre-activations of every layer with weights, before any batch norm."""
    found: list[Tensor] = []
    layers = [module for module in model.modules() if weight_names(module)]
    handles = [m.register_forward_hook(lambda _, __, t: found.append(t)) for m in layers]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return found
