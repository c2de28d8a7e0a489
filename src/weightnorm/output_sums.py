"""Sum a linear layer's outputs over a batch without computing them: Σ w·x = w·Σx.

For a convolution, the weight at offset k meets only some positions of the input. With xₛ the sum of
the input over the batch, and A_d the 0/1 matrix that holds which positions along axis d offset k
meets (stride, padding and dilation are in it),

    S[c, k] = Σ_p A₁[k₁, p₁] ⋯ A_r[k_r, p_r] · xₛ[c, p],    Σ t[o] = Σ_{c,k} w[o, c, k] · S[c, k].

The cost is one read of the input. Autograd differentiates it as it stands: the gradient of the
input is one image, expanded over the batch, which autograd adds in place to the layer's own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weightnorm._kernels import is_eager
from weightnorm._units import wide_dtype
from weightnorm.layers import Conv, ConvTransposed


class Axis(NamedTuple):
    """One spatial axis of a convolution."""

    size: int
    """Positions of the input."""
    out: int
    """Positions of the output."""
    kernel: int
    stride: int
    padding: int
    dilation: int
    transposed: bool


def output_axes(layer: nn.Module, shape: torch.Size) -> list[Axis] | None:
    """The spatial axes of a convolution on an input of this shape; none for a linear layer.

    None where the sum of the outputs does not follow from that of the inputs alone: padding with
    values other than 0, or unequal padding on the two sides.
    """
    if not isinstance(layer, Conv):
        return []
    if layer.padding_mode != "zeros":
        return None
    axes = []
    for d, size in enumerate(shape[2:]):
        kernel, stride, dilation = layer.kernel_size[d], layer.stride[d], layer.dilation[d]
        reach = dilation * (kernel - 1)
        if isinstance(layer.padding, str):
            total = reach if layer.padding == "same" else 0
            if total % 2:
                return None
            padding = total // 2
        else:
            padding = layer.padding[d]
        if isinstance(layer, ConvTransposed):
            out = (size - 1) * stride - 2 * padding + reach + layer.output_padding[d] + 1
        else:
            out = (size + 2 * padding - reach - 1) // stride + 1
        if out < 1:
            return None  # the layer itself raises
        transposed = isinstance(layer, ConvTransposed)
        axes.append(Axis(size, out, kernel, stride, padding, dilation, transposed))
    return axes


def sum_outputs(layer: nn.Module, x: Tensor, weight: Tensor, axes: list[Axis]) -> Tensor:
    """Sum of w·x (without the bias) over all examples and positions, per output unit: (O,).

    Args:
        layer: a linear layer or a convolution.
        x: (B, C, …) for a convolution, (…, C) for a linear layer.
        weight: the layer's weight.
        axes: from :func:`output_axes`.

    In float32 or wider.
    """
    dtype = wide_dtype(x.dtype)
    w = weight.to(dtype)
    if not isinstance(layer, Conv):
        return w.mv(x.reshape(-1, x.shape[-1]).sum(0, dtype=dtype))
    met = _sum_met(x, axes, dtype)  # (C, *kernel)
    groups = layer.groups
    met = met.reshape(groups, -1, math.prod(layer.kernel_size))  # (G, C/G, K)
    if isinstance(layer, ConvTransposed):
        w = w.reshape(*met.shape[:2], -1, met.shape[2])  # (G, C/G, O/G, K)
        return torch.einsum("gcok,gck->go", w, met).flatten()
    if groups == 1:
        return w.flatten(1).mv(met.flatten())
    return torch.bmm(w.reshape(groups, -1, met[0].numel()), met.reshape(groups, -1, 1)).flatten()


def _sum_met(x: Tensor, axes: list[Axis], dtype: torch.dtype) -> Tensor:
    """S: the sum of the inputs that each weight meets, (C, *kernel).

    The reduction over examples and the product next to it run along rows that are contiguous in
    memory, so that the gradient of x has the strides of x: any other is several times as slow to
    add.
    """
    last = x.movedim(1, -1)
    if last.is_contiguous() and not x.is_contiguous():  # channels-last: first spatial axis first
        met = last.flatten(1).sum(0, dtype=dtype).view(axes[0].size, -1)  # (size₁, …·C)
        met = window_matrix(axes[0], met).t() @ met
        met = met.view(-1, *last.shape[2:]).movedim(-1, 0)  # (C, kernel₁, size₂, …)
        for axis in axes[1:]:
            met = met.movedim(2, -1) @ window_matrix(axis, met)
        return met
    met = x.sum(0, dtype=dtype) @ window_matrix(axes[-1], x.new_empty(0, dtype=dtype))
    for axis in axes[:-1]:
        met = met.movedim(1, -1) @ window_matrix(axis, met)
    return met.movedim(1, -1)


def window_matrix(axis: Axis, like: Tensor) -> Tensor:
    """Aᵀ of an axis, (size, kernel): 1 where a position of the input meets an offset of the kernel.

    >>> window_matrix(Axis(4, 4, 3, 1, 1, 1, False), torch.zeros(()))
    tensor([[1., 1., 0.],
            [1., 1., 1.],
            [1., 1., 1.],
            [0., 1., 1.]])
    """
    # Large ones are not kept: with sequences of varying length there would be many.
    if not is_eager(like) or axis.size * axis.kernel > MAX_CACHED:
        return _window_matrix(axis, like.device, like.dtype)
    with torch.inference_mode(False):  # a cached inference tensor could not be trained with
        return _cached_window_matrix(axis, like.device, like.dtype)


def _window_matrix(axis: Axis, device: torch.device, dtype: torch.dtype) -> Tensor:
    position = torch.arange(axis.size, device=device).unsqueeze(1)
    offset = torch.arange(axis.kernel, device=device) * axis.dilation
    if axis.transposed:  # output position = input position · stride + offset − padding
        out = position * axis.stride + offset - axis.padding
        meets = (out >= 0) & (out < axis.out)
    else:  # input position = output position · stride + offset − padding
        reached = position + axis.padding - offset
        meets = (reached >= 0) & (reached < axis.out * axis.stride) & (reached % axis.stride == 0)
    return meets.to(dtype)


MAX_CACHED = 2**14
"""Elements of a matrix that is kept for the next batch."""
_cached_window_matrix = lru_cache(maxsize=256)(_window_matrix)
