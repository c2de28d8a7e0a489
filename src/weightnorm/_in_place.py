"""Turn weights into directions and back in their own memory: w ⇄ v, ∇w → ∇v and ∇g (eq. 3).

v = w·(‖v‖/g) differs from w by one number per unit. So a weight can hold v for the time of an
optimizer step; what has to be kept between steps is g and ‖v‖, two numbers per unit.

Note [cut units]
    Each rank works on its shard of a DTensor. Where a unit lies on several ranks (columns under
    tensor parallelism, transposed convolutions under FSDP2), its squares and products are summed
    over them: one all-reduce for all such weights.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weightnorm._dtensor import is_sharded, local, placed_like
from weightnorm._units import EPS, Parts, Units, wide_dtype

Retract = bool | float | Literal["rms"]


class InPlaceWeight:
    """A weight of the model, with g and ‖v‖ of its units.

    Args:
        name: its name in the model.
        weight: a plain parameter, perhaps sharded.
        units: its units, with axes counted from the front.
        blocks: 0 to hand the weight itself to the inner optimizer; n to hand it n matrices that are
            stacked along axis 0, in the weight's memory.
    """

    def __init__(self, name: str, weight: nn.Parameter, units: Units, blocks: int = 0) -> None:
        self.name, self.weight, self.units, self.blocks = name, weight, units, blocks
        self.kept_axes, self.groups = units.kept(weight.ndim), units.groups
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
        kept = {k: v for k, v in self.__dict__.items() if k not in derived}
        return {**kept, "norm": self.norm.clone()}  # torch cannot copy a DTensor's view

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.index, self.cut = None, ()
        self._locate_units()
        self.bind()

    def _locate_units(self) -> None:
        """Which mesh axes cut units, and where the units' numbers lie."""
        self.shape = self.units.shape(self.weight.shape)
        self.placements: Any = None
        if not is_sharded(self.weight):
            return
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh, placements = self.weight.device_mesh, self.weight.placements
        if any(p.is_partial() for p in placements):
            raise ValueError(f"{self.name} has pending reductions over ranks: {placements}")
        # By `dim`, not `is_shard`: FSDP2 of a tensor-parallel weight has strided shards.
        shards = [None if p.is_replicate() else p.dim for p in placements]
        whole = [dim is None or dim in self.kept_axes for dim in shards]
        if self.groups > 1 and not all(p.is_replicate() or p.is_shard() for p in placements):
            raise ValueError(
                f"{self.name} has groups and the placements {placements}: which rows this rank has "
                "is not known. Leave it out with `where`"
            )
        self.cut = tuple(mesh.get_group(i) for i, kept in enumerate(whole) if not kept)
        self.placements = [p if w else Replicate() for p, w in zip(placements, whole, strict=True)]
        if self.groups > 1:  # a shard may begin and end within a group
            rows = torch.arange(self.weight.shape[0], device=self.weight.device)
            along = [p if p.is_shard(0) else Replicate() for p in placements]
            mine = local(distribute_tensor(rows, mesh, along, src_data_rank=None))
            self.index = mine // (self.weight.shape[0] // self.groups)

    def _directions(self) -> list[nn.Parameter]:
        """The parameters that the inner optimizer moves in place of the weight."""
        stored = self.master
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
        if self.copy is None and wide_dtype(self.weight.dtype) != self.weight.dtype:
            raise RuntimeError(
                f"{self.name} became {self.weight.dtype} after the optimizer was built, so there "
                "is no float32 copy of it; cast the model first, then build the optimizer"
            )
        if self.copy is not None and (
            self.copy.device != self.weight.device
            or self.copy.dtype != wide_dtype(self.weight.dtype)
        ):
            self.copy.data = self.weight.detach().to(wide_dtype(self.weight.dtype))
        stored = local(self.master.detach())
        if self.directions[0] is not self.weight and self.directions[0] is not self.copy:
            for matrix, memory in zip(
                self.directions,
                self._matrices(self.master.detach()),
                strict=True,
            ):
                set_data(matrix, local(memory))
        self.pointer, self.stored = local(self.weight).data_ptr(), stored
        self.strides, self.dtype = stored.stride(), self.weight.dtype
        self.x, self.axes = self._unit_view(stored)
        self.rows = self.units.are_rows and self.axes == (1,) and self.x.is_contiguous()
        kept = [1 if axis in self.axes else size for axis, size in enumerate(self.x.shape)]
        if self.index is not None:
            kept[0] = self.groups
        self.kept = torch.Size(kept)
        self.count = self.kept.numel()

    @property
    def master(self) -> nn.Parameter:
        """The weight in float32 or wider: itself, or its copy if it is bfloat16 or float16."""
        return self.weight if self.copy is None else self.copy

    def fan_in(self) -> int:
        """Elements per unit; 1 if there are none."""
        shape = self.weight.shape
        return max(1, shape.numel() // max(1, math.prod(self.shape)))

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
        if self.units.are_rows and x.ndim > 1 and _has_dense_rows(x):
            return _rows(x), (1,)
        if self.groups > 1:
            x, kept = x.unflatten(0, (self.groups, -1)), {0, *(a + 1 for a in self.kept_axes)}
        else:
            kept = {*self.kept_axes}
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
        here = local(placed_like(grad, self.weight)) if is_sharded(self.weight) else grad
        if here.dtype is not self.stored.dtype or here.stride() != self.strides:
            here = torch.empty_like(self.stored).copy_(here)
        return here

    def replacement(self, grad: Tensor, new: Tensor) -> Tensor:
        """New values for a result of `local_grad`, as a tensor that takes no further memory."""
        if grad.untyped_storage().nbytes() == grad.nbytes:
            return new.as_strided(grad.shape, self.strides)
        # A view of a bucket of gradients, say: replacing it would not free its memory.
        return grad.copy_(new.as_strided(grad.shape, self.strides))

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
        for axis in self.kept_axes:
            here[axis] = local(self.weight).shape[axis]
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
        self.read_copy()
        stored = self.master.detach()
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


def initial_norm(weight: InPlaceWeight, retract: Retract) -> None:
    """Set ‖v‖ of a weight before the first step: ‖w‖, or what `retract` holds it at."""
    norm = local(weight.norm)
    if retract == "rms":
        norm.fill_(math.sqrt(weight.fan_in()))
    elif isinstance(retract, float | int) and not isinstance(retract, bool):
        norm.fill_(float(retract))
    else:
        weight.read_copy()
        norm.copy_(weight._norm().view(norm.shape))
        norm.masked_fill_(norm <= EPS, 1.0)  # a zero row has the diagonal direction, of length 1


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


def set_data(x: Tensor, memory: Tensor) -> None:
    """Let x, or its shard on this rank, use this memory."""
    target: Any = x._local_tensor if is_sharded(x) else x
    target.data = memory
