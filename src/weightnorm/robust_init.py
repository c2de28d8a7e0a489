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
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import type_before_parametrizations

from weightnorm import layers
from weightnorm._dtensor import refuse_sharded
from weightnorm._torch_private import BatchNormBase, DropoutBase, MaxPoolBase
from weightnorm._units import Units, wide_dtype
from weightnorm.data_init import layer_of, target_layers
from weightnorm.folding import refuse_folded
from weightnorm.functional import compose
from weightnorm.inspection import is_weight_normed, normalized_weight
from weightnorm.mean_only import MeanOnlyBatchNorm1d, MeanOnlyBatchNorm2d, MeanOnlyBatchNorm3d

Gain = float | Mapping[str, float]


@torch.no_grad()
def robust_init(
    model: nn.Module,
    *,
    gain: Gain | None = None,
    residual: str | Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Initialize linear and convolutional layers without data, preserving norms through depth.

    Sets v to random orthogonal rows, g to √(gain·fan_in/fan_out) and the bias to 0. A layer without
    weight norm gets the weight w = g·v/‖v‖. All other layers keep their initialization. Call it
    before building the optimizer; ``data_dependent_init`` needs no such call before it.

    Args:
        model: changed in place.
        gain: the gain of all layers, or of layers by name or pattern, such as ``{"blocks.*": 2.0}``
            (others get 1). Default: 2 for a layer whose output goes to a ReLU, 2/(1 + a²) for a
            leaky ReLU of slope a, 1 otherwise, found by tracing the model with torch.fx.
        residual: name or pattern of the last layer of each residual branch, such as
            ``"blocks.*.conv2"``. They are scaled by 1/√B, with B the number of layers that match.
            For a network of several stages give one pattern per stage.
        generator: source of random numbers.

    Returns:
        g of every layer that was set, by name. Layers that share a weight are set once, under the
        first name. Not set are layers that share a weight with another kind of module, such as an
        embedding, layers whose weight another parametrization or hook computes, and frozen ones.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> robust_init(model)
    {'0': 1.0, '2': 2.0}
    """
    refuse_sharded(model, "initialize it first, then fully_shard")
    for module in model.modules():
        refuse_folded(module, "initialize the weights")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: give it memory first")
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("the model has lazy layers without a shape: run it once on data first")
    found = {
        name: layer_of(module)
        for name, module in target_layers(model)
        if _is_settable(layer_of(module))
    }
    gains = _gains(model, found, gain)
    scales = _residual_scales(list(found), residual)
    owners = layers.parameter_owners(model)
    lengths: dict[str, float] = {}
    done: set[nn.Module] = set()
    for name, layer in found.items():
        sharing = {
            owner
            for parameter in layers.own_parameters(layer)
            for _, owner in owners[layers.memory_key(parameter)]
        }
        if sharing & done or not sharing <= set(found.values()):
            continue
        done.add(layer)
        fan_in, fan_out = _fans(layer)
        lengths[name] = math.sqrt(gains[name] * fan_in / fan_out) * scales[name]
        _set_weight(layer, lengths[name], generator)
        if (bias := layer._parameters.get("bias")) is not None:
            bias.zero_()
    return lengths


def _is_settable(layer: nn.Module) -> bool:
    """Return whether this is a linear layer or convolution with a plain or normalized weight that
    is trained."""
    if isinstance(layer, nn.Bilinear):
        return False
    if not all(p.requires_grad for p in layers.own_parameters(layer)):
        return False
    return is_weight_normed(layer, "weight") or layer._parameters.get("weight") is not None


def _fans(layer: Any) -> tuple[int, int]:
    """Return fan in and fan out, up to the common factor of kernel size and groups."""
    if isinstance(layer, layers.Conv):
        return layer.in_channels, layer.out_channels
    return layer.in_features, layer.out_features


def _set_weight(layer: nn.Module, length: float, generator: torch.Generator | None) -> None:
    """Give every unit of the layer an orthogonal direction and the norm `length`."""
    units = layers.units_of(layer)
    weight: Any = layer.weight
    v = orthogonal(weight, units, int(getattr(layer, "groups", 1)), generator)
    if is_weight_normed(layer, "weight"):
        normalized = normalized_weight(layer, "weight")
        stored = normalized.stored
        if stored.g.shape == units.shape(stored.v.shape):
            mask = getattr(normalized.parametrization, "mask", None)
            stored.v.copy_(v if mask is None else v * mask)  # as checkpoints expect it
            stored.g.fill_(math.log(length) if normalized.is_log else length)
            normalized.refresh()
            return
    w = compose(v=v, g=v.new_full(units.shape(v.shape), length), units=units)
    if is_weight_normed(layer, "weight"):
        normalized.write(w.to(stored.v.dtype))
    else:
        layer.get_parameter("weight").copy_(w)


def orthogonal(
    like: Tensor, units: Units, groups: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw a weight whose units have orthogonal weight vectors (within each group).

    If a group has more units than inputs, its columns are orthogonal instead. Drawn in float32 or
    wider.
    """
    count = math.prod(units.shape(like.shape))
    rows = torch.empty(
        groups,
        count // groups,
        like.numel() // max(count, 1),
        device=like.device,
        dtype=wide_dtype(like.dtype),
    )
    for block in rows:
        if block.numel():
            nn.init.orthogonal_(block, generator=generator)
    return units.from_rows(rows.flatten(0, 1), like.shape)


def _residual_scales(names: list[str], residual: str | Sequence[str]) -> dict[str, float]:
    """Return 1/√B for the layers that each pattern matches, 1 for others."""
    scales = dict.fromkeys(names, 1.0)
    for pattern in [residual] if isinstance(residual, str) else residual:
        matches = layers.matching(names, pattern, "residual")
        for name in matches:
            scales[name] = 1 / math.sqrt(len(matches))
    return scales


def _gains(model: nn.Module, found: Mapping[str, nn.Module], gain: Gain | None) -> dict[str, float]:
    """Return the gain of each layer by name."""
    if gain is None:
        return _traced_gains(model, found)
    gains = dict.fromkeys(found, 1.0)
    for pattern, value in (gain if isinstance(gain, Mapping) else {"*": gain}).items():
        if not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise ValueError(f"gain must be a positive number; got {value!r} for {pattern!r}")
        gains.update(dict.fromkeys(layers.matching(list(found), pattern, "gain"), float(value)))
    return gains


class _Tracer(fx.Tracer):
    """Traces the model down to the modules of torch and of this library."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        kind = type_before_parametrizations(module)
        own = kind.__module__.startswith(("torch.nn", "weightnorm.mean_only"))
        return (own and kind is not nn.Sequential) or bool(layers.weight_names(module))


def _traced_gains(model: nn.Module, found: Mapping[str, nn.Module]) -> dict[str, float]:
    """Return the gain that the activation after each layer needs: 1 unless it is always a ReLU."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # forward is the user's code and may raise anything
        raise ValueError(
            f"robust_init could not trace {type(model).__name__} to find the layers before a ReLU "
            f"({type(error).__name__}: {error}); name them, for example "
            'gain={"blocks.*.conv1": 2.0}'
        ) from error
    modules = dict(model.named_modules(remove_duplicate=False))
    gains: dict[nn.Module, set[float]] = {}
    inside: set[nn.Module] = set()
    for node in graph.nodes:
        if node.op == "call_module":
            module = modules[node.target]
            gains.setdefault(layer_of(module), set()).update(_gains_after(node, modules))
            inside.update(module.modules())
    for attention in model.modules():  # its projections have no activation after them
        if isinstance(attention, nn.MultiheadAttention):
            inside.difference_update(attention.modules())
    if hidden := [name for name, layer in found.items() if layer in inside - gains.keys()]:
        raise ValueError(
            f"robust_init cannot see which activation follows {', '.join(hidden)}, inside modules "
            "that torch.fx does not trace; name the layers before a ReLU, for example "
            f'gain={{"{hidden[0]}": 2.0}}'
        )
    return {
        name: next(iter(gains[layer])) if len(gains.get(layer, ())) == 1 else 1.0
        for name, layer in found.items()
    }


_TRANSPARENT = (
    nn.Identity, nn.Flatten, nn.Unflatten, DropoutBase,
    MaxPoolBase, BatchNormBase,
    MeanOnlyBatchNorm1d, MeanOnlyBatchNorm2d, MeanOnlyBatchNorm3d,
)  # fmt: skip
"""Modules that may stand between a layer and its ReLU. Others are taken as another activation."""
_TRANSPARENT_CALLS = (torch.flatten, F.dropout, F.max_pool2d, "flatten", "view", "reshape")


def _gains_after(node: fx.Node, modules: Mapping[str, nn.Module]) -> set[float]:
    """Return the gains that the users of a node need."""
    found: set[float] = set()
    for user in node.users:
        module = modules[str(user.target)] if user.op == "call_module" else None
        called = None if module is not None else user.target  # a module may be named "relu"
        if isinstance(module, _TRANSPARENT) or called in _TRANSPARENT_CALLS:
            found |= _gains_after(user, modules)
        else:
            found.add(_gain_of(user, module, called))
    return found


def _gain_of(node: fx.Node, module: nn.Module | None, called: object) -> float:
    """Return 2 for a ReLU, 2/(1 + a²) for a leaky one, 1 for anything else."""
    if isinstance(module, nn.LeakyReLU):
        return 2 / (1 + module.negative_slope**2)
    if called in (F.leaky_relu, F.leaky_relu_):
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        return 2 / (1 + slope**2) if isinstance(slope, (int, float)) else 1.0
    is_relu = isinstance(module, nn.ReLU) or called in (
        F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"
    )  # fmt: skip
    return 2.0 if is_relu else 1.0
