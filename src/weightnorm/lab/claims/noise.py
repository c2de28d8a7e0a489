"""Claim 15: noise of batch statistics (section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from weightnorm.lab.claims.claim import (
    Context,
    Outcome,
    Statement,
    above,
    below,
    claim,
    figure,
    paired,
    series,
)
from weightnorm.lab.claims.probes import batch_statistics, excess_kurtosis, pre_activations
from weightnorm.lab.records import Row
from weightnorm.lab.statistics import mean_interval

PAPERS_BATCH = 100
BATCHES = (16, 32, PAPERS_BATCH)
LIGHT = 0.5
"""Excess kurtosis below which noise counts as nearly Gaussian; tails count as much heavier if their
excess kurtosis is more than this above the batch mean's."""
STATISTICS = {"mean": "batch mean", "variance": "batch variance", "inverse_std": "1/σ of the batch"}
PARAMETERIZATIONS = ("batch-norm", "weight-norm-mean-only")
EDGES = [x / 4 for x in range(-24, 25)]
"""Edges of the histograms' bins, in standard deviations."""
RAREST = 1e-5
"""Smallest density that is plotted."""


@claim(
    15,
    "4",
    *(
        Statement(
            f"{words}: {how}",
            paper,
            f"excess kurtosis over 4,000 random batches of {PAPERS_BATCH} real activations, mean "
            f"over layers and channels, after 100 steps of training: {rule}. Other batch sizes "
            "beside it",
        )
        for how in PARAMETERIZATIONS
        for words, paper, rule in (
            (
                "The noise of the batch mean is nearly Gaussian",
                "approximately Gaussian",
                f"that of the mean below {LIGHT}",
            ),
            (
                "That of the batch variance has much heavier tails",
                "much higher kurtosis",
                f"that of the variance over {LIGHT} above that of the mean",
            ),
        )
    ),
)
def noise_tails(context: Context) -> list[Outcome]:
    outcomes = []
    for how in PARAMETERIZATIONS:
        found = context.map(tails, [(how, seed) for seed in context.seeds])
        kurtosis = {
            batch: {name: over_layers(found, batch, name) for name in STATISTICS}
            for batch in BATCHES
        }
        light = below(mean_interval(kurtosis[PAPERS_BATCH]["mean"]), LIGHT)
        at_100 = kurtosis[PAPERS_BATCH]
        heavy = above(paired(at_100["variance"], at_100["mean"]), LIGHT)

        def text(*names: str, kurtosis: Any = kurtosis) -> str:
            return "; ".join(
                f"batch {batch}: "
                + ", ".join(f"{STATISTICS[name]} {mean_interval(row[name])}" for name in names)
                for batch, row in reversed(kurtosis.items())
            )

        figures = (_sizes(how, kurtosis), _layers(how, found), _histogram(how, found))
        n = len(found)
        outcomes.append(Outcome(text("mean"), light, n, {"by seed": kurtosis}, figures))
        outcomes.append(Outcome(text("variance", "inverse_std"), heavy, n))
    return outcomes


def tails(context: Context, how: str, seed: int) -> dict[str, Any]:
    """By batch size and statistic the excess kurtosis of each layer, mean over channels; and the
    middle layer's histograms at the paper's batch size."""
    problem = context.problem("cifar10")
    model = problem.network(how, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    problem.train(model, optimizer, steps=100, batch=PAPERS_BATCH, seed=seed)
    layers = pre_activations(model.eval(), problem.data.train[:1000])
    draws = context.size(4000, 1000)
    kurtosis: dict[str, list[float]] = {}
    histograms: dict[str, list[float]] = {}
    for (index, t), batch in product(enumerate(layers), BATCHES):
        generator = torch.Generator().manual_seed(seed)
        for name, noise in batch_statistics(t, batch, draws, generator)._asdict().items():
            mean = excess_kurtosis(noise).nanmean().item()
            kurtosis.setdefault(f"{name}, {batch}", []).append(mean)
            if (index, batch) == (len(layers) // 2, PAPERS_BATCH):
                histograms[name] = histogram(noise)
    return {"kurtosis": kurtosis, "histograms": histograms}


def over_layers(found: Sequence[dict[str, Any]], batch: int, name: str) -> list[float]:
    """Mean excess kurtosis of all layers, by seed."""
    return [fmean(seed["kurtosis"][f"{name}, {batch}"]) for seed in found]


def histogram(noise: Tensor) -> list[float]:
    """Density of standardized noise, over all channels."""
    z = (noise - noise.mean(0)) / noise.std(0)
    counts, edges = torch.histogram(z.flatten().double(), torch.tensor(EDGES).double())
    found: list[float] = (counts / z.numel() / edges.diff()).clamp_min(RAREST).tolist()
    return found


def _sizes(how: str, kurtosis: dict[int, dict[str, list[float]]]) -> Row:
    lines = [
        series(words, BATCHES, [kurtosis[batch][name] for batch in BATCHES])
        for name, words in STATISTICS.items()
    ]
    title = f"Tails of the noise of batch statistics, {how}"
    return figure(title, "batch size", "excess kurtosis", lines, log_x=True)


def _layers(how: str, found: Sequence[dict[str, Any]]) -> Row:
    lines = []
    for name, words in STATISTICS.items():
        rows = [seed["kurtosis"][f"{name}, {PAPERS_BATCH}"] for seed in found]
        lines.append(series(words, range(1, len(rows[0]) + 1), zip(*rows, strict=True)))
    title = f"Tails of the noise of batch statistics by layer, batches of {PAPERS_BATCH}, {how}"
    return figure(title, "layer", "excess kurtosis", lines)


def _histogram(how: str, found: Sequence[dict[str, Any]]) -> Row:
    x = tuple((a + b) / 2 for a, b in pairwise(EDGES))
    lines = []
    for name, words in STATISTICS.items():
        columns = zip(*(seed["histograms"][name] for seed in found), strict=True)
        lines.append({"name": words, "x": x, "y": [*map(fmean, columns)]})
    normal = (math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) for z in x)
    lines.append({"name": "normal distribution", "x": x, "y": [max(y, RAREST) for y in normal]})
    title = f"Noise of batch statistics, batches of {PAPERS_BATCH}, the middle layer, {how}"
    return figure(title, "standard deviations", "density", lines, log_y=True)
