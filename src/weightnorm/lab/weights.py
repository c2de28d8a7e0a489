"""Weights of a network as one row per output unit: their norms, and how far they turn."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weightnorm.diagnostics import effective_step, v_norms
from weightnorm.inspection import find_normalized
from weightnorm.layers import layer_weights, units_of


@torch.no_grad()
def weight_rows(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight by name, normalized or not, as a matrix with one row per output unit.

    >>> weight_rows(nn.ConvTranspose1d(2, 3, 5))["weight"].shape
    torch.Size([3, 10])
    """
    found = {w.path: w.units.rows(w.weight()).clone() for w in find_normalized(model)}
    for path, layer, name in layer_weights(model):
        if path not in found:
            found[path] = units_of(layer).rows(getattr(layer, name)).clone()
    return found


@torch.no_grad()
def direction_angle(model: nn.Module, since: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the angle in radians between each unit's weight now and earlier; 0 for a zero row.

    `since` is an earlier result of `weight_rows`. 2·asin(‖a − b‖/2) is exact for small angles,
    unlike acos(a·b).
    """
    now = weight_rows(model)
    angles = {}
    for name, rows in since.items():
        a, b = (each / each.norm(dim=1, keepdim=True) for each in (now[name], rows))
        half = ((a - b).norm(dim=1) / 2).clamp_max(1)
        angles[name] = torch.nan_to_num(2 * half.asin(), 0.0)
    return angles


def largest_norms(model: object, count: int = 5) -> str:
    """List the weights with the largest norm of a unit, NaNs first."""
    weights = weight_rows(model) if isinstance(model, nn.Module) else {}
    norms = {name: w.norm(dim=1).max().item() for name, w in weights.items()}
    names = sorted(norms, key=lambda name: (not math.isnan(norms[name]), -norms[name]))
    return ", ".join(f"{name} {norms[name]:.4g}" for name in names[:count])


def mean_norms(model: nn.Module) -> dict[str, float]:
    """Return means over the units of all weights: ‖w‖, and of normalized ones ‖v‖ and g/‖v‖."""
    means = {"w_norm": torch.cat([w.norm(dim=1) for w in weight_rows(model).values()])}
    if norms := v_norms(model):
        means["v_norm"] = torch.cat([*norms.values()])
        means["effective_step"] = torch.cat([*effective_step(model).values()])
    return {name: x.mean().item() for name, x in means.items()}
