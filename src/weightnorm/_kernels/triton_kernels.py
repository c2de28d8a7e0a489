# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernels themselves; see triton.py, which decides when they run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weightnorm._units import wide_dtype


@triton.jit
def _offsets(program, units, after, stride, n, BU: tl.constexpr):
    """The unit numbers of a program, which of them exist, and where their first elements lie."""
    per_outer = tl.cdiv(units, BU)
    outer = program.to(tl.int64) // per_outer
    u = (program.to(tl.int64) % per_outer) * BU + tl.arange(0, BU)
    return outer * units + u, u < units, outer * (n // after) * stride + u * after


@triton.jit
def compose_kernel(
    V, G, W, NORM, units, after, stride, n, eps,
    WIDE: tl.constexpr, BU: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """w = g·v/‖v‖ of BU units; NORM is ‖v‖, ∞ for a zero unit and NaN where squares overflow."""
    u, is_unit, start = _offsets(tl.program_id(0), units, after, stride, n, BU)
    squares = tl.zeros((BU, BE), WIDE)
    for first in range(0, n, BE):
        e = tl.arange(0, BE) + first
        offset = start[:, None] + ((e // after).to(tl.int64) * stride + e % after)[None, :]
        mask = is_unit[:, None] & (e < n)[None, :]
        v = tl.load(V + offset, mask=mask, other=0.0).to(WIDE)
        squares += v * v
    length = tl.sqrt(tl.sum(squares, 1))
    norm = tl.where(length == float("inf"), float("nan"), length)
    norm = tl.where(length <= eps, float("inf"), norm)
    tl.store(NORM + u, norm, mask=is_unit)
    g = tl.load(G + u, mask=is_unit, other=0.0).to(WIDE)
    scale = (g / norm)[:, None]
    for first in range(0, n, BE):
        e = tl.arange(0, BE) + first
        offset = start[:, None] + ((e // after).to(tl.int64) * stride + e % after)[None, :]
        mask = is_unit[:, None] & (e < n)[None, :]
        v = tl.load(V + offset, mask=mask, other=0.0).to(WIDE)
        tl.store(W + offset, (v * scale).to(W.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    GRAD_W, V, G, NORM, GRAD_V, GRAD_G, units, after, stride, n,
    WIDE: tl.constexpr, BU: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Eq. 3 for BU units: ∇g = ∇w·v/‖v‖, ∇v = (g/‖v‖)(∇w − (∇g/‖v‖)v)."""
    u, is_unit, start = _offsets(tl.program_id(0), units, after, stride, n, BU)
    products = tl.zeros((BU, BE), WIDE)
    for first in range(0, n, BE):
        e = tl.arange(0, BE) + first
        offset = start[:, None] + ((e // after).to(tl.int64) * stride + e % after)[None, :]
        mask = is_unit[:, None] & (e < n)[None, :]
        v = tl.load(V + offset, mask=mask, other=0.0).to(WIDE)
        grad_w = tl.load(GRAD_W + offset, mask=mask, other=0.0).to(WIDE)
        products += grad_w * v
    norm = tl.load(NORM + u, mask=is_unit, other=1.0)
    grad_g = tl.sum(products, 1) / norm
    tl.store(GRAD_G + u, grad_g.to(GRAD_G.dtype.element_ty), mask=is_unit)
    g = tl.load(G + u, mask=is_unit, other=0.0).to(WIDE)
    along = (grad_g / norm)[:, None]
    scale = (g / norm)[:, None]
    for first in range(0, n, BE):
        e = tl.arange(0, BE) + first
        offset = start[:, None] + ((e // after).to(tl.int64) * stride + e % after)[None, :]
        mask = is_unit[:, None] & (e < n)[None, :]
        v = tl.load(V + offset, mask=mask, other=0.0).to(WIDE)
        grad_w = tl.load(GRAD_W + offset, mask=mask, other=0.0).to(WIDE)
        grad_v = (grad_w - along * v) * scale
        tl.store(GRAD_V + offset, grad_v.to(GRAD_V.dtype.element_ty), mask=mask)


def tiles(before: int, after: int) -> tuple[int, int]:
    """Return BU and BE, see Note [tiles] in triton.py."""
    if before == 1:
        be = min(1024, max(16, triton.next_power_of_2(after)))
        return min(32, 1024 // be), be
    if after >= 32:
        return 1, min(1024, triton.next_power_of_2(before * after))
    return 64 // triton.next_power_of_2(after), 32


def compose(v: Tensor, g: Tensor, blocks: list[int], eps: float) -> tuple[Tensor, Tensor]:
    """Return w and ‖v‖ to divide by."""
    outer, before, units, after = blocks
    w, norm = torch.empty_like(v), v.new_empty(outer * units, dtype=wide_dtype(v.dtype))
    bu, be = tiles(before, after)
    compose_kernel[(outer * triton.cdiv(units, bu),)](
        v, g, w, norm, units, after, units * after, before * after, eps,
        WIDE=_WIDE[norm.dtype], BU=bu, BE=be,
    )  # fmt: skip
    return w, norm


def backward(
    grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor, blocks: list[int]
) -> tuple[Tensor, Tensor]:
    """Return ∇v and ∇g."""
    outer, before, units, after = blocks
    grad_v, grad_g = torch.empty_like(v), torch.empty_like(g)
    bu, be = tiles(before, after)
    backward_kernel[(outer * triton.cdiv(units, bu),)](
        grad_w, v, g, norm, grad_v, grad_g, units, after, units * after, before * after,
        WIDE=_WIDE[norm.dtype], BU=bu, BE=be,
    )  # fmt: skip
    return grad_v, grad_g


_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}
