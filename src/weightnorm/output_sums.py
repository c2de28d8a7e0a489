"""Sum a linear layer's outputs over a batch without computing them: Σ w·x = w·Σx.

For a convolution, the weight at offset k multiplies only some positions of the input. With xₛ the
sum of the input over the batch, and A_d the 0/1 matrix of the positions along axis d that offset k
multiplies (stride, padding and dilation are in it),

    S[c, k] = Σ_p A₁[k₁, p₁] ⋯ A_r[k_r, p_r] · xₛ[c, p],    Σ t[o] = Σ_{c,k} w[o, c, k] · S[c, k].

The cost is one read of the input. Autograd differentiates it as it stands: the gradient of the
input is one image, expanded over the batch, which autograd adds in place to the layer's own.

Note [products in float64]
    After the sum over the batch little is left to compute, but over many positions: a float32 dot
    product of 20,000 numbers around 1,000 is off by 0.1. In float64 the result is as exact as the
    sum of the outputs, which torch takes in pairs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weightnorm._kernels import is_eager
from weightnorm._units import exact_dtype, wide_dtype
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
    """Return the spatial axes of a convolution on an input of this shape; none for a linear layer.

    None where the sum of the outputs does not follow from that of the inputs alone: padding with
    values other than 0, or unequal padding on the two sides.
    """
    if not isinstance(layer, Conv):
        return []
    if layer.padding_mode != "zeros":
        return None
    axes, transposed = [], isinstance(layer, ConvTransposed)
    for d, size in enumerate(shape[2:]):
        kernel, stride, dilation = layer.kernel_size[d], layer.stride[d], layer.dilation[d]
        reach = dilation * (kernel - 1)
        if isinstance(layer.padding, str):
            both = reach if layer.padding == "same" else 0
        else:
            both = 2 * layer.padding[d]
        if isinstance(layer, ConvTransposed):
            out = (size - 1) * stride - both + reach + layer.output_padding[d] + 1
        else:
            out = (size + both - reach - 1) // stride + 1
        if both % 2 or out < 1:  # without outputs the layer itself raises
            return None
        axes.append(Axis(size, out, kernel, stride, both // 2, dilation, transposed))
    return axes


def output_count(layer: nn.Module, shape: torch.Size, axes: list[Axis]) -> int:
    """Return the number of outputs per unit: examples times output positions."""
    if isinstance(layer, Conv):
        return shape[0] * math.prod([axis.out for axis in axes])
    return math.prod(shape[:-1])


def sum_outputs(layer: nn.Module, x: Tensor, weight: Tensor, axes: list[Axis]) -> Tensor:
    """Return the sum of w·x, without the bias, over all examples and positions per unit: (O,).

    Args:
        layer: a linear layer or a convolution.
        x: (B, C, …) for a convolution, (…, C) for a linear layer.
        weight: the layer's weight.
        axes: from `output_axes`.

    In float32 or wider; see Note [products in float64].
    """
    wide, exact = wide_dtype(x.dtype), exact_dtype(x)
    w = weight.to(exact)
    if not isinstance(layer, Conv):
        return w.mv(x.reshape(-1, x.shape[-1]).sum(0, dtype=wide).to(exact)).to(wide)
    groups, taps = layer.groups, math.prod(layer.kernel_size)
    inputs = _sum_per_offset(x, axes, exact).reshape(groups, -1, taps)  # (G, C/G, K)
    if isinstance(layer, ConvTransposed):
        w = w.reshape(groups, inputs.shape[1], -1, taps)  # (G, C/G, O/G, K)
        total = torch.einsum("gcok,gck->go", w, inputs)
    elif groups == 1:
        total = w.flatten(1).mv(inputs.flatten())
    else:
        total = torch.bmm(w.reshape(groups, -1, inputs[0].numel()), inputs.reshape(groups, -1, 1))
    return total.flatten().to(wide)


def _sum_per_offset(x: Tensor, axes: list[Axis], exact: torch.dtype) -> Tensor:
    """Return S: the sum of the inputs that each kernel offset multiplies, (C, *kernel).

    The reduction over examples and the product next to it run along rows that are contiguous in
    memory, so that the gradient of x has the strides of x: any other is several times as slow to
    add.
    """
    wide, last = wide_dtype(x.dtype), x.movedim(1, -1)
    if last.is_contiguous() and not x.is_contiguous():  # channels-last: first spatial axis first
        sums = last.flatten(1).sum(0, dtype=wide).to(exact).view(axes[0].size, -1)  # (size₁, …·C)
        sums = window_matrix(axes[0], sums).t() @ sums
        sums = sums.view(-1, *last.shape[2:]).movedim(-1, 0)  # (C, kernel₁, size₂, …)
        for axis in axes[1:]:
            sums = sums.movedim(2, -1) @ window_matrix(axis, sums)
        return sums
    sums = x.sum(0, dtype=wide).to(exact)
    sums = sums @ window_matrix(axes[-1], sums)
    for axis in axes[:-1]:
        sums = sums.movedim(1, -1) @ window_matrix(axis, sums)
    return sums.movedim(1, -1)


def window_matrix(axis: Axis, like: Tensor) -> Tensor:
    """Return Aᵀ of an axis, (size, kernel): 1 where an offset multiplies a position of the input.

    >>> window_matrix(Axis(4, 4, 3, 1, 1, 1, False), torch.zeros(()))
    tensor([[1., 1., 0.],
            [1., 1., 1.],
            [1., 1., 1.],
            [0., 1., 1.]])
    """
    if not is_eager(like) or axis.size * axis.kernel > MAX_CACHED:
        return _window_matrix(axis, like.device, like.dtype)
    with torch.inference_mode(False):  # a cached inference tensor could not be trained with
        return _cached_window_matrix(axis, like.device, like.dtype)


def _window_matrix(axis: Axis, device: torch.device, dtype: torch.dtype) -> Tensor:
    position = torch.arange(axis.size, device=device).unsqueeze(1)
    offset = torch.arange(axis.kernel, device=device) * axis.dilation
    if axis.transposed:  # output position = input position · stride + offset − padding
        out = position * axis.stride + offset - axis.padding
        is_multiplied = (out >= 0) & (out < axis.out)
    else:  # input position = output position · stride + offset − padding
        start = position + axis.padding - offset
        is_multiplied = (start >= 0) & (start < axis.out * axis.stride) & (start % axis.stride == 0)
    return is_multiplied.to(dtype)


MAX_CACHED = 2**11
"""Elements of a matrix that is kept for the next batch: with 64 of them, 1 MB. Sequences of varying
length have many, and long ones."""
_cached_window_matrix = lru_cache(maxsize=64)(_window_matrix)
