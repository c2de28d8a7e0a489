"""What a user would pick: plain layers, this library, or one of torch's two weight norms."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as torchs_hook

from weightnorm import weight_norm_model
from weightnorm.lab.benchmarks.interleaved import Call
from weightnorm.layers import chosen_weights

PLAIN, OURS = "plain", "weight norm"
PARAMETRIZATION, HOOK = "torch, parametrization", "torch, hook"


def with_torchs_parametrization(model: nn.Module) -> None:
    """torch's newer flavour on every weight that ours would normalize."""
    for _, module, name in [*chosen_weights(model, None)]:
        parametrizations.weight_norm(module, name)


def with_torchs_hook(model: nn.Module) -> None:
    """torch's older flavour, likewise; it warns that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for _, module, name in [*chosen_weights(model, None)]:
            torchs_hook(module, name)


FLAVOURS: dict[str, Callable[[nn.Module], object]] = {
    PLAIN: lambda model: None,
    OURS: weight_norm_model,
    PARAMETRIZATION: with_torchs_parametrization,
    HOOK: with_torchs_hook,
}


def flavours(make: Callable[[], nn.Module], device: torch.device) -> dict[str, nn.Module]:
    """The same network from the same random state, in every flavour."""
    return {name: flavour(make, normalize, device) for name, normalize in FLAVOURS.items()}


def flavour(
    make: Callable[[], nn.Module], normalize: Callable[[nn.Module], object], device: torch.device
) -> nn.Module:
    torch.manual_seed(0)
    model = make().to(device)
    normalize(model)
    return model


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Call:
    """Gradient of a loss, and a step of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step
