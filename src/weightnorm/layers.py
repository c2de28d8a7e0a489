"""Facts about torch's layers, and the choice of the weights to normalize."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from weightnorm import _units
from weightnorm._parametrize import modules_of, parametrizations_of, pending_hooks
from weightnorm._torch_private import ConvBase, ConvTransposeBase
from weightnorm._units import Units
from weightnorm.inspection import is_weight_normed

Dim = _units.Dim | Literal["auto"]
Where = Callable[[str, nn.Module], bool]

Conv = ConvBase
"""Base class of torch's convolutions, including transposed ones."""

ConvTransposed = ConvTransposeBase

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of a torch layer's weights; empty for any other module.

    >>> weight_names(nn.LSTMCell(2, 3))
    ('weight_ih', 'weight_hh')
    """
    if isinstance(layer, (nn.Linear, nn.Bilinear, Conv, *EMBEDDING)):
        return ("weight",)
    if isinstance(layer, nn.RNNBase):
        return tuple(n for n in layer._flat_weights_names if n.startswith("weight"))
    if isinstance(layer, nn.RNNCellBase):
        return ("weight_ih", "weight_hh")
    if isinstance(layer, nn.MultiheadAttention):
        if layer._qkv_same_embed_dim:
            return ("in_proj_weight",)
        return ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return ()


def units_of(layer: nn.Module) -> Units:
    """Return the output units of a torch layer's weights.

    They lie along axis 0, or along axis 1 of each group of a transposed convolution. The gates of a
    recurrent layer and the q, k, v blocks of an attention layer are stacked along axis 0, so each
    unit of each gate or block is one row.
    """
    return Units(1, layer.groups) if isinstance(layer, ConvTransposed) else Units()


def layer_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, layer, name) of the weights of torch's layers, except embeddings."""
    for prefix, module in model.named_modules():
        if not isinstance(module, EMBEDDING):
            for name in weight_names(module):
                yield f"{prefix}.{name}".lstrip("."), module, name


@dataclass(frozen=True)
class PlainWeight:
    """A parameter to normalize."""

    path: str
    """Name of the parameter in the model, as in ``encoder.0.weight``."""
    module: nn.Module
    name: str
    parameter: nn.Parameter
    dim: Dim

    @property
    def units(self) -> Units:
        """The units, each with a length of its own; raises if the parameter has no such axes."""
        if self.dim != "auto":
            return Units(self.dim).of(self.parameter.shape)
        return units_of(self.module)


def select(
    model: nn.Module,
    where: Where | None = None,
    dim: Dim | Callable[[str, nn.Module], Dim] = "auto",
) -> list[PlainWeight]:
    """Choose the weights of a model to normalize, in the order of its modules.

    By default the weights of torch's linear, bilinear, convolutional, recurrent and attention
    layers. ``where(name, module)`` narrows the choice by the parameter's name in the model and the
    module that has it, or widens it: to embeddings, and to any parameter of two or more dimensions
    if `dim` is given. Weights that are normalized already are passed over. A parameter that several
    modules share is listed for each, wherever one of them is chosen.

    Raises ValueError or TypeError for a weight that cannot be normalized, and if there is none.
    """
    chosen: list[PlainWeight] = []
    already = 0
    for prefix, module in modules_of(model):
        for name in _candidates(module, where is not None):
            path = f"{prefix}.{name}".lstrip(".")
            if where is None:
                is_chosen = not isinstance(module, EMBEDDING)
            else:
                is_chosen = bool(where(path, module))
            if not is_chosen:
                continue
            if is_weight_normed(module, name) or name in pending_hooks(module):
                already += 1
            else:
                axes = dim(path, module) if callable(dim) else dim
                chosen.append(plain_weight(module, name, axes, path))
    if not chosen:
        raise ValueError(_nothing_to_normalize(model, already))
    return _with_tied(model, chosen)


def _candidates(module: nn.Module, others: bool) -> Iterator[str]:
    """Yield the names of a module's weights; with `others` also those of unknown modules."""
    known = weight_names(module)
    yield from known
    if not known and others and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        yield from parametrizations_of(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter) and parameter.ndim > 1:
                yield name


def plain_weight(module: nn.Module, name: str, dim: Dim, path: str | None = None) -> PlainWeight:
    """Return a parameter of a module as a weight to normalize; raise if it cannot be."""
    path = f"{type(module).__name__}.{name}" if path is None else path
    if (reason := _refusal(module, name)) is not None:
        raise ValueError(f"{path} {reason}")
    parameter = module._parameters[name]
    assert parameter is not None
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        raise TypeError(
            f"{path} is {parameter.dtype}; weight norm needs real floating-point weights of 16 "
            "bits or more" + (" (view a complex weight as two real ones)" * parameter.is_complex())
        )
    if parameter.layout is not torch.strided:
        raise TypeError(f"{path} has layout {parameter.layout}; weight norm needs a dense weight")
    if dim == "auto" and name not in weight_names(module):
        raise ValueError(
            f"{path}: the output axis of a parameter of {type(module).__name__} is unknown; "
            "pass dim, or do not select it"
        )
    weight = PlainWeight(path, module, name, parameter, dim)
    if not isinstance(parameter, UninitializedParameter):
        if dim == "auto" and parameter.ndim < 2:
            raise ValueError(
                f"{path} has shape {tuple(parameter.shape)}, so it holds no vector per unit to "
                "normalize; pass dim=None for one g for the whole tensor. (Is it what FSDP1 or "
                "DeepSpeed's ZeRO leaves on this rank? Then use torch's fully_shard)"
            )
        units = weight.units
        if isinstance(units.dim, tuple) and len(units.dim) == parameter.ndim:
            raise ValueError(
                f"{path} has shape {tuple(parameter.shape)}, and dim={dim} keeps every axis, so "
                "that a unit is one number, without a direction; leave out the axes to normalize"
            )
    return weight


def _refusal(module: nn.Module, name: str) -> str | None:
    """Return why this tensor of this module cannot be weight-normalized; None if it can."""
    if is_weight_normed(module, name) or name in pending_hooks(module):
        return "is weight-normalized already; use remove_weight_norm to remove it"
    if module._parameters.get(name) is None:
        if name in parametrizations_of(module) or getattr(module, name, None) is not None:
            return (
                "is not a parameter: another parametrization, pruning or a hook computes it; apply "
                "weight norm before that"
            )
        own = ", ".join(n for n, p in module._parameters.items() if p is not None)
        return f"does not exist; the parameters are {own or 'none: normalize its layers'}"
    if isinstance(module, EMBEDDING) and name == "weight":
        if module.sparse:
            return (
                "cannot be weight-normalized: its gradients are sparse, those of v are dense; "
                "build it with sparse=False"
            )
        if module.max_norm is not None:
            return "is written to by max_norm in every forward pass; build it without"
    return None


def _with_tied(model: nn.Module, chosen: list[PlainWeight]) -> list[PlainWeight]:
    """Add the other modules that share a chosen parameter."""
    first = {id(weight.parameter): weight for weight in reversed(chosen)}
    by_path = {weight.path: weight for weight in chosen}
    complete = []
    for prefix, module in modules_of(model):
        for name, parameter in module._parameters.items():
            path = f"{prefix}.{name}".lstrip(".")
            weight = by_path.get(path)
            source = first.get(id(parameter))
            if weight is None and source is not None:
                known = name in weight_names(module)
                dim = source.dim if known or source.dim != "auto" else 0
                weight = plain_weight(module, name, dim, path)
            if weight is None or source is None:
                continue
            if not is_lazy(weight.parameter) and weight.units != source.units:
                raise ValueError(
                    f"{path} is the same parameter as {source.path}, but their units lie along "
                    "different axes; pass dim to keep the same axis for both, or leave out both "
                    "with `where`"
                )
            complete.append(weight)
    return complete


def _nothing_to_normalize(model: nn.Module, already: int) -> str:
    known = sum(bool(weight_names(module)) for module in model.modules())
    if already:
        reason = f"all {already} weights are normalized already"
    elif known:
        reason = f"`where` selected none of its {known} layers"
    else:
        reason = "it has no linear, convolutional, recurrent or attention layer"
    return (
        f"nothing to normalize in {type(model).__name__}: {reason}; other parameters are chosen "
        "with `where` and dim"
    )


def matching(names: list[str], pattern: str, argument: str) -> list[str]:
    """Return the names that match a pattern; raise ValueError if none does.

    >>> matching(["blocks.0.conv1", "blocks.0.conv2"], "blocks.*.conv2", "target_std")
    ['blocks.0.conv2']
    """
    found = [name for name in names if pattern in ("*", name) or fnmatchcase(name, pattern)]
    if not found and pattern != "*":
        raise ValueError(f"{argument}: no layer matches {pattern!r}; there are {names}")
    return found


def per_layer(
    names: list[str], values: float | Mapping[str, float], argument: str
) -> dict[str, float]:
    """Return a positive number for each layer: one for all, or by name or pattern, with 1 for the
    others.

    >>> per_layer(["conv", "head"], {"h*": 0.1}, "target_std")
    {'conv': 1.0, 'head': 0.1}
    """
    numbers = dict.fromkeys(names, 1.0)
    for pattern, value in (values if isinstance(values, Mapping) else {"*": values}).items():
        if not 0 < value < math.inf:
            raise ValueError(f"{argument} must be a positive number; got {value!r} for {pattern!r}")
        numbers.update(dict.fromkeys(matching(names, pattern, argument), float(value)))
    return numbers


def own_parameters(module: nn.Module) -> list[Tensor]:
    """Return the module's own parameters; those of a parametrized tensor are v and g."""
    own: list[Tensor] = list(module.parameters(recurse=False))
    for parametrizations in parametrizations_of(module).values():
        own += parametrizations.parameters()
    return own


def memory_key(parameter: Tensor) -> tuple[int, int]:
    """Identify the memory of a parameter: tied parameters have equal keys."""
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset())


def sharing(model: nn.Module) -> dict[nn.Module, list[tuple[str, nn.Module]]]:
    """Map each module with parameters to the others, (path, module), that have one of them too."""
    owners: dict[tuple[int, int], list[tuple[str, nn.Module]]] = {}
    for path, module in modules_of(model):
        for parameter in own_parameters(module):
            if not is_lazy(parameter):
                owners.setdefault(memory_key(parameter), []).append((path, module))
    found: dict[nn.Module, list[tuple[str, nn.Module]]] = {}
    for modules in owners.values():
        for _, module in modules:
            others = [(path, other) for path, other in modules if other is not module]
            found.setdefault(module, []).extend(others)
    return found


def linear_map(layer: nn.Module, x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer or convolution to x with another weight and bias."""
    bias = None if bias is None else bias.to(weight.dtype)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    assert isinstance(layer, Conv)
    if not isinstance(layer, ConvTransposed):
        out: Tensor = layer._conv_forward(x, weight, bias)
        return out
    conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(layer.kernel_size) - 1]
    padding: Any = layer.padding
    return conv(
        x,
        weight,
        bias,
        layer.stride,
        padding,
        layer.output_padding,
        layer.groups,
        layer.dilation,
    )
