"""Claims 8 and 9: the covariance C of the gradient of w, and its projection (section 2)."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.lab.claims.claim import (
    Context,
    Outcome,
    Statement,
    Verdict,
    above,
    at_least,
    claim,
    figure,
    percent,
    series,
    weakest,
)
from weightnorm.lab.claims.probes import example_gradients, gradient_covariance, weight_rows
from weightnorm.lab.records import Row
from weightnorm.lab.statistics import Interval, mean_interval

EXAMPLES, BATCH = 256, 100
UNITS = 8
"""Units of each layer that are measured."""
DOMINANT = 5
"""Number of top eigenvectors."""
NEAR = 0.5
"""A |cosine| that counts as near; that of a random direction is about √(2/πn)."""
OFTEN = 0.5
"""Share of the units."""
CLOSER = 0.05
"""Share of the distance to the identity that is not negligible."""
PARAMETERIZATIONS = {"standard": 0.0003, "weight-norm": 0.003}
"""Parameterization → Adam's learning rate in the paper."""


@claim(
    8,
    "2",
    *(
        Statement(
            f"w is often near a dominant eigenvector of the covariance C of its gradient: {how}",
            "empirical, no number given",
            f"share of the units of all layers whose w has a |cosine| above {NEAR} with one of the "
            f"{DOMINANT} top eigenvectors of C, at two times of training with batches of {BATCH}: "
            "above one half. Random directions beside it",
        )
        for how in PARAMETERIZATIONS
    ),
)
def dominant_direction(context: Context) -> list[Outcome]:
    outcomes = []
    for how in PARAMETERIZATIONS:
        rows = alignment_rows(context, how)
        trained = [row for row in rows if row["step"] > 0]  # before it w is a random direction
        near, chance = (over_seeds(trained, key) for key in ("near", "near_random"))
        nearer = over_seeds(trained, "cosine_dominant", less="cosine_dominant_random")
        rayleigh = over_seeds(trained, "rayleigh", less="rayleigh_random")
        value = (
            f"{percent(near)} of units are near, of random directions {percent(chance)}; |cosine| "
            f"{over_seeds(trained, 'cosine_dominant')}, {nearer} above random; w′Cw/(‖w‖²λ) "
            f"{rayleigh} above random"
        )
        numbers = {"measured": [{k: v for k, v in row.items() if k != "spectra"} for row in rows]}
        outcomes.append(
            Outcome(value, above(near, OFTEN), len(context.seeds), numbers, (_cosines(rows, how),))
        )
    return outcomes


def _cosines(rows: list[dict[str, Any]], how: str) -> Row:
    layers, times = (sorted({row[key] for row in rows}) for key in ("layer", "step"))

    def line(name: str, key: str, at: list[int]) -> Row:
        columns = [
            seed_means([r for r in rows if r["layer"] == n and r["step"] in at], key)
            for n in layers
        ]
        return series(name, layers, columns)

    lines = [line(f"after {at} steps", "cosine_dominant", [at]) for at in times]
    lines.append(line("random direction", "cosine_dominant_random", times))
    title = f"|cosine| of w with the nearest of C's {DOMINANT} dominant eigenvectors, {how}"
    return figure(title, "layer", "mean |cosine|", lines)


@claim(
    9,
    "2",
    *(
        Statement(
            f"Projecting w away brings the covariance closer to the identity: {how}",
            "follows from claim 8",
            f"decrease of ‖C/(tr C/n) − 1‖ by the projection, after training with batches of "
            f"{BATCH}: at least {100 * CLOSER:g} %, and more than by projecting a random "
            "direction away",
        )
        for how in PARAMETERIZATIONS
    ),
)
def nearer_identity(context: Context) -> list[Outcome]:
    outcomes = []
    for how in PARAMETERIZATIONS:
        rows = [row for row in alignment_rows(context, how) if "spectra" in row]
        gain = over_seeds(rows, "closer")
        beyond = over_seeds(rows, "closer", less="closer_random")
        value = f"{percent(gain)}, beyond a random direction {percent(beyond)}"
        layers = sorted({row["layer"] for row in rows})
        chart = _spectra(rows, how, layers[len(layers) // 2])
        numbers = {"gain": gain, "beyond random": beyond}
        outcomes.append(
            Outcome(value, nearer_verdict(gain, beyond), len(context.seeds), numbers, (chart,))
        )
    return outcomes


def nearer_verdict(gain: Interval, beyond: Interval) -> Verdict:
    """The gain must not be negligible, and exceed that of a random direction."""
    return weakest(at_least(gain, CLOSER), above(beyond, 0.0))


def _spectra(rows: list[dict[str, Any]], how: str, layer: int) -> Row:
    found = [row["spectra"] for row in rows if row["layer"] == layer]
    lines = []
    for name in ("C", "D"):
        values = [spectra[name] for spectra in found]
        lines.append(series(name, range(1, len(values[0]) + 1), zip(*values, strict=True)))
    title = f"Eigenvalues of C and D, layer {layer}, {how}"
    return figure(title, "rank", "eigenvalue / trace", lines, log_y=True)


def over_seeds(rows: list[dict[str, Any]], key: str, *, less: str = "") -> Interval:
    """Interval over seeds of the mean over layers and times, which are not independent."""
    return mean_interval(seed_means(rows, key, less=less))


def seed_means(rows: list[dict[str, Any]], key: str, *, less: str = "") -> list[float]:
    """Mean over layers and times, of each seed."""
    values = []
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if row["seed"] == seed]
        values.append(fmean(row[key] - (row[less] if less else 0.0) for row in own))
    return values


def alignment_rows(context: Context, how: str) -> list[dict[str, Any]]:
    """Alignment in every network, time and layer; claims 8 and 9 share the networks."""
    found = context.map(covariances_in_training, [(how, seed) for seed in context.seeds])
    pairs = zip(context.seeds, found, strict=True)
    return [{"seed": seed, **row} for seed, rows in pairs for row in rows]


def covariances_in_training(context: Context, how: str, seed: int) -> list[dict[str, Any]]:
    """Alignment at several times of training, by layer; means over units."""
    times = context.size((0, 50, 300), (0, 20, 100))
    problem = context.problem("cifar10 at 16×16")
    model = problem.network(how, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=PARAMETERIZATIONS[how])
    x, y = problem.data.train[:EXAMPLES], problem.data.train_labels[:EXAMPLES]
    chance = torch.Generator().manual_seed(10_000 + seed)  # independent of the weights
    found: list[dict[str, Any]] = []

    def measure(step: int) -> None:
        grads = example_gradients(model, F.cross_entropy, x, y)
        for layer, (name, w) in enumerate(weight_rows(model).items(), 1):
            c = gradient_covariance(grads[name][:, :UNITS].double())
            row = layer_row(c, w[:UNITS].double(), chance, spectra=step == times[-1])
            found.append({"step": step, "layer": layer, **row})

    def after_step(step: int, _: nn.Module) -> None:
        if step + 1 in times:
            measure(step + 1)

    measure(0)
    problem.train(model, optimizer, steps=times[-1], batch=BATCH, seed=seed, after_step=after_step)
    return found


def layer_row(c: Tensor, w: Tensor, chance: torch.Generator, *, spectra: bool) -> dict[str, Any]:
    """Alignment of one layer, and the spectra before and after the projection; units without
    gradient are left out."""
    alive = torch.einsum("unn->u", c) > 0
    c, w = c[alive], w[alive]
    noise = torch.randn(w.shape, generator=chance, dtype=w.dtype)
    row: dict[str, Any] = alignment(c, w)
    row |= {f"{key}_random": value for key, value in alignment(c, noise).items()}
    if spectra:
        ones = torch.ones(len(w), 1, dtype=w.dtype)
        matrices = (c, scaled_and_projected(c, w, ones), scaled_and_projected(c, noise, ones))
        before, after, random = map(spectrum, matrices)
        row["closer"], row["closer_random"] = closer(before, after), closer(before, random)
        row["spectra"] = {"C": shares(before), "D": shares(after[:, :-1])}
    return row


def alignment(c: Tensor, direction: Tensor) -> dict[str, float]:
    """Alignment of directions with the eigenvectors of C; means over units."""
    values, vectors = torch.linalg.eigh(c)
    d = F.normalize(direction, dim=1)
    cosines = torch.einsum("un,unk->uk", d, vectors[..., -DOMINANT:]).abs()
    quotient = torch.einsum("un,unm,um->u", d, c, d) / values[:, -1]
    nearest = cosines.amax(1)
    return {
        "cosine_dominant": nearest.mean().item(),
        "near": (nearest > NEAR).double().mean().item(),
        "rayleigh": quotient.mean().item(),
    }


def scaled_and_projected(c: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """(g²/‖v‖²)·M C M for each unit: c (units, n, n), w (units, n), scale (units, 1)."""
    direction = F.normalize(w, dim=1)
    m = torch.eye(w.shape[1], dtype=w.dtype) - direction[:, :, None] * direction[:, None, :]
    d: Tensor = scale.square()[..., None] * (m @ c @ m)
    return d


def spectrum(c: Tensor) -> Tensor:
    """Eigenvalues of each unit, descending, clamped to 0."""
    values: Tensor = torch.linalg.eigvalsh(c)
    return values.clamp_min(0).flip(1)


def closer(before: Tensor, after: Tensor) -> float:
    """Relative decrease of the distance to the identity, mean over units. The last eigenvalue after
    the projection is that of the removed direction and is left out."""
    return (1 - distance(after[:, :-1]) / distance(before)).mean().item()


def distance(values: Tensor) -> Tensor:
    """Frobenius norm ‖C/(tr C/n) − 1‖/√n from the eigenvalues: 0 for a multiple of the identity,
    √(n − 1) for rank 1."""
    scaled = values / values.mean(1, keepdim=True)
    return (scaled - 1).square().mean(1).sqrt()


def shares(values: Tensor) -> list[float]:
    """Eigenvalues as shares of the trace, mean over units."""
    found: list[float] = (values / values.sum(1, keepdim=True)).mean(0).clamp_min(1e-9).tolist()
    return found
