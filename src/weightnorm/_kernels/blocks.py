"""How kernels see a weight: as contiguous rows, or as (outer, before, units, after)."""

from __future__ import annotations

from torch import Tensor

from weightnorm._units import Units

Blocks = list[int]
BLOCKS = Units((0, 2))
"""The units of a weight that is seen as (outer, before, units, after)."""


def blocks_of(shape: tuple[int, ...], units: Units) -> Blocks | None:
    """Return (outer, before, units, after) for a contiguous weight; None if it has no such view.

    >>> blocks_of((4, 3, 5), Units(1, groups=2)), blocks_of((8, 40, 20), Units((0, 1)))
    ([2, 2, 3, 5], [1, 1, 320, 20])
    """
    sizes = list(shape)
    kept = [axis in units.kept(len(shape)) for axis in range(len(shape))]
    if units.groups > 1:
        sizes[:1], kept[:1] = [units.groups, shape[0] // units.groups], [True, False]
    runs: list[tuple[bool, int]] = []  # neighboring axes that are all kept or all summed over
    for size, is_kept in zip(sizes, kept, strict=True):
        if runs and runs[-1][0] == is_kept:
            runs[-1] = is_kept, runs[-1][1] * size
        else:
            runs.append((is_kept, size))
    if not runs or not runs[0][0]:
        runs.insert(0, (True, 1))
    if len(runs) > 4:
        return None
    outer, before, count, after = [size for _, size in runs] + [1] * (4 - len(runs))
    if before * after >= 2**31:  # the kernels number the elements of a unit in int32
        return None
    # Rows, which one program can take several of.
    return [1, 1, outer, before] if count == after == 1 else [outer, before, count, after]


def in_memory_order(x: Tensor, units: Units) -> tuple[Tensor, Units, list[int]]:
    """Return x with its axes in the order of its memory, its units, and the order that undoes it.

    A channels-last tensor becomes contiguous. x stays as it is where its units would be in another
    order than those of g.
    """
    if x.is_contiguous():
        return x, units, [*range(x.ndim)]
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda axis: (-strides[axis], axis))
    back = [order.index(axis) for axis in range(x.ndim)]
    kept = [back[axis] for axis in units.kept(x.ndim)]
    if kept != sorted(kept) or (units.groups > 1 and order[0] != 0):
        return x, units, [*range(x.ndim)]
    return x.permute(order), Units(tuple(kept) or None, units.groups), back


def unit_view(x: Tensor, units: Units) -> tuple[Tensor, Units]:
    """Return x as rows or blocks in its memory, and the units of that; x itself if it has neither.

    >>> import torch
    >>> view, units = unit_view(torch.zeros(4, 3, 5, 5), Units(1))
    >>> view.shape, units.dim
    (torch.Size([1, 4, 3, 25]), (0, 2))
    """
    moved, there, _ = in_memory_order(x, units)
    blocks = blocks_of(moved.shape, there)
    if blocks is None or not moved.is_contiguous():
        return x, units
    if blocks[:2] == [1, 1]:
        return moved.view(blocks[2:]), Units()
    return moved.view(blocks), BLOCKS
