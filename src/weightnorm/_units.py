"""How a weight splits into units, and the arithmetic between a weight and one number per unit.

g has the size of the weight along the axes that are kept and 1 elsewhere, so it broadcasts to the
weight, and a norm is a sum over all other axes. Only a grouped transposed convolution needs more:
its axis 0 holds the groups' inputs one after the other, so g has one row for each group.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weightnorm._dtensor import gathered, is_sharded, resolve_partial

Dim = int | tuple[int, ...] | None

EPS = 1e-12
"""Units with a norm up to this count as zero."""


SHORTEST = 2 * EPS
"""Length of the shortest row that the optimizer form leaves in a model.

Note [short rows keep their direction]
    A row of length g = 0 would be w = 0, which has no direction. Where |g| is smaller than
    `SHORTEST`, w = ±SHORTEST·v/‖v‖, while g itself is kept exactly. The error in w is at most
    2·10⁻¹². A row that was zero, and whose g is 0, stays zero.
"""


class Parts(NamedTuple):
    """Direction v and signed length g of a normalized weight."""

    v: Tensor
    """The direction, of the shape of w."""
    g: Tensor
    """The length, of size 1 along every axis that is not kept."""


@dataclass(frozen=True)
class Units:
    """The units of a weight: those parts of it that have one length g each.

    Args:
        dim: the axis that is kept, with one unit for each index along it; several axes, as (0, 1)
            of a stack of matrices; or None, for one unit that is the whole weight. Negative axes
            count from the end.
        groups: how many groups axis 0 splits into, each with units of its own.

    >>> Units().shape((40, 20)), Units(None).shape((40, 20)), Units((0, 1)).shape((8, 40, 20))
    ((40, 1), (), (8, 40, 1))
    >>> Units(1, groups=2).shape((4, 3, 5))  # a transposed convolution: 2 groups of 3 channels
    (2, 3, 1)
    """

    dim: Dim = 0
    groups: int = 1

    def __post_init__(self) -> None:
        axes = self.dim if isinstance(self.dim, tuple) else (self.dim,)
        if self.dim is not None and not all(type(axis) is int for axis in axes):
            raise TypeError(f"dim={self.dim!r}; expected an axis, several as a tuple, or None")

    @property
    def are_rows(self) -> bool:
        """Whether a unit is one index along the first axis."""
        return self.dim == 0 and self.groups == 1

    def kept(self, ndim: int) -> tuple[int, ...]:
        """Return the kept axes of a weight with `ndim` axes, counted from the front."""
        if self.dim is None:
            return ()
        axes = self.dim if isinstance(self.dim, tuple) else (self.dim,)
        for axis in axes:
            if not -ndim <= axis < ndim:
                span = f"−{ndim} … {ndim - 1}" if ndim else "None"
                raise IndexError(
                    f"dim={self.dim} is out of range for a weight of {ndim} "
                    f"dimension{'s' * (ndim != 1)}; expected {span}, or None for one g for the "
                    "whole tensor"
                )
        return tuple(sorted({axis % ndim for axis in axes}))

    def of(self, shape: tuple[int, ...]) -> Units:
        """Return these units with axes counted from the front; raise if no such weight has them."""
        kept = self.kept(len(shape))
        if self.groups != 1 and (
            not kept or 0 in kept or self.groups < 1 or shape[0] % self.groups
        ):
            raise ValueError(
                f"groups={self.groups} must divide axis 0 of a weight of shape {tuple(shape)}, "
                f"and the kept axis must be another one; got dim={self.dim}"
            )
        return Units(kept[0] if len(kept) == 1 else kept or None, self.groups)

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of g for a weight of this shape; () when one g serves all."""
        if self.dim is None:
            return ()
        kept = self.kept(len(weight))
        shape = [size if axis in kept else 1 for axis, size in enumerate(weight)]
        if self.groups > 1:
            shape[0] = self.groups
        return tuple(shape)

    def fan_in(self, weight: tuple[int, ...]) -> int:
        """Return the number of elements per unit; 1 if there are none."""
        return max(1, math.prod(weight) // max(1, math.prod(self.shape(weight))))

    def check(self, v: Tensor, g: Tensor) -> None:
        """Raise ValueError unless g has one number for each unit of v."""
        if self.are_rows and g.ndim == v.ndim and g.numel() == v.shape[0] == g.shape[0]:
            return  # what nearly all weights are, in few calls
        expected = self.shape(v.shape)
        if g.shape != expected:
            groups = f" and groups={self.groups}" if self.groups > 1 else ""
            raise ValueError(
                f"g has shape {tuple(g.shape)}, but v of shape {tuple(v.shape)} with "
                f"dim={self.dim}{groups} needs {expected}; reshape it with g.reshape{expected}"
            )

    def sum(self, x: Tensor) -> Tensor:
        """Sum over each unit, in the shape of g."""
        if self.dim is None:
            return x.sum()
        kept = self.kept(x.ndim)
        if self.groups == 1:
            rest = tuple(axis for axis in range(x.ndim) if axis not in kept)
            return x.sum(rest, keepdim=True) if rest else x
        grouped = gathered(x).unflatten(0, (self.groups, -1))
        rest = (1, *(axis + 1 for axis in range(1, x.ndim) if axis not in kept))
        total: Tensor = grouped.sum(rest, keepdim=True).squeeze(1)
        return total

    def spread(self, u: Tensor, x: Tensor) -> Tensor:
        """Return one number per unit so that it broadcasts to x, of the weight's shape."""
        if self.groups == 1:
            return u
        rows = x.shape[0] // self.groups
        return gathered(u).unsqueeze(1).expand(-1, rows, *u.shape[1:]).flatten(0, 1)

    def norm(self, v: Tensor) -> Tensor:
        """Return ‖v‖ in the shape of g, in float32 or wider; its gradient at 0 is 0."""
        squares = resolve_partial(self.sum(v.to(wide_dtype(v.dtype)).square()))
        if not torch.is_grad_enabled():
            return squares.sqrt()
        zero = squares == 0
        return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())

    def random_directions(self, shape: tuple[int, ...], name: str) -> Tensor:
        """Return a weight whose units have random directions of norm 1, in float32 on the CPU.

        Its generator is seeded with `name`, so that all ranks and devices have the same.
        """
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
        x = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        return x / self.spread(self.divisor(x), x)

    def exact_norm(self, v: Tensor) -> Tensor:
        """Return ‖v‖ in float64, to the bit the same on every device: halves are added up, so that
        the order of the sums does not depend on the device (it does for shards over ranks)."""
        wide = in_float64(v)
        if is_sharded(wide):
            return self.norm(wide)
        sums = self.rows(wide).square()
        width = 1 << max(sums.shape[1] - 1, 0).bit_length()
        sums = torch.nn.functional.pad(sums, (0, width - sums.shape[1]))
        while sums.shape[1] > 1:
            first, second = sums.chunk(2, dim=1)
            sums = first + second
        return sums.sqrt().reshape(self.shape(v.shape))

    def divisor(self, v: Tensor, eps: float = EPS) -> Tensor:
        """Return ‖v‖ to divide by: ∞ for a zero unit, whose quotients are then 0, and NaN where the
        sum of squares overflows.

        It has derivatives of every order, 0 for a zero unit.
        """
        squares = resolve_partial(self.sum(v.to(wide_dtype(v.dtype)).square()))
        zero = squares.detach().sqrt() <= eps
        norm = torch.where(zero, 1.0, squares).sqrt()
        return torch.where(zero, torch.inf, torch.where(norm.isinf(), torch.nan, norm))

    def gradients(self, grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor) -> Parts:
        """Return ∇v and ∇g by eq. 3, given ‖v‖: ∇g = ∇w·v/‖v‖, ∇v = (g/‖v‖)(∇w − (∇g/‖v‖)v)."""
        grad_w, v = grad_w.to(norm.dtype), v.to(norm.dtype)
        grad_g = self.sum(grad_w * v) / norm
        along = self.spread(grad_g / norm, v)
        return Parts(v=(grad_w - along * v) * self.spread(g / norm, v), g=grad_g)

    def rows(self, w: Tensor) -> Tensor:
        """Return the weight as a matrix with one row per unit, in the order of g.

        >>> Units(1, groups=2).rows(torch.zeros(4, 3, 5)).shape
        torch.Size([6, 10])
        """
        grouped, kept = w, self.kept(w.ndim)
        if self.groups > 1:
            grouped = gathered(w).unflatten(0, (self.groups, -1))
            kept = (0, *(axis + 1 for axis in kept))
        count = math.prod(self.shape(w.shape))
        moved = grouped.movedim(kept, tuple(range(len(kept)))) if kept else grouped
        return moved.reshape(count, w.numel() // max(count, 1) if count else 0)

    def from_rows(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the weight of this shape whose `rows` these are."""
        kept, full = self.kept(len(shape)), list(shape)
        if self.groups > 1:
            full[:1] = [self.groups, shape[0] // self.groups]
            kept = (0, *(axis + 1 for axis in kept))
        order = (*kept, *(axis for axis in range(len(full)) if axis not in kept))
        moved = rows.reshape([full[axis] for axis in order])
        return moved.permute([order.index(axis) for axis in range(len(full))]).reshape(shape)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which norms are taken: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def exact_dtype(x: Tensor) -> torch.dtype:
    """Return float64, for sums over many numbers; on Apple's GPUs, which lack it, float32."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def in_float64(x: Tensor) -> Tensor:
    """Return x in float64; on the CPU if its device has no such type."""
    return x.to("cpu" if x.device.type == "mps" else x.device, torch.float64)


def agree(g: Tensor, length: Tensor) -> Tensor:
    """Return where ‖w‖ is what g gives, but for rounding. False for zero rows and NaN."""
    size = g.abs().clamp_min_(SHORTEST)
    return (length - size).abs_() < size.mul_(64 * torch.finfo(g.dtype).eps)
