"""Measurements of normalized weights, gradients and batch statistics during training.

Each costs O(parameters) unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from weightnorm._dtensor import whole
from weightnorm._units import Units, wide_dtype
from weightnorm.folding import remove_weight_norm
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.layers import layer_weights, units_of

Loss = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def v_norms(model: nn.Module) -> dict[str, Tensor]:
    """Return ‖v‖ of every unit of every normalized weight, by name.

    Under gradient descent it never decreases, and it grows faster with noisier gradients
    (section 2.1).
    """
    return {weight.path: whole(weight.v_norm()).flatten() for weight in find_normalized(model)}


@torch.no_grad()
def effective_step(model: nn.Module) -> dict[str, Tensor]:
    """Return ``|g|/‖v‖`` of every unit by name: the scale of ∇v in eq. 4. 0 for a zero row.

    A step with learning rate lr changes the direction of w by about ``lr·|g|·‖M∇w‖/‖v‖²`` radians.
    """
    norms = v_norms(model)
    lengths = {w.path: whole(w.parts().g).flatten().abs() for w in find_normalized(model)}
    return {path: torch.where(norms[path] == 0, 0.0, lengths[path] / norms[path]) for path in norms}


@torch.no_grad()
def weight_rows(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight by name, normalized or not, as a matrix with one row per output unit.

    Pass it to ``direction_angle`` later to measure how far each unit's direction has moved.

    >>> weight_rows(nn.ConvTranspose1d(2, 3, 5))["weight"].shape
    torch.Size([3, 10])
    """
    found = {weight.path: rows_of(weight) for weight in find_normalized(model)}
    for path, layer, name in layer_weights(model):
        if path not in found:
            found[path] = units_of(layer).rows(getattr(layer, name)).clone()
    return found


@torch.no_grad()
def direction_angle(model: nn.Module, since: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the angle in radians between each unit's weight now and earlier; 0 for a zero row.

    `since` is an earlier result of ``weight_rows``.
    """
    now = weight_rows(model)
    return {
        name: angles(whole((unit_vectors(now[name]) - unit_vectors(rows)).norm(dim=1)))
        for name, rows in since.items()
    }


def unit_vectors(rows: Tensor) -> Tensor:
    """Return each row divided by its norm; NaN for a zero row."""
    directions: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return directions


def angles(distance: Tensor) -> Tensor:
    """Return 2·asin(‖a − b‖/2), the angle between unit vectors at this distance; 0 for NaN.

    Unlike acos(a·b) it is exact for small angles.
    """
    return torch.nan_to_num(2 * (distance / 2).clamp_max(1).asin(), 0.0)


def example_gradients(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Return ∇w of each single example, by weight name: (examples, units, inputs of a unit).

    For a normalized weight this is the gradient of w, so parameterizations can be compared. Costs a
    copy of the model and the memory of one gradient per example: pass the `names` you need. A
    weight that layers share is listed under its first name. Layers that mix examples (batch norm in
    training) have no such gradient.
    """
    plain = deepcopy(model).requires_grad_(False)
    remove_weight_norm(plain)
    units = {path: units_of(layer) for path, layer, _ in layer_weights(plain)}
    weights = {path: getattr(layer, name).detach() for path, layer, name in layer_weights(plain)}
    if unknown := [name for name in names if name not in units]:
        raise ValueError(f"no weight {unknown[0]!r}; there are {', '.join(units)}")
    first = {w.data_ptr(): path for path, w in reversed(weights.items())}
    chosen = list(names) or [path for path, w in weights.items() if first[w.data_ptr()] == path]

    def example_loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(plain, weights, (x[None],))
        return loss(out, y[None])

    per_example = vmap(grad(example_loss), in_dims=(None, 0, 0), randomness="different")
    gradients = per_example({name: weights[name] for name in chosen}, inputs, targets)
    return {name: _example_rows(gradients[name], units[name]) for name in chosen}


def gradient_covariance(gradients: Tensor) -> Tensor:
    """Return the covariance C of each unit's gradient: (examples, units, n) → (units, n, n).

    This is the gradient noise of section 2, as population covariance. Costs O(units · n²) memory.

    >>> gradient_covariance(torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]))
    tensor([[[1., 0.],
             [0., 0.]]])
    """
    centered = gradients - gradients.mean(0)
    return torch.einsum("kum,kun->umn", centered, centered) / len(gradients)


class BatchStatistics(NamedTuple):
    """Batch statistics of each channel: (draws, channels), or a statistic of them, (channels)."""

    mean: Tensor
    """μ of a batch."""
    variance: Tensor
    """σ² of a batch."""
    inverse_std: Tensor
    """1/σ of a batch."""


@torch.no_grad()
def batch_statistics(
    t: Tensor, batch_size: int, draws: int = 1000, generator: torch.Generator | None = None
) -> BatchStatistics:
    """Return mean, variance and 1/σ of a pre-activation in `draws` random batches of a size.

    t is (examples, channels, …). Costs O(draws · batch_size) rows of (examples, channels). Computed
    in float32 or wider, around the mean of all examples.
    """
    t = t.to(wide_dtype(t.dtype))
    x = t.flatten(2) if t.dim() > 2 else t[..., None]
    center = x.mean((0, 2), keepdim=True)  # E[t²] − E[t]² of large means would be inexact
    x = x - center
    first, second = x.mean(2), x.square().mean(2)  # (examples, channels)
    rows = torch.randint(len(t), (draws, batch_size), generator=generator).to(t.device)
    mean = first[rows].mean(1)  # (draws, channels)
    variance = (second[rows].mean(1) - mean.square()).clamp_min(torch.finfo(t.dtype).tiny)
    return BatchStatistics(mean + center[0, :, 0], variance, variance.rsqrt())


def noise_kurtosis(
    t: Tensor, batch_size: int, draws: int = 1000, generator: torch.Generator | None = None
) -> BatchStatistics:
    """Return the excess kurtosis of the batch statistics of each channel; 0 for Gaussian noise.

    Mean-only batch norm adds only the noise of the batch mean; full batch norm also multiplies by
    1/σ of the batch (section 4). Batches are drawn as in ``batch_statistics``.
    """
    return BatchStatistics(*map(excess_kurtosis, batch_statistics(t, batch_size, draws, generator)))


def excess_kurtosis(x: Tensor) -> Tensor:
    """Return m₄/m₂² − 3 along the first axis."""
    centered = x - x.mean(0)
    return centered.pow(4).mean(0) / centered.square().mean(0).square() - 3


@torch.no_grad()
def rows_of(weight: NormalizedWeight) -> Tensor:
    """Return a copy of the weight as a matrix with one row per output unit."""
    return weight.units.rows(weight.weight()).clone()


def _example_rows(gradient: Tensor, units: Units) -> Tensor:
    return torch.stack([units.rows(one) for one in gradient])
