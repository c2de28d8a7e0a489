"""Weights of torch's layers: their names, the axis of their units, and which are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from weightnorm.torch_private import ConvBase, ConvTransposeBase

Conv = ConvBase
"""Base class of torch's convolutions, including transposed ones."""

ConvTransposed = ConvTransposeBase

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


class UnitAxis(NamedTuple):
    """Axis of a weight along which its output units lie, and the groups that split axis 0."""

    dim: int
    groups: int


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


def chosen_weights(
    model: nn.Module,
    where: Callable[[str, nn.Module], bool] | None = None,
    has_weight: Callable[[nn.Module], bool] | None = None,
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, layer, name) of every weight that `where` selects by path and module.

    Default: all torch layers except embeddings, which are lookups. `where` may select other modules
    too, if they have a matrix called ``weight`` (by default `has_weight_matrix`).
    """
    has_weight = has_weight or has_weight_matrix
    for path, module in model.named_modules():
        names = weight_names(module)
        if where is None:
            chosen = not isinstance(module, EMBEDDING)
        else:
            chosen = bool(where(path, module))
            names = names or (("weight",) if has_weight(module) else ())
        for name in names if chosen else ():
            yield f"{path}.{name}".lstrip("."), module, name


def has_weight_matrix(module: nn.Module) -> bool:
    """Return whether a module has a parameter called ``weight`` of two or more dimensions.

    Not one with a number for each feature, as layer norm's, which has any number of dimensions.
    """
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and not isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        and not isinstance(weight, UninitializedParameter)
        and weight.ndim > 1
    )


def unknown_axis(path: str, module: nn.Module) -> str:
    """Return the message for a weight of a module whose output axis is not known."""
    return (
        f"`where` selected {path.rpartition('.')[0] or 'the model itself'}, but the output axis of "
        f"{type(module).__name__}.weight is unknown; pass dim, or do not select it"
    )


def matching(names: list[str], pattern: str, argument: str) -> list[str]:
    """Return the names that match a pattern; raise ValueError if none does.

    >>> matching(["blocks.0.conv1", "blocks.0.conv2"], "blocks.*.conv2", "target_std")
    ['blocks.0.conv2']
    """
    found = [name for name in names if pattern in ("*", name) or fnmatchcase(name, pattern)]
    if not found and pattern != "*":
        near = get_close_matches(pattern, names, 3) or names
        raise ValueError(f"{argument}: no layer matches {pattern!r}; there are {near}")
    return found


def parametrizations_of(module: nn.Module) -> Any:
    """Return the module's ParametrizationLists by tensor name; empty if there are none.

    (torch's ``is_parametrized`` reads the attribute, so it is also true of a wrapper that forwards
    attributes to the module it wraps, as peft's do.)
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    own = module._modules.get("parametrizations")
    if not isinstance(own, nn.ModuleDict):
        return {}
    return own if all(isinstance(one, ParametrizationList) for one in own.values()) else {}


def own_parameters(module: nn.Module) -> list[Tensor]:
    """Return the module's own parameters; those of a parametrized tensor are v and g."""
    own: list[Tensor] = list(module.parameters(recurse=False))
    for parametrizations in parametrizations_of(module).values():
        own += parametrizations.parameters()
    return own


def memory_key(parameter: Tensor) -> tuple[int, int]:
    """Identify the memory of a parameter: tied parameters have equal keys."""
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset())


def parameter_owners(model: nn.Module) -> dict[tuple[int, int], list[tuple[str, nn.Module]]]:
    """Map the memory of each parameter to the modules (path, module) that own it; tied parameters
    have several."""
    inner = {
        part
        for module in model.modules()
        for parametrizations in parametrizations_of(module).values()
        for part in parametrizations.modules()
    }
    owners: dict[tuple[int, int], list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for parameter in own_parameters(module) if module not in inner else ():
            if not is_lazy(parameter):
                owners.setdefault(memory_key(parameter), []).append((path, module))
    return owners


def unit_axis(layer: nn.Module, name: str) -> UnitAxis:
    """Return axis 0, or axis 1 and the groups of a transposed convolution.

    The gates of a recurrent layer and the q, k, v blocks of an attention layer are stacked along
    axis 0, so each unit of each gate or block is one row.
    """
    if isinstance(layer, ConvTransposed) and name == "weight":
        return UnitAxis(1, layer.groups)
    return UnitAxis(0, 1)


def refusal(layer: nn.Module, name: str) -> str | None:
    """Return why this tensor of this layer cannot be weight-normalized; None if it can."""
    if isinstance(layer, EMBEDDING) and layer.sparse:
        return "its gradients are sparse, those of v are dense; build the layer with sparse=False"
    if isinstance(layer, nn.MultiheadAttention):
        if name in ("bias_k", "bias_v"):
            return f"{name} is appended to the sequence unchanged: it is not multiplied by an input"
        if name == "in_proj_weight" and not layer._qkv_same_embed_dim:
            return (
                "with kdim or vdim the projections are three tensors; "
                "use q_proj_weight, k_proj_weight, v_proj_weight"
            )
        if name.endswith("_proj_weight") and name[0] in "qkv" and layer._qkv_same_embed_dim:
            return f"{name} is a block of in_proj_weight here; use in_proj_weight"
    return None


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
