"""w = g·v/‖v‖ in torch's operations: any device, layout and order of derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weightnorm._dtensor import placed_like
from weightnorm._units import EPS, Parts, Units


def formula(v: Tensor, g: Tensor, units: Units, eps: float = EPS) -> Tensor:
    """Return w = g·v/‖v‖, differentiated operation by operation."""
    w = v * units.spread(g / units.divisor(v, eps), v)
    return placed_like(w.to(v.dtype), v)


class _ClosedForm(torch.autograd.Function):
    """w = g·v/‖v‖ with eq. 3 as its backward pass: v, g and ‖v‖ are all that is kept."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, units: Units, eps: float) -> Tensor:
        norm = units.divisor(v, eps)
        ctx.save_for_backward(v, g, norm)
        ctx.units, ctx.eps = units, eps
        return (v * units.spread(g / norm, v)).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor) -> tuple[Tensor, Tensor, None, None]:
        v, g, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward: ‖v‖ must carry its own gradient
            norm = ctx.units.divisor(v, ctx.eps)
        return *gradients(grad_w, v, g, ctx.units, norm), None, None


def closed_form(v: Tensor, g: Tensor, units: Units, eps: float = EPS) -> Tensor:
    """Return w = g·v/‖v‖ with a closed-form backward pass: fewer operations, less memory."""
    w: Tensor = _ClosedForm.apply(v, g, units, eps)
    return w


def gradients(grad_w: Tensor, v: Tensor, g: Tensor, units: Units, norm: Tensor) -> Parts:
    """Return ∇v and ∇g of eq. 3 in the types of v and g, given ‖v‖ to divide by."""
    grad_v, grad_g = units.gradients(grad_w, v, g, norm)
    return Parts(v=grad_v.to(v.dtype), g=grad_g.to(g.dtype))
