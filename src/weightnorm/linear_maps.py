"""Linear layers and convolutions as maps of (x, w, b), and the same centred: w·x − μ[w·x] + b.

Note [the mean is linear]
    t = w·x is linear in x, so μ[w·x] = w·μ[x]: one mean image through the layer replaces a pass
    over all activations, and b − μ rides in the layer's own bias. For a convolution the mean over
    space is taken of that one image's output, so strides, padding and groups come out exactly.

Note [the mean's gradient in place]
    Back through the mean goes one image too: the gradient of each example's input is changed by the
    same image, which is added to what the layer's own backward pass has just made. Autograd would
    put the sum into new memory, and on a CPU that costs more than the sum: by far the most of what
    centring costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import layers
from weightnorm.kernels import is_eager, wide_dtype

Layer = nn.Linear | layers.Conv
Observe = Callable[[Tensor, int], Tensor]
"""Sum of each unit over the batch, and over how many → the mean to subtract."""


def linear_map(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's own map, with a weight and a bias handed in."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if not isinstance(layer, layers.ConvTransposed):
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


def centered_map(
    layer: Layer,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    observe: Observe,
    alone: bool = True,
) -> Tensor:
    """w·x − μ[w·x] + b. `alone`: the mean is over this process's batch only."""
    if not isinstance(layer, nn.Linear) and x.ndim != len(layer.kernel_size) + 2:
        raise ValueError(
            f"mean-only batch norm needs a batch: expected {len(layer.kernel_size) + 2} "
            f"dimensions, got an input of shape {tuple(x.shape)}"
        )
    if isinstance(layer, nn.Linear) and x.ndim != 2:  # units lie along axis 1, as in convolutions
        rows = x.reshape(-1, x.shape[-1])
        out = centered_map(layer, rows, weight, bias, observe, alone)
        return out.reshape(*x.shape[:-1], out.shape[-1])
    if alone and _has_closed_form(layer, x, weight):
        centered: Tensor = _CenteredMap.apply(layer, observe, x, weight, bias)
        return centered
    return _composed(layer, x, weight, bias, _mean_input(x), observe)


def sum_and_count(t: Tensor, axis: int) -> tuple[Tensor, int]:
    """Sum of each feature over every other axis, in float32 or wider, and over how many."""
    axes = [d for d in range(t.ndim) if d != axis % t.ndim]
    return t.sum(axes, dtype=wide_dtype(t.dtype)), t.numel() // max(t.shape[axis], 1)


def _mean_input(x: Tensor) -> Tensor:
    """μ[x] over the batch: (1, channels, *space)."""
    moved = x.movedim(1, -1)
    # Channels-last images are summed as they lie in memory, which is many times as fast.
    as_it_lies = moved.is_contiguous() and not x.is_contiguous()
    total = (moved if as_it_lies else x).sum(0, keepdim=True, dtype=wide_dtype(x.dtype))
    mean = (total.movedim(-1, 1) if as_it_lies else total) / max(x.shape[0], 1)
    return mean.to(x.dtype)


def _composed(
    layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None, mean_x: Tensor, observe: Observe
) -> Tensor:
    """By differentiable operations: Note [the mean is linear]."""
    t = linear_map(layer, mean_x, weight, None)  # (1, C, *space)
    total, space = sum_and_count(t, 1)
    mean = observe(total * x.shape[0], space * x.shape[0])
    shift = -mean if bias is None else bias - mean
    return linear_map(layer, x, weight, shift.to(weight.dtype))


class _CenteredMap(torch.autograd.Function):
    """The same with Note [the mean's gradient in place]."""

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, observe: Observe, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        mean_x, ctx.layer = _mean_input(x), layer
        ctx.save_for_backward(x, weight, bias, mean_x)
        return _composed(layer, x, weight, bias, mean_x, observe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean_x = ctx.saved_tensors
        layer, wanted = ctx.layer, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # a graph of the gradient is asked for
            inputs = [i for i, want in zip((x, weight, bias), wanted, strict=True) if want]
            out = _composed(layer, x, weight, bias, _mean_input(x), torch.div)
            found = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
            return None, None, *(next(found) if want else None for want in wanted)
        grad_x, grad_w, grad_b = _backward(layer, grad, x, weight, (*wanted[:2], True))
        # Every position of the mean image's output is 1/space of the mean, which all of t̃ lack.
        per_unit = (grad_b / -grad[0, 0].numel()).view(-1, *[1] * (grad.ndim - 2))
        grad_t = torch.empty_like(grad[:1]).copy_(per_unit)
        by_x, by_w, _ = _backward(layer, grad_t, mean_x, weight, (*wanted[:2], False))
        grads = (
            grad_x.add_(by_x, alpha=1 / len(x)) if wanted[0] else None,
            grad_w.add_(by_w) if wanted[1] else None,
            grad_b if wanted[2] else None,
        )
        return None, None, *grads


def _has_closed_form(layer: Layer, x: Tensor, weight: Tensor) -> bool:
    """Whether `_backward` is the layer's backward pass, and nothing but autograd looks on."""
    padded = isinstance(layer, nn.Linear) or (
        layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )
    return (
        padded
        and is_eager(x)
        and x.numel() > 0
        and x.dtype == weight.dtype == wide_dtype(x.dtype)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _backward(
    layer: Layer, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, ...]
) -> tuple[Any, Any, Any]:
    """Gradients of the layer's map by x, w and b, where they are wanted."""
    if isinstance(layer, nn.Linear):
        return (
            grad @ weight if wanted[0] else None,
            grad.t() @ x if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
        )
    grads: tuple[Any, Any, Any] = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        [layer.out_channels],
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.transposed,
        layer.output_padding,
        layer.groups,
        wanted,
    )
    return grads
