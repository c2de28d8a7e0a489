"""w = g·v/‖v‖ by torch's fused kernel: the fastest form on a CPU where units are rows.

Note [torch's second derivative]
    torch differentiates its fused backward as if ‖v‖ did not depend on v, so second derivatives
    are silently wrong (torch 2.13; a gradient penalty needs them). Where a graph of the gradient is
    asked for, eq. 3 in differentiable form takes the place of the fused backward pass. This is an
    override of one operator of torch for the whole process, made when the kernel is first used: it
    costs nothing unless it is called, and corrects torch's own weight norm as well.
    `correct_torch_second_derivative(False)` takes it back; then the closed form serves in place of
    the kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weightnorm._kernels.formula import gradients
from weightnorm._torch_private import (
    DIFFERENTIABLE_BACKWARD,
    fused_weight_norm,
    fused_weight_norm_backward,
)
from weightnorm._units import Units


def serves(v: Tensor, g: Tensor, units: Units) -> bool:
    """Return whether the kernel takes this weight: rows of float32 or float64, in memory order."""
    return (
        units.are_rows
        and (v.dtype is torch.float32 or v.dtype is torch.float64)
        and g.dtype is v.dtype
        and v.ndim > 1
        and v.numel() > 0
        and (v.is_contiguous() or v.movedim(1, -1).is_contiguous())
        and _overrides()
    )


def compose(v: Tensor, g: Tensor, eps: float) -> Tensor | None:
    """Return w, differentiated by torch; None if a norm is 0, NaN or ∞: then the formula serves."""
    if v.is_contiguous():
        w, norm = fused_weight_norm(v, g.contiguous(), 0)
    else:  # channels-last: the order of the columns does not matter to a norm
        w, norm = fused_weight_norm(v.movedim(1, -1), g.contiguous(), 0)
        w = w.movedim(-1, 1)
    shortest, longest = norm.detach().aminmax()
    return w if shortest.item() > eps and longest.item() < math.inf else None


def norm(v: Tensor) -> Tensor:
    """Return ‖v‖ of each row to the bit as `compose` takes it: with g = ‖v‖, w is v exactly."""
    rows = v if v.is_contiguous() else v.movedim(1, -1)
    ones = v.new_ones(v.shape[0], *[1] * (v.ndim - 1))
    found: Tensor = fused_weight_norm(rows, ones, 0)[1]
    return found


def backward(grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∇v and ∇g of a contiguous weight, given the norms that `norm` returns."""
    grad_v, grad_g = fused_weight_norm_backward(
        grad_w.contiguous(), v, g.contiguous(), norm.contiguous(), 0
    )
    return grad_v, grad_g


_override: torch.library.Library | None = None
_is_allowed = True


def correct_torch_second_derivative(enabled: bool = True) -> None:
    """Choose whether torch's fused weight norm has correct second derivatives in this process.

    By default it has from the first use of weight norm on a CPU: one operator of torch's autograd,
    ``_weight_norm_differentiable_backward``, is overridden. With ``False`` torch is left, or put
    back, as it was. This library's own derivatives are correct either way.
    """
    global _override, _is_allowed
    _is_allowed = enabled
    if enabled:
        _overrides()
    else:
        _override = None  # it lasts as long as this object


def _overrides() -> bool:
    """Make the override unless it is switched off; return whether it is active."""
    global _override
    if _override is None and _is_allowed:
        _override = torch.library.Library("aten", "IMPL")
        _override.impl(DIFFERENTIABLE_BACKWARD, _differentiable_backward, "AutogradCPU")
    return _override is not None


def _differentiable_backward(grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int) -> Any:
    """Return eq. 3 as a graph, see Note [torch's second derivative]."""
    units = Units(dim)
    return tuple(gradients(grad_w, v, g, units, units.divisor(v, 0.0)))
