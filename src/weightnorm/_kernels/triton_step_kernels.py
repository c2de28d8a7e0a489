# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernels of the optimizer form's step; see triton_step.py, which decides when they run.

One program handles one unit of one weight. A table of addresses says where each weight and gradient
lies. It changes only when memory moves, so that CUDA graphs can capture the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS: tl.constexpr = tl.constexpr(9)
"""Of the table: addresses of w, its narrow copy, ∇w, ∇v; units, after, n, first unit, fan-in."""


@triton.jit
def _unit(TABLE, UNIT, BE: tl.constexpr):
    """The row of the table and the unit of this program, where it starts, and its strides."""
    k = tl.load(UNIT + 2 * tl.program_id(0)).to(tl.int64)
    j = tl.load(UNIT + 2 * tl.program_id(0) + 1).to(tl.int64)
    row = TABLE + COLUMNS * k
    units, after, n = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    start = (j // units) * n * units + (j % units) * after
    return row, tl.load(row + 7) + j, start, units * after, after.to(tl.int32), n.to(tl.int32)


@triton.jit
def _read(W, NARROW, offset, mask, WIDE: tl.constexpr, IS_NARROW: tl.constexpr):
    """Elements of w; those of the narrow weight that were written to since it was rounded."""
    w = tl.load(W + offset, mask=mask, other=0.0).to(WIDE)
    if IS_NARROW:
        now = tl.load(NARROW + offset, mask=mask, other=0.0)
        w = tl.where(w.to(now.dtype).to(WIDE) == now.to(WIDE), w, now.to(WIDE))
    return w


@triton.jit
def _sums(
    W, NARROW, GRAD, start, stride, after, n,
    WIDE: tl.constexpr, IS_NARROW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Σw², Σ∇w·w and Σ∇w of a unit."""
    square, product, total = (
        tl.zeros((BE,), WIDE), tl.zeros((BE,), WIDE), tl.zeros((BE,), WIDE)
    )  # fmt: skip
    for i in range(0, n, BE):
        e = tl.arange(0, BE) + i
        offset, mask = start + (e // after).to(tl.int64) * stride + e % after, e < n
        w = _read(W, NARROW, offset, mask, WIDE, IS_NARROW)
        grad = tl.load(GRAD + offset, mask=mask, other=0.0).to(WIDE)
        square += w * w
        product += grad * w
        total += grad
    return tl.sum(square, 0), tl.sum(product, 0), tl.sum(total, 0)


@triton.jit
def sums_kernel(TABLE, UNIT, SUMS, WIDE: tl.constexpr, NARROW_TYPE: tl.constexpr, BE: tl.constexpr):
    """Σw², Σ∇w·w and Σ∇w of every unit, for units that lie on several ranks."""
    row, u, start, stride, after, n = _unit(TABLE, UNIT, BE)
    W = tl.load(row).to(tl.pointer_type(WIDE))
    NARROW = tl.load(row + 1).to(tl.pointer_type(NARROW_TYPE))
    GRAD = tl.load(row + 2).to(tl.pointer_type(NARROW_TYPE))
    square, product, total = _sums(
        W, NARROW, GRAD, start, stride, after, n, WIDE, NARROW_TYPE != WIDE, BE
    )
    tl.store(SUMS + 3 * u, square)
    tl.store(SUMS + 3 * u + 1, product)
    tl.store(SUMS + 3 * u + 2, total)


@triton.jit
def directions_kernel(
    TABLE, UNIT, G, NORM, GRAD_G, WAS_ZERO, SUMS, shortest, eps, tolerance, tiny,
    LOG: tl.constexpr, PROJECT: tl.constexpr, GIVEN: tl.constexpr,
    WIDE: tl.constexpr, NARROW_TYPE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """w → v, ∇w → ∇v, ∇g, for a unit; g where w was written to."""
    row, u, start, stride, after, n = _unit(TABLE, UNIT, BE)
    W = tl.load(row).to(tl.pointer_type(WIDE))
    NARROW = tl.load(row + 1).to(tl.pointer_type(NARROW_TYPE))
    GRAD = tl.load(row + 2).to(tl.pointer_type(NARROW_TYPE))
    GRAD_V = tl.load(row + 3).to(tl.pointer_type(WIDE))
    if GIVEN:
        square = tl.load(SUMS + 3 * u)
        product, total = tl.load(SUMS + 3 * u + 1), tl.load(SUMS + 3 * u + 2)
    else:
        square, product, total = _sums(
            W, NARROW, GRAD, start, stride, after, n, WIDE, NARROW_TYPE != WIDE, BE
        )
    length = tl.sqrt(square)
    length = tl.where(length == float("inf"), float("nan"), length)
    stored = tl.load(G + u)
    old = tl.exp(stored) if LOG else stored
    size = tl.maximum(tl.abs(old), shortest)
    same = tl.abs(length - size) < size * tolerance
    zero = length <= eps
    new = tl.where(same, old, tl.where(old < 0, -length, length))
    divisor = tl.where(zero, 1.0, length)
    signed = tl.where(old < 0, -divisor, divisor)
    diagonal = 1.0 / tl.sqrt(tl.load(row + 8).to(WIDE))
    dot = tl.where(zero, total * diagonal, product) / signed
    norm = tl.load(NORM + u)
    tl.store(GRAD_G + u, dot * new if LOG else dot)
    written = tl.log(tl.maximum(length, tiny)) if LOG else new
    tl.store(G + u, tl.where(same, stored, written))
    tl.store(WAS_ZERO + u, zero & (same == 0))
    along, gain, scale = dot / signed, new / norm, norm / signed
    for i in range(0, n, BE):
        e = tl.arange(0, BE) + i
        offset, mask = start + (e // after).to(tl.int64) * stride + e % after, e < n
        w = _read(W, NARROW, offset, mask, WIDE, NARROW_TYPE != WIDE)
        w = tl.where(zero, diagonal, w)
        grad = tl.load(GRAD + offset, mask=mask, other=0.0).to(WIDE)
        if PROJECT:
            grad = grad - along * w
        tl.store(GRAD_V + offset, grad * gain, mask=mask)
        tl.store(W + offset, w * scale, mask=mask)


@triton.jit
def weights_kernel(
    TABLE, UNIT, G, NORM, WAS_ZERO, SQUARES, shortest, eps,
    LOG: tl.constexpr, GIVEN: tl.constexpr,
    WIDE: tl.constexpr, NARROW_TYPE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """v → w = g·v/‖v‖ for a unit, and its ‖v‖."""
    row, u, start, stride, after, n = _unit(TABLE, UNIT, BE)
    W = tl.load(row).to(tl.pointer_type(WIDE))
    if GIVEN:
        square = tl.load(SQUARES + u)
    else:
        squares = tl.zeros((BE,), WIDE)
        for i in range(0, n, BE):
            e = tl.arange(0, BE) + i
            offset, mask = start + (e // after).to(tl.int64) * stride + e % after, e < n
            v = tl.load(W + offset, mask=mask, other=0.0)
            squares += v * v
        square = tl.sum(squares, 0)
    length = tl.sqrt(square)
    length = tl.where(length == float("inf"), float("nan"), length)
    stored = tl.load(G + u)
    g = tl.exp(stored) if LOG else stored
    zero = length <= eps
    size = tl.maximum(tl.abs(g), shortest)
    factor = tl.where(g < 0, -size, size) / tl.where(zero, 1.0, length)
    gone = zero | ((tl.load(WAS_ZERO + u) != 0) & (g == 0))
    factor = tl.where(gone, 0.0, factor)
    tl.store(NORM + u, tl.where(zero, tl.load(NORM + u), length))
    for i in range(0, n, BE):
        e = tl.arange(0, BE) + i
        offset, mask = start + (e // after).to(tl.int64) * stride + e % after, e < n
        w = tl.load(W + offset, mask=mask, other=0.0) * factor
        tl.store(W + offset, w, mask=mask)
        if NARROW_TYPE != WIDE:
            NARROW = tl.load(row + 1).to(tl.pointer_type(NARROW_TYPE))
            tl.store(NARROW + offset, w.to(NARROW_TYPE), mask=mask)


# — tables —

_tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
"""The latest tables, by the addresses in them."""


def table(
    w: Sequence[Tensor],
    narrow: Sequence[Tensor],
    grad: Sequence[Tensor],
    grad_v: Sequence[Tensor],
    first: Sequence[int],
    fan_in: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the table of the weights and that of the units, made anew only if memory moved."""
    none = [0] * len(w)
    addresses = [[x.data_ptr() for x in each] or none for each in (w, narrow, grad, grad_v)]
    key = (w[0].device.index or 0, *(a for each in addresses for a in each), *first)
    key += tuple(size for x in w for size in x.shape)
    if key not in _tables:
        if len(_tables) >= 32:
            _tables.clear()
        rows, units = [], []
        for k, x in enumerate(w):
            outer, before, count, after = _blocks(x)
            geometry = (count, after, before * after, first[k], fan_in[k] if fan_in else 0)
            rows.append([*(each[k] for each in addresses), *geometry])
            units += [(k, j) for j in range(outer * count)]
        _tables[key] = (
            _on_device(torch.tensor(rows, dtype=torch.int64), w[0].device),
            _on_device(torch.tensor(units, dtype=torch.int32), w[0].device),
        )
    return _tables[key]


_pinned: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
_captured: list[Tensor] = []
"""What the copies in CUDA graphs read, as long as the process lives."""


def _on_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a table to the device, also while a CUDA graph is captured.

    A capture refuses copies from memory that is not pinned, and cannot pin any, so a block of the
    size is kept from the step before it.
    """
    if device.type != "cuda":
        return x.to(device)
    is_capturing, key = torch.cuda.is_current_stream_capturing(), (x.shape, x.dtype)
    ready = _pinned.pop(key, None)
    if ready is None:
        ready = torch.empty_like(x, pin_memory=True)
    if is_capturing:
        _captured.append(ready)
    else:
        _pinned[key] = torch.empty_like(x, pin_memory=True)
    return ready.copy_(x).to(device, non_blocking=True)


def tile(w: Sequence[Tensor]) -> int:
    """Return BE: the elements that a program handles at a time."""
    longest = max(before * after for _, before, _, after in map(_blocks, w))
    return min(1024, max(32, int(triton.next_power_of_2(longest))))


def _blocks(x: Tensor) -> tuple[int, ...]:
    """Return (outer, before, units, after) of rows or blocks."""
    return (1, 1, *x.shape) if x.ndim == 2 else tuple(x.shape)


TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
