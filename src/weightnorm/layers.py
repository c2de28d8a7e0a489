"""What torch's layers are made of: which tensors are weights, and which axis holds the units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

Conv = _ConvNd
"""Every convolution of torch, transposed ones included."""

ConvTransposed = _ConvTransposeNd

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


class UnitAxis(NamedTuple):
    """The axis of a weight along which its output units lie, and the groups axis 0 splits into."""

    dim: int
    groups: int


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """The weights of a layer torch knows; empty for any other module.

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
    model: nn.Module, where: Callable[[str, nn.Module], bool] | None = None
) -> Iterator[tuple[str, nn.Module, str]]:
    """(path, layer, name) of every weight of a model that `where` chooses by path and module.

    By default every layer torch knows but embeddings: they look vectors up and weigh nothing.
    """
    for path, module in model.named_modules():
        chosen = not isinstance(module, EMBEDDING) if where is None else where(path, module)
        for name in weight_names(module) if chosen else ():
            yield f"{path}.{name}".lstrip("."), module, name


def unit_axis(layer: nn.Module, name: str) -> UnitAxis:
    """Axis 0, but axis 1 of a transposed convolution, whose channels are split by group.

    The gates of a recurrent layer and the q, k, v blocks of an attention layer are stacked along
    axis 0, so each unit of each gate or block has a row of its own.
    """
    if isinstance(layer, ConvTransposed) and name == "weight":
        return UnitAxis(1, layer.groups)
    return UnitAxis(0, 1)


def refusal(layer: nn.Module, name: str) -> str | None:
    """Why this tensor of this layer cannot be weight-normalized, if it cannot."""
    if isinstance(layer, EMBEDDING) and layer.sparse:
        return "its gradients are sparse, those of v are not; make the layer with sparse=False"
    if isinstance(layer, nn.MultiheadAttention):
        if name in ("bias_k", "bias_v"):
            return f"{name} is appended to the sequence as it is: it weights no input"
        if name == "in_proj_weight" and not layer._qkv_same_embed_dim:
            return (
                "with kdim or vdim of their own the projections are three tensors; "
                "use q_proj_weight, k_proj_weight, v_proj_weight"
            )
        if name.endswith("_proj_weight") and name[0] in "qkv" and layer._qkv_same_embed_dim:
            return f"{name} is a block of in_proj_weight here; use in_proj_weight"
    return None


def linear_map(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """The map of a linear layer or convolution, with another bias."""
    weight: Any = layer.weight
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
