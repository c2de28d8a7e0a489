"""Claims 7, 8 and 9: the projection and the covariance of the gradient (section 2)."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.diagnostics import example_gradients, gradient_covariance, weight_rows
from weightnorm.inspection import find_normalized
from weightnorm.lab.claims.claim import (
    HOLDS,
    QUALITATIVELY,
    Figure,
    Measured,
    Series,
    Verdict,
    claim,
    exactly,
    series,
    undecided,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.statistics import Interval, mean_interval

EXAMPLES = 256
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
    7, "2", "The covariance of ∇v is D = (g²/‖v‖²)·M C M, with C that of ∇w",
    paper="exact",
    measured="largest relative deviation from the covariance of the gradients of 64 real examples "
    "in v, over some units of every layer, float64",
)  # fmt: skip
def transformed_covariance(context: Context) -> Measured:
    model = context.network("weight-norm", context.seeds[0]).double()
    x, y = context.data.train[:64].double(), context.data.train_labels[:64]
    found = {weight.path: weight.parts() for weight in find_normalized(model)}
    of_v: dict[str, list[Tensor]] = {path: [] for path in found}
    for image, label in zip(x, y, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        gradients = torch.autograd.grad(loss, [part.v for part in found.values()])
        for path, gradient in zip(found, gradients, strict=True):
            of_v[path].append(gradient[:UNITS].flatten(1))
    of_w = example_gradients(model, F.cross_entropy, x, y)
    deviations = {}
    for path, (v, g) in found.items():
        v, g = v.detach()[:UNITS].flatten(1), g.detach()[:UNITS].flatten(1)
        c = gradient_covariance(of_w[path][:, :UNITS])
        d = scaled_and_projected(c, v, g / v.norm(dim=1, keepdim=True))
        off = gradient_covariance(torch.stack(of_v[path])) - d
        deviations[path] = (off.abs().max() / d.abs().max()).item()
    worst = max(deviations.values())
    return Measured(f"{worst:.1e}", exactly(worst, 1e-9), len(deviations), {**deviations})


def scaled_and_projected(c: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """(g²/‖v‖²)·M C M for each unit: c (units, n, n), w (units, n), scale (units, 1)."""
    direction = F.normalize(w, dim=1)
    m = torch.eye(w.shape[1], dtype=w.dtype) - direction[:, :, None] * direction[:, None, :]
    d: Tensor = scale.square()[..., None] * (m @ c @ m)
    return d


@claim(
    8, "2", "w is often near a dominant eigenvector of the covariance C of its gradient",
    paper="empirical, no number given",
    measured=f"share of units whose w has a |cosine| above {NEAR} with one of the {DOMINANT} top "
    "eigenvectors of C, over layers, two times of training, standard and weight norm; and "
    "w′Cw/(‖w‖²λ); "
    "both compared with random directions",
)  # fmt: skip
def dominant_direction(context: Context) -> Measured:
    rows = all_rows(context)
    trained = [row for row in rows if row["step"] > 0]  # before training w is a random direction
    near, by_chance = (over_seeds(trained, key) for key in ("near", "near_random"))
    best, top = (over_seeds(trained, key) for key in ("cosine_dominant", "cosine"))
    more = over_seeds(trained, "rayleigh", less="rayleigh_random")
    nearer = over_seeds(trained, "cosine_dominant", less="cosine_dominant_random")
    value = (
        f"{100 * near.value:.0f} % of units are near "
        f"[{100 * near.low:.0f}, {100 * near.high:.0f}], "
        f"of random directions {100 * by_chance.value:.0f} %; |cosine| with the nearest {best}, "
        f"{nearer} above random; with the first {top}; Rayleigh quotient {more} above random"
    )
    verdict = alignment_verdict(near, nearer, more)
    kept = [{k: v for k, v in row.items() if k != "spectra"} for row in rows]
    figures = tuple(_cosines(rows, how) for how in PARAMETERIZATIONS)
    return Measured(value, verdict, len(context.seeds), {"measured": kept}, figures)


def alignment_verdict(near: Interval, nearer: Interval, more: Interval) -> Verdict:
    """Holds if over half of the units are near; qualitatively if cosine and Rayleigh quotient are
    above those of random directions."""
    if nearer.low <= 0 or more.low <= 0:
        return undecided(nearer, more)
    return HOLDS if near.low > OFTEN else QUALITATIVELY


def _cosines(rows: list[dict[str, Any]], how: str) -> Figure:
    rows = [row for row in rows if row["parameterization"] == how]
    layers, times = (sorted({row[key] for row in rows}) for key in ("layer", "step"))

    def line(name: str, key: str, at: list[int]) -> Series:
        columns = [
            seed_means([r for r in rows if r["layer"] == n and r["step"] in at], key)
            for n in layers
        ]
        return series(name, layers, columns)

    lines = [line(f"after {at} steps", "cosine_dominant", [at]) for at in times]
    lines.append(line("random direction", "cosine_dominant_random", times))
    title = f"|cosine| of w with the nearest of C's {DOMINANT} dominant eigenvectors, {how}"
    return Figure(title, "layer", "mean |cosine|", tuple(lines))


@claim(
    9, "2", "D is nearer the identity than C on the complement of w",
    paper="follows from claim 8",
    measured="how much nearer, as a share of ‖C/(tr C/n) − 1‖, and of what a projection away from "
    "a random direction gives; over layers, standard and weight norm, after training",
)  # fmt: skip
def nearer_identity(context: Context) -> Measured:
    rows = [row for row in all_rows(context) if "spectra" in row]
    gain = over_seeds(rows, "closer")
    beyond = over_seeds(rows, "closer", less="closer_random")
    value = f"nearer by {gain}, beyond a random direction {beyond}"
    middle = sorted({row["layer"] for row in rows})[len({row["layer"] for row in rows}) // 2]
    figures = tuple(_spectra(rows, how, middle) for how in PARAMETERIZATIONS)
    numbers = {"gain": gain, "beyond random": beyond}
    return Measured(value, nearer_verdict(gain, beyond), len(context.seeds), numbers, figures)


def nearer_verdict(gain: Interval, beyond: Interval) -> Verdict:
    """Holds if the gain is not negligible and exceeds that of a random direction; qualitatively if
    it only exceeds it."""
    if beyond.low <= 0 or gain.low <= 0:
        return undecided(beyond, gain)
    return HOLDS if gain.low > CLOSER else QUALITATIVELY


def _spectra(rows: list[dict[str, Any]], how: str, layer: int) -> Figure:
    found = [
        row["spectra"] for row in rows if row["parameterization"] == how and row["layer"] == layer
    ]
    lines = []
    for name in ("C", "D"):
        values = [spectra[name] for spectra in found]
        lines.append(series(name, range(1, len(values[0]) + 1), zip(*values, strict=True)))
    title = f"Eigenvalues of C and D, layer {layer}, {how}"
    return Figure(title, "rank", "eigenvalue / trace", tuple(lines), log_y=True)


def over_seeds(rows: list[dict[str, Any]], key: str, *, less: str = "") -> Interval:
    """Interval over seeds of the mean over layers and times, which are not independent."""
    return mean_interval(seed_means(rows, key, less=less))


def seed_means(rows: list[dict[str, Any]], key: str, *, less: str = "") -> list[float]:
    """Mean over layers and times, of each seed."""
    seeds = sorted({row["seed"] for row in rows})
    values = []
    for seed in seeds:
        own = [row for row in rows if row["seed"] == seed]
        values.append(fmean(row[key] - (row[less] if less else 0.0) for row in own))
    return values


def all_rows(context: Context) -> list[dict[str, Any]]:
    """Alignment of every network, time and layer; claims 8 and 9 share the networks."""
    parts = [(how, seed) for how in PARAMETERIZATIONS for seed in context.seeds]
    found = context.map(covariances_in_training, parts)
    return [
        {"parameterization": how, "seed": seed, **row}
        for (how, seed), rows in zip(parts, found, strict=True)
        for row in rows
    ]


def covariances_in_training(context: Context, how: str, seed: int) -> list[dict[str, Any]]:
    """Alignment at several times of training, by layer; means over units."""
    times = (0, 20, 100) if context.quick else (0, 50, 300)
    model = context.network(how, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=PARAMETERIZATIONS[how])
    x, y = context.data.train[:EXAMPLES], context.data.train_labels[:EXAMPLES]
    chance = torch.Generator().manual_seed(10_000 + seed)  # independent of the weights
    found: list[dict[str, Any]] = []

    def measure(step: int) -> None:
        grads = example_gradients(model, F.cross_entropy, x, y)
        for layer, (name, w) in enumerate(weight_rows(model).items(), 1):
            c = gradient_covariance(grads[name][:, :UNITS].double())
            last = step == times[-1]
            row = {"step": step, "layer": layer, **layer_row(c, w[:UNITS].double(), chance, last)}
            found.append(row)

    def after_step(step: int, _: nn.Module) -> None:
        if step + 1 in times:
            measure(step + 1)

    measure(0)
    context.train(model, optimizer, steps=times[-1], batch=64, seed=seed, after_step=after_step)
    return found


def layer_row(c: Tensor, w: Tensor, chance: torch.Generator, spectra: bool) -> dict[str, Any]:
    """Alignment of one layer, and the spectra before and after the projection; units without
    gradient are left out."""
    alive = torch.einsum("unn->u", c) > 0
    c, w = c[alive], w[alive]
    noise = torch.randn(w.shape, generator=chance, dtype=w.dtype)
    row: dict[str, Any] = alignment(c, w)
    row |= {f"{key}_random": value for key, value in alignment(c, noise).items()}
    if spectra:
        before, after, random = (spectrum(m) for m in (c, projected(c, w), projected(c, noise)))
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
        "cosine": cosines[:, -1].mean().item(),
        "cosine_dominant": nearest.mean().item(),
        "near": (nearest > NEAR).double().mean().item(),
        "rayleigh": quotient.mean().item(),
    }


def projected(c: Tensor, w: Tensor) -> Tensor:
    """M C M, which is D up to a factor."""
    return scaled_and_projected(c, w, torch.ones(len(w), 1, dtype=w.dtype))


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
