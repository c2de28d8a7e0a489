"""What weight norm does to a model in training, as numbers. Cost O(parameters) unless stated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from weightnorm.dtensor import whole
from weightnorm.folding import remove_weight_norm
from weightnorm.functional import unit_rows
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.layers import chosen_weights, unit_axis

Loss = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def weight_norms(model: nn.Module) -> dict[str, Tensor]:
    """‖v‖ of every unit of every normalized weight, by name.

    Under plain gradient descent it never shrinks, and grows faster the noisier the gradient
    (section 2.1).
    """
    return {site.path: whole(site.v_norm()).flatten() for site in find_normalized(model)}


@torch.no_grad()
def effective_step(model: nn.Module) -> dict[str, Tensor]:
    """|g|/‖v‖ of every unit, by name: what eq. 4 scales its gradient by. 0 for a zero row.

    The direction of w turns by about learning rate × (|g|/‖v‖)·‖M∇w‖/‖v‖ in one step.
    """
    norms = weight_norms(model)
    lengths = {site.path: whole(site.parts().g).flatten().abs() for site in find_normalized(model)}
    return {path: torch.where(norms[path] == 0, 0.0, lengths[path] / norms[path]) for path in norms}


@torch.no_grad()
def unit_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every weight by name, normalized or not, as a matrix with one row for each output unit.

    Keep it to see later, with :func:`direction_angle`, how far each unit has turned.

    >>> unit_weights(nn.ConvTranspose1d(2, 3, 5))["weight"].shape
    torch.Size([3, 10])
    """
    found = {site.path: rows_of(site) for site in find_normalized(model)}
    for path, layer, name in chosen_weights(model):
        if path not in found:
            found[path] = unit_rows(getattr(layer, name), *unit_axis(layer, name)).clone()
    return found


@torch.no_grad()
def direction_angle(model: nn.Module, since: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Angle in radians between each unit's weight now and then; 0 where either is a zero row.

    `since` is what :func:`unit_weights` gave then.
    """
    now = unit_weights(model)
    return {
        name: angles(whole((unit_length(now[name]) - unit_length(rows)).norm(dim=1)))
        for name, rows in since.items()
    }


def unit_length(rows: Tensor) -> Tensor:
    """Each row over its length; a zero row is not a number."""
    directions: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return directions


def angles(apart: Tensor) -> Tensor:
    """2·asin(‖a − b‖/2) between unit vectors that far apart, exact for small angles too; 0 where
    it is not a number."""
    return torch.nan_to_num(2 * (apart / 2).clamp_max(1).asin(), 0.0)


def example_gradients(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """∇w of each example on its own, by weight: (examples, units, inputs of a unit).

    A normalized weight counts as the w it stands for, so models can be compared across
    parameterizations. Costs a copy of the model and, for each example, a gradient's memory: name
    the weights you need. Layers that mix examples (batch norms in training) have no such gradient.
    """
    plain = deepcopy(model)
    remove_weight_norm(plain)
    axes = {path: unit_axis(layer, name) for path, layer, name in chosen_weights(plain)}
    chosen = list(names or axes)
    if unknown := [name for name in chosen if name not in axes]:
        raise ValueError(f"no weight {unknown[0]!r}; there are {', '.join(axes)}")
    state = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    state = {name: tensor.detach() for name, tensor in state.items()}

    def example_loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(plain, {**state, **weights}, (x[None],))
        return loss(out, y[None])

    per_example = vmap(grad(example_loss), in_dims=(None, 0, 0), randomness="different")
    gradients = per_example({name: state[name] for name in chosen}, inputs, targets)
    return {name: _example_rows(gradients[name], *axes[name]) for name in chosen}


def gradient_covariance(gradients: Tensor) -> Tensor:
    """C of each unit from the gradients of examples: (examples, units, n) → (units, n, n).

    The noise that section 2 speaks of; population covariance. Costs O(units · n²) memory.

    >>> gradient_covariance(torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]))
    tensor([[[1., 0.],
             [0., 0.]]])
    """
    centred = gradients - gradients.mean(0)
    return torch.einsum("kum,kun->umn", centred, centred) / len(gradients)


class BatchNoise(NamedTuple):
    """What batches estimate of each channel: (draws, channels), or a statistic of it (channels)."""

    mean: Tensor
    variance: Tensor
    inverse_std: Tensor


@torch.no_grad()
def batch_noise(
    t: Tensor, batch_size: int, draws: int = 1000, generator: torch.Generator | None = None
) -> BatchNoise:
    """The mean, variance and 1/σ of `draws` batches of `batch_size` examples of a pre-activation.

    t is (examples, channels, …). Costs O(draws · batch_size) rows of (examples, channels).
    """
    x = t.flatten(2) if t.dim() > 2 else t[..., None]
    first, second = x.mean(2), x.square().mean(2)  # (examples, channels)
    rows = torch.randint(len(t), (draws, batch_size), generator=generator).to(t.device)
    mean = first[rows].mean(1)  # (draws, channels)
    variance = (second[rows].mean(1) - mean.square()).clamp_min(torch.finfo(t.dtype).tiny)
    return BatchNoise(mean, variance, variance.rsqrt())


def noise_kurtosis(
    t: Tensor, batch_size: int, draws: int = 1000, generator: torch.Generator | None = None
) -> BatchNoise:
    """How heavy the tails are of the noise that a batch's statistics put on a pre-activation:
    excess kurtosis, channel by channel; 0 for Gaussian noise.

    Mean-only batch norm adds the noise of the batch mean alone; full batch norm multiplies by 1/σ
    of the batch (section 4). Drawn as in :func:`batch_noise`.
    """
    return BatchNoise(*map(excess_kurtosis, batch_noise(t, batch_size, draws, generator)))


def excess_kurtosis(x: Tensor) -> Tensor:
    """m₄/m₂² − 3 along the first axis."""
    centred = x - x.mean(0)
    return centred.pow(4).mean(0) / centred.square().mean(0).square() - 3


@torch.no_grad()
def rows_of(site: NormalizedWeight) -> Tensor:
    """The weight as a matrix with one row for each output unit; a copy."""
    dim, groups = site.axis
    return unit_rows(site.weight(), dim, groups).clone()


def _example_rows(gradient: Tensor, dim: int, groups: int) -> Tensor:
    return torch.stack([unit_rows(one, dim, groups) for one in gradient])
