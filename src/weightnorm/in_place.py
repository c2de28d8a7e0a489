"""Turn weights into directions and back in their own memory: w ⇄ v, ∇w → ∇v and ∇g (eq. 3).

v = w·(‖v‖/g) differs from w by one number per unit. So a weight can hold v for the time of an
optimizer step; what has to be kept between steps is g and ‖v‖, two numbers per unit.

Note [one flat vector]
    The numbers per unit of all weights on a device lie in one vector, so arithmetic on them costs a
    few kernel launches per step, not per weight. `InPlaceWeight.g` and `.norm` are views of it.

Note [cut units]
    Each rank works on its shard of a DTensor. Where a unit lies on several ranks (columns under
    tensor parallelism, transposed convolutions under FSDP2), its squares and products are summed
    over them: one all-reduce for all such weights.

Note [small weights]
    A call of a kernel takes longer than its arithmetic on a small weight. Small weights with rows
    of equal shape are copied into one matrix, processed by one call of each kernel, and copied
    back. The number of elements in such a matrix is limited, and so is the memory for it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weightnorm.dtensor import is_sharded, local, placed_like
from weightnorm.functional import Parts
from weightnorm.kernels import EPS, unit_shape, wide_dtype
from weightnorm.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_sub_,
    fused_weight_norm_backward,
)

Retract = bool | float | Literal["rms"]

_SMALL, _STACKED, _FEWEST = 2**13, 2**15, 4
"""Elements of a small weight, of a stack of them, and how many are worth a copy."""


class InPlaceWeight:
    """A weight of the model, with g and ‖v‖ of its units.

    Args:
        name: its name in the model.
        weight: a plain parameter, perhaps sharded.
        dim: the axis that is kept, or None for one g.
        groups: how many groups axis 0 splits into, for grouped transposed convolutions.
        blocks: 0 to hand the weight itself to the inner optimizer; n to hand it n matrices that are
            stacked along axis 0, in the weight's memory.
    """

    def __init__(
        self, name: str, weight: nn.Parameter, dim: int | None, groups: int = 1, blocks: int = 0
    ) -> None:
        self.name, self.weight, self.dim, self.groups, self.blocks = (
            name,
            weight,
            dim,
            groups,
            blocks,
        )
        self.index: Tensor | None = None
        self.cut: tuple[Any, ...] = ()
        self._locate_units()
        # Two roundings of bfloat16 or float16 per step would lose small updates.
        is_narrow = wide_dtype(weight.dtype) != weight.dtype
        self.copy = (
            nn.Parameter(weight.detach().to(wide_dtype(weight.dtype))) if is_narrow else None
        )
        self.directions = self._directions()
        self.bind()
        norm = self.as_units(self._norm())
        self.g, self.norm = nn.Parameter(norm.clone()), norm

    def __getstate__(self) -> dict[str, Any]:
        """Without what `bind` finds again, and without process groups."""
        derived = ("x", "stored", "pointer", "index", "cut", "placements")
        return {k: v for k, v in self.__dict__.items() if k not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.norm = self.norm.clone()
        self.index, self.cut = None, ()
        self._locate_units()
        self.bind()

    def _locate_units(self) -> None:
        """Which mesh axes cut units, and where the units' numbers lie."""
        self.shape = unit_shape(self.weight.shape, self.dim, self.groups)
        self.placements: Any = None
        if not is_sharded(self.weight):
            return
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh, placements = self.weight.device_mesh, self.weight.placements
        if any(p.is_partial() for p in placements):
            raise ValueError(f"{self.name} has pending reductions over ranks: {placements}")
        whole = [p.is_replicate() or p.is_shard(self.dim) for p in placements]
        if self.dim is None:
            whole = [p.is_replicate() for p in placements]
        self.cut = tuple(mesh.get_group(i) for i, kept in enumerate(whole) if not kept)
        self.placements = [p if w else Replicate() for p, w in zip(placements, whole, strict=True)]
        if self.groups > 1:  # a shard may begin and end within a group
            rows = torch.arange(self.weight.shape[0], device=self.weight.device)
            along = [p if p.is_shard(0) else Replicate() for p in placements]
            mine = local(distribute_tensor(rows, mesh, along, src_data_rank=None))
            self.index = mine // (self.weight.shape[0] // self.groups)

    def _directions(self) -> list[nn.Parameter]:
        """The parameters that the inner optimizer moves in place of the weight."""
        stored = self.weight if self.copy is None else self.copy
        if not self.blocks or (self.blocks == 1 and stored.ndim == 2):
            return [stored]
        if self.blocks > 1 and is_sharded(stored):
            raise ValueError(
                f"{self.name} stacks {self.blocks} matrices and is sharded: a matrix may lie on "
                "several ranks. Leave it out with `where`, or use a layer with separate matrices"
            )
        return [nn.Parameter(m) for m in self._matrices(stored.detach())]

    def _matrices(self, x: Tensor) -> list[Tensor]:
        """The blocks of x as matrices in its memory."""
        if not is_sharded(x):
            return [_rows(block) for block in x.chunk(self.blocks)]
        shape = (x.shape[0], math.prod(x.shape[1:]))
        matrix: Tensor = type(x).from_local(
            _rows(local(x)),
            x.device_mesh,
            x.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
        return [matrix]

    def bind(self) -> None:
        """Find the memory again, after the weight has moved to another device or dtype."""
        if self.copy is not None and (
            self.copy.device != self.weight.device
            or self.copy.dtype != wide_dtype(self.weight.dtype)
        ):
            self.copy.data = self.weight.detach().to(wide_dtype(self.weight.dtype))
        stored = local((self.weight if self.copy is None else self.copy).detach())
        if self.directions[0] is not self.weight and self.directions[0] is not self.copy:
            for matrix, memory in zip(
                self.directions,
                self._matrices((self.weight if self.copy is None else self.copy).detach()),
                strict=True,
            ):
                _set_data(matrix, local(memory))
        self.pointer, self.stored = local(self.weight).data_ptr(), stored
        self.strides, self.dtype = stored.stride(), self.weight.dtype
        self.x, self.axes = self._unit_view(stored)
        self.rows = self.dim == 0 and self.axes == (1,) and self.x.is_contiguous()
        self.stacking: tuple[int, ...] | None = None
        """Small weights that share it are stacked, see Note [small weights]."""
        if self.rows and not self.cut and stored.is_contiguous() and stored.numel() <= _SMALL:
            self.stacking = tuple(stored.shape[1:])
        kept = [1 if axis in self.axes else size for axis, size in enumerate(self.x.shape)]
        if self.index is not None:
            kept[0] = self.groups
        self.kept = torch.Size(kept)
        self.count = self.kept.numel()

    def fan_in(self) -> int:
        """Elements per unit."""
        shape = self.weight.shape
        return shape.numel() // max(1, math.prod(self.shape))

    def moved(self) -> bool:
        """Whether the weight lies elsewhere than at the last `bind`."""
        weight = local(self.weight)
        return weight.data_ptr() != self.pointer or weight.dtype is not self.dtype

    def unit_view(self, x: Tensor) -> Tensor:
        """Something laid out as the weight, so that numbers per unit broadcast to it."""
        if self.rows and x.is_contiguous():
            return x if x.ndim == 2 else x.view(self.x.shape)
        return self._unit_view(x)[0]

    def _unit_view(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The same, and the axes that a norm runs over."""
        if self.index is not None:
            return x, tuple(range(2, x.ndim))
        if self.dim == 0 and x.ndim > 1 and _has_dense_rows(x):
            return _rows(x), (1,)
        if self.groups > 1:
            x, kept = x.unflatten(0, (self.groups, -1)), {0, self.dim + 1}  # type: ignore[operator]
        else:
            kept = set() if self.dim is None else {self.dim}
        return x, tuple(axis for axis in range(x.ndim) if axis not in kept)

    def has_grad(self) -> bool:
        """Whether there is a gradient; raises if it is sparse."""
        grad = self.weight.grad
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"{self.name} has a sparse gradient, but ∇v is dense; build the layer with "
                "sparse=False or leave it out with `where`"
            )
        return grad is not None

    def local_grad(self) -> Tensor:
        """The gradient as a tensor that may be overwritten, laid out as the weight."""
        grad = self.weight.grad
        assert grad is not None
        here = local(placed_like(grad, self.weight))
        if here.dtype is not self.stored.dtype or here.stride() != self.strides:
            here = torch.empty_like(self.stored).copy_(here)
        return here

    def _norm(self) -> Tensor:
        """‖w‖ of every unit as a column, summed over ranks."""
        squares = self.sum(self.x.square())
        for group in self.cut:
            torch.distributed.all_reduce(squares, group=group)
        return squares.sqrt()

    def sum(self, x: Tensor) -> Tensor:
        """Σ over each unit of this rank's part, as a column."""
        if self.index is not None:
            per_row = x.sum(self.axes)
            total = per_row.new_zeros(self.groups, x.shape[1])
            return total.index_add_(0, self.index, per_row).view(-1, 1)
        if not self.axes:
            return x.reshape(-1, 1).clone()
        return x.sum(self.axes).reshape(-1, 1)

    def spread(self, column: Tensor) -> Tensor:
        """A column of numbers per unit, so that it broadcasts to `x`."""
        if self.index is not None:
            return column.view(self.kept)[self.index]
        return column.view(self.kept)

    def as_units(self, column: Tensor) -> Tensor:
        """A column in the shape of g; sharded if the weight is."""
        shape = self.shape
        if not is_sharded(self.weight):
            return column.view(shape)
        here = list(shape)
        if self.dim is not None:
            here[self.dim] = local(self.weight).shape[self.dim]
        strides = torch.empty(shape, device="meta").stride()
        units: Tensor = type(self.weight).from_local(
            column.view(here),
            self.weight.device_mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=strides,
        )
        return units

    def set_gradients(self, grad: Tensor | None, grad_g: Tensor | None) -> None:
        """Hand ∇v and ∇g to the parameters that the inner optimizer moves."""
        self.g.grad = None if grad_g is None else self.as_units(grad_g)
        if grad is None:
            for direction in self.directions:
                direction.grad = None
            return
        whole = self._like_stored(grad)
        if self.directions[0] is self.weight:
            if self.weight.grad is not whole:
                self.weight.grad = whole
        elif self.directions[0] is self.copy:
            self.copy.grad = whole
        else:
            for direction, part in zip(self.directions, self._matrices(whole), strict=True):
                direction.grad = part

    def _like_stored(self, here: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return here
        whole: Tensor = type(self.weight).from_local(
            here,
            self.weight.device_mesh,
            self.weight.placements,
            run_check=False,
            shape=self.weight.shape,
            stride=self.weight.stride(),
        )
        return whole

    def clear_gradients(self) -> None:
        """Drop ∇v and ∇g: they are not ∇w, on which a later backward pass would add."""
        self.g.grad = self.weight.grad = None
        if self.directions[0] is not self.weight:
            for direction in self.directions:
                direction.grad = None

    def read_copy(self) -> None:
        """Take over elements of a bfloat16 or float16 weight that were written to."""
        if self.copy is not None:
            now, kept = local(self.weight.detach()), self.stored
            self.stored.copy_(torch.where(kept.to(now.dtype) == now, kept, now.to(kept.dtype)))

    def write_copy(self) -> None:
        """Round the float32 copy into the model's weight."""
        if self.copy is not None:
            local(self.weight.detach()).copy_(self.stored)

    def parts(self, log: bool) -> Parts:
        """v and g as new tensors."""
        stored = (self.weight if self.copy is None else self.copy).detach()
        g = self.g.detach().exp() if log else self.g.detach().clone()
        column, norm = (local(t).reshape(-1, 1) for t in (g, self.norm))
        length = self._norm()
        zero = length <= EPS
        scale = norm / torch.copysign(length.masked_fill(zero, 1.0), column)
        rounding = 8 * torch.finfo(length.dtype).eps * length
        written = (column.abs() - length).abs() > rounding  # since the last step: g is ±‖w‖ now
        column.copy_(torch.where(written, torch.copysign(length, column), column))
        x = torch.where(self.spread(zero), self.fan_in() ** -0.5, self.x) * self.spread(scale)
        v = torch.empty_like(local(stored))
        self._unit_view(v)[0].copy_(x)
        return Parts(self._like_stored(v), g)


class UnitBatch:
    """Weights that are processed at a time, and their numbers per unit.

    The small weights of Note [small weights] are copied into one matrix by `read` and back by
    `write`; all others are processed in their own memory.
    """

    def __init__(self, units: Units, numbers: list[int], start: int) -> None:
        self.numbers, self.weights = numbers, [units.weights[i] for i in numbers]
        self.counts = [weight.count for weight in self.weights]
        self.part = slice(start, start + sum(self.counts))
        self.g, self.norm = units.g[self.part], units.norm[self.part]
        first = self.weights[0]
        self.stacks = len(numbers) > 1 and first.stacking is not None
        self.cut = [i for i, weight in enumerate(self.weights) if weight.cut]
        self.rows = first.rows and not self.cut
        self.is_fused = (
            self.rows
            and first.x.device.type in ("cpu", "cuda")
            and first.x.dtype in (torch.float32, torch.float64)
            and all(weight.x.numel() for weight in self.weights)
        )
        self.on_cpu = first.x.device.type == "cpu"
        self.sizes = [self.part.stop - start] if self.stacks else self.counts
        """Units of each tensor that `read` returns."""

    def read(self) -> list[Tensor]:
        """The weights as tensors that numbers per unit broadcast to."""
        if self.stacks:
            return [torch.cat([weight.stored for weight in self.weights]).flatten(1)]
        return [weight.x for weight in self.weights]

    def write(self, xs: list[Tensor]) -> None:
        """Store the changed result of `read`."""
        if self.stacks:
            _unstack([weight.stored for weight in self.weights], xs[0], self.counts)

    def read_gradients(self, gradients: dict[int, Tensor]) -> list[Tensor | None]:
        """The gradients in the layout of `read`; None where there is none."""
        found = [gradients.get(i) for i in self.numbers]
        if not self.stacks:
            return [
                None if grad is None else weight.unit_view(grad)
                for weight, grad in zip(self.weights, found, strict=True)
            ]
        if all(grad is None for grad in found):
            return [None]
        tensors = [
            torch.zeros_like(weight.stored) if grad is None else grad
            for weight, grad in zip(self.weights, found, strict=True)
        ]
        return [torch.cat(tensors).flatten(1)]

    def write_gradient(self, gradients: dict[int, Tensor], k: int, new: Tensor) -> None:
        """Store new values of the k-th tensor of `read_gradients`."""
        if self.stacks:
            _unstack([gradients.get(i) for i in self.numbers], new, self.counts)
            return
        grad = gradients[self.numbers[k]]
        _replace(grad, new.as_strided(grad.shape, grad.stride()))

    def split(self, column: Tensor) -> Sequence[Tensor]:
        """A column's part for each tensor of `read`."""
        return [column] if len(self.sizes) == 1 else column.split_with_sizes(self.sizes)

    def spread(self, column: Tensor) -> list[Tensor]:
        """A column's part for each tensor of `read`, so that it broadcasts to it."""
        parts = self.split(column)
        if self.rows:
            return list(parts)
        return [weight.spread(part) for weight, part in zip(self.weights, parts, strict=True)]

    def norms(self, xs: list[Tensor]) -> Tensor:
        """‖·‖ of every unit."""
        norm = torch.empty_like(self.norm)
        columns = self.split(norm)
        if self.rows:
            for x, column in zip(xs, columns, strict=True):
                torch.linalg.vector_norm(x, dim=1, keepdim=True, out=column)
            return norm
        for weight, column in zip(self.weights, columns, strict=True):
            column.copy_(weight.sum(weight.x.square()))
        self.sum_over_ranks(columns)
        return norm.sqrt_()

    def sum_over_ranks(self, columns: Sequence[Tensor]) -> None:
        """Σ over the ranks that a unit lies on, see Note [cut units]."""
        by_groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for i in self.cut:
            by_groups[self.weights[i].cut].append(columns[i])
        for groups, parts in by_groups.items():
            joined = torch.cat(parts)
            for group in groups:
                torch.distributed.all_reduce(joined, group=group)
            for part, total in zip(parts, joined.split([len(p) for p in parts]), strict=True):
                part.copy_(total)

    def scale(self, xs: list[Tensor], factor: Tensor) -> None:
        """Multiply every unit by its factor."""
        foreach_mul_(xs, self.spread(factor))

    def may_hold_other(self, mask: Tensor) -> bool:
        """Whether any is false; without reading numbers back from a device, whether it may be."""
        return not self.on_cpu or torch.compiler.is_compiling() or not bool(mask.all())


class Units:
    """Numbers per unit of all weights on one device, see Note [one flat vector]."""

    def __init__(self, weights: Sequence[InPlaceWeight], log: bool) -> None:
        alike = Counter(weight.stacking for weight in weights)
        for weight in weights:
            if alike[weight.stacking] < _FEWEST:
                weight.stacking = None
        # Weights of a batch have to be neighbors.
        self.weights = sorted(weights, key=lambda w: (bool(w.cut), not w.rows, w.stacking or ()))
        self.log = log
        first = self.weights[0].stored
        self.counts = [w.count for w in self.weights]
        self.g, self.norm = (
            torch.cat([local(t.detach()).reshape(-1, 1).to(first) for t in tensors])
            for tensors in ([w.g for w in self.weights], [w.norm for w in self.weights])
        )
        for weight, g, norm in zip(
            self.weights, self.g.split(self.counts), self.norm.split(self.counts), strict=True
        ):
            _set_data(weight.g, g.view(local(weight.g).shape))
            weight.norm = weight.as_units(norm)
        self._batches: dict[tuple[int, ...], list[UnitBatch]] = {}

    def batches(self, active: Sequence[int]) -> list[UnitBatch]:
        """The active weights in batches."""
        key = tuple(active)
        if key not in self._batches:
            if len(self._batches) >= 8:  # other weights have gradients in every step
                self._batches.clear()
            self._batches[key] = list(self._find_batches(active))
        return self._batches[key]

    def _find_batches(self, active: Sequence[int]) -> Iterator[UnitBatch]:
        starts = [0, *itertools.accumulate(self.counts)]
        numbers: list[int] = []
        size = 0
        for i in active:
            weight, last = self.weights[i], self.weights[numbers[-1]] if numbers else None
            limit = _STACKED if weight.stacking is not None else math.inf
            if last is not None and (
                numbers[-1] != i - 1
                or weight.stacking != last.stacking
                or (weight.rows, bool(weight.cut)) != (last.rows, bool(last.cut))
                or size + weight.x.numel() > limit
            ):
                yield UnitBatch(self, numbers, starts[numbers[0]])
                numbers, size = [], 0
            numbers.append(i)
            size += weight.x.numel()
        if numbers:
            yield UnitBatch(self, numbers, starts[numbers[0]])

    def lengths(self, batch: UnitBatch) -> Tensor:
        """g, signed; eˢ for a log-scale."""
        return batch.g.exp() if self.log else batch.g

    def _read_lengths(self, batch: UnitBatch, xs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(g, ±‖w‖), after weights that were written to and zero rows have been taken care of."""
        length = batch.norms(xs)
        g = self.lengths(batch)
        size = g.abs()
        # Where ‖w‖ is |g| but for rounding, g stays as it is. False for zero rows and NaN.
        same = (length - size).abs_() < size.sub_(EPS).mul_(64 * torch.finfo(g.dtype).eps)
        if batch.may_hold_other(same):
            g = torch.where(same, g, torch.copysign(length, g))
            if self.log:
                tiny = torch.finfo(g.dtype).tiny
                batch.g.copy_(torch.where(same, batch.g, length.clamp_min(tiny).log()))
            else:
                batch.g.copy_(g)
            # A zero row takes the diagonal direction: as if ‖w‖ were 1, with g = 0.
            zero = length <= EPS
            for x, weight, mask in zip(xs, batch.weights, batch.spread(zero), strict=False):
                x.masked_fill_(mask, weight.fan_in() ** -0.5)
            length.masked_fill_(zero, 1.0)
        return g, torch.copysign(length, g)

    def to_directions(
        self, active: Sequence[int], graded: Sequence[int], *, train_g: bool, project: bool
    ) -> None:
        """Overwrite w by v, and ∇w by ∇v in those weights that are `graded`; set their ∇g.

        With g signed and L = ±‖w‖: v = w·‖v‖/L, ∇g = ∇w·w/L, ∇v = (g/‖v‖)(∇w − (∇g/L)w).
        """
        for i in active:
            self.weights[i].read_copy()
        gradients = {i: self.weights[i].local_grad() for i in graded}
        grad_g = torch.zeros_like(self.g) if train_g else None
        for batch in self.batches(active):
            xs = batch.read()
            g, length = self._read_lengths(batch, xs)
            factor = batch.norm / length
            if any(i in gradients for i in batch.numbers):
                if project and batch.is_fused and not torch.compiler.is_compiling():
                    column = _project_fused(batch, xs, gradients, g, length, factor)
                else:
                    column = _project(batch, xs, gradients, g, length, train_g, project)
                if grad_g is not None:  # for a log-scale ∇s = g·∇g
                    grad_g[batch.part] = column * g if self.log else column
            batch.scale(xs, factor)
            batch.write(xs)
        columns = None if grad_g is None else grad_g.split_with_sizes(self.counts)
        for i, grad in gradients.items():
            self.weights[i].set_gradients(grad, None if columns is None else columns[i])

    def shrink(self, i: int, factor: float) -> None:
        """Multiply g of one weight."""
        g = self.g.split(self.counts)[i]
        if self.log:
            g.add_(math.log(factor))
        else:
            g.mul_(factor)

    def copies(self, active: Sequence[int]) -> list[Tensor]:
        """The active weights as they are now."""
        return [self.weights[i].x.clone() for i in active]

    def normalize_update(
        self, active: Sequence[int], before: list[Tensor], rates: Sequence[Any]
    ) -> None:
        """Rescale v − `before` to the length lr·‖v‖, unit by unit."""
        if not active:
            return
        now = [self.weights[i].x for i in active]
        foreach_sub_(now, before)
        for batch in self.batches(active):
            xs = batch.read()
            step = batch.norms(xs)
            factor = (batch.norm / step).masked_fill_(step == 0, 0.0)
            for i, column in zip(batch.numbers, factor.split(batch.counts), strict=True):
                column.mul_(rates[i])
            batch.scale(xs, factor)
            batch.write(xs)
        foreach_add_(now, before)

    def to_weights(self, active: Sequence[int], *, keep_norm: bool) -> None:
        """Overwrite v by w = g·v/‖v‖ (eq. 2), and take over ‖v‖ unless it is retracted."""
        for batch in self.batches(active):
            xs = batch.read()
            norm = batch.norms(xs)
            factor = self.lengths(batch) / norm
            alive = norm > EPS
            if batch.may_hold_other(alive):
                zero = norm <= EPS  # not NaN
                factor.masked_fill_(zero, 0.0)
                norm = torch.where(zero, batch.norm, norm)
            batch.scale(xs, factor)
            batch.write(xs)
            if not keep_norm:
                batch.norm.copy_(norm)
        for i in active:
            self.weights[i].write_copy()


def _project_fused(
    batch: UnitBatch,
    xs: list[Tensor],
    gradients: dict[int, Tensor],
    g: Tensor,
    length: Tensor,
    factor: Tensor,
) -> Tensor:
    """Overwrite ∇w by ∇v; returns ∇g. By torch's backward pass, with w for v and g·L/‖v‖ for g."""
    columns: list[Tensor] = []
    found, gains, norms = (
        batch.read_gradients(gradients),
        batch.split(g / factor),
        batch.split(length),
    )
    for k, (grad, x, gain, norm) in enumerate(zip(found, xs, gains, norms, strict=True)):
        if grad is None:
            columns.append(torch.zeros_like(norm))
            continue
        found[k] = None  # or it would keep memory that is replaced
        grad_v, grad_g = fused_weight_norm_backward(grad, x, gain, norm, 0)
        batch.write_gradient(gradients, k, grad_v)
        columns.append(grad_g)
    return columns[0] if len(columns) == 1 else torch.cat(columns)


def _project(
    batch: UnitBatch,
    xs: list[Tensor],
    gradients: dict[int, Tensor],
    g: Tensor,
    length: Tensor,
    train_g: bool,
    project: bool,
) -> Tensor:
    """Overwrite ∇w by ∇v, or by (g/‖v‖)∇w without `project`; returns ∇g."""
    found, dot = batch.read_gradients(gradients), torch.zeros_like(g)
    if project or train_g:
        parts = batch.split(dot)
        for grad, x, weight, part in zip(found, xs, batch.weights, parts, strict=False):
            if grad is not None:
                part.copy_(weight.sum(grad * x))
        batch.sum_over_ranks(parts)
        dot.div_(length)
    slopes = batch.spread(g / batch.norm)
    along = batch.spread(dot / length) if project else slopes
    for k, (grad, x, slope, each) in enumerate(zip(found, xs, slopes, along, strict=True)):
        if grad is not None:
            if project:
                grad.sub_(x * each)
            grad.mul_(slope)
            if batch.stacks:
                batch.write_gradient(gradients, k, grad)
    return dot


def _replace(x: Tensor, new: Tensor) -> None:
    """Let x have new values, without a copy unless its memory belongs to other tensors too."""
    if x.untyped_storage().nbytes() == new.untyped_storage().nbytes():
        x.data = new
    else:  # a view of a bucket of gradients, say, whose memory would not be freed
        x.copy_(new)


def initial_norm(weight: InPlaceWeight, retract: Retract) -> None:
    """Set ‖v‖ of a weight before the first step."""
    norm = local(weight.norm)
    if retract == "rms":
        norm.fill_(math.sqrt(weight.fan_in()))
    elif isinstance(retract, float | int) and not isinstance(retract, bool):
        norm.fill_(float(retract))
    else:
        norm.masked_fill_(norm <= EPS, 1.0)  # a zero row has the diagonal direction, of length 1


def units_by_device(weights: Iterable[InPlaceWeight], log: bool) -> list[Units]:
    """One `Units` for each device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[InPlaceWeight]] = defaultdict(list)
    for weight in weights:
        found[weight.stored.device, weight.stored.dtype].append(weight)
    return [Units(each, log) for each in found.values()]


def _memory_order(x: Tensor) -> list[int]:
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda axis: (-strides[axis], axis))


def _has_dense_rows(x: Tensor) -> bool:
    """Whether x is a contiguous matrix with axis 0 as its rows, channels-last included."""
    order = _memory_order(x)
    return order[0] == 0 and x.permute(order).is_contiguous()


def _rows(x: Tensor) -> Tensor:
    """x as a matrix in its memory; the order of its columns is that of the memory."""
    if x.ndim < 2 or not _has_dense_rows(x):
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is no matrix in memory; "
            "make the weight contiguous or channels-last"
        )
    return x.permute(_memory_order(x)).flatten(1)


def _unstack(xs: Sequence[Tensor | None], matrix: Tensor, counts: list[int]) -> None:
    """Copy the rows of a matrix to the tensors that it was stacked from; None is left out."""
    pairs = [(x, part) for x, part in zip(xs, matrix.split(counts), strict=True) if x is not None]
    foreach_copy_([x for x, _ in pairs], [part.view(x.shape) for x, part in pairs])


def _set_data(x: Tensor, memory: Tensor) -> None:
    """Let x, or its shard on this rank, use this memory."""
    target: Any = x._local_tensor if is_sharded(x) else x
    target.data = memory
