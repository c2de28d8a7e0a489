"""Initialization without data (Arpit, Campos & Bengio 2019, arXiv 1906.02341).

v is orthogonal and every unit of a layer has g = √(gain·fan_in/fan_out), with gain 2 before a ReLU
and 1 elsewhere. Then ‖ReLU(Wh)‖ ≈ ‖h‖ in expectation, so activations and gradients neither explode
nor vanish with depth. With a residual branch in each of B blocks the norm would double B times:
the last layer of every branch is scaled by 1/√B, which bounds the growth of ‖h‖² by
(1 + 1/B)ᴮ < e.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weightnorm import layers
from weightnorm._units import Units, wide_dtype
from weightnorm.data_init import check_writable, layer_of, refusal, target_layers
from weightnorm.functional import compose
from weightnorm.inspection import is_weight_normed, normalized_weight


@torch.no_grad()
def robust_init(
    model: nn.Module,
    *,
    gain: float | Mapping[str, float],
    residual: str | Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Initialize linear and convolutional layers without data, preserving norms through depth.

    Sets v to random orthogonal rows, g to √(gain·fan_in/fan_out) and the bias to 0. A layer without
    weight norm gets the weight w = g·v/‖v‖. All other layers keep their initialization. Call it
    before building the optimizer; ``data_dependent_init`` needs no such call before it.

    Args:
        model: changed in place.
        gain: 2 for layers before a ReLU, 2/(1 + a²) before a leaky ReLU of slope a, 1 for others: a
            number for all layers, or numbers by name or pattern, such as ``{"blocks.*": 2.0}``
            (other layers get 1).
        residual: name or pattern of the last layer of each residual branch, such as
            ``"blocks.*.conv2"``. They are scaled by 1/√B, with B the number of layers that match.
            For a network of several stages give one pattern per stage.
        generator: source of random numbers.

    Returns:
        g of every layer that was set, by name. Layers that share a weight are set once, under the
        first name. Not set are layers that share a weight with another kind of module, such as an
        embedding, layers whose weight or bias another parametrization or hook computes, and frozen
        ones.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> robust_init(model, gain={"0": 2.0})
    {'0': 1.0, '2': 2.0}
    """
    check_writable(model, "robust_init")
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("the model has lazy layers without a shape: run it once on data first")
    targets = ((name, layer_of(module)) for name, module in target_layers(model))
    found = {name: layer for name, layer in targets if _is_settable(layer)}
    gains = layers.per_layer(list(found), gain, "gain")
    scales = _residual_scales(list(found), residual)
    sharing = layers.sharing(model)
    lengths: dict[str, float] = {}
    done: set[nn.Module] = set()
    for name, layer in found.items():
        others = {other for _, other in sharing[layer]}
        if others & done or not others <= set(found.values()):
            continue
        done.add(layer)
        fan_in, fan_out = _fans(layer)
        lengths[name] = math.sqrt(gains[name] * fan_in / fan_out) * scales[name]
        _set_weight(layer, lengths[name], generator)
        if (bias := layer._parameters.get("bias")) is not None:
            bias.zero_()
    return lengths


def _is_settable(layer: nn.Module) -> bool:
    """Return whether this is a linear layer or convolution whose parameters can all be set."""
    is_trained = all(p.requires_grad for p in layers.own_parameters(layer))
    return is_trained and not refusal(layer) and not isinstance(layer, nn.Bilinear)


def _fans(layer: Any) -> tuple[int, int]:
    """Return fan in and fan out, up to the common factor of kernel size and groups."""
    if isinstance(layer, layers.Conv):
        return layer.in_channels, layer.out_channels
    return layer.in_features, layer.out_features


def _set_weight(layer: nn.Module, length: float, generator: torch.Generator | None) -> None:
    """Give every unit of the layer an orthogonal direction and the norm `length`."""
    units = layers.units_of(layer)
    weight: Any = layer.weight
    v = _orthogonal(weight, units, int(getattr(layer, "groups", 1)), generator)
    w = compose(v=v, g=v.new_full(units.shape(v.shape), length), units=units)
    if not is_weight_normed(layer, "weight"):
        layer.get_parameter("weight").copy_(w)
        return
    normalized = normalized_weight(layer, "weight")
    stored = normalized.stored
    if stored.g.shape != units.shape(stored.v.shape):  # another axis: v cannot be orthogonal
        normalized.write(w.to(stored.v.dtype))
        return
    mask = getattr(normalized.parametrization, "mask", None)
    stored.v.copy_(v if mask is None else v * mask)  # as checkpoints expect it
    stored.g.fill_(math.log(length) if normalized.is_log else length)
    normalized.refresh()


def _orthogonal(
    like: Tensor, units: Units, groups: int, generator: torch.Generator | None
) -> Tensor:
    """Draw a weight whose units have orthogonal weight vectors (within each group).

    If a group has more units than inputs, its columns are orthogonal instead. Drawn in float32 or
    wider.
    """
    count = math.prod(units.shape(like.shape))
    shape = (groups, count // groups, like.numel() // max(count, 1))
    rows = torch.empty(shape, device=like.device, dtype=wide_dtype(like.dtype))
    for block in rows:
        if block.numel():
            nn.init.orthogonal_(block, generator=generator)
    return units.from_rows(rows.flatten(0, 1), like.shape)


def _residual_scales(names: list[str], residual: str | Sequence[str]) -> dict[str, float]:
    """Return 1/√B for the layers that each pattern matches, 1 for others."""
    scales = dict.fromkeys(names, 1.0)
    for pattern in [residual] if isinstance(residual, str) else residual:
        matches = layers.matching(names, pattern, "residual")
        scales.update(dict.fromkeys(matches, 1 / math.sqrt(len(matches))))
    return scales
