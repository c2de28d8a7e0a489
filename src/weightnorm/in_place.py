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
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from weightnorm.dtensor import is_sharded, local, placed_like
from weightnorm.functional import Parts
from weightnorm.kernels import EPS, unit_shape, wide_dtype
from weightnorm.torch_private import (
    foreach_add_,
    foreach_mul_,
    foreach_sub_,
    fused_weight_norm_backward,
)

Retract = bool | float | Literal["rms"]

_PIECE = 2**18
"""Elements that are processed at a time on a CPU: more would leave the cache between passes."""


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
        kept = [1 if axis in self.axes else size for axis, size in enumerate(self.x.shape)]
        if self.index is not None:
            kept[0] = self.groups
        self.kept = torch.Size(kept)
        self.count = self.kept.numel()

    def fan_in(self) -> int:
        """Elements per unit."""
        shape = self.weight.shape
        units = math.prod(unit_shape(shape, self.dim, self.groups))
        return shape.numel() // max(1, units)

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
        if not is_sharded(self.weight):
            return column.view(unit_shape(self.weight.shape, self.dim, self.groups))
        shape = unit_shape(self.weight.shape, self.dim, self.groups)
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


class Part(NamedTuple):
    """A weight, or rows of a large one, as a batch processes it."""

    number: int
    """Of the weight."""
    x: Tensor
    rows: slice | None
    """None: all of the weight."""


class UnitBatch:
    """Weights that are processed at a time, and their numbers per unit.

    On a CPU as many as fit into the cache, so that norm, gradient and scaling read them from memory
    once; on an accelerator all of them, for the fewest kernel launches.
    """

    def __init__(self, units: Units, parts: list[Part], start: int, counts: list[int]) -> None:
        self.parts, self.counts = parts, counts
        self.weights = [units.weights[part.number] for part in parts]
        self.g, self.norm = (t[start : start + sum(counts)] for t in (units.g, units.norm))
        self.xs = [part.x for part in parts]
        self.cut = [i for i, weight in enumerate(self.weights) if weight.cut]
        self.rows = not self.cut and all(weight.rows for weight in self.weights)
        first = self.xs[0]
        self.is_fused = (
            self.rows
            and first.device.type in ("cpu", "cuda")
            and first.dtype in (torch.float32, torch.float64)
            and all(x.numel() for x in self.xs)
        )
        self.on_cpu = first.device.type == "cpu"

    def split(self, column: Tensor) -> Sequence[Tensor]:
        """A column's part for each weight."""
        return [column] if len(self.counts) == 1 else column.split(self.counts)

    def spread(self, column: Tensor) -> list[Tensor]:
        """A column's part for each weight, so that it broadcasts to it."""
        parts = self.split(column)
        if self.rows:
            return list(parts)
        return [weight.spread(part) for weight, part in zip(self.weights, parts, strict=True)]

    def norms(self) -> Tensor:
        """‖·‖ of every unit, of the weights as they are now."""
        norm = torch.empty_like(self.norm)
        columns = self.split(norm)
        if self.rows:
            for x, column in zip(self.xs, columns, strict=True):
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

    def scale(self, factor: Tensor) -> None:
        """Multiply every unit by its factor."""
        foreach_mul_(self.xs, self.spread(factor))

    def may_hold_other(self, mask: Tensor) -> bool:
        """Whether any is false; without reading numbers back from a device, whether it may be."""
        return not self.on_cpu or torch.compiler.is_compiling() or not bool(mask.all())


class Units:
    """Numbers per unit of all weights on one device, see Note [one flat vector]."""

    def __init__(self, weights: Sequence[InPlaceWeight], log: bool) -> None:
        # Those that need other formulas or collectives last, so that batches are contiguous.
        self.weights = sorted(weights, key=lambda w: (bool(w.cut), not w.rows))
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
        parts: list[Part] = []
        for i in active:
            weight, last = self.weights[i], self.weights[parts[-1].number] if parts else None
            limit = _PIECE if weight.x.device.type == "cpu" and weight.rows else math.inf
            size = sum(part.x.numel() for part in parts) + weight.x.numel()
            if last is not None and (
                parts[-1].number != i - 1
                or (weight.rows, bool(weight.cut)) != (last.rows, bool(last.cut))
                or (size > limit and not weight.cut)
            ):
                yield self._batch(parts, starts)
                parts = []
            if weight.cut or not weight.x.numel() > 2 * limit:
                parts.append(Part(i, weight.x, None))
                continue
            rows = max(1, _PIECE // weight.x.shape[1])
            for start in range(0, len(weight.x), rows):
                cut = slice(start, min(start + rows, len(weight.x)))
                part = Part(i, weight.x[cut], cut)
                yield UnitBatch(self, [part], starts[i] + start, [cut.stop - cut.start])
        if parts:
            yield self._batch(parts, starts)

    def _batch(self, parts: list[Part], starts: list[int]) -> UnitBatch:
        counts = [self.counts[part.number] for part in parts]
        return UnitBatch(self, parts, starts[parts[0].number], counts)

    def lengths(self, batch: UnitBatch) -> Tensor:
        """g, signed; eˢ for a log-scale."""
        return batch.g.exp() if self.log else batch.g

    def _read_lengths(self, batch: UnitBatch, length: Tensor) -> tuple[Tensor, Tensor]:
        """(g, ±‖w‖), after weights that were written to and zero rows have been taken care of."""
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
            for x, weight, mask in zip(batch.xs, batch.weights, batch.spread(zero), strict=True):
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
        grads = {i: self.weights[i].local_grad() for i in graded}
        views = {i: self.weights[i].unit_view(grad) for i, grad in grads.items()}
        grad_g: dict[int, list[Tensor]] = {i: [] for i in graded}
        for batch in self.batches(active):
            g, length = self._read_lengths(batch, batch.norms())
            factor = batch.norm / length
            here = [
                views.get(part.number) if part.rows is None else views[part.number][part.rows]
                for part in batch.parts
                if part.rows is None or part.number in views
            ]
            if any(view is not None for view in here):
                columns = self._gradients(batch, here, g, length, factor, train_g, project)
                if self.log and train_g:  # ∇s = g·∇g
                    columns = [c * each for c, each in zip(columns, batch.split(g), strict=True)]
                for part, column in zip(batch.parts, columns, strict=False):
                    if part.number in grad_g:
                        grad_g[part.number].append(column)
            batch.scale(factor)
        for i in graded:
            columns = grad_g[i] if train_g else []
            whole = torch.cat(columns) if len(columns) > 1 else columns[0] if columns else None
            self.weights[i].set_gradients(grads[i], whole)

    def _gradients(
        self,
        batch: UnitBatch,
        grads: Sequence[Tensor | None],
        g: Tensor,
        length: Tensor,
        factor: Tensor,
        train_g: bool,
        project: bool,
    ) -> Sequence[Tensor]:
        """Overwrite ∇w by ∇v; returns ∇g of each weight."""
        if project and batch.is_fused and not torch.compiler.is_compiling():
            # torch's fused backward pass, with w for v and g·L/‖v‖ for g.
            gains, lengths, found = batch.split(g / factor), batch.split(length), []
            for grad, x, gain, norm in zip(grads, batch.xs, gains, lengths, strict=True):
                if grad is None:
                    found.append(norm)
                    continue
                grad_v, grad_g = fused_weight_norm_backward(grad, x, gain, norm, 0)
                grad.copy_(grad_v)
                found.append(grad_g)
            return found
        columns: Sequence[Tensor] = ()
        if project or train_g:
            dot = torch.zeros_like(g)
            columns = batch.split(dot)
            for grad, x, weight, column in zip(
                grads, batch.xs, batch.weights, columns, strict=True
            ):
                if grad is not None:
                    column.copy_(weight.sum(grad * x))
            batch.sum_over_ranks(columns)
            dot.div_(length)
        slopes = batch.spread(g / batch.norm)
        along = batch.spread(dot / length) if project else slopes
        for grad, x, slope, part in zip(grads, batch.xs, slopes, along, strict=True):
            if grad is not None:
                if project:
                    grad.sub_(x * part)
                grad.mul_(slope)
        return columns

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
            step = batch.norms()
            factor = (batch.norm / step).masked_fill_(step == 0, 0.0)
            for part, column in zip(batch.parts, batch.split(factor), strict=True):
                column.mul_(rates[part.number])
            batch.scale(factor)
        foreach_add_(now, before)

    def to_weights(self, active: Sequence[int], *, keep_norm: bool) -> None:
        """Overwrite v by w = g·v/‖v‖ (eq. 2), and take over ‖v‖ unless it is retracted."""
        for batch in self.batches(active):
            norm = batch.norms()
            factor = self.lengths(batch) / norm
            alive = norm > EPS
            if batch.may_hold_other(alive):
                zero = norm <= EPS  # not NaN
                factor.masked_fill_(zero, 0.0)
                norm = torch.where(zero, batch.norm, norm)
            batch.scale(factor)
            if not keep_norm:
                batch.norm.copy_(norm)
        for i in active:
            self.weights[i].write_copy()


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


def _set_data(x: Tensor, memory: Tensor) -> None:
    """Let x, or its shard on this rank, use this memory."""
    target: Any = x._local_tensor if is_sharded(x) else x
    target.data = memory
