"""Claims 7, 8 and 9: what the projection does to the noise of the gradient (section 2)."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.diagnostics import example_gradients, gradient_covariance, unit_weights
from weightnorm.functional import compose, gradients, norm
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
    exactly,
)
from weightnorm.lab.claims.workbench import Workbench

EXAMPLES = 256
UNITS = 8
"""Of each layer."""
NEAR = 0.5
"""A cosine that counts as near; that of random directions is about √(2/πn)."""


@claim(
    7, "2", "The covariance of ∇v is D = (g²/‖v‖²)·M C M, with C that of ∇w",
    paper="exact",
    measured="largest relative deviation from the covariance of 200 gradients, float64",
)  # fmt: skip
def transformed_covariance(bench: Workbench) -> Measured:
    torch.manual_seed(bench.seeds[0])
    k, units, n = 200, 3, 6
    v = torch.randn(units, n, dtype=torch.float64)
    g = torch.randn(units, 1, dtype=torch.float64)
    grad_w = torch.randn(k, units, n, dtype=torch.float64) @ torch.randn(n, n, dtype=torch.float64)
    empirical = gradient_covariance(torch.stack([gradients(x, v, g).v for x in grad_w]))
    formula = scaled_and_projected(gradient_covariance(grad_w), compose(v, g), g / norm(v))
    off = ((empirical - formula).abs().max() / formula.abs().max()).item()
    return Measured(f"{off:.1e}", exactly(off, 1e-9), units, {"deviation": off})


def scaled_and_projected(c: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """(g²/‖v‖²)·M C M for each unit: c (units, n, n), w (units, n), scale (units, 1)."""
    direction = F.normalize(w, dim=1)
    m = torch.eye(w.shape[1], dtype=w.dtype) - direction[:, :, None] * direction[:, None, :]
    d: Tensor = scale.square()[..., None] * (m @ c @ m)
    return d


@claim(
    8, "2", "w is often near a dominant eigenvector of the covariance C of its gradient",
    paper="empirical, no number given",
    measured="|cosine| of w with the top eigenvector of C over layers and training time; and "
    "w′Cw/(‖w‖²λ) less that of random directions",
)  # fmt: skip
def dominant_direction(bench: Workbench) -> Measured:
    times = (0, 20, 100) if bench.quick else (0, 50, 300)
    found: list[dict[str, Any]] = []
    for seed in bench.seeds:
        for at, layer, c, w in snapshots(bench, seed, times):
            found.append({"step": at, "layer": layer, **alignment(c, w, seed)})
    cosine = bootstrap([x["cosine"] for x in found])
    random = bootstrap([x["random"] for x in found])
    rayleigh = bootstrap([x["rayleigh"] - x["rayleigh_random"] for x in found])
    value = f"cosine {cosine}, random {random}; Rayleigh quotient {rayleigh} above random"
    verdict = alignment_verdict(cosine, random, rayleigh)
    return Measured(value, verdict, len(found), {"measured": found}, (_cosines(found, times),))


def _cosines(found: list[dict[str, Any]], times: tuple[int, ...]) -> Figure:
    layers = list(dict.fromkeys(row["layer"] for row in found))
    x = tuple(float(i) for i in range(1, len(layers) + 1))

    def means(key: str, at: tuple[int, ...]) -> tuple[float, ...]:
        groups = ([r[key] for r in found if r["layer"] == n and r["step"] in at] for n in layers)
        return tuple(fmean(group) for group in groups)

    lines = [Series(f"after {at} steps", x, means("cosine", (at,))) for at in times]
    lines.append(Series("random direction", x, means("random", times)))
    title = "|cosine| of w with the dominant eigenvector of C"
    return Figure(title, "layer", "mean |cosine|", tuple(lines))


def alignment_verdict(cosine: Interval, random: Interval, rayleigh: Interval) -> Verdict:
    """Near in the mean; or at least nearer than chance; or not."""
    if cosine.low > max(NEAR, random.high):
        return HOLDS
    return QUALITATIVELY if cosine.low > random.high and rayleigh.low > 0 else FAILS


def alignment(c: Tensor, w: Tensor, seed: int) -> dict[str, float]:
    """Of each unit's w, and of random directions, with the top eigenvector; means over units."""
    values, vectors = torch.linalg.eigh(c)
    top, largest = vectors[..., -1], values[..., -1].clamp_min(torch.finfo(c.dtype).tiny)
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed), dtype=w.dtype)

    def measure(direction: Tensor) -> tuple[float, float]:
        d = F.normalize(direction, dim=1)
        quotient = torch.einsum("un,unm,um->u", d, c, d) / largest
        return (d * top).sum(1).abs().mean().item(), quotient.mean().item()

    (cosine, rayleigh), (random, chance) = measure(w), measure(noise)
    return {"cosine": cosine, "random": random, "rayleigh": rayleigh, "rayleigh_random": chance}


@claim(
    9, "2", "D is nearer the identity than C on the complement of w",
    paper="follows from claim 8",
    measured="evenness (Σλ)²/(nΣλ²) of the spectrum: that of M C M on the complement of w less "
    "that of C, after training for a while",
)  # fmt: skip
def nearer_identity(bench: Workbench) -> Measured:
    step = 100 if bench.quick else 300
    gains, spectra = [], []
    for seed in bench.seeds:
        for _, layer, c, w in snapshots(bench, seed, (step,)):
            before, after = spectrum(c), spectrum(scaled_and_projected(c, w, torch.ones(len(w), 1)))
            n = c.shape[-1]
            pairs = zip(evenness(before, n), evenness(after[:, 1:], n - 1), strict=True)
            gains += [b - a for a, b in pairs]
            if seed == bench.seeds[0]:
                spectra.append((layer, before.mean(0), after.mean(0)))
    gain = bootstrap(gains)
    _, before, after = spectra[len(spectra) // 2]
    rank = tuple(float(i) for i in range(1, len(before) + 1))
    lines = (Series("C", rank, relative(before)), Series("M C M", rank, relative(after)))
    title = "Eigenvalues of C and of M C M, a layer in the middle"
    figure = Figure(title, "rank", "eigenvalue / trace", lines, log_y=True)
    return Measured(f"{gain}", evenness_verdict(gain), len(gains), {"gain": tuple(gain)}, (figure,))


def evenness_verdict(gain: Interval) -> Verdict:
    """An even spectrum has 1, a single direction 1/n: 0.05 of that is more than a trace."""
    if gain.low > 0.05:
        return HOLDS
    return QUALITATIVELY if gain.low > 0 else FAILS


def spectrum(c: Tensor) -> Tensor:
    """Eigenvalues of each unit, ascending and not negative."""
    values: Tensor = torch.linalg.eigvalsh(c)
    return values.clamp_min(0)


def evenness(values: Tensor, n: int) -> list[float]:
    """(Σλ)²/(nΣλ²): 1 for a multiple of the identity."""
    total = values.sum(1).square() / values.square().sum(1).clamp_min(1e-300)
    found: list[float] = (total / n).tolist()
    return found


def relative(values: Tensor) -> tuple[float, ...]:
    """Largest first, as parts of the trace."""
    found: list[float] = (values.flip(0) / values.sum()).clamp_min(1e-12).tolist()
    return tuple(found)


def snapshots(
    bench: Workbench, seed: int, times: tuple[int, ...]
) -> list[tuple[int, str, Tensor, Tensor]]:
    """(step, layer, C, w) of some units of every layer, in float64, of the standard
    parameterization as it trains."""
    model = bench.network("standard", seed, noise=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: list[tuple[int, str, Tensor, Tensor]] = []

    def take(step: int) -> None:
        rows = torch.arange(EXAMPLES)
        frozen: Any = model.eval()
        grads = example_gradients(
            frozen, F.cross_entropy, bench.data.train[rows], bench.data.train_labels[rows]
        )
        for name, w in unit_weights(model).items():
            c = gradient_covariance(grads[name][:, :UNITS].double())
            found.append((step, name, c, w[:UNITS].double()))
        model.train()

    def watch(step: int, _: nn.Module) -> None:
        if step + 1 in times:
            take(step + 1)

    if 0 in times:
        take(0)
    bench.train(model, optimizer, steps=max(times), batch=64, seed=seed, watch=watch)
    return found
