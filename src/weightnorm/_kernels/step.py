"""The two passes of an optimizer step in torch's operations: w → v and ∇w → ∇v, then v → w.

Both take lists of weights, and g, ‖v‖ and ∇g as flat columns with one number for each unit, so that
arithmetic on those costs a few kernel launches per step, not per weight. On a CPU and CUDA, eq. 3
of rows is torch's fused kernel. triton_step.py has the same passes as two launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weightnorm._torch_private import foreach_mul_, fused_weight_norm_backward
from weightnorm._units import EPS, SHORTEST, Units, agree


class Weights:
    """The weights that take part in a step, all on one device and of one dtype.

    Args:
        x: the weights in float32 or wider, as rows or blocks where they have such a view.
        units: the units of each.
        narrow: the model's weights where they are bfloat16 or float16 and `x` is a copy; else [].
        first: where the numbers of each weight begin in the flat columns.
        fan_in: the number of elements per unit; of the whole weight, if `x` is a shard.
    """

    def __init__(
        self,
        x: list[Tensor],
        units: list[Units],
        narrow: list[Tensor],
        first: list[int],
        fan_in: list[int],
    ) -> None:
        self.x, self.units, self.narrow, self.first, self.fan_in = x, units, narrow, first, fan_in
        self.shapes = [each.shape(w.shape) for each, w in zip(units, x, strict=True)]
        self.counts = [math.prod(shape) for shape in self.shapes]
        self.rows = [u.are_rows and w.ndim == 2 for u, w in zip(units, x, strict=True)]
        self.are_rows = all(self.rows)
        kinds = zip(self.rows, x, strict=True)
        self.fused = [is_rows and _has_fused_kernel(w) for is_rows, w in kinds]
        """Whether torch's kernel computes eq. 3."""
        last = [start + count for start, count in zip(first, self.counts, strict=True)]
        self.columns: slice | Tensor = slice(first[0], last[-1])
        """The rows of the flat columns that belong to these weights."""
        if first[1:] != last[:-1]:
            spans = zip(first, last, strict=True)
            self.columns = torch.cat([torch.arange(*s, device=x[0].device) for s in spans])

    def split(self, column: Tensor) -> list[Tensor]:
        """Return the part of each weight, in the shape of its g."""
        parts = list(column.split(self.counts))
        if self.are_rows:
            return parts
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def spread(self, column: Tensor) -> list[Tensor]:
        """Return the part of each weight, so that it broadcasts to it."""
        parts = self.split(column)
        if self.are_rows:
            return parts
        return [u.spread(part, x) for u, part, x in zip(self.units, parts, self.x, strict=True)]

    def lengths(self) -> Tensor:
        """Return the length of every unit as a column; NaN where a sum of squares overflows."""
        lengths = self.x[0].new_empty(sum(self.counts), 1)
        for k, column in enumerate(self.split(lengths)):
            if self.rows[k]:
                torch.linalg.vector_norm(self.x[k], 2, 1, True, out=column)
            else:
                torch.sqrt(self.units[k].sum(self.x[k].square()), out=column)
        return overflow_is_nan(lengths)

    def scale(self, factor: Tensor) -> None:
        """Multiply every unit by its factor."""
        foreach_mul_(self.x, self.spread(factor))


def unit_sums(
    w: Weights, narrow: Sequence[Tensor], grad: Sequence[Tensor | None], out: Tensor
) -> None:
    """Write Σw², Σ∇w·w and Σ∇w of every unit to the columns of `out`."""
    sums = out.new_zeros(sum(w.counts), 3)
    parts = (w.split(column[:, None]) for column in sums.unbind(1))
    for k, (units, *part) in enumerate(zip(w.units, *parts, strict=True)):
        x = latest(w.x[k], narrow[k]) if narrow else w.x[k]
        slope = grad[k]
        slope = torch.zeros_like(x) if slope is None else slope.to(x.dtype)
        for column, term in zip(part, (x.square(), slope * x, slope), strict=True):
            column.copy_(units.sum(term))
    out[w.columns] = sums


def to_directions(
    w: Weights,
    grad: list[Tensor | None],
    g: Tensor,
    norm: Tensor,
    grad_g: Tensor,
    was_zero: Tensor,
    sums: Tensor | None,
    *,
    log: bool,
    project: bool,
) -> None:
    """Overwrite w by v, and the entries of `grad` by ∇v; set ∇g.

    With g signed and L = ±‖w‖: v = w·‖v‖/L, ∇g = ∇w·w/L, ∇v = (g/‖v‖)(∇w − (∇g/L)w).

    Args:
        w: the weights.
        grad: ∇w of each, laid out as it; None for a weight that has none. May be overwritten.
        g, norm, grad_g, was_zero: flat columns: g, ‖v‖, ∇g, and whether w was zero. g is updated
            where a weight was written to.
        sums: what `unit_sums` returns, added up over ranks, where units lie on several; else None.
        log: whether `g` has s = log g.
        project: False for ∇v = (g/‖v‖)∇w.
    """
    for x, now in zip(w.x[: len(w.narrow)], w.narrow, strict=True):
        x.copy_(latest(x, now))
    length = w.lengths() if sums is None else overflow_is_nan(sums[w.columns, :1].sqrt())
    stored = g[w.columns]
    own = stored.exp() if log else stored
    same = agree(own, length)
    zero = torch.zeros_like(same)
    signed = torch.copysign(length, own)
    if _may_hold_false(same):
        own, signed, zero = read_lengths(own, length)
        tiny = torch.finfo(g.dtype).tiny
        g[w.columns] = torch.where(same, stored, length.clamp_min(tiny).log()) if log else own
        # A zero row takes the diagonal direction: as if ‖w‖ were 1, with g = 0.
        for x, mask, fan_in in zip(w.x, w.spread(zero), w.fan_in, strict=True):
            x.masked_fill_(mask, fan_in**-0.5)
    was_zero[w.columns] = zero
    scale = norm[w.columns] / signed
    gains, lengths = w.split(own / scale), w.split(signed)
    products: list[Tensor | None] = [None] * len(w.x)
    if sums is not None:  # taken before zero rows had a direction
        given = [w.split(column[:, None]) for column in sums[w.columns, 1:].unbind(1)]
        products = [
            torch.where(mask, total * fan_in**-0.5, product)
            for mask, product, total, fan_in in zip(w.split(zero), *given, w.fan_in, strict=True)
        ]
    slopes = []
    may_fuse = project and sums is None and not torch.compiler.is_compiling()
    for k, (x, units) in enumerate(zip(w.x, w.units, strict=True)):
        grad_w, slope = grad[k], gains[k]
        if grad_w is not None and may_fuse and w.fused[k]:
            grad[k], slope = _fused_gradients(grad_w, x, gains[k], lengths[k])
        elif grad_w is not None:
            grad[k], slope = _gradients(
                grad_w, x, gains[k], units, lengths[k], products[k], project=project
            )
        slopes.append(slope if w.rows[k] else slope.reshape(-1, 1))
        del grad_w  # or ∇w would keep its memory while the next ∇v is formed
    grad_g[w.columns] = torch.cat(slopes) * own if log else torch.cat(slopes)
    w.scale(scale)


def _has_fused_kernel(rows: Tensor) -> bool:
    return (
        (rows.is_contiguous() and rows.numel() > 0)
        and rows.device.type in ("cpu", "cuda")
        and rows.dtype in (torch.float32, torch.float64)
    )


def _fused_gradients(
    grad_w: Tensor, x: Tensor, gain: Tensor, length: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ∇v and ∇g of rows by eq. 3, with w for v and `gain` = g·L/‖v‖ for g, given L."""
    grad_w = grad_w if grad_w.dtype is x.dtype else grad_w.to(x.dtype)
    grad_v, grad_g = fused_weight_norm_backward(grad_w, x, gain, length, 0)
    # A view of a bucket of gradients, say, is overwritten: its memory would not be freed.
    is_view = grad_w.untyped_storage().nbytes() > grad_w.numel() * grad_w.element_size()
    return grad_w.copy_(grad_v) if is_view else grad_v, grad_g


def _gradients(
    grad_w: Tensor,
    x: Tensor,
    gain: Tensor,
    units: Units,
    length: Tensor,
    product: Tensor | None,
    *,
    project: bool,
) -> tuple[Tensor, Tensor]:
    """Return the same for any units, ∇v in the memory of ∇w, given Σ∇w·w if it is known.

    Without `project` the first result is (g/‖v‖)∇w.
    """
    grad_w = grad_w.to(x.dtype)
    grad_g = (units.sum(grad_w * x) if product is None else product) / length
    if project:
        grad_w.sub_(x * units.spread(grad_g / length, x))
    return grad_w.mul_(units.spread(gain / length, x)), grad_g


def to_weights(
    w: Weights, g: Tensor, norm: Tensor, was_zero: Tensor, squares: Tensor | None, *, log: bool
) -> None:
    """Overwrite v by w = g·v/‖v‖ (eq. 2), and keep the new ‖v‖ in `norm`.

    `squares` is Σv² of every unit, added up over ranks, where units lie on several; else None.
    """
    length = w.lengths() if squares is None else overflow_is_nan(squares[w.columns].sqrt())
    own = g[w.columns].exp() if log else g[w.columns]
    size = own.abs()
    factor = own / length
    if _may_hold_false(torch.minimum(length, size) > SHORTEST):
        zero = length <= EPS  # not NaN
        # See Note [short rows keep their direction].
        factor = torch.copysign(size.clamp_min_(SHORTEST), own) / length
        factor.masked_fill_(zero | (was_zero[w.columns] & (own == 0)), 0.0)
        length = torch.where(zero, norm[w.columns], length)
    w.scale(factor)
    norm[w.columns] = length
    for x, now in zip(w.x[: len(w.narrow)], w.narrow, strict=True):
        now.copy_(x)


def latest(x: Tensor, now: Tensor) -> Tensor:
    """Return the float32 copy of a bfloat16 or float16 weight, with the elements that were written
    to since it was rounded."""
    return torch.where(x.to(now.dtype) == now, x, now.to(x.dtype))


def read_lengths(g: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (g, ±‖w‖ to divide by, mask of zero rows), given g and ‖w‖.

    g stays as it is where it agrees with ‖w‖, and is ±‖w‖ where w was written to.
    """
    zero = length <= EPS
    g = torch.where(agree(g, length), g, torch.copysign(length, g))
    return g, torch.copysign(length.masked_fill(zero, 1.0), g), zero


def overflow_is_nan(norm: Tensor) -> Tensor:
    """Replace ∞, in place, by NaN: a sum of squares overflowed, and w/‖w‖ would silently be 0."""
    return norm.nan_to_num_(nan=math.nan, posinf=math.nan)


def _may_hold_false(mask: Tensor) -> bool:
    """Return whether `mask` may contain False: always on accelerators, to avoid a sync."""
    return not mask.is_cpu or torch.compiler.is_compiling() or not bool(mask.all())
