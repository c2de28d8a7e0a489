"""Compute w = g·v/‖v‖: one formula in five forms, chosen by device and layout.

- ``formula``: plain differentiable operations. Any layout, traceable, any order of derivative.
- ``fused``: torch's fused kernel on a CPU, where the kept axis is the first, the second of a
  matrix, or, for a small weight, moved to the front by a copy.
- ``fused_rows``: torch's fused kernel on an accelerator, for any axis: one launch forward and one
  backward, three more for zero rows, and nothing is read back from the device.
- ``fused_flat``: the same for many weights of several shapes at once, for ``batched_weights``.
- ``closed_form``: eq. 3 as the backward pass, keeping only v, g and 1/‖v‖. Everything else.

``compose`` picks one. All agree to rounding, and on zero rows:

Note [zero rows]
    At v = 0 the direction v/‖v‖ does not exist. A row with ‖v‖ ≤ eps counts as zero: w = 0, and no
    gradient reaches v or g (the only choice symmetric in v). NaN is not a zero row: it propagates.

Note [torch's second derivative]
    torch differentiates its fused backward as if ‖v‖ did not depend on v, so second derivatives
    are silently wrong (torch 2.13; a gradient penalty needs them). Where a graph of the gradient is
    asked for, eq. 3 in differentiable form takes the place of the fused backward pass. For torch's
    own autograd on a CPU this is an override of one operator, made when this module is imported: it
    costs nothing unless it is called, and corrects torch's weight norm as well.

Note [blocks]
    Any weight is viewed as (groups, before, units, after), with `units` the kept axis and the norm
    over `before` and `after`. Only a grouped transposed convolution has more than one group: its
    output unit is a pair (group, channel).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from weightnorm.dtensor import gathered, is_sharded, placed_like
from weightnorm.torch_private import (
    DIFFERENTIABLE_BACKWARD,
    are_functorch_transforms_active,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_key_for_device,
    fused_weight_norm,
    fused_weight_norm_backward,
    get_tracing_state,
    len_torch_dispatch_stack,
)

EPS = 1e-12
"""Rows with a norm up to this count as zero rows."""


def check_lengths(v: Tensor, g: Tensor, dim: int | None, groups: int = 1) -> None:
    """Raise a ValueError unless there is one g for each unit of v; torch's kernels do not check."""
    if g.numel() != (1 if dim is None else v.size(dim) * groups):
        raise ValueError(wrong_shape(v, g, dim, groups))


def wrong_shape(v: Tensor, g: Tensor, dim: int | None, groups: int = 1) -> str:
    """Describe which shape g should have."""
    expected = unit_shape(v.shape, dim, groups)
    return (
        f"g has shape {tuple(g.shape)}, but v of shape {tuple(v.shape)} with dim={dim}"
        f"{f' and groups={groups}' if groups > 1 else ''} needs {expected}; "
        f"reshape it with g.reshape{expected}"
    )


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
        # Two axes, so that the norm is a norm of norms: one long float32 sum is inexact.
        return 1, shape[0] if shape else 1, 1, math.prod(shape[1:])
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    return groups, before // groups, shape[dim], after


def as_blocks(x: Tensor, dim: int | None, groups: int = 1) -> Tensor:
    """A weight, or anything of its shape, as (groups, before, units, after)."""
    whole = gathered(x) if groups > 1 else x  # a shard may end within a group
    return whole.reshape(block_shape(x.shape, dim, groups))


def _as_units(g: Tensor, blocks: Tensor) -> Tensor:
    """g, or anything of its shape, as (groups, 1, units, 1); gathered where the blocks are."""
    whole = gathered(g) if blocks.shape[0] > 1 else g
    return whole.reshape(blocks.shape[0], 1, blocks.shape[2], 1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are taken in float32 or wider, whatever the weight's own type."""
    return torch.promote_types(dtype, torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Compute in the tensors' own types: autocast would round sums and products of matrices."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


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
        inverse = norm.reciprocal()
        if is_sharded(inverse):  # in torch 2.9 DTensors have no masked_fill_
            return torch.masked_fill(inverse, zero, 0.0)
        return inverse.masked_fill_(zero, 0.0)
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


def differentiable_inverse(blocks: Tensor, eps: float) -> Tensor:
    """1/‖v‖, and 0 for a zero row, with derivatives of every order (0 for a zero row)."""
    if not torch.is_grad_enabled():
        return block_inverse(block_norm(blocks), eps)
    # A norm has no second derivative at 0; a sum of squares has.
    squares = blocks.to(wide_dtype(blocks.dtype)).square().sum(1, keepdim=True)
    squares = squares.sum(3, keepdim=True)
    zero = squares.detach().sqrt() <= eps
    return torch.where(zero, 0.0, 1.0 / torch.where(zero, 1.0, squares).sqrt())


def formula(v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ by differentiable operations."""
    blocks = as_blocks(v, dim, groups)
    w = blocks * (_as_units(g, blocks) * differentiable_inverse(blocks, eps))
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
            inverse = differentiable_inverse(v, ctx.eps)
        grad_v, grad_g = block_gradients(grad_w, v, g, inverse)
        return grad_v.to(v.dtype), grad_g.to(g.dtype), None


def closed_form(v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ with a closed-form backward pass."""
    shape = block_shape(v.shape, dim, groups)
    blocks, units = v.reshape(shape), g.reshape(shape[0], 1, shape[2], 1)
    w: Tensor = _ClosedForm.apply(blocks, units, eps)
    return w.reshape(v.shape)


def fused(v: Tensor, g: Tensor, dim: int = 0, eps: float = EPS) -> Tensor | None:
    """w = g·v/‖v‖ by torch's fused kernel, differentiated by torch: the fastest form on a CPU.

    Reads the shortest norm, so on an accelerator it would wait for the device. None if there is a
    zero row (or a NaN, which may hide one): then another form has to serve.
    """
    w, norm = fused_weight_norm(v, g, dim)
    return w if norm.min().item() > eps else None


def _differentiable(
    v: Any, g: Any, dim: int, eps: float, grads: tuple[Tensor | None, ...], grad_w: Tensor
) -> tuple[Tensor | None, ...]:
    """Eq. 3 with a graph of its own in place of torch's `grads`.

    See Note [torch's second derivative].
    """
    shape = block_shape(v.shape, dim)
    blocks, units = v.reshape(shape), g.reshape(shape[0], 1, shape[2], 1)
    inverse = differentiable_inverse(blocks, eps)
    grad_v, grad_g = block_gradients(grad_w.reshape(shape), blocks, units, inverse)
    right = (grad_v.to(v.dtype).reshape(v.shape), grad_g.to(g.dtype).reshape(g.shape))
    return tuple(new if old is not None else None for new, old in zip(right, grads, strict=True))


def _correct_second_derivative() -> torch.library.Library:
    """Override torch's differentiable backward pass, see Note [torch's second derivative]."""

    def backward(grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int) -> Any:
        return _differentiable(v, g, dim, 0.0, (v, g), grad_w)

    library = torch.library.Library("aten", "IMPL")
    library.impl(DIFFERENTIABLE_BACKWARD, backward, "AutogradCPU")
    return library


# The override lasts as long as this object, which a reload of the module must not drop.
_CORRECTION = globals().get("_CORRECTION") or _correct_second_derivative()


class _FusedRows(torch.autograd.Function):
    """w = g·v/‖v‖ of a matrix by torch's fused pair of kernels, without reading anything back.

    Zero rows: their w is overwritten by 0, and their saved norm by ∞, for which the fused backward
    pass returns exactly 0.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, dim: int, eps: float) -> Tensor:
        w, norm = fused_weight_norm(v, g, dim)
        zero = norm <= eps
        w.masked_fill_(zero, 0.0)
        norm.masked_fill_(zero, math.inf)
        ctx.save_for_backward(v, g, norm)
        ctx.dim, ctx.eps = dim, eps
        return w

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor) -> tuple[Tensor | None, ...]:
        v, g, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward: ‖v‖ must carry its own gradient
            wanted = tuple(grad_w if needed else None for needed in ctx.needs_input_grad[:2])
            grads = _differentiable(v, g, ctx.dim, ctx.eps, wanted, grad_w)
        else:
            grads = fused_weight_norm_backward(grad_w.contiguous(), v, g, norm, ctx.dim)
        return *grads, None, None


def fused_rows(v: Tensor, g: Tensor, dim: int, groups: int = 1, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ by torch's fused pair on any axis: the form with the fewest kernel launches.

    The first and the last axis are taken as they are. For any other, the units are moved to the
    front by a copy, and back by another.
    """
    shape = block_shape(v.shape, dim, groups)
    _, before, units, after = shape
    if groups == 1 and before == 1:
        return _rows(v.reshape(units, after), g.reshape(units, 1), 0, eps).view(v.shape)
    if groups == 1 and after == 1:
        return _rows(v.reshape(before, units), g.reshape(1, units), 1, eps).view(v.shape)
    moved = v.reshape(shape).transpose(1, 2)  # (groups, units, before, after)
    w = _rows(moved.reshape(groups * units, before * after), g.reshape(-1, 1), 0, eps)
    return w.view(moved.shape).transpose(1, 2).reshape(v.shape)


def _rows(v: Tensor, g: Tensor, dim: int, eps: float) -> Tensor:
    w: Tensor = _FusedRows.apply(v, g, dim, eps)
    return w


class Rows(NamedTuple):
    """Which rows a flat tensor holds, one after the other."""

    counts: tuple[int, ...]
    """Numbers of rows of equal length."""
    lengths: tuple[int, ...]
    """Their lengths."""
    row_of: Tensor
    """The row of every element."""


def flat_rows(counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Rows:
    """Describe a flat tensor that holds `counts[i]` rows of `lengths[i]` elements for each i."""
    each = [n for count, n in zip(counts, lengths, strict=True) for _ in range(count)]
    row_of = torch.arange(len(each), dtype=torch.int32)
    row_of = row_of.repeat_interleave(torch.tensor(each), output_size=sum(each))
    return Rows(tuple(counts), tuple(lengths), row_of.to(device))


class _FusedFlat(torch.autograd.Function):
    """w = g·v/‖v‖ of many rows of several lengths: one fused kernel for each length.

    Zero rows as in _FusedRows, for all lengths together.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, rows: Rows, eps: float) -> Tensor:
        pieces = [
            fused_weight_norm(v_rows, g_rows, 0)
            for v_rows, g_rows in zip(_matrices(v, rows), g.split(rows.counts), strict=True)
        ]
        w = torch.cat([piece.flatten() for piece, _ in pieces])
        norm = torch.cat([norm for _, norm in pieces])  # (rows, 1)
        zero = norm <= eps
        w.masked_fill_(zero.flatten().index_select(0, rows.row_of), 0.0)
        norm.masked_fill_(zero, math.inf)
        ctx.save_for_backward(v, g, norm)
        ctx.rows, ctx.eps = rows, eps
        return w

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor) -> tuple[Tensor | None, ...]:
        v, g, norm = ctx.saved_tensors
        rows, counts = ctx.rows, ctx.rows.counts
        pieces = zip(
            *(_matrices(x, rows) for x in (grad_w.contiguous(), v)),
            *(x.split(counts) for x in (g, norm)),
            strict=True,
        )
        grads: list[Any]
        if torch.is_grad_enabled():
            grads = [
                _differentiable(v_, g_, 0, ctx.eps, (g_, g_), grad_) for grad_, v_, g_, _ in pieces
            ]
        else:
            grads = [fused_weight_norm_backward(*piece, 0) for piece in pieces]
        grad_v = torch.cat([of_v.flatten() for of_v, _ in grads])
        return grad_v, torch.cat([of_g for _, of_g in grads]), None, None


def _matrices(x: Tensor, rows: Rows) -> list[Tensor]:
    """A flat tensor as one matrix for each length of rows."""
    counts, lengths = rows.counts, rows.lengths
    sizes = [count * length for count, length in zip(counts, lengths, strict=True)]
    pieces = zip(x.split(sizes), counts, lengths, strict=True)
    return [piece.view(count, length) for piece, count, length in pieces]


def fused_flat(v: Tensor, g: Tensor, rows: Rows, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ row by row, for v and w flat and g of shape (rows, 1), by torch's fused pair."""
    w: Tensor = _FusedFlat.apply(v, g, rows, eps)
    return w


def compose(v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS) -> Tensor:
    """w = g·v/‖v‖ in the fastest form for this device and layout."""
    check_lengths(v, g, dim, groups)
    on_device = on_accelerator(v)
    if not (is_differentiated_by_autograd(v) if on_device else is_eager(v)):
        return formula(v, g, dim, groups, eps)
    if not v.is_contiguous():
        return _compose_strided(v, g, dim, groups, eps)
    if not g.is_contiguous():  # torch's fused kernels read it as if it were
        g = g.contiguous()
    if on_device:
        if dim is not None and v.numel() and g.dtype is v.dtype and has_fused_kernel(v.device.type):
            return fused_rows(v, g, dim, groups, eps)
    elif dim is not None and (w := _compose_on_cpu(v, g, dim, groups, eps)) is not None:
        return w
    if torch.is_grad_enabled() and (v.requires_grad or g.requires_grad):
        return closed_form(v, g, dim, groups, eps)
    return formula(v, g, dim, groups, eps)


def _compose_on_cpu(v: Tensor, g: Tensor, dim: int, groups: int, eps: float) -> Tensor | None:
    """The fused form where it is the fastest one, if there is no zero row."""
    if _is_fast_on_cpu(v, g, dim, groups):
        return fused(v, g, dim, eps)
    if dim and v.ndim > 2 and groups == 1 and v.numel() <= _SMALL and _is_fast_on_cpu(v, g, 0, 1):
        return _compose_transposed(v, g, dim, eps)
    return None


def gradients(
    grad_w: Tensor, v: Tensor, g: Tensor, dim: int | None, groups: int = 1, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    """∇v and ∇g of eq. 3 in the fastest form for this layout."""
    check_lengths(v, g, dim, groups)
    alone = not torch.is_grad_enabled() and is_eager(v) and v.is_contiguous()
    if dim is not None and alone and v.is_cpu and _is_fast_on_cpu(v, g, dim, groups):
        norm = torch.norm_except_dim(v, 2, dim)
        if norm.min().item() > eps and grad_w.dtype == v.dtype:
            grad_w, g = grad_w.contiguous(), g.contiguous()
            grad_v, grad_g = fused_weight_norm_backward(grad_w, v, g, norm, dim)
            return grad_v, grad_g
    blocks = as_blocks(v, dim, groups)
    grad_v, grad_g = block_gradients(
        as_blocks(grad_w, dim, groups),
        blocks,
        _as_units(g, blocks),
        block_inverse(block_norm(blocks), eps),
    )
    return grad_v.to(v.dtype).reshape(v.shape), grad_g.to(g.dtype).reshape(g.shape)


def _is_fast_on_cpu(v: Tensor, g: Tensor, dim: int, groups: int) -> bool:
    """Whether torch's fused CPU kernel is the fastest form for this contiguous weight."""
    dtype = v.dtype
    if (dtype is not torch.float32 and dtype is not torch.float64) or g.dtype is not dtype:
        return False  # it is not exact
    if dim == 0:
        return v.ndim > 1 and v.numel() > 0
    return dim == 1 and groups == 1 and v.ndim == 2 and v.shape[1] >= _WIDE and v.shape[0] > 0


def _compose_transposed(v: Tensor, g: Tensor, dim: int, eps: float) -> Tensor | None:
    """The fused kernel on a copy with the kept axis first: two more copies, ten fewer calls."""
    units = g.reshape(-1, *[1] * (v.ndim - 1))
    w = fused(v.transpose(0, dim).contiguous(), units, 0, eps)
    return w if w is None else w.transpose(0, dim).contiguous()


_SMALL = 2**16
"""Elements in a weight below which two copies cost less than the calls they save, on a CPU."""
_WIDE = 64
"""Units along a last axis from which the fused CPU kernel is fast: it works along whole rows."""


def _compose_strided(v: Tensor, g: Tensor, dim: int | None, groups: int, eps: float) -> Tensor:
    """A channels-last weight is contiguous once its channel axis is moved last."""
    moved = v.movedim(1, -1) if v.ndim > 2 else v
    if not moved.is_contiguous() or dim is None:
        return formula(v, g, dim, groups, eps)
    last = v.ndim - 1
    w = compose(moved, g.movedim(1, -1), {0: 0, 1: last}.get(dim, dim - 1), groups, eps)
    return w.movedim(-1, 1)


def on_accelerator(v: Tensor) -> bool:
    """Whether reading a value of this tensor would wait for a device."""
    return (_assume_accelerator or not v.is_cpu) and not v.is_meta


_assume_accelerator = False


@contextmanager
def assume_accelerator() -> Iterator[None]:
    """Take the path of an accelerator on any device, to count or test what it would launch."""
    global _assume_accelerator
    before, _assume_accelerator = _assume_accelerator, True
    try:
        yield
    finally:
        _assume_accelerator = before


@cache
def has_fused_kernel(device_type: str) -> bool:
    """Whether torch has its fused weight norm for this kind of device."""
    key = dispatch_key_for_device(device_type)
    return dispatch_has_kernel_for_dispatch_key("aten::_weight_norm_interface", key)


def is_eager(v: Tensor) -> bool:
    """Whether values are real, and can be read, and only reverse-mode autograd is active.

    Forms with a data-dependent branch need it.
    """
    return is_differentiated_by_autograd(v) and len_torch_dispatch_stack() == 0


def is_differentiated_by_autograd(v: Tensor) -> bool:
    """Whether only reverse-mode autograd is active: no compiler, function transform or tracer.

    Forms with a hand-written backward pass need it.
    """
    return (
        type(v) in _PLAIN
        and not v.is_meta
        and not torch.compiler.is_compiling()
        and not are_functorch_transforms_active()
        and get_tracing_state() is None
        and forward_ad._current_level < 0
    )


_PLAIN = (Tensor, torch.nn.Parameter)
