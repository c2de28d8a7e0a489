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

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weightnorm.dtensor import is_sharded, local, placed_like
from weightnorm.functional import Parts
from weightnorm.kernels import EPS, unit_shape, wide_dtype

Retract = bool | float | Literal["rms"]

_PIECE = 2**17
"""Elements of a CPU weight that are processed at a time: more would leave the cache in between."""


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
        norm = self._as_units(self._norm())
        self.g, self.norm = nn.Parameter(norm.clone()), norm

    def __getstate__(self) -> dict[str, Any]:
        """Without what `bind` finds again, and without process groups."""
        derived = ("x", "stored", "pieces", "pointer", "index", "cut", "placements")
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
            raise ValueError(f"{self.name} has pending sums over ranks: {placements}")
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
        self.pointer = self._pointer()
        self.stored = stored
        self.x, self.axes = self._unit_view(stored)
        self.rows = self.dim == 0 and self.axes == (1,) and self.x.is_contiguous()
        kept = [1 if axis in self.axes else size for axis, size in enumerate(self.x.shape)]
        if self.index is not None:
            kept[0] = self.groups
        self.kept = torch.Size(kept)
        self.count = self.kept.numel()
        self.pieces = self._pieces(self.x)

    def fan_in(self) -> int:
        """Elements per unit."""
        shape = self.weight.shape
        units = math.prod(unit_shape(shape, self.dim, self.groups))
        return shape.numel() // max(1, units)

    def moved(self) -> bool:
        """Whether the weight lies elsewhere than at the last `bind`."""
        return self._pointer() != self.pointer

    def _pointer(self) -> tuple[object, ...]:
        here = local(self.weight)
        return here.data_ptr(), here.dtype, here.device, here.stride()

    def _unit_view(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """x so that numbers per unit broadcast to it, and the axes that a norm runs over."""
        if self.index is not None:
            return x, tuple(range(2, x.ndim))
        if self.dim == 0 and x.ndim > 1 and _has_dense_rows(x):
            return _rows(x), (1,)
        if self.groups > 1:
            x, kept = x.unflatten(0, (self.groups, -1)), {0, self.dim + 1}  # type: ignore[operator]
        else:
            kept = set() if self.dim is None else {self.dim}
        return x, tuple(axis for axis in range(x.ndim) if axis not in kept)

    def _pieces(self, x: Tensor) -> list[Tensor]:
        """Rows that fit into the cache, for large weights on a CPU."""
        if not self.rows or x.device.type != "cpu" or x.numel() <= 2 * _PIECE:
            return [x]
        return list(x.split(max(1, _PIECE // x.shape[1])))

    def local_grad(self) -> Tensor:
        """The gradient as a tensor that may be overwritten, laid out as the weight."""
        grad = self.weight.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ValueError(
                f"{self.name} has a sparse gradient, but ∇v is dense; build the layer with "
                "sparse=False or leave it out with `where`"
            )
        here, like = local(placed_like(grad, self.weight)), self.stored
        if here.dtype != like.dtype or here.stride() != like.stride() or here.shape != like.shape:
            here = torch.empty_like(like).copy_(here)
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

    def _as_units(self, column: Tensor) -> Tensor:
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
        self.g.grad = None if grad_g is None else self._as_units(grad_g)
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
        x = torch.where(self.spread(zero), self.fan_in() ** -0.5, self.x) * self.spread(scale)
        v = torch.empty_like(local(stored))
        self._unit_view(v)[0].copy_(x)
        return Parts(self._like_stored(v), g)


class Units:
    """Numbers per unit of all weights on one device, see Note [one flat vector]."""

    def __init__(self, weights: Sequence[InPlaceWeight], log: bool) -> None:
        self.weights, self.log = list(weights), log
        first = weights[0].stored
        self.counts = [w.count for w in weights]
        self.g, self.norm = (
            torch.cat([local(t.detach()).reshape(-1, 1).to(first) for t in tensors])
            for tensors in ([w.g for w in weights], [w.norm for w in weights])
        )
        for weight, g, norm in zip(weights, self.split(self.g), self.split(self.norm), strict=True):
            _set_data(weight.g, g.view(local(weight.g).shape))
            weight.norm = weight._as_units(norm)

    def split(self, column: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = column.split(self.counts)
        return parts

    def lengths(self) -> Tensor:
        """g, signed; eˢ for a log-scale."""
        return self.g.exp() if self.log else self.g

    def norms(self, active: Sequence[int], otherwise: Tensor) -> Tensor:
        """‖·‖ of every unit of the active weights as they are now; `otherwise` for the rest."""
        norm = otherwise.clone() if len(active) < len(self.weights) else torch.empty_like(otherwise)
        columns = self.split(norm)
        cut = []
        for i in active:
            weight, column = self.weights[i], columns[i]
            if weight.rows and not weight.cut:
                if len(weight.pieces) == 1:
                    torch.linalg.vector_norm(weight.x, dim=1, keepdim=True, out=column)
                else:
                    parts = column.split(weight.pieces[0].shape[0])
                    for piece, part in zip(weight.pieces, parts, strict=True):
                        torch.linalg.vector_norm(piece, dim=1, keepdim=True, out=part)
                continue
            column.copy_(weight.sum(weight.x.square()))
            if weight.cut:
                cut.append(i)
            else:
                column.sqrt_()
        self._sum_over_ranks(columns, cut)
        for i in cut:
            columns[i].sqrt_()
        return norm

    def _sum_over_ranks(self, columns: Sequence[Tensor], cut: Sequence[int]) -> None:
        """Σ over the ranks that a unit lies on, see Note [cut units]."""
        by_groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for i in cut:
            by_groups[self.weights[i].cut].append(columns[i])
        for groups, parts in by_groups.items():
            joined = torch.cat(parts)
            for group in groups:
                torch.distributed.all_reduce(joined, group=group)
            for part, total in zip(parts, joined.split([len(p) for p in parts]), strict=True):
                part.copy_(total)

    def take_lengths(self, length: Tensor) -> Tensor:
        """g = ±‖w‖ where a weight was written to; else g as it is, free of w's rounding."""
        g = self.lengths()
        size = g.abs()
        same = (length - size).abs() <= 16 * torch.finfo(g.dtype).eps * size
        g = torch.where(same, g, torch.copysign(length, g))
        if self.log:
            tiny = torch.finfo(g.dtype).tiny
            self.g.copy_(torch.where(same, self.g, length.clamp_min(tiny).log()))
        else:
            self.g.copy_(g)
        return g

    def to_directions(
        self, active: Sequence[int], graded: Sequence[int], *, train_g: bool, project: bool
    ) -> None:
        """Overwrite w by v, and ∇w by ∇v in those weights that are `graded`; set their ∇g.

        With g signed and L = ±‖w‖: v = w·‖v‖/L, ∇g = ∇w·w/L, ∇v = (g/‖v‖)(∇w − (∇g/L)w).
        """
        for i in active:
            self.weights[i].read_copy()
        length = self.norms(active, self.lengths().abs())
        g = self.take_lengths(length)
        zero = length <= EPS
        if torch.compiler.is_compiling() or length.device.type != "cpu" or bool(zero.any()):
            # A zero row takes the diagonal direction: as if ‖w‖ were 1, with g = 0.
            masks = self.split(zero)
            for i in active:
                weight = self.weights[i]
                weight.x.masked_fill_(weight.spread(masks[i]), weight.fan_in() ** -0.5)
            length.masked_fill_(zero, 1.0)
        length = torch.copysign(length, g)
        if graded:
            self._gradients(graded, g, length, train_g, project)
        self._scale(active, self.norm / length)

    def _gradients(
        self, active: Sequence[int], g: Tensor, length: Tensor, train_g: bool, project: bool
    ) -> None:
        slope = g / self.norm
        slopes, lengths = self.split(slope), self.split(length)
        grads = {i: self.weights[i].local_grad() for i in active}
        views = {i: self.weights[i]._unit_view(grad)[0] for i, grad in grads.items()}
        grad_g: dict[int, Tensor] = {}
        if project or train_g:
            fused = [i for i in active if project and self._is_fused(self.weights[i])]
            if fused:
                gains = self.split(slope * length)
                for i in fused:
                    grad_g[i] = self._fused(self.weights[i], views[i], gains[i], lengths[i])
            rest = [i for i in active if i not in grad_g]
            if rest:
                dot = torch.zeros_like(g)
                dots = self.split(dot)
                for i in rest:
                    dots[i].copy_(self.weights[i].sum(views[i] * self.weights[i].x))
                self._sum_over_ranks(dots, [i for i in rest if self.weights[i].cut])
                dot.div_(length)
                grad_g.update({i: dots[i] for i in rest})
                along = self.split(dot / length)
                for i in rest if project else ():
                    weight = self.weights[i]
                    views[i].sub_(weight.x * weight.spread(along[i]))
                    views[i].mul_(weight.spread(slopes[i]))
        if not project:
            for i in active:
                views[i].mul_(self.weights[i].spread(slopes[i]))
        lengths_of_g = self.split(g) if self.log else ()
        for i in active:
            along_g = grad_g.get(i) if train_g else None
            if along_g is not None and self.log:
                along_g = along_g * lengths_of_g[i]  # ∇s = g·∇g
            self.weights[i].set_gradients(grads[i], along_g)

    def _is_fused(self, weight: InPlaceWeight) -> bool:
        """Whether torch's fused backward pass of weight norm takes this weight."""
        x = weight.x
        return (
            weight.rows
            and not weight.cut
            and x.device.type in ("cpu", "cuda")
            and x.dtype in (torch.float32, torch.float64)
            and x.numel() > 0
            and not torch.compiler.is_compiling()
        )

    def _fused(self, weight: InPlaceWeight, grad: Tensor, gain: Tensor, length: Tensor) -> Tensor:
        """∇v into the memory of ∇w; returns ∇g. torch's kernel gets w for v, and g·L/‖v‖ for g."""
        backward = torch.ops.aten._weight_norm_interface_backward
        if len(weight.pieces) == 1:
            grad_v, grad_g = backward(grad, weight.x, gain, length, 0)
            grad.copy_(grad_v)
            return grad_g  # type: ignore[no-any-return]
        rows = weight.pieces[0].shape[0]
        columns = []
        for piece, part, a, b in zip(
            weight.pieces, grad.split(rows), gain.split(rows), length.split(rows), strict=True
        ):
            grad_v, grad_g = backward(part, piece, a, b, 0)
            part.copy_(grad_v)
            columns.append(grad_g)
        return torch.cat(columns)

    def _scale(self, active: Sequence[int], factor: Tensor) -> None:
        """Multiply every unit of the active weights by its factor."""
        factors = self.split(factor)
        torch._foreach_mul_(
            [self.weights[i].x for i in active],
            [self.weights[i].spread(factors[i]) for i in active],
        )

    def shrink(self, i: int, factor: float) -> None:
        """Multiply g of one weight."""
        g = self.split(self.g)[i]
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
        torch._foreach_sub_(now, before)
        step = self.norms(active, self.norm)
        factor = (self.norm / step).masked_fill_(step == 0, 0.0)
        for i, part in enumerate(self.split(factor)):
            part.mul_(rates[i])
        self._scale(active, factor)
        torch._foreach_add_(now, before)

    def to_weights(self, active: Sequence[int], *, keep_norm: bool) -> None:
        """Overwrite v by w = g·v/‖v‖ (eq. 2), and take over ‖v‖ unless it is retracted."""
        norm = self.norms(active, self.norm)
        zero = norm <= EPS
        factor = (self.lengths() / norm).masked_fill_(zero, 0.0)
        self._scale(active, factor)
        if not keep_norm:
            self.norm.copy_(torch.where(zero, self.norm, norm))
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
