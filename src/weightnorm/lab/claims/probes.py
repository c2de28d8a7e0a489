"""Measurements of weights, gradients of single examples and batch statistics.

For networks whose weights have one output unit per row: linear layers and convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from weightnorm import remove_weight_norm


def plain_weights(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy of the model without weight norm, and its weights by name."""
    plain = deepcopy(model).requires_grad_(False)
    remove_weight_norm(plain)
    return plain, {name: p for name, p in plain.named_parameters() if p.ndim > 1}


def weight_rows(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight by name, normalized or not, as a matrix with one row per output unit."""
    return {name: w.flatten(1) for name, w in plain_weights(model)[1].items()}


def example_gradients(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """Return ∇w of each single example, by weight name: (examples, units, inputs of a unit).

    For a normalized weight this is the gradient of w, so parameterizations can be compared. Layers
    that mix examples (batch norm in training) have no such gradient.
    """
    plain, weights = plain_weights(model)

    def example_loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(plain, weights, (x[None],)), y[None])

    per_example = vmap(grad(example_loss), in_dims=(None, 0, 0), randomness="different")
    return {name: x.flatten(2) for name, x in per_example(weights, inputs, targets).items()}


def gradient_covariance(gradients: Tensor) -> Tensor:
    """Return the covariance C of each unit's gradient: (examples, units, n) → (units, n, n).

    This is the gradient noise of section 2, as population covariance.

    >>> gradient_covariance(torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]))
    tensor([[[1., 0.],
             [0., 0.]]])
    """
    centered = gradients - gradients.mean(0)
    return torch.einsum("kum,kun->umn", centered, centered) / len(gradients)


class BatchStatistics(NamedTuple):
    """Batch statistics of each channel: (draws, channels)."""

    mean: Tensor
    """μ of a batch."""
    variance: Tensor
    """σ² of a batch."""
    inverse_std: Tensor
    """1/σ of a batch."""


@torch.no_grad()
def batch_statistics(
    t: Tensor, batch_size: int, draws: int, generator: torch.Generator
) -> BatchStatistics:
    """Return mean, variance and 1/σ of a pre-activation in `draws` random batches of a size.

    t is (examples, channels, …). Computed around the mean of all examples.
    """
    x = t.flatten(2) if t.dim() > 2 else t[..., None]
    center = x.mean((0, 2), keepdim=True)  # E[t²] − E[t]² of large means would be inexact
    x = x - center
    first, second = x.mean(2), x.square().mean(2)  # (examples, channels)
    rows = torch.randint(len(t), (draws, batch_size), generator=generator)
    mean = first[rows].mean(1)  # (draws, channels)
    variance = (second[rows].mean(1) - mean.square()).clamp_min(torch.finfo(t.dtype).tiny)
    return BatchStatistics(mean + center[0, :, 0], variance, variance.rsqrt())


def excess_kurtosis(x: Tensor) -> Tensor:
    """Return m₄/m₂² − 3 along the first axis; 0 for Gaussian noise."""
    centered = x - x.mean(0)
    return centered.pow(4).mean(0) / centered.square().mean(0).square() - 3


@torch.no_grad()
def pre_activations(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output of every linear and convolutional layer, in the order in which they run."""
    found: list[Tensor] = []
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    handles = [m.register_forward_hook(lambda _, __, t: found.append(t)) for m in layers]
    model(x)
    for handle in handles:
        handle.remove()
    return found
