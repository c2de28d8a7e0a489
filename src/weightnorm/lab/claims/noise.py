"""Claim 15: the noise that batch statistics put on a pre-activation (section 4)."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from weightnorm.diagnostics import noise_kurtosis
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
from weightnorm.layers import weight_names

BATCHES = (16, 32, 100)


@claim(
    15, "4", "The noise of the batch mean is nearly Gaussian, gentler than what the batch variance "
    "adds, which has heavy tails",
    paper="qualitative",
    measured="excess kurtosis over batches of real activations, mean over channels and layers",
)  # fmt: skip
def gentler_noise(bench: Workbench) -> Measured:
    rows: dict[int, dict[str, list[float]]] = {b: {} for b in BATCHES}
    for seed in bench.seeds:
        model = bench.network("standard", seed, noise=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
        bench.train(model, optimizer, steps=100, batch=64, seed=seed)
        for t, batch in product(activations(model, bench.data.train[:1000]), BATCHES):
            draw = torch.Generator().manual_seed(seed)
            found = noise_kurtosis(t, batch, 1000 if bench.quick else 4000, draw)
            for name, value in found._asdict().items():
                rows[batch].setdefault(name, []).append(value.nanmean().item())
    gaps = {
        batch: {
            name: bootstrap([b - a for a, b in zip(x["mean"], x[name], strict=True)])
            for name in ("variance", "inverse_std")
        }
        for batch, x in rows.items()
    }
    said = [
        f"batch {batch}: mean {bootstrap(x['mean']).mean:.2g}, variance "
        f"{bootstrap(x['variance']).mean:.2g}, 1/σ {bootstrap(x['inverse_std']).mean:.2g}"
        for batch, x in rows.items()
    ]
    n, numbers = len(rows[BATCHES[0]]["mean"]), {str(b): x for b, x in rows.items()}
    return Measured("; ".join(said), noise_verdict(gaps), n, numbers, (_figure(rows),))


def noise_verdict(gaps: dict[int, dict[str, Interval]]) -> Verdict:
    """Heavier tails of the variance and of 1/σ at every batch size; or at the smallest only."""
    every = [x.low > 0 for gap in gaps.values() for x in gap.values()]
    if all(every):
        return HOLDS
    return QUALITATIVELY if all(x.low > 0 for x in gaps[min(gaps)].values()) else FAILS


def _figure(rows: dict[int, dict[str, list[float]]]) -> Figure:
    names = {"mean": "batch mean", "variance": "batch variance", "inverse_std": "1/σ of the batch"}
    series = []
    for key, name in names.items():
        stats = [bootstrap(rows[batch][key]) for batch in BATCHES]
        mean, low, high = zip(*stats, strict=True)
        series.append(Series(name, tuple(map(float, BATCHES)), mean, low, high))
    title = "Tails of the noise of batch statistics"
    return Figure(title, "batch size", "excess kurtosis", tuple(series), log_x=True)


@torch.no_grad()
def activations(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The pre-activations of every layer with weights."""
    found: list[Tensor] = []
    layers = [module for module in model.modules() if weight_names(module)]
    handles = [m.register_forward_hook(lambda _, __, t: found.append(t)) for m in layers]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return found
