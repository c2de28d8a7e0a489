"""Implementations that are compared: plain layers, this library, torch's weight norms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as torch_weight_norm

from weightnorm import normalized_weights, weight_norm_model
from weightnorm.lab.interleaved import Call

PLAIN, OURS, OPTIMIZER = "plain", "weight norm", "optimizer form"
PARAMETRIZATION, HOOK = "torch parametrization", "torch hook"


def chosen_weights(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (layer, name) of every weight that `weight_norm_model` would normalize."""
    normalized = deepcopy(model)
    weight_norm_model(normalized)
    paths = (path.rpartition(".")[::2] for path in normalized_weights(normalized))
    return [(model.get_submodule(layer), name) for layer, name in paths]


def apply_torch_parametrization(model: nn.Module) -> None:
    """Apply torch's parametrization to every weight that ours would normalize."""
    for layer, name in chosen_weights(model):
        parametrizations.weight_norm(layer, name)


def apply_torch_hook(model: nn.Module) -> None:
    """Apply torch's deprecated hook to every weight that ours would normalize."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for layer, name in chosen_weights(model):
            torch_weight_norm(layer, name)


NORMALIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    PLAIN: lambda model: None,
    OURS: weight_norm_model,
    PARAMETRIZATION: apply_torch_parametrization,
    HOOK: apply_torch_hook,
}


def peer_models(make: Callable[[], nn.Module], device: torch.device) -> dict[str, nn.Module]:
    """The same network, from the same random state, with every normalization."""
    return {name: build(make, normalize, device) for name, normalize in NORMALIZATIONS.items()}


def build(
    make: Callable[[], nn.Module], normalize: Callable[[nn.Module], object], device: torch.device
) -> nn.Module:
    """Make a network from a fixed random state and normalize it."""
    torch.manual_seed(0)
    model = make().to(device)
    normalize(model)
    return model


adam = partial(torch.optim.Adam, lr=1e-3, fused=True)


def training_step(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> Call:
    """A training step: gradient of a loss, and a step of an optimizer, by default Adam."""
    optimizer = optimizer or adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step
