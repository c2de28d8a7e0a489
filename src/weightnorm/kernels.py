"""How w = g·v/‖v‖ is computed: one formula, three forms, chosen by layout and device.

- ``formula``: plain differentiable operations. Any layout, traceable, any order of derivative.
- ``native``: torch's fused kernel, for contiguous CPU weights whose kept axis is the first, for
  matrices whose kept axis is the second, and for small weights, turned so that it is the first.
- ``closed_form``: eq. 3 as the backward pass, keeping only v, g and 1/‖v‖. All the rest.

``compose`` picks one. All agree to rounding, and on the zero row:

Note [zero rows]
    At v = 0 the direction v/‖v‖ does not exist. A row with ‖v‖ ≤ eps counts as zero: w = 0, and no
    gradient reaches v or g (the only choice symmetric in v). NaN is not a zero row: it propagates.

Note [torch's second derivative]
    torch differentiates its fused backward as if ‖v‖ did not depend on v, so second derivatives
    come out wrong without a word (torch 2.13; a gradient penalty meets this). A hook on the node
    puts the right expression in its place when a graph of the gradient is asked for.

Note [blocks]
    Any weight is viewed as (groups, before, units, after), with `units` the kept axis and the norm
    over `before` and `after`. Only a grouped transposed convolution has more than one group: its
    output unit is a pair (group, channel).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from weightnorm.dtensor import gathered, placed_like

EPS = 1e-12
"""Rows this short count as zero rows."""


def unit_shape(shape: torch.Size, dim: int | None, groups: int = 1) -> tuple[int, ...]:
    """Shape of g (and of ‖v‖): 1 everywhere but the kept axis; () when one g serves all."""
    if dim is None:
        return ()
    kept = [1] * len(shape)
    kept[dim] = shape[dim]
    if groups > 1:
        kept[0] = groups
    return tuple(kept)


def block_shape(shape: torch.Size, dim: int | None, groups: int = 1) -> tuple[int, int, int, int]:
    """(groups, before, units, after), see Note [blocks]."""
    if dim is None:
        return 1, 1, 1, math.prod(shape)
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    return groups, before // groups, shape[dim], after


def as_blocks(x: Tensor, dim: int | None, groups: int = 1) -> Tensor:
    """A weight, or anything of its shape, as (groups, before, units, after)."""
    whole = gathered(x) if groups > 1 else x  # a shard may end within a group
    return whole.reshape(block_shape(x.shape, dim, groups))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are taken in float32 or wider, whatever the weight's own type."""
    return torch.promote_types(dtype, torch.float32)


def block_norm(blocks: Tensor) -> Tensor:
    """‖v‖ of each unit: (groups, before, units, after) → (groups, 1, units, 1)."""
    norm, dtype = blocks, wide_dtype(blocks.dtype)
    if norm.shape[1] != 1 and not torch.is_grad_enabled() and is_eager(blocks):
        # By hand, many times as fast along an outer axis; but its derivative at 0 is not 0.
        square = blocks.to(dtype).square().sum(1, keepdim=True)
        return square.sum(3, keepdim=True).sqrt()
    # The outer axis first: it reduces whole contiguous rows, which vectorizes.
    if norm.shape[1] != 1:
        norm = torch.linalg.vector_norm(norm, dim=1, keepdim=True, dtype=dtype)
    if norm.shape[3] != 1:
        norm = torch.linalg.vector_norm(norm, dim=3, keepdim=True, dtype=dtype)
    return norm.to(dtype).abs() if norm is blocks else norm


def block_inverse(norm: Tensor, eps: float) -> Tensor:
    """1/‖v‖, and 0 for a zero row."""
    zero = norm <= eps
    if not torch.is_grad_enabled():
        return norm.reciprocal().masked_fill_(zero, 0.0)
    return torch.where(zero, 0.0, 1.0 / torch.where(zero, 1.0, norm))


def block_gradients(grad_w: Tensor, v: Tensor, g: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 3 on blocks: ∇g = ∇w·v/‖v‖ and ∇v = (g/‖v‖)∇w − (g∇g/‖v‖²)v."""
    grad_w, v = grad_w.to(inverse.dtype), v.to(inverse.dtype)
    dot = (grad_w * v).sum(1, keepdim=True).sum(3, keepdim=True)
    grad_g = dot * inverse
    scale = g * inverse
    grad_v = grad_w * _per_weight(scale, v)
    return grad_v.addcmul_(v, _per_weight(scale * inverse * grad_g, v), value=-1), grad_g


def _per_weight(units: Tensor, blocks: Tensor) -> Tensor:
    """One value per unit, laid out so that multiplying by `blocks` runs over long rows."""
    if blocks.shape[1] == 1 or blocks.shape[3] == 1:
        return units
    return units.expand(-1, -1, -1, blocks.shape[3]).contiguous()


def formula(v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ by differentiable operations."""
    blocks = as_blocks(v, dim, groups)
    units = g.reshape(blocks.shape[0], 1, blocks.shape[2], 1)
    w = blocks * (units * block_inverse(block_norm(blocks), eps))
    return placed_like(w.to(v.dtype).reshape(v.shape), v)


class _ClosedForm(torch.autograd.Function):
    """w = g·v/‖v‖ on blocks, with eq. 3 as its backward pass."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, eps: float) -> Tensor:
        inverse = block_inverse(block_norm(v), eps)
        ctx.save_for_backward(v, g, inverse)
        ctx.eps = eps
        return (v * _per_weight(g * inverse, v)).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor) -> tuple[Tensor, Tensor, None]:
        v, g, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward: 1/‖v‖ must carry its own gradient
            inverse = block_inverse(block_norm(v), ctx.eps)
        grad_v, grad_g = block_gradients(grad_w, v, g, inverse)
        return grad_v.to(v.dtype), grad_g.to(g.dtype), None


def closed_form(v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ with a closed-form backward pass."""
    shape = block_shape(v.shape, dim, groups)
    blocks, units = v.reshape(shape), g.reshape(shape[0], 1, shape[2], 1)
    w: Tensor = _ClosedForm.apply(blocks, units, eps)
    return w.reshape(v.shape)


def native(v: Tensor, g: Tensor, dim: int = 0, eps: float = EPS) -> Tensor | None:
    """w = g·v/‖v‖ by torch's fused kernel (first or last dim); None if a zero row is in the way."""
    w, norm = torch._weight_norm_interface(v, g, dim)
    if norm.min().item() <= eps:  # NaN passes: it is not a zero row
        return None
    if w.grad_fn is not None:
        w.grad_fn.register_hook(partial(_mend_second_order, v, g, dim, eps))
    return w


def _mend_second_order(
    v: Tensor,
    g: Tensor,
    dim: int,
    eps: float,
    grads: tuple[Tensor | None, ...],
    grad_w: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...] | None:
    """Replace torch's gradients by eq. 3 in differentiable form, if they will be differentiated.

    See Note [torch's second derivative].
    """
    if not torch.is_grad_enabled():
        return None
    shape = block_shape(v.shape, dim)
    blocks = v.reshape(shape)
    inverse = block_inverse(block_norm(blocks), eps)
    units = g.reshape(shape[0], 1, shape[2], 1)
    grad_v, grad_g = block_gradients(grad_w[0].reshape(shape), blocks, units, inverse)
    mended = (grad_v.reshape(v.shape), grad_g.reshape(g.shape))
    return tuple(new if old is not None else None for new, old in zip(mended, grads, strict=True))


def compose(v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ in the form that is fastest here. Arguments are taken as checked."""
    if not is_eager(v):
        return formula(v, g, dim, groups, eps)
    if not v.is_contiguous():
        return _compose_strided(v, g, dim, groups, eps)
    if dim is not None and _is_fused(v, g, dim, groups):
        w = native(v, g, dim, eps)
        if w is not None:
            return w
    if dim and v.ndim > 2 and groups == 1 and v.numel() <= _FEW and _is_fused(v, g, 0, 1):
        w = _compose_turned(v, g, dim, eps)
        if w is not None:
            return w
    if torch.is_grad_enabled() and (v.requires_grad or g.requires_grad):
        return closed_form(v, g, dim, groups, eps)
    return formula(v, g, dim, groups, eps)


def gradients(
    grad_w: Tensor, v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    """∇v and ∇g of eq. 3 in the form that is fastest here. Arguments are taken as checked."""
    alone = not torch.is_grad_enabled() and is_eager(v) and v.is_contiguous()
    if dim is not None and alone and _is_fused(v, g, dim, groups):
        norm = torch.norm_except_dim(v, 2, dim)
        if norm.min().item() > eps and grad_w.dtype == v.dtype:
            fused = torch.ops.aten._weight_norm_interface_backward
            grad_v, grad_g = fused(grad_w.contiguous(), v, g, norm, dim)
            return grad_v, grad_g
    blocks = as_blocks(v, dim, groups)
    grad_v, grad_g = block_gradients(
        as_blocks(grad_w, dim, groups),
        blocks,
        g.reshape(blocks.shape[0], 1, blocks.shape[2], 1),
        block_inverse(block_norm(blocks), eps),
    )
    return grad_v.to(v.dtype).reshape(v.shape), grad_g.to(g.dtype).reshape(g.shape)


def _is_fused(v: Tensor, g: Tensor, dim: int, groups: int) -> bool:
    """Whether torch has a fused kernel for this contiguous weight that is worth taking."""
    columns = dim == 1 and v.ndim == 2 and v.shape[1] >= _WIDE and groups == 1
    if not columns and (dim != 0 or v.ndim < 2):
        return False
    return v.is_cpu and _NATIVE.get(v.dtype) is g.dtype and v.numel() > 0


def _compose_turned(v: Tensor, g: Tensor, dim: int, eps: float) -> Tensor | None:
    """The fused kernel on a copy with the kept axis first: two copies more, ten calls fewer."""
    units = g.reshape(-1, *[1] * (v.ndim - 1))
    w = native(v.transpose(0, dim).contiguous(), units, 0, eps)
    return w if w is None else w.transpose(0, dim).contiguous()


_FEW = 2**16
"""Numbers in a weight that are copied sooner than calls are made."""
_WIDE = 64
"""Units along a last axis from which the fused kernel is fast: it works through whole rows."""
_NATIVE = {torch.float32: torch.float32, torch.float64: torch.float64}


def _compose_strided(v: Tensor, g: Tensor, dim: int | None, groups: int, eps: float) -> Tensor:
    """Channels-last weights are contiguous once their channel axis is moved last."""
    moved = v.movedim(1, -1) if v.ndim > 2 else v
    if not moved.is_contiguous() or dim is None:
        return formula(v, g, dim, groups, eps)
    last = v.ndim - 1
    w = compose(moved, g.movedim(1, -1), {0: 0, 1: last}.get(dim, dim - 1), groups, eps)
    return w.movedim(-1, 1)


def is_eager(v: Tensor) -> bool:
    """Whether values are real and only autograd's reverse mode watches: no tracer, no transform.

    Forms with a hand-written backward or a data-dependent branch serve only this case.
    """
    return (
        type(v) in _PLAIN
        and not v.is_meta
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


_PLAIN = (Tensor, torch.nn.Parameter)
